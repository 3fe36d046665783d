"""Networks trained and evaluated by the lab, against the same with the paper's equations as they are printed.

What our evidence rests on beyond the layers: that the lab puts them in, lets the strength and the learning rate change
at the same steps, sends the batch forward again after the update, evaluates with the memory, and counts errors right.
"""

import pytest
import torch
from torch import Tensor, nn

from memnorm.lab import models
from memnorm.lab.data import Source
from memnorm.lab.data.seeds import mix
from memnorm.lab.spec import RunSpec
from memnorm.lab.training import Training
from memnorm.reference import ReferenceBatchNorm, set_recording

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


class Literal:
    """Momentum, weight decay, schedules and both forwards written out, over layers that keep whole batches."""

    def __init__(self, spec: RunSpec, shape: tuple[int, int, int]) -> None:
        self.double = spec.scheme == "double"
        torch.manual_seed(mix(spec.seed, "weights"))
        self.network = models.build(spec.model, classes=CLASSES, image_shape=shape).double()
        if spec.norm == "mbn":
            use_reference(self.network, spec.norm_options.get("memory_size", 20))
        self.layers = [layer for layer in self.network.modules() if isinstance(layer, ReferenceBatchNorm)]
        self.velocity = [torch.zeros_like(one) for one in self.network.parameters()]
        self.losses: list[float] = []
        self.wrong: list[bool] = []

    def step(self, step: int, images: Tensor, labels: Tensor) -> None:
        for layer in self.layers:
            layer.strength = STRENGTHS[step]
        set_recording(self.layers, not self.double)
        scores = self.network(images)
        losses = nn.functional.cross_entropy(scores, labels, reduction="none")
        self.losses += losses.tolist()
        self.wrong += (scores.argmax(1) != labels).tolist()
        gradients = torch.autograd.grad(losses.mean(), list(self.network.parameters()))
        with torch.no_grad():
            for one, gradient, velocity in zip(self.network.parameters(), gradients, self.velocity, strict=True):
                velocity.mul_(0.9).add_(gradient + 1e-4 * one)
                one.sub_(RATES[step] * velocity)
            if self.double:
                set_recording(self.layers, True)
                self.network(images)

    def training_error(self) -> dict[str, float]:
        """Of the steps since this was asked before."""
        told = {"train_loss": mean(self.losses), "train_error": 100 * mean(self.wrong)}
        self.losses, self.wrong = [], []
        return told

    @torch.no_grad()
    def test_error(self, unseen: Noise) -> dict[str, float]:
        scores = self.network.eval()(unseen.images.double())
        self.network.train()
        loss = nn.functional.cross_entropy(scores, unseen.labels)
        return {"test_loss": loss.item(), "test_error": 100 * mean((scores.argmax(1) != unseen.labels).tolist())}


def use_reference(module: nn.Module, memory_size: int) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, ReferenceBatchNorm(child.num_features, memory_size=memory_size))
        use_reference(child, memory_size)


def mean(values) -> float:
    return sum(values) / len(values)


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
    lab, literal, unseen = Training(spec, CLASSES, shape, "cpu"), Literal(spec, shape), Noise(50, shape, seed=1000)
    for step in range(STEPS):
        batch = Noise(4, shape, seed=step)
        assert lab.step(step, batch.images, batch.labels)
        literal.step(step, batch.images.double(), batch.labels)
        ours, theirs = list(lab.model.parameters()), list(literal.network.parameters())
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
        if (step + 1) % EVALUATED_EVERY == 0:
            assert told(lab, unseen) == pytest.approx(literal.training_error() | literal.test_error(unseen), rel=1e-8)


@pytest.mark.parametrize("channels_last", [False, True], ids=["planes", "channels last"])
@pytest.mark.parametrize(("norm", "scheme"), ARMS)
def test_in_float32_a_step_differs_by_rounding(norm, scheme, channels_last):
    """With the batch size, image size and memory of our runs. Both sides begin each step with the same weights, for
    training makes much of little. In few steps rounding takes a value across the zero of a ReLU, which is seen.
    """
    shape = (3, 32, 32)
    spec = RunSpec(model="resnet8", norm=norm, scheme=scheme, iterations=STEPS)
    lab, literal = Training(spec, CLASSES, shape, "cpu", channels_last), Literal(spec, shape)
    unseen, off = Noise(50, shape, seed=1000), []
    for step in range(STEPS):
        batch = Noise(8, shape, seed=step)
        assert lab.step(step, batch.images, batch.labels)
        literal.step(step, batch.images.double(), batch.labels)
        ours = list(lab.model.parameters())
        velocities = [lab.optimizer.state[one]["momentum_buffer"] for one in ours]
        pairs = list(zip(velocities, literal.velocity, strict=True))
        off.append(max(((mine.double() - wanted).norm() / wanted.norm()).item() for mine, wanted in pairs))
        with torch.no_grad():
            for mine, wanted in [*pairs, *zip(ours, literal.network.parameters(), strict=True)]:
                mine.copy_(wanted)
        if (step + 1) % EVALUATED_EVERY == 0:
            wanted = literal.training_error() | literal.test_error(unseen)
            assert told(lab, unseen) == pytest.approx(wanted, rel=1e-5)
    assert sorted(off)[STEPS // 2] < 1e-5
    assert max(off) < 2e-2
