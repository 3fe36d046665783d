"""Double-Forward in a training loop: which batches are recorded, when, and under which weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.common import assert_same_state, images, labels, randn, small_net
from helpers.double_forward import accumulate, assert_remembers, attached, batch, sgd, train_step, transparent_net
from torch import Tensor, nn
from torch.nn import functional as F

import memnorm
from memnorm.errors import OptionError
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


def test_double_forward_equals_the_scheme_written_by_hand():
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


def test_accumulated_micro_batches_are_one_entry_each_newest_first():
    model, optimizer = attached()
    for seed in (1, 2, 3):
        accumulate(model, batch(seed))
    optimizer.step()
    assert_remembers(model, batch(3), batch(2), batch(1))


# Closures


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar")  # LBFGS of torch 2.8
@pytest.mark.parametrize("by_keyword", [False, True], ids=["positional", "keyword"])
@pytest.mark.parametrize("set_to_none", [False, True], ids=["zeros", "none"])
def test_only_the_last_evaluation_of_a_closure_is_recorded(by_keyword, set_to_none):
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
    model, optimizer = attached()
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


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    """A gradient penalty: its forward is differentiated before, and apart from, the backward of the loss."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def test_a_forward_for_a_gradient_penalty_is_recorded_with_the_others():
    model, optimizer = attached()
    critic = model(batch(1)).mean() - model(batch(2)).mean()
    (critic + penalty(model, batch(3))).backward()
    optimizer.step()
    assert_remembers(model, batch(3), batch(2), batch(1))


def test_a_forward_for_a_gradient_penalty_is_cleared_with_the_others():
    model, optimizer = attached()
    (model(batch(1)).mean() + penalty(model, batch(2))).backward()
    train_step(model, optimizer, batch(3))
    assert_remembers(model, batch(3))


def test_a_forward_whose_gradients_were_cleared_is_not_recorded():
    """A GAN's generator phase: it goes through the discriminator, whose step has none of these gradients."""
    model, optimizer = attached()
    train_step(model, optimizer, batch(1))
    accumulate(model, batch(2).requires_grad_())
    train_step(model, optimizer, batch(3))
    assert_remembers(model, batch(3), batch(1))


def test_a_forward_without_a_backward_is_not_recorded():
    """The loop skips the batch, for instance because of its loss."""
    model, optimizer = attached()
    model(batch(1))
    train_step(model, optimizer, batch(2))
    assert_remembers(model, batch(2))


def test_a_forward_inside_recording_off_is_not_recorded_later():
    model, optimizer = attached()
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


# Batches without a gradient in the step


@pytest.mark.parametrize("clear", ["before the attack", "after the attack"])
def test_the_forwards_of_an_adversarial_attack_are_not_recorded(clear):
    model, optimizer = attached()
    for step in range(2):
        if clear == "before the attack":
            optimizer.zero_grad()
        x = batch(step).requires_grad_()
        for _ in range(3):
            (gradient,) = torch.autograd.grad(model(x).pow(2).sum(), x)
            x = (x + 0.1 * gradient.sign()).detach().requires_grad_()
        if clear == "after the attack":
            optimizer.zero_grad()
        model(x.detach()).pow(2).sum().backward()
        optimizer.step()
    assert int(model[0].num_batches_tracked) == 2


def test_an_attack_between_accumulated_batches_is_not_recorded():
    model, optimizer = attached()
    model(batch(1)).mean().backward()
    x = batch(2).requires_grad_()
    torch.autograd.grad(model(x).sum(), x)
    model(batch(3)).mean().backward()
    optimizer.step()
    assert_remembers(model, batch(3), batch(1))


def test_a_batch_whose_graph_is_used_again_after_backward_is_recorded():
    model, optimizer = attached()
    x = batch(1).requires_grad_()
    loss = model(x).mean()
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, x)
    optimizer.step()
    assert_remembers(model, batch(1))


def test_a_forward_through_frozen_parameters_is_not_recorded():
    """The generator's phase of a GAN that freezes its discriminator."""
    model, optimizer = attached()
    model.requires_grad_(False)
    model(batch(1).requires_grad_()).mean().backward()
    model.requires_grad_(True)
    model(batch(2)).mean().backward()
    optimizer.step()
    assert_remembers(model, batch(2))


def test_gradients_cleared_just_before_the_step_are_not_in_it():
    model, optimizer = attached()
    model(batch(1)).mean().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert_remembers(model)


def test_a_batch_whose_backward_raised_is_not_recorded():
    model, optimizer = attached()
    raising = model[1].weight.register_hook(lambda _gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch(1)).mean().backward()
    raising.remove()
    train_step(model, optimizer, batch(2))
    assert_remembers(model, batch(2))


def test_an_optimizer_that_steps_inside_backward_is_followed_by_a_second_forward():
    model, optimizer = attached()
    last = next(iter(model.parameters()))  # the first layer's gradient arrives last
    last.register_post_accumulate_grad_hook(lambda _parameter: optimizer.step())
    for seed in (1, 2):
        model(batch(seed)).mean().backward()
    assert_remembers(model, batch(2), batch(1))


