"""What can go wrong around Double-Forward, each trap with the loop that springs it."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from helpers.double_forward import accumulate, assert_remembers, batch, sgd, train_step, transparent_net
from torch import Tensor, nn
from torch.optim import swa_utils

import memnorm

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
@pytest.mark.parametrize("told", [True, False], ids=["scaler=, zeros", "no scaler=, none"])
def test_the_batches_of_a_skipped_step_never_enter_the_memory(told, clear):
    model, scaler = transparent_net(), new_scaler()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer, scaler=scaler if told else None)
    options = {"clear": clear, "set_to_none": not told}
    scaled_step(model, optimizer, scaler, batch(1), **options)
    scaled_step(model, optimizer, scaler, batch(2), batch(3), overflow=True, **options)
    scaled_step(model, optimizer, scaler, batch(4), overflow=True, **options)
    assert_remembers(model, batch(1))
    scaled_step(model, optimizer, scaler, batch(5), batch(6), **options)
    assert_remembers(model, batch(6), batch(5), batch(1))


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
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
    model = transparent_net(Doubling())
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    train_step(model, optimizer, batch(1))
    assert_remembers(model, 2 * batch(1))


def test_an_input_overwritten_by_the_loop_is_replayed_as_it_was():
    model = transparent_net()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    static = torch.empty(4, 3)
    for seed in (1, 2):
        accumulate(model, static.copy_(batch(seed)))
    static.zero_()
    optimizer.step()
    assert_remembers(model, batch(2), batch(1))


def test_a_list_emptied_by_the_model_is_replayed_as_it_was():
    class Popping(nn.Module):
        def forward(self, xs: list[Tensor]) -> Tensor:
            return xs.pop()

    model = transparent_net(Popping())
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    train_step(model, optimizer, [batch(1)])  # type: ignore[arg-type]
    assert_remembers(model, batch(1))


# Copies


def saved_and_loaded(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


each_copy = pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, saved_and_loaded, lambda model: swa_utils.AveragedModel(model).module],
    ids=["deepcopy", "pickle", "AveragedModel"],
)


@each_copy
@pytest.mark.parametrize("muted", [False, True], ids=["", "inside recording off"])
def test_a_copy_records_its_training_forwards(copied, muted):
    model = transparent_net()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    accumulate(model, batch(1))
    with memnorm.recording(model, not muted):
        twin = copied(model)
    accumulate(twin, batch(2))
    optimizer.step()
    assert_remembers(twin, batch(2))


@each_copy
def test_a_copy_carries_neither_handle_nor_optimizer(copied):
    model = transparent_net()
    optimizer = sgd(model)
    handle = memnorm.double_forward(model, optimizer)
    accumulate(model, batch(1))
    references = [weakref.ref(handle), weakref.ref(optimizer)]
    twin = copied(model)
    del model, optimizer, handle
    gc.collect()
    assert twin.training
    assert [reference() for reference in references] == [None, None]


def test_a_pickle_carries_no_pending_batch():
    def size(model: nn.Module) -> int:
        torch.save(model, file := io.BytesIO())
        return len(file.getvalue())

    model = transparent_net()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    before = size(model)
    accumulate(model, batch(1, size=10_000))
    assert size(model) < before + 1000
    assert optimizer.param_groups


@each_copy
def test_a_copy_can_be_given_its_own(copied):
    model = transparent_net()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    train_step(model, optimizer, batch(1))
    twin = copied(model)
    twin_sgd = sgd(twin)
    memnorm.double_forward(twin, twin_sgd)
    accumulate(twin, batch(2))
    assert_remembers(twin, batch(1))
    twin_sgd.step()
    assert_remembers(twin, batch(2), batch(1))


@each_copy
def test_after_remove_a_copy_has_no_hook_left(copied):
    model = transparent_net()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    twin = copied(model)
    memnorm.double_forward(twin, sgd(twin)).remove()
    hooks = (twin._forward_pre_hooks, twin._forward_hooks, twin._forward_hooks_always_called)
    assert [len(kind) for kind in hooks] == [0, 0, 0]


@each_copy
def test_the_original_goes_on_after_a_copy(copied):
    model = transparent_net()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    accumulate(model, batch(1))
    copied(model)
    assert_remembers(model)
    optimizer.step()
    assert_remembers(model, batch(1))


# Exceptions


class Failing(nn.Module):
    """Raises in one of its calls, the first being number 1; counts the others in a buffer."""

    calls: Tensor

    def __init__(self, call: int, error: type[BaseException] = ZeroDivisionError) -> None:
        super().__init__()
        self.call, self.error, self.started = call, error, 0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.started += 1
        self.calls += 1
        torch.rand(1)
        if self.started == self.call:
            raise self.error
        return x


def test_after_a_training_forward_that_raised_the_layers_record_when_called_by_others():
    model = transparent_net(Failing(call=1))
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    with pytest.raises(ZeroDivisionError):
        model(batch(1))
    model[1](batch(2))
    assert optimizer.param_groups
    assert_remembers(model, batch(2))


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_after_a_training_forward_that_raised_the_next_step_is_normal(error):
    model = transparent_net(Failing(call=1, error=error))
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    with pytest.raises(error):
        model(batch(1))
    train_step(model, optimizer, batch(2))
    assert_remembers(model, batch(2))


def test_after_an_interrupted_training_forward_the_next_forward_without_grad_records():
    model = transparent_net(Failing(call=1, error=KeyboardInterrupt))
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    with pytest.raises(KeyboardInterrupt):
        model(batch(1))
    with torch.no_grad():
        model(batch(2))
    assert optimizer.param_groups
    assert_remembers(model, batch(2))


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_in_the_second_forward_leaves_everything_as_it_was(error):
    model = transparent_net(Failing(call=2, error=error))
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    accumulate(model, batch(1))
    model[1].recording = False
    modes, buffers = [m.training for m in model.modules()], [b.clone() for b in model.buffers()]
    torch.rand(1)
    random_state = torch.get_rng_state()
    with pytest.raises(error):
        optimizer.step()
    assert model[1].recording is False
    assert [m.training for m in model.modules()] == modes
    torch.testing.assert_close(list(model.buffers()), buffers, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.is_grad_enabled()


def test_after_an_error_in_the_second_forward_the_next_step_is_normal():
    model = transparent_net(Failing(call=2))
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    with pytest.raises(ZeroDivisionError):
        train_step(model, optimizer, batch(1))
    train_step(model, optimizer, batch(2))
    assert_remembers(model, batch(2))


def test_a_step_whose_second_forward_raised_is_counted_for_every():
    model = transparent_net(Failing(call=3))
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer, every=2)
    train_step(model, optimizer, batch(1))
    with pytest.raises(ZeroDivisionError):
        train_step(model, optimizer, batch(2))
    accumulate(model, batch(3))
    assert_remembers(model, batch(3), batch(1))
