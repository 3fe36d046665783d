"""Double-Forward in a training loop: which batches are recorded, when, and under which weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.common import assert_same_state, images, labels, randn, small_net
from helpers.double_forward import accumulate, assert_remembers, batch, sgd, train_step, transparent_net
from torch import Tensor, nn
from torch.nn import functional as F

import memnorm
from memnorm.replay import recorders


def classifier(**options: Any) -> Any:
    return memnorm.convert(small_net(), **options)


def momentum_sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def classify(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One ordinary training step."""
    optimizer.zero_grad()
    F.cross_entropy(model(images(4, seed=seed)), labels(4, seed=seed)).backward()
    optimizer.step()


def recorded(model: nn.Module) -> list[int]:
    """Batches recorded so far, per layer."""
    return [int(layer.num_batches_tracked) for layer in recorders(model)]  # type: ignore[attr-defined]


def count_forwards(model: nn.Module) -> list[torch.Size]:
    """The shape of each input from now on."""
    shapes: list[torch.Size] = []
    model.register_forward_hook(lambda _module, args, _output: shapes.append(args[0].shape))
    return shapes


# The scheme


def test_it_equals_the_scheme_written_by_hand():
    ours, manual = classifier(memory_size=5), classifier(memory_size=5)
    ours_sgd, manual_sgd = momentum_sgd(ours), momentum_sgd(manual)
    memnorm.double_forward(ours, ours_sgd)
    for seed in range(12):
        classify(ours, ours_sgd, seed)
        manual_sgd.zero_grad()
        with memnorm.recording(manual, False):
            loss = F.cross_entropy(manual(images(4, seed=seed)), labels(4, seed=seed))
        loss.backward()
        manual_sgd.step()
        memnorm.rerecord(manual, images(4, seed=seed))
        assert_same_state(ours, manual)


def test_without_it_the_training_forward_records():
    model = transparent_net()
    model(batch(1))
    assert_remembers(model, batch(1))


def test_the_training_forward_records_nothing():
    model = transparent_net()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    before = copy.deepcopy(model)
    accumulate(model, batch(1))
    assert_same_state(model, before)
    assert optimizer.state == {}


def test_a_step_records_exactly_one_batch_in_every_layer():
    model = classifier()
    optimizer = momentum_sgd(model)
    memnorm.double_forward(model, optimizer)
    classify(model, optimizer, seed=1)
    assert recorded(model) == [1, 1]


def test_the_recorded_moments_are_those_under_the_new_weights():
    model = classifier()
    optimizer = momentum_sgd(model)
    memnorm.double_forward(model, optimizer)
    classify(model, optimizer, seed=1)
    var, mean = torch.var_mean(model[0](images(4, seed=1)), dim=(0, 2, 3), correction=0)
    torch.testing.assert_close(model[1].memory_mean[0], mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(model[1].memory_var[0], var, rtol=0, atol=1e-6)


def test_accumulated_micro_batches_are_one_entry_each_newest_first():
    model = transparent_net()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    for seed in (1, 2, 3):
        accumulate(model, batch(seed))
    optimizer.step()
    assert_remembers(model, batch(3), batch(2), batch(1))


# Closures


@pytest.mark.parametrize("by_keyword", [False, True], ids=["positional", "keyword"])
@pytest.mark.parametrize("set_to_none", [False, True], ids=["zeros", "none"])
def test_of_the_evaluations_of_a_closure_only_the_last_is_recorded(by_keyword, set_to_none):
    model = transparent_net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=3)
    memnorm.double_forward(model, optimizer)
    seeds: list[int] = []

    def closure() -> Tensor:
        seeds.append(len(seeds))
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = model(batch(seeds[-1])).square().mean()
        loss.backward()
        return loss

    last = []
    for _ in range(2):
        optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
        last.append(seeds[-1])
    assert len(seeds) > 2
    assert_remembers(model, batch(last[1]), batch(last[0]))


def test_a_closure_leaves_batches_accumulated_before_the_step_in_place():
    model = transparent_net()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    accumulate(model, batch(1))
    optimizer.step(lambda: accumulate(model, batch(2)))
    assert_remembers(model, batch(2), batch(1))


# Several optimizers