def test_an_optimizer_that_steps_every_other_time_loses_no_batch():
    model = transparent_net()
    parameters = list(model.parameters())
    often, seldom = (torch.optim.SGD(part, lr=0.1) for part in (parameters[:2], parameters[2:]))
    handle = memnorm.double_forward(model, [often, seldom])
    for step in range(6):
        often.zero_grad(), seldom.zero_grad()
        model(batch(step)).mean().backward()
        often.step()
        if step % 2:
            seldom.step()
    assert_remembers(model, *(batch(step) for step in (5, 4, 3, 2, 1, 0)))
    assert handle.steps <= 6


def test_two_models_may_share_an_optimizer_and_not_run_at_first():
    used, unused = transparent_net(), transparent_net()
    optimizer = torch.optim.SGD([*used.parameters(), *unused.parameters()], lr=0.1)
    memnorm.double_forward(used, optimizer)
    memnorm.double_forward(unused, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        used(batch(step)).mean().backward()
        if step == 2:
            unused(batch(9)).mean().backward()
        optimizer.step()
    assert_remembers(used, batch(2), batch(1), batch(0))
    assert_remembers(unused, batch(9))


def test_fraction_without_a_batch_dimension_is_an_error():
    class OfList(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = memnorm.convert(small_net())

        def forward(self, pictures):
            return self.net(torch.stack(pictures))

    model = OfList()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memnorm.double_forward(model, optimizer, fraction=0.5)
    model(list(images(4, seed=1))).mean().backward()
    with pytest.raises(OptionError, match="fraction needs a tensor with a batch dimension"):
        optimizer.step()


# Steps that a GradScaler skips


def scaled_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    *batches: Tensor,
    overflow: bool = False,
    clear: str = "before",
    set_to_none: bool = True,
) -> None:
    """One step over `batches`, its gradients cleared before the forwards, between forward and backward, or after."""
    if clear == "before":
        optimizer.zero_grad(set_to_none)
    for index, x in enumerate(batches):
        loss = model(x).square().mean()
        if clear == "between" and index == 0:
            optimizer.zero_grad(set_to_none)
        scaler.scale(loss).backward()
    if overflow:
        next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
    scaler.step(optimizer)
    scaler.update()
    if clear == "after":
        optimizer.zero_grad(set_to_none)


def new_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=4.0)


@pytest.mark.parametrize("clear", ["before", "between", "after"])
@pytest.mark.parametrize("passed", [True, False], ids=["scaler=, zeros", "no scaler=, none"])
def test_the_batches_of_a_skipped_step_never_enter_the_memory(passed, clear):
    model, scaler = transparent_net(), new_scaler()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer, scaler=scaler if passed else None)
    options = {"clear": clear, "set_to_none": not passed}
    scaled_step(model, optimizer, scaler, batch(1), **options)
    scaled_step(model, optimizer, scaler, batch(2), batch(3), overflow=True, **options)
    scaled_step(model, optimizer, scaler, batch(4), overflow=True, **options)
    assert_remembers(model, batch(1))
    scaled_step(model, optimizer, scaler, batch(5), batch(6), **options)
    assert_remembers(model, batch(6), batch(5), batch(1))


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_a_fused_optimizer_that_skips_inside_its_step_records_nothing(optimizer_class):
    model, scaler = transparent_net(), new_scaler()
    optimizer = optimizer_class(model.parameters(), lr=0.01, fused=True)
    memnorm.double_forward(model, optimizer)
    steps: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(...))
    scaled_step(model, optimizer, scaler, batch(1), set_to_none=False)
    scaled_step(model, optimizer, scaler, batch(2), overflow=True, set_to_none=False)
    assert len(steps) == 2, "the hook fires although nothing moved: else this test is pointless"
    assert_remembers(model, batch(1))
    scaled_step(model, optimizer, scaler, batch(3), set_to_none=False)
    assert_remembers(model, batch(3), batch(1))


# Inputs that are overwritten before the step


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def test_an_input_changed_by_the_model_is_replayed_as_it_was():
    model, optimizer = attached(Doubling())
    train_step(model, optimizer, batch(1))
    assert_remembers(model, 2 * batch(1))


def test_a_list_emptied_by_the_model_is_replayed_as_it_was():
    class Popping(nn.Module):
        def forward(self, xs: list[Tensor]) -> Tensor:
            return xs.pop()

    model, optimizer = attached(Popping())
    train_step(model, optimizer, [batch(1)])  # type: ignore[arg-type]
    assert_remembers(model, batch(1))


# Arguments and outputs


class CallRecorder(nn.Module):
    """Keeps the arguments of every call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls = memnorm.MemorizedBatchNorm1d(3), []

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.calls.append((args, kwargs))
        return self.norm(args[0]).mean()


def test_the_second_forward_gets_the_same_arguments():
    model = CallRecorder()
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
    [lambda y: ({"loss": y}, [[2 * y]]), lambda y: (y, None, 1), Output],
    ids=["nested, with an output that is not used", "tuple", "dataclass"],
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


def test_every_step_records_one_batch_and_every_third_has_a_second_forward():
    model, optimizer = attached(every=3)
    shapes = count_forwards(model)
    totals = []
    for seed in range(7):
        train_step(model, optimizer, batch(seed))
        totals.append(len(shapes))
    assert totals == [1, 2, 4, 5, 6, 8, 9]
    assert_remembers(model, *(batch(seed) for seed in reversed(range(7))))


def test_fraction_takes_the_same_rows_of_every_tensor_of_the_batch_and_leaves_others_whole():
    model = CallRecorder()
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
    model = CallRecorder()
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
