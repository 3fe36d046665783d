"""The handle of Double-Forward, its errors, and the primitives underneath: `recording` and `rerecord`."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
from helpers.common import images, labels, small_net
from helpers.double_forward import accumulate, assert_remembers, batch, sgd, train_step, transparent_net
from torch import nn
from torch.nn import functional as F

import memnorm
from memnorm.errors import DTypeError, NothingToRecord, OptionError


def hooks_of(model: nn.Module, optimizer: Any) -> int:
    of_model = len(model._forward_pre_hooks) + len(model._forward_hooks) + len(model._forward_hooks_always_called)
    return of_model + len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


def test_remove_takes_away_every_hook():
    model = transparent_net()
    optimizer = sgd(model)
    handle = memnorm.double_forward(model, optimizer)
    assert hooks_of(model, optimizer) > 0
    handle.remove()
    assert hooks_of(model, optimizer) == 0


def test_after_remove_the_training_forward_records_and_the_step_does_not():
    model = transparent_net()
    optimizer = sgd(model)
    handle = memnorm.double_forward(model, optimizer)
    accumulate(model, batch(1))
    handle.remove()
    accumulate(model, batch(2))
    optimizer.step()
    assert_remembers(model, batch(2))


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_a_with_statement_removes_it_also_after_an_exception(error):
    model = transparent_net()
    optimizer = sgd(model)
    with contextlib.suppress(ZeroDivisionError), memnorm.double_forward(model, optimizer):
        train_step(model, optimizer, batch(1))
        if error:
            raise error
    assert_remembers(model, batch(1))
    assert hooks_of(model, optimizer) == 0


@pytest.mark.parametrize("part", [slice(None), slice(2)], ids=["same model", "part of it"])
def test_a_second_one_on_the_same_layers_is_refused(part):
    model = transparent_net()
    memnorm.double_forward(model, (optimizer := sgd(model)))
    with pytest.raises(memnorm.MemnormError, match=r"remove\(\).*or pass all optimizers") as caught:
        memnorm.double_forward(model[part], sgd(model))
    assert "'0'" in str(caught.value)
    train_step(model, optimizer, batch(1))
    assert_remembers(model, batch(1))


def test_two_models_trained_by_one_optimizer_have_one_each():
    models = transparent_net(), transparent_net()
    optimizer = sgd(nn.ModuleList(models))
    for model in models:
        memnorm.double_forward(model, optimizer)
    (models[0](batch(1)).mean() + models[1](batch(2)).mean()).backward()
    optimizer.step()
    assert_remembers(models[0], batch(1))
    assert_remembers(models[1], batch(2))


def test_after_remove_it_can_be_attached_again():
    model = transparent_net()
    optimizer = sgd(model)
    handle = memnorm.double_forward(model, optimizer)
    handle.remove()
    memnorm.double_forward(model, optimizer)
    train_step(model, optimizer, batch(1))
    assert_remembers(model, batch(1))


def test_a_deleted_optimizer_makes_room_for_a_new_one():
    model = transparent_net()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    accumulate(model, batch(1))
    del optimizer
    gc.collect()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    train_step(model, optimizer, batch(2))
    assert_remembers(model, batch(2))


def test_when_its_optimizer_is_deleted_the_training_forward_records_again():
    model = transparent_net()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    del optimizer
    gc.collect()
    model(batch(1))
    assert_remembers(model, batch(1))


@pytest.mark.parametrize("owns_a_buffer", [False, True])
def test_it_does_not_keep_the_model_alive(owns_a_buffer):
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


# Errors


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"model": small_net()}, NothingToRecord, "BatchNorm2d.*Call memnorm.convert"),
        ({"model": nn.Linear(2, 2)}, NothingToRecord, "no norm at all.*Call memnorm.convert"),
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
def test_wrong_arguments_are_refused_and_leave_no_hook(arguments, error, words):
    model = transparent_net()
    optimizer = sgd(model)
    given = {"model": model, "optimizer": optimizer, **arguments}
    with pytest.raises(error, match=words):
        memnorm.double_forward(**given)
    assert hooks_of(model, optimizer) == 0


def nested_net() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(transparent_net()), nn.Identity())


def test_when_only_a_child_is_called_the_error_names_it():
    model = nested_net()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    accumulate(model[0][0], batch(1))
    with pytest.raises(NothingToRecord, match=r"inside its '0\.0' were.*double_forward\(model\.0\.0, optimizer\)"):
        optimizer.step()


def test_a_step_with_gradients_before_any_forward_is_an_error():
    model = transparent_net()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(NothingToRecord, match=r"Sequential itself was never called \(none of its layers ran"):
        optimizer.step()


def test_ten_steps_without_a_forward_give_one_warning():
    model = transparent_net()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    train_step(model, optimizer, batch(1))
    for _ in range(9):
        optimizer.step()
    with pytest.warns(memnorm.MemnormWarning, match="10 optimizer steps without a training forward of Sequential"):
        optimizer.step()
    optimizer.step()


def test_more_pending_batches_than_allowed_are_an_error_and_are_forgotten():
    model = transparent_net()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer, max_pending=3)
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


def test_rerecord_of_an_unconverted_model_is_an_error():
    with pytest.raises(NothingToRecord, match=r"BatchNorm2d\. Call memnorm\.convert"):
        memnorm.rerecord(small_net(), images(2, seed=1))


def test_recording_of_an_unconverted_model_is_an_error():
    with pytest.raises(NothingToRecord, match=r"BatchNorm2d\. Call memnorm\.convert"):
        memnorm.recording(small_net(), True).__enter__()


def test_layers_stripped_by_sync_batch_norm_before_attaching_are_an_error_that_says_so():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(transparent_net())
    with pytest.raises(NothingToRecord, match=r"convert_sync_batchnorm .*call memnorm\.convert\(model\) last"):
        memnorm.double_forward(model, sgd(model))


@pytest.mark.parametrize("steps_before", [0, 2])
def test_layers_stripped_by_sync_batch_norm_after_attaching_are_an_error_at_the_next_step(steps_before):
    model = transparent_net()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    for seed in range(steps_before):
        train_step(model, optimizer, batch(seed))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    with pytest.raises(NothingToRecord, match="convert_sync_batchnorm"):
        train_step(model, optimizer, batch(5))


# The primitives


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_recording_restores_the_switch_of_each_layer(on, error):
    model: Any = memnorm.convert(small_net())
    model[1].recording = False
    with contextlib.suppress(ZeroDivisionError), memnorm.recording(model, on):
        assert [model[1].recording, model[4].recording] == [on, on]
        if error:
            raise error
    assert [model[1].recording, model[4].recording] == [False, True]


def test_rerecord_leaves_modes_and_gradients_alone():
    model: Any = memnorm.convert(small_net())
    model[4].eval()
    model[3].weight.requires_grad_(False)
    F.cross_entropy(model(images(4, seed=1)), labels(4, seed=1)).backward()
    modes = [module.training for module in model.modules()]
    grads = [parameter.grad for parameter in model.parameters()]
    values = [None if grad is None else grad.clone() for grad in grads]
    memnorm.rerecord(model, images(4, seed=2))
    assert [module.training for module in model.modules()] == modes
    for parameter, grad, value in zip(model.parameters(), grads, values, strict=True):
        assert parameter.grad is grad
        torch.testing.assert_close(grad, value, rtol=0, atol=0)