def two_optimizers(model: nn.Sequential) -> list[torch.optim.Optimizer]:
    return [sgd(model[0]), sgd(model[1:])]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_the_second_forward_waits_for_all_optimizers(order):
    model = transparent_net()
    optimizers = two_optimizers(model)
    memnorm.double_forward(model, optimizers)
    accumulate(model, batch(1))
    optimizers[order[0]].step()
    assert_remembers(model)
    optimizers[order[1]].step()
    assert_remembers(model, batch(1))


def test_an_optimizer_that_steps_again_does_not_wait_for_the_other():
    model = transparent_net()
    first, _second = optimizers = two_optimizers(model)
    memnorm.double_forward(model, optimizers)
    train_step(model, first, batch(1))
    assert_remembers(model)
    train_step(model, first, batch(2))
    assert_remembers(model, batch(2), batch(1))
    train_step(model, first, batch(3))
    assert_remembers(model, batch(3), batch(2), batch(1))


# Several forwards for one step, as a GAN's discriminator has them


def test_each_forward_with_a_backward_of_its_own_is_recorded():
    model = transparent_net()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    for first in (1, 3):
        optimizer.zero_grad()
        accumulate(model, batch(first))
        accumulate(model, batch(first + 1))
        optimizer.step()
    assert_remembers(model, batch(4), batch(3), batch(2), batch(1))


def test_all_forwards_of_one_backward_are_recorded():
    model = transparent_net()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    (model(batch(1)).mean() - model(batch(2)).mean() + model(batch(3)).square().mean()).backward()
    optimizer.step()
    assert_remembers(model, batch(3), batch(2), batch(1))


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    """A gradient penalty: its forward is differentiated before, and apart from, the backward of the loss."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def test_a_forward_for_a_gradient_penalty_is_recorded_with_the_others():
    model = transparent_net()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    critic = model(batch(1)).mean() - model(batch(2)).mean()
    (critic + penalty(model, batch(3))).backward()
    optimizer.step()
    assert_remembers(model, batch(3), batch(2), batch(1))


def test_a_forward_for_a_gradient_penalty_is_cleared_with_the_others():
    model = transparent_net()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    (model(batch(1)).mean() + penalty(model, batch(2))).backward()
    train_step(model, optimizer, batch(3))
    assert_remembers(model, batch(3))


def test_a_forward_whose_gradients_were_cleared_is_not_recorded():
    """The generator's phase goes through the discriminator as well, but its gradients are in no step of it."""
    model = transparent_net()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    train_step(model, optimizer, batch(1))
    accumulate(model, batch(2).requires_grad_())
    train_step(model, optimizer, batch(3))
    assert_remembers(model, batch(3), batch(1))


def test_a_forward_without_a_backward_is_not_recorded():
    """A loop that leaves out a batch whose loss it does not like."""
    model = transparent_net()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    model(batch(1))
    train_step(model, optimizer, batch(2))
    assert_remembers(model, batch(2))


def test_a_forward_inside_recording_off_is_not_recorded_later():
    model = transparent_net()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    with memnorm.recording(model, False):
        accumulate(model, batch(1))
    optimizer.step()
    assert_remembers(model)


def test_a_layer_whose_recording_is_off_is_not_recorded_by_the_second_forward():
    model = classifier()
    optimizer = momentum_sgd(model)
    memnorm.double_forward(model, optimizer)
    model[1].recording = False
    classify(model, optimizer, seed=1)
    assert recorded(model) == [0, 1]


# Arguments and outputs


