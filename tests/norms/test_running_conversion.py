"""Conversion to the norms that are batch norm in eval mode, between them, and back."""

import copy
import io

import pytest
import torch
from helpers.common import LAYERS, SHAPES, assert_same_state, images, leaf, small_net
from helpers.conversion import VARIANTS, BatchNormAct2d, assert_bitwise, evaluated, train_step, with_statistics
from helpers.running_norms import NAMES, OPTIONS, built, each_norm, net_with, replace
from torch import nn
from torch.utils.checkpoint import checkpoint

import memnorm


@each_norm
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_converted_layer_evaluates_bit_for_bit_the_same(name, shape):
    plain = with_statistics(LAYERS[len(shape)][1](3), shape)
    x = leaf(shape, seed=9, dtype=torch.float32)
    assert_bitwise(evaluated(replace(copy.deepcopy(plain), name), x), evaluated(plain, x))


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
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_a_trained_layer_evaluates_bit_for_bit_the_same_as_a_plain_one(name, options):
    layer = with_statistics(replace(nn.BatchNorm2d(3, **options), name))
    x = leaf((4, 3, 2, 2), seed=9, dtype=torch.float32)
    before = evaluated(layer, x)
    assert_bitwise(evaluated(memnorm.to_batchnorm(layer), x), before)


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
def test_the_layer_that_was_replaced_stays_a_plain_batch_norm(name):
    plain = with_statistics(nn.BatchNorm2d(3))
    repr_before = repr(plain)
    with_statistics(replace(plain, name))
    assert type(plain) is nn.BatchNorm2d
    assert repr(plain) == repr_before
    assert plain.state_dict().keys() == nn.BatchNorm2d(3).state_dict().keys()


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
def test_conversion_from_memorized_layers_drops_the_memory(name):
    model = with_statistics(memnorm.convert(nn.BatchNorm2d(3)))
    x = leaf((4, 3, 2, 2), seed=9, dtype=torch.float32)
    before = evaluated(model, x)
    model = memnorm.convert(model, name)
    assert not [key for key in model.state_dict() if key.startswith("memory")]
    assert_bitwise(evaluated(model, x), before)


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
def test_a_layer_that_replaced_none_becomes_the_batch_norm_for_its_data(name, shape):
    layer = type(built(name))(3)
    layer(leaf(shape, seed=0, dtype=torch.float32))
    back = memnorm.to_batchnorm(layer)
    assert type(back) is LAYERS[len(shape)][1]
    assert back.__dict__.keys() == LAYERS[len(shape)][1](3).__dict__.keys()
    assert evaluated(back, leaf(shape, seed=1, dtype=torch.float32)).shape == shape
