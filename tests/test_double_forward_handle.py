"""Double-Forward's handle: attaching, removing, copies of the model, and errors."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import weakref
from typing import Any

import pytest
import torch
from helpers.common import images, small_net
from helpers.double_forward import accumulate, assert_remembers, attached, batch, sgd, train_step, transparent_net
from torch import nn
from torch.optim import swa_utils

import memnorm
from memnorm.errors import DTypeError, MemnormWarning, NothingToRecord, OptionError

# The handle


def hooks_of(model: nn.Module, optimizer: Any) -> int:
    of_model = len(model._forward_pre_hooks) + len(model._forward_hooks) + len(model._forward_hooks_always_called)
    return of_model + len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def test_after_remove_the_training_forward_records_and_the_step_does_not():
    model = transparent_net()
    optimizer = sgd(model)
    handle = memnorm.double_forward(model, optimizer)
    accumulate(model, batch(1))
    handle.remove()
    accumulate(model, batch(2))
    optimizer.step()
    assert_remembers(model, batch(2))


def test_its_repr_says_what_it_is_attached_to_and_how_far_it_is():
    model = transparent_net()
    optimizer = sgd(model)
    handle = memnorm.double_forward(model, optimizer, every=2)
    accumulate(model, batch(1))
    optimizer.step()
    state = "layers=1, optimizers=1, every=2, fraction=1, steps=1)"
    assert repr(handle) == f"DoubleForward(attached to {type(model).__name__}, {state}"
    handle.remove()
    assert repr(handle) == f"DoubleForward(removed, {state}"


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_the_end_of_a_with_statement_removes_the_hooks(error):
    model = transparent_net()
    optimizer = sgd(model)
    with contextlib.suppress(ZeroDivisionError), memnorm.double_forward(model, optimizer):
        train_step(model, optimizer, batch(1))
        if error:
            raise error
    assert_remembers(model, batch(1))
    assert hooks_of(model, optimizer) == 0


@pytest.mark.parametrize("part", [slice(None), slice(2)], ids=["same model", "part of it"])
def test_a_second_double_forward_on_the_same_layers_is_an_error(part):
    model = transparent_net()
    memnorm.double_forward(model, (optimizer := sgd(model)))
    with pytest.raises(memnorm.MemnormError, match=r"remove\(\).*or pass all optimizers") as caught:
        memnorm.double_forward(model[part], sgd(model))
    assert "'0'" in str(caught.value)
    train_step(model, optimizer, batch(1))
    assert_remembers(model, batch(1))


def test_double_forward_can_be_attached_again_after_remove():
    model = transparent_net()
    optimizer = sgd(model)
    handle = memnorm.double_forward(model, optimizer)
    handle.remove()
    memnorm.double_forward(model, optimizer)
    train_step(model, optimizer, batch(1))
    assert_remembers(model, batch(1))


def test_double_forward_can_be_attached_again_after_its_optimizer_is_deleted():
    model, optimizer = attached()
    accumulate(model, batch(1))
    del optimizer
    gc.collect()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    train_step(model, optimizer, batch(2))
    assert_remembers(model, batch(2))


def test_the_training_forward_records_again_after_the_optimizer_is_deleted():
    model, optimizer = attached()
    del optimizer
    gc.collect()
    model(batch(1))
    assert_remembers(model, batch(1))


@pytest.mark.parametrize("owns_a_buffer", [False, True])
def test_a_handle_does_not_keep_the_model_alive(owns_a_buffer):
    model = transparent_net()
    if owns_a_buffer:
        model.register_buffer("own", torch.zeros(2))
    optimizer = sgd(model)
    handle = memnorm.double_forward(model, optimizer)
    train_step(model, optimizer, batch(1))
    accumulate(model, batch(2))
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    assert handle.steps == 1


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
def test_a_copy_records_its_training_forwards_and_the_original_its_second_forwards(copied, muted):
    model, optimizer = attached()
    accumulate(model, batch(1))
    with memnorm.recording(model, not muted):
        twin = copied(model)
    accumulate(twin, batch(2))
    assert_remembers(model)
    optimizer.step()
    assert_remembers(twin, batch(2))
    assert_remembers(model, batch(1))


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


@each_copy
def test_a_copy_can_have_its_own_double_forward(copied):
    model, optimizer = attached()
    train_step(model, optimizer, batch(1))
    twin = copied(model)
    twin_sgd = sgd(twin)
    handle = memnorm.double_forward(twin, twin_sgd)
    accumulate(twin, batch(2))
    assert_remembers(twin, batch(1))
    twin_sgd.step()
    assert_remembers(twin, batch(2), batch(1))
    handle.remove()
    assert hooks_of(twin, twin_sgd) == 0


# Errors


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"model": small_net()}, NothingToRecord, "BatchNorm2d.*Call memnorm.convert"),
        ({"model": nn.Linear(2, 2)}, NothingToRecord, "no norm.*Call memnorm.convert"),
        ({"optimizer": sgd(nn.Linear(2, 2))}, OptionError, "SGD holds no parameter of Sequential"),
        ({"optimizer": "sgd"}, DTypeError, "expected a torch.optim.Optimizer.*got str"),
        ({"optimizer": []}, DTypeError, "expected a torch.optim.Optimizer"),
        ({"every": 0}, OptionError, "every must be a positive number of steps; got 0"),
        ({"every": 1.5}, OptionError, "every must be a positive number of steps; got 1.5"),
        ({"fraction": 0}, OptionError, r"fraction must lie in \(0, 1\]; got 0"),
        ({"fraction": 1.5}, OptionError, r"fraction must lie in \(0, 1\]; got 1.5"),
        ({"max_pending": 0}, OptionError, "max_pending must be positive; got 0"),
    ],
    ids=lambda value: f"{next(iter(value))}={next(iter(value.values()))!r}"[:24] if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_errors_and_leave_no_hook(arguments, error, words):
    model = transparent_net()
    optimizer = sgd(model)
    given = {"model": model, "optimizer": optimizer, **arguments}
    with pytest.raises(error, match=words):
        memnorm.double_forward(**given)
    assert hooks_of(model, optimizer) == 0


def test_when_only_a_child_is_called_the_error_names_it():
    model = nn.Sequential(nn.Sequential(transparent_net()), nn.Identity())
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    accumulate(model[0][0], batch(1))
    with pytest.raises(NothingToRecord, match=r"inside its '0\.0' were.*double_forward\(model\.0\.0, optimizer\)"):
        optimizer.step()


def test_a_step_with_gradients_before_any_forward_is_an_error():
    model, optimizer = attached()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(NothingToRecord, match=r"Sequential itself was never called \(none of its layers ran"):
        optimizer.step()


def test_ten_steps_without_a_forward_give_one_warning():
    model, optimizer = attached()
    train_step(model, optimizer, batch(1))
    for _ in range(9):
        optimizer.step()
    with pytest.warns(memnorm.MemnormWarning, match="10 optimizer steps without a training forward of Sequential"):
        optimizer.step()
    optimizer.step()


def test_more_pending_batches_than_allowed_are_an_error_and_are_forgotten():
    model, optimizer = attached(max_pending=3)
    for seed in (1, 2, 3):
        accumulate(model, batch(seed))
    with pytest.raises(memnorm.MemnormError, match=r"3 training forwards.*raise max_pending.*another optimizer"):
        model(batch(4))
    train_step(model, optimizer, batch(5))
    assert_remembers(model, batch(5))


def test_rerecord_of_a_model_in_eval_mode_is_an_error():
    model = transparent_net().eval()
    with pytest.raises(NothingToRecord, match=r"every memorized layer .* is in eval mode.*model\.train\(\)"):
        memnorm.rerecord(model, batch(1))


@pytest.mark.parametrize("call", [memnorm.rerecord, lambda *args: memnorm.recording(*args).__enter__()])
def test_rerecord_and_recording_of_an_unconverted_model_are_errors(call):
    with pytest.raises(NothingToRecord, match=r"BatchNorm2d\. Call memnorm\.convert"):
        call(small_net(), images(2, seed=1))


def test_layers_replaced_by_sync_batch_norm_are_an_error_that_names_the_cause():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(transparent_net())
    with pytest.raises(NothingToRecord, match=r"convert_sync_batchnorm .*call memnorm\.convert\(model\) last"):
        memnorm.double_forward(model, sgd(model))


class UnregisteredNorm(nn.Module):
    """Its forward calls a norm that is not registered as its module."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.called = ({"norm": nn.BatchNorm2d(3)},)

    def forward(self, x):
        return self.called[0]["norm"](self.conv(x))


def test_three_second_forwards_that_record_nothing_give_a_warning():
    model = memnorm.convert(UnregisteredNorm())
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    train_step(model, optimizer, images(4, seed=0))
    train_step(model, optimizer, images(4, seed=1))
    with pytest.warns(MemnormWarning, match="second forwards of UnregisteredNorm recorded nothing"):
        train_step(model, optimizer, images(4, seed=2))
