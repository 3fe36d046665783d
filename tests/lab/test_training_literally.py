"""Networks trained and evaluated by the lab, against the same with the paper's equations as they are printed.

What our evidence rests on beyond the layers: that the lab puts them in, lets the strength and the learning rate change
at the same steps, sends the batch forward again after the update, evaluates with the memory, and counts errors right.
"""

import pytest
import torch

from memnorm.lab.data import Source
from memnorm.lab.literal import LiteralTraining
from memnorm.lab.spec import RunSpec
from memnorm.lab.training import Training

STEPS, EVALUATED_EVERY = 25, 5
RATES = [0.1] * 10 + [0.01] * 5 + [0.001] * 10
STRENGTHS = [0.1] * 10 + [0.5] * 5 + [0.9] * 10
CLASSES = 10
ARMS = [("bn", "single"), ("mbn", "single"), ("mbn", "double")]


class Noise(Source):
    """Images that can be told apart by their class, and not too easily."""

    def __init__(self, count: int, shape: tuple[int, int, int], seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(CLASSES, (count,), generator=draw)
        self.images = torch.randn(count, *shape, generator=draw) + self.labels.view(-1, 1, 1, 1) / CLASSES

    def subset(self, indices):
        raise NotImplementedError

    def batches(self, plan, *, workers=0):
        for indices, _ in plan:
            yield self.images[indices], self.labels[indices]


def told(lab: Training, unseen: Noise) -> dict[str, float]:
    """What the lab says at an evaluation."""
    found = lab.tally.summary("train") | lab.evaluate(unseen, workers=0)
    lab.tally = type(lab.tally)()
    return {name: found[name] for name in ("train_loss", "train_error", "test_loss", "test_error")}


@pytest.mark.parametrize(("norm", "scheme"), ARMS)
def test_the_lab_trains_and_evaluates_a_network_as_it_is_written(norm, scheme):
    options, shape = {"memory_size": 5} if norm == "mbn" else {}, (3, 8, 8)
    spec = RunSpec(
        model="resnet8", norm=norm, norm_options=options, scheme=scheme, iterations=STEPS, precision="float64"
    )
    lab, literal = Training(spec, CLASSES, shape, "cpu"), LiteralTraining(spec, CLASSES, shape)
    unseen = Noise(50, shape, seed=1000)
    for step in range(STEPS):
        batch = Noise(4, shape, seed=step)
        assert lab.step(step, batch.images, batch.labels)
        literal.step(batch.images, batch.labels, learning_rate=RATES[step], strength=STRENGTHS[step])
        ours, theirs = list(lab.model.parameters()), list(literal.network.parameters())
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
        if (step + 1) % EVALUATED_EVERY == 0:
            assert told(lab, unseen) == pytest.approx(
                literal.training_error() | literal.test_error(unseen.images, unseen.labels), rel=1e-8
            )


@pytest.mark.parametrize("channels_last", [False, True], ids=["planes", "channels last"])
@pytest.mark.parametrize(("norm", "scheme"), ARMS)
def test_in_float32_a_step_differs_by_rounding(norm, scheme, channels_last):
    """With the batch size, image size and memory of our runs. Both sides begin each step with the same weights, for
    training makes much of little. In few steps rounding takes a value across the zero of a ReLU, which is seen.
    """
    shape = (3, 32, 32)
    spec = RunSpec(model="resnet8", norm=norm, scheme=scheme, iterations=STEPS)
    lab, literal = Training(spec, CLASSES, shape, "cpu", channels_last), LiteralTraining(spec, CLASSES, shape)
    unseen, off = Noise(50, shape, seed=1000), []
    for step in range(STEPS):
        batch = Noise(8, shape, seed=step)
        assert lab.step(step, batch.images, batch.labels)
        literal.step(batch.images, batch.labels, learning_rate=RATES[step], strength=STRENGTHS[step])
        ours = list(lab.model.parameters())
        velocities = [lab.optimizer.state[one]["momentum_buffer"] for one in ours]
        pairs = list(zip(velocities, literal.velocity, strict=True))
        off.append(max(((mine.double() - wanted).norm() / wanted.norm()).item() for mine, wanted in pairs))
        with torch.no_grad():
            for mine, wanted in [*pairs, *zip(ours, literal.network.parameters(), strict=True)]:
                mine.copy_(wanted)
        if (step + 1) % EVALUATED_EVERY == 0:
            wanted = literal.training_error() | literal.test_error(unseen.images, unseen.labels)
            assert told(lab, unseen) == pytest.approx(wanted, rel=1e-5)
    assert sorted(off)[STEPS // 2] < 1e-5
    assert max(off) < 2e-2
