"""Norms that are batch norm in eval mode: conversion, state, training, errors."""

import copy
import io
import pickle

import pytest
import torch
from helpers.common import LAYERS, SHAPES, assert_same_state, images, leaf, small_net
from helpers.conversion import VARIANTS, BatchNormAct2d, assert_bitwise, evaluated, train_step, with_statistics
from helpers.running_norms import (
    NAMES,
    OPTIONS,
    built,
    drifting,
    each_norm,
    each_recorder,
    gradients,
    net_with,
    replace,
    warmed,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import memnorm
from memnorm.errors import InputError, OptionError


@each_norm
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_conversion_and_back_restores_every_attribute(name, options):
    layer = with_statistics(nn.BatchNorm2d(3, **options))
    layer.note_of_the_user = "kept"
    back = memnorm.to_batchnorm(replace(copy.deepcopy(layer), name))
    assert type(back) is nn.BatchNorm2d
    assert back.__dict__.keys() == layer.__dict__.keys()
    assert repr(back) == repr(layer)
    assert_same_state(back, layer)


@each_norm
def test_a_saved_model_needs_nothing_of_memnorm_after_to_batchnorm(name):
    model = net_with(name, **OPTIONS[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = memnorm.double_forward(model, optimizer)
    train_step(model, optimizer, seed=0)
    checkpoint(model, images(4, seed=0), use_reentrant=False).sum().backward()
    assert handle.steps == 1
    file = io.BytesIO()
    torch.save(memnorm.to_batchnorm(model), file)
    assert b"memnorm" not in file.getvalue()
    assert list(model.state_dict()) == list(small_net().state_dict())


@each_norm
def test_parameters_mode_hooks_and_sharing_are_kept_both_ways(name):
    layer, calls = nn.BatchNorm2d(3), []
    layer.register_forward_hook(lambda *_: calls.append(1))
    layer.weight.requires_grad_(False)
    model = nn.ModuleDict({"a": layer.eval(), "b": nn.Sequential(layer)}).train()
    layer.eval()
    for change in (lambda: memnorm.convert(model, name, **OPTIONS[name]), lambda: memnorm.to_batchnorm(model)):
        change()
        assert model["a"] is model["b"][0]
        assert model["a"].weight is layer.weight
        assert not model["a"].training
        model["a"](leaf((4, 3, 2, 2), seed=0, dtype=torch.float32))
    assert len(calls) == 2


@each_norm
@pytest.mark.parametrize("other", ["mbn", *NAMES])
def test_conversion_between_norms_equals_conversion_through_batch_norm(name, other):
    plain = with_statistics(nn.BatchNorm2d(3))
    over = memnorm.convert(copy.deepcopy(plain), name)
    there = memnorm.convert(over, other)
    direct = memnorm.convert(copy.deepcopy(plain), other)
    assert type(there) is type(direct)
    assert repr(there) == repr(direct)
    assert_same_state(there, direct)
    assert_same_state(memnorm.to_batchnorm(memnorm.convert(there, name)), plain)


@each_norm
def test_the_activation_of_a_norm_is_kept(name):
    plain = with_statistics(BatchNormAct2d(3, act=nn.Tanh()))
    model = memnorm.convert(copy.deepcopy(plain), name, **OPTIONS[name])
    x = leaf((4, 3, 2, 2), seed=9, dtype=torch.float32)
    assert_bitwise(evaluated(model, x), evaluated(plain, x))
    assert float(model.train()(x).detach().abs().max()) < 1
    model.load_state_dict(plain.state_dict(), strict=True)
    back = memnorm.to_batchnorm(model)
    assert type(back) is BatchNormAct2d
    assert_bitwise(evaluated(back, x), evaluated(plain, x))


@each_norm
def test_a_sync_batch_norm_is_restored(name):
    plain = nn.SyncBatchNorm(3)
    back = memnorm.to_batchnorm(replace(copy.deepcopy(plain), name))
    assert type(back) is nn.SyncBatchNorm
    assert back.__dict__.keys() == plain.__dict__.keys()


@each_norm
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_new_layer_becomes_the_batch_norm_for_the_rank_of_its_data(name, shape):
    layer = type(built(name))(3)
    layer(leaf(shape, seed=0, dtype=torch.float32))
    back = memnorm.to_batchnorm(layer)
    assert type(back) is LAYERS[len(shape)][1]
    assert back.__dict__.keys() == LAYERS[len(shape)][1](3).__dict__.keys()
    assert evaluated(back, leaf(shape, seed=1, dtype=torch.float32)).shape == shape


@each_norm
def test_a_checkpoint_of_batch_norm_loads_strictly_and_evaluates_the_same(name):
    plain = with_statistics(nn.BatchNorm2d(3))
    layer = type(built(name))(3)
    layer.load_state_dict(plain.state_dict(), strict=True)
    x = leaf((4, 3, 2, 2), seed=9, dtype=torch.float32)
    assert_bitwise(evaluated(layer, x), evaluated(plain, x))


def through_pickle(layer):
    return pickle.loads(pickle.dumps(layer))


def through_state_dict(layer):
    fresh = copy.deepcopy(layer)
    with torch.no_grad():
        for tensor in (*fresh.parameters(), *fresh.buffers()):
            tensor.fill_(3)
    fresh.load_state_dict(copy.deepcopy(layer.state_dict()))
    return fresh


@each_recorder
@pytest.mark.parametrize("way", [copy.deepcopy, through_pickle, through_state_dict])
def test_a_copy_trains_like_the_original(name, way):
    layer = warmed(name)
    other = way(layer)
    for step in range(6, 9):
        x = drifting((8, 3, 5, 4), step)
        assert_bitwise(gradients(other, x, other.parameters()), gradients(layer, x, layer.parameters()))
    assert_same_state(other, layer)


@each_recorder
def test_with_recording_off_a_forward_computes_the_same_and_writes_nothing(name):
    layer = warmed(name)
    before, twin = copy.deepcopy(layer.state_dict()), copy.deepcopy(layer)
    x = drifting((8, 3, 5, 4), 9)
    with memnorm.recording(layer, False):
        muted = gradients(layer, x, layer.parameters())
    for key, value in layer.state_dict().items():
        assert_bitwise(value, before[key])
    for mine, recorded in zip(muted, gradients(twin, x, twin.parameters()), strict=True):
        assert_bitwise(mine, recorded)
    assert int(twin.num_batches_tracked) > int(layer.num_batches_tracked)


@each_recorder
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_batch_that_is_not_finite_is_not_recorded(name, bad):
    layer = warmed(name)
    before = copy.deepcopy(layer.state_dict())
    x = drifting((8, 3, 5, 4), 9).detach()
    x[2, 1, 0, 0] = bad
    layer(x)
    for key, value in layer.state_dict().items():
        assert_bitwise(value, before[key])


@each_norm
@pytest.mark.parametrize("late", [False, True])
def test_without_running_statistics_it_is_batch_norm_on_the_batch(name, late):
    layer = built(name, **OPTIONS[name], plain={"track_running_stats": late})
    layer.track_running_stats = False
    plain = nn.BatchNorm2d(3, dtype=torch.float64, track_running_stats=False)
    plain.load_state_dict(layer.state_dict(), strict=False)
    for mode in (True, False) if not late else (True,):
        x = drifting((8, 3, 5, 4), 1)
        assert_bitwise(layer.train(mode)(x), plain.train(mode)(x))
    layer.train()(x * torch.inf)
    assert all(buffer.isfinite().all() for buffer in layer.buffers())


@each_recorder
def test_a_layer_on_meta_can_be_initialized(name):
    layer = type(built(name))(3, device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    fresh = type(built(name))(3)
    assert_same_state(layer, fresh)


class Section(nn.Module):
    """A norm between two maps, run under activation checkpointing or not."""

    def __init__(self, norm, how):
        super().__init__()
        self.norm, self.how = norm, how

    def forward(self, x):
        if self.how is None:
            return self.norm(x.tanh()).square()
        return checkpoint(lambda x: self.norm(x.tanh()).square(), x, use_reentrant=self.how == "reentrant")


@each_recorder
@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_a_checkpointed_section_has_the_same_gradients_and_records_once(name, how):
    layers = [warmed(name), warmed(name)]
    results = []
    for layer, way in zip(layers, (None, how), strict=True):
        section, xs = Section(layer, way), [drifting((8, 3, 5, 4), step) for step in (7, 8)]
        total = sum(section(x).mean() for x in xs)  # two forwards, then both backwards
        results.append(torch.autograd.grad(total, xs) if how != "reentrant" else backward_into(total, xs))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert_same_state(*layers)


def backward_into(total, xs):
    total.backward()
    return [x.grad for x in xs]


@each_norm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_model_trains_and_evaluates(name, dtype):
    layer = built(name, dtype=torch.float32, **OPTIONS[name]).to(dtype)
    for step in range(3):
        x = drifting((8, 3, 5, 4), step).detach().to(dtype).requires_grad_()
        y = layer(x)
        y.sum().backward()
        assert (y.dtype, x.grad.dtype, layer.running_var.dtype) == (dtype, dtype, dtype)
    assert layer.eval()(x).dtype == dtype


@each_norm
def test_a_summary_counts_recorded_batches(name):
    layer = built(name, momentum=0.25)
    assert note(layer).startswith("0 batches recorded, momentum 0.25")
    layer(drifting((8, 3, 5, 4), 0))
    assert note(layer).startswith("1 batch recorded" if name != "ghost" else "1 batch recorded, momentum 0.25, ghost")
    layer.recording = False
    assert note(layer).endswith("recording off")


def note(layer):
    [row] = memnorm.summary(nn.Sequential(layer)).layers
    assert row.kind == type(layer).__name__
    return row.note


def test_a_summary_of_layers_without_statistics_or_on_meta():
    assert note(built("brn", plain={"track_running_stats": False})).startswith("batch statistics only")
    assert note(type(built("brn"))(3, device="meta")) == "on meta"


BAD_INPUTS = {
    "one value": ((1, 3), InputError, "Expected more than 1 value per channel when training"),
    "channels": ((8, 4, 5), InputError, r"the layer has 3 channels, the input has shape \(8, 4, 5\)"),
    "rank": ((3,), InputError, r"at least 2-D input \(N, C, …\), got shape \(3,\)"),
}


@each_norm
@pytest.mark.parametrize(("shape", "error", "message"), BAD_INPUTS.values(), ids=BAD_INPUTS)
def test_wrong_inputs_are_errors_that_say_what_was_expected(name, shape, error, message):
    layer = built(name, rank=2)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(error, match=message):
        layer(torch.ones(shape, dtype=torch.float64))
    for key, value in layer.state_dict().items():
        assert_bitwise(value, before[key])


@each_recorder
def test_unknown_options_are_named_in_the_error(name):
    with pytest.raises(OptionError, match=r"unknown option nonsense; (its options are|it has no options)"):
        built(name, nonsense=1)


@each_norm
@pytest.mark.parametrize("momentum", [-0.1, 1.5, "0.1", True])
def test_a_wrong_momentum_is_an_error(name, momentum):
    with pytest.raises(OptionError, match="momentum must be a number from 0 to 1"):
        built(name, momentum=momentum)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "brn"])
def test_the_momentum_of_the_replaced_layer_is_kept(name):
    assert built(name, plain={"momentum": 0.37}).momentum == 0.37
    assert built(name, plain={"momentum": None}).momentum is None


@each_recorder
def test_a_new_layer_takes_the_arguments_of_a_batch_norm(name):
    layer = type(built(name))(3, 1e-3, 0.2, bias=False, dtype=torch.float64)
    assert (layer.eps, layer.momentum, layer.bias) == (1e-3, 0.2, None)
    assert layer.running_var.dtype == torch.float64
    assert layer(leaf((4, 3, 2), seed=0)).isfinite().all()