class Recalling(nn.Module):
    """Keeps the arguments of every call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls = memnorm.MemorizedBatchNorm1d(3), []

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls.append((args, kwargs))
        return self.norm(args[0]).mean()


def test_the_second_forward_gets_the_same_arguments():
    model = Recalling()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    nested = {"pair": (randn(4, seed=3), "text")}
    model(batch(1), 3, [randn(5, seed=2), None], scale=2.0, nested=nested, mask=None).backward()
    optimizer.step()
    training, second = model.calls
    x, number, (vector, nothing) = second[0]
    kwargs = second[1]
    torch.testing.assert_close(
        [x, vector, kwargs["nested"]["pair"][0]], [batch(1), randn(5, seed=2), randn(4, seed=3)], rtol=0, atol=0
    )
    others = [number, nothing, kwargs["scale"], kwargs["nested"]["pair"][1], kwargs["mask"]]
    assert others == [3, None, 2.0, "text", None]
    assert [type(arg) for arg in second[0]] == [type(arg) for arg in training[0]]


@dataclass
class Output:
    logits: Tensor


@pytest.mark.parametrize(
    "wrap",
    [lambda y: {"loss": y}, lambda y: (y, None, 1), lambda y: [[y]], Output],
    ids=["dict", "tuple", "list", "dataclass"],
)
def test_the_model_may_return_anything(wrap):
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.last = transparent_net(), torch.zeros(())

        def forward(self, x: Tensor) -> Any:
            self.last = self.net(x)
            return wrap(self.last)

    model = Wrapped()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    model(batch(1))
    model.last.mean().backward()
    optimizer.step()
    assert_remembers(model, batch(1))


# every, fraction


def test_every_third_step_has_a_second_forward():
    model = classifier()
    optimizer = momentum_sgd(model)
    memnorm.double_forward(model, optimizer, every=3)
    shapes = count_forwards(model)
    totals = []
    for seed in range(7):
        classify(model, optimizer, seed)
        totals.append(len(shapes))
    assert totals == [1, 2, 4, 5, 6, 8, 9]


def test_every_step_records_one_batch_with_a_second_forward_or_without():
    model = transparent_net()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer, every=3)
    for seed in range(1, 5):
        train_step(model, optimizer, batch(seed))
    assert_remembers(model, batch(4), batch(3), batch(2), batch(1))


def test_a_step_without_second_forward_records_the_moments_under_the_old_weights():
    model = classifier()
    optimizer = momentum_sgd(model)
    memnorm.double_forward(model, optimizer, every=2)
    mean = model[0](images(4, seed=1)).mean((0, 2, 3)).detach()
    classify(model, optimizer, seed=1)
    torch.testing.assert_close(model[1].memory_mean[0], mean, rtol=0, atol=1e-6)


def test_fraction_takes_the_same_rows_of_every_tensor_of_the_batch_and_leaves_others_whole():
    model = Recalling()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer, fraction=0.5)
    row = torch.arange(8)
    x = batch(1, size=8)
    model(x, {"row": row}, short=torch.arange(5), long=torch.arange(12), number=torch.tensor(8)).backward()
    optimizer.step()
    (half, extras), kwargs = model.calls[1]
    assert half.shape == (4, 3)
    torch.testing.assert_close(half, x[extras["row"]], rtol=0, atol=0)
    whole = {"short": torch.arange(5), "long": torch.arange(12), "number": torch.tensor(8)}
    torch.testing.assert_close(kwargs, whole, rtol=0, atol=0)


def test_fraction_takes_distinct_rows_that_change_from_step_to_step():
    model = Recalling()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer, fraction=0.5)
    for _ in range(6):
        model(batch(1, size=8), torch.arange(8)).backward()
        optimizer.step()
    chosen = {tuple(args[1].tolist()) for args, _kwargs in model.calls[1::2]}
    assert all(len(set(rows)) == 4 for rows in chosen)
    assert len(chosen) > 3


def test_fraction_takes_at_least_two_images():
    model = classifier()
    optimizer = momentum_sgd(model)
    memnorm.double_forward(model, optimizer, fraction=0.1)
    shapes = count_forwards(model)
    classify(model, optimizer, seed=1)
    assert [shape[0] for shape in shapes] == [4, 2]


def test_a_resumed_run_goes_on_alike():
    model = classifier()
    optimizer = momentum_sgd(model)
    handle = memnorm.double_forward(model, optimizer, every=2, fraction=0.5)
    for seed in range(3):
        classify(model, optimizer, seed)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), handle.state_dict()])
    resumed = classifier()
    resumed_sgd = momentum_sgd(resumed)
    resumed_handle = memnorm.double_forward(resumed, resumed_sgd, every=2, fraction=0.5)
    for target, state in zip((resumed, resumed_sgd, resumed_handle), saved, strict=True):
        target.load_state_dict(state)
    for seed in range(3, 7):
        classify(model, optimizer, seed)
        classify(resumed, resumed_sgd, seed)
        assert_same_state(model, resumed)
