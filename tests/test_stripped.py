"""Layers that `convert_sync_batchnorm` has replaced are reported at the next step, or when the model is saved."""

import copy
import pickle
import warnings

import pytest
import torch
from helpers.common import small_net
from torch import nn
from torch.optim.swa_utils import AveragedModel

import memnorm
from memnorm.errors import MemnormWarning, NothingToRecord

to_sync = nn.SyncBatchNorm.convert_sync_batchnorm


def step(model, optimizer):
    """SyncBatchNorm takes no CPU tensor in training, so the model is stepped on a gradient from elsewhere."""
    optimizer.zero_grad()
    sum(parameter.square().sum() for parameter in model.parameters()).backward()
    optimizer.step()


def saves_silently(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return model.state_dict()


def test_the_schedule_reports_replaced_layers_at_its_next_step():
    model = memnorm.convert(small_net())
    schedule = memnorm.StrengthSchedule(model, 10)
    schedule.step()
    to_sync(model)
    with pytest.raises(
        NothingToRecord, match=r"StrengthSchedule: the SyncBatchNorm '1', '4' .*memnorm\.convert.* last"
    ):
        schedule.step()
    assert schedule.last_step == 1


def test_a_schedule_created_afterwards_is_an_error_that_names_the_cause():
    with pytest.raises(NothingToRecord, match=r"no memorized layer\. .*convert_sync_batchnorm"):
        memnorm.StrengthSchedule(to_sync(memnorm.convert(small_net())), 10)


@pytest.mark.parametrize("attach", ["double_forward", "schedule"])
def test_replaced_layers_in_one_part_of_the_model_are_an_error(attach):
    model = nn.Sequential(memnorm.convert(small_net()), memnorm.convert(small_net()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if attach == "double_forward":
        memnorm.double_forward(model, optimizer)
    else:
        schedule = memnorm.StrengthSchedule(model, 10)
        optimizer.register_step_post_hook(lambda *_: schedule.step())
    model[0] = to_sync(model[0])
    with pytest.raises(NothingToRecord, match=r"'0\.1', '0\.4' of Sequential no longer record"):
        step(model, optimizer)


def test_a_model_without_double_forward_and_schedule_reports_replaced_layers_when_it_is_saved():
    model = to_sync(memnorm.convert(small_net()))
    with pytest.warns(MemnormWarning, match=r"state_dict: the SyncBatchNorm '1', '4' of Sequential came after"):
        model.state_dict()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_reports_replaced_layers_when_it_is_saved(copied):
    model = copied(memnorm.convert(small_net()))
    saves_silently(model)
    with pytest.warns(MemnormWarning, match="convert_sync_batchnorm"):
        to_sync(model).state_dict()


def test_many_layers_are_named_in_part():
    model = memnorm.convert(nn.Sequential(*(nn.BatchNorm2d(2) for _ in range(5))))
    with pytest.warns(MemnormWarning, match="'0', '1', '2' and 2 more"):
        to_sync(model).state_dict()


def test_a_model_with_memorized_layers_is_saved_without_a_warning():
    model = memnorm.convert(small_net())
    saves_silently(model)
    saves_silently(AveragedModel(model))
    saves_silently(memnorm.convert(to_sync(model)))


@pytest.mark.parametrize("back", [memnorm.to_batchnorm, lambda model: memnorm.convert(model, nn.SyncBatchNorm)])
def test_an_intended_sync_batch_norm_is_saved_without_a_warning(back):
    model = back(memnorm.convert(small_net()))
    assert not model._state_dict_pre_hooks
    saves_silently(to_sync(model))


def test_converting_twice_watches_once():
    model = memnorm.convert(memnorm.convert(small_net()), decay=0.8)
    assert len(model._state_dict_pre_hooks) == 1


def test_a_skipped_sync_batch_norm_gives_no_warning():
    model = small_net()
    model[1] = nn.SyncBatchNorm(6)
    model[1].forward = lambda x: x
    with pytest.warns(MemnormWarning, match="convert skipped"):
        memnorm.convert(model)
    saves_silently(model)
