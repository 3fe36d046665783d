"""The options of `convert`: names of norms, factories, and new options for layers that are memorized already."""

import copy

import pytest
import torch
from helpers.common import assert_same_state, images, leaf, small_net
from helpers.conversion import (
    BatchNormAct2d,
    assert_bitwise,
    evaluated,
    memorized,
    trained,
    with_statistics,
)
from torch import nn
from torch.nn import functional as F

import memnorm
from memnorm import MemorizedBatchNorm, norms
from memnorm.errors import OptionError


def test_without_options_layers_get_the_papers_defaults():
    layer = memnorm.convert(small_net())[1]
    assert (layer.memory_size, layer.decay, layer.strength.item()) == (20, 0.9, 0.5)


@pytest.mark.parametrize("memory_size", [3, None])
def test_options_reach_every_layer(memory_size):
    given = {"memory_size": memory_size, "decay": 0.5, "strength": 0.1, "prior_weight": 2.0, "prior_from_init": True}
    for layer in memorized(memnorm.convert(small_net(), **given)):
        assert {name: getattr(layer, name) for name in given} == given


BAD_OPTIONS = [
    ({"memory": 3}, r"unknown option memory for norm 'mbn'; its options are memory_size, decay, strength"),
    ({"momentum": 0.1, "eps": 1e-3}, r"unknown option eps, momentum for norm 'mbn'"),
    ({"norm": "mbm"}, r"unknown norm 'mbm'; available: .*mbn"),
    ({"memory_size": 0}, r"memory_size must be a positive number of batches, or None for all of them; got 0"),
    ({"memory_size": 2.5}, r"memory_size must be a positive number of batches, .* got 2\.5"),
    ({"memory_size": True}, r"memory_size must be a positive number of batches, .* got True"),
    ({"decay": 0}, r"decay must lie in \(0, 1\]; got 0"),
    ({"decay": 1.5}, r"decay must lie in \(0, 1\]; got 1\.5"),
    ({"decay": float("nan")}, r"decay must lie in \(0, 1\]; got nan"),
    ({"strength": -0.1}, r"strength must lie in \[0, 1\]; got -0\.1"),
    ({"strength": "high"}, r"strength must lie in \[0, 1\]; got 'high'"),
    ({"prior_weight": -1.0}, r"prior_weight must be zero or a positive number of batches; got -1\.0"),
    ({"prior_weight": float("inf")}, r"prior_weight must be zero or a positive number of batches; got inf"),
]


@pytest.mark.parametrize("build", [nn.BatchNorm2d, memnorm.MemorizedBatchNorm2d], ids=["plain", "memorized"])
@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS, ids=lambda value: value if isinstance(value, str) else "")
def test_wrong_options_are_errors(options, words, build):
    with pytest.raises(OptionError, match=words):
        memnorm.convert(small_net(build), **options)


@pytest.mark.parametrize("norm", [20, None], ids=str)
def test_a_norm_that_is_neither_name_nor_function_is_an_error(norm):
    with pytest.raises(OptionError, match="norm"):
        memnorm.convert(small_net(), norm)


def test_a_name_is_registered_once():
    with pytest.raises(OptionError, match="there is already a norm 'mbn'"):
        norms.register(norms.get("mbn"))


def test_a_factory_builds_the_replacement_of_each_layer_with_the_options():
    net = memnorm.convert(small_net(), lambda channels, groups: nn.GroupNorm(groups, channels), groups=2)
    assert [type(net[i]) for i in (1, 4)] == [nn.GroupNorm] * 2
    assert [(net[i].num_channels, net[i].num_groups) for i in (1, 4)] == [(6, 2), (4, 2)]


def test_a_layer_from_a_factory_gets_the_statistics():
    net = trained(small_net())
    expected = evaluated(net, images(5, seed=9))
    memnorm.convert(net, lambda channels: nn.BatchNorm2d(channels, momentum=0.01))
    assert net[1].momentum == 0.01
    assert_bitwise(evaluated(net, images(5, seed=9)), expected)


def test_a_layer_from_a_factory_gets_mode_and_dtype():
    net = small_net(dtype=torch.float64)
    net[1].eval()
    memnorm.convert(net, nn.SyncBatchNorm)
    assert [net[i].training for i in (1, 4)] == [False, True]
    assert net[1].running_mean.dtype == torch.float64


def test_a_replacement_without_parameters_of_that_shape_keeps_its_own():
    net = memnorm.convert(small_net(), lambda channels: nn.LayerNorm([channels, 6, 6]))
    assert net[1].weight.shape == (6, 6, 6)


@pytest.mark.parametrize(
    "build",
    [
        BatchNormAct2d,
        lambda channels: memnorm.convert(BatchNormAct2d(channels)),
    ],
    ids=["plain", "memorized"],
)
def test_a_factory_does_not_strip_a_norm_of_its_activation(build):
    model = nn.Sequential(build(4))
    x = leaf((4, 4, 3, 3), seed=0, dtype=torch.float32)
    expected = F.relu(F.group_norm(x, 2, model[0].weight, model[0].bias))
    memnorm.convert(model, lambda channels: nn.GroupNorm(2, channels))
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-6)


def test_memorized_layers_stay_the_same_objects_without_options():
    net = memnorm.convert(small_net())
    before = memorized(net)
    assert all(new is old for new, old in zip(memorized(memnorm.convert(net)), before, strict=True))


def test_in_a_mixed_model_the_memorized_layers_stay_and_the_others_are_converted():
    model = nn.Sequential(memnorm.MemorizedBatchNorm2d(3), nn.BatchNorm2d(3))
    kept = model[0]
    memnorm.convert(model)
    assert model[0] is kept
    assert isinstance(model[1], MemorizedBatchNorm)


def test_a_layer_with_a_smaller_memory_trains_like_one_that_always_had_that_size():
    shape = (8, 3, 5, 4)
    resized = with_statistics(memnorm.MemorizedBatchNorm2d(3, memory_size=8, dtype=torch.float64), dtype=torch.float64)
    small = with_statistics(memnorm.MemorizedBatchNorm2d(3, memory_size=2, dtype=torch.float64), dtype=torch.float64)
    resized = memnorm.convert(resized, memory_size=2)
    assert_same_state(resized, small, atol=1e-12)
    for seed in (7, 8):
        x = leaf(shape, seed=seed)
        torch.testing.assert_close(resized(x), small(x), rtol=0, atol=1e-12)


def test_a_new_decay_and_a_new_strength_keep_the_memory():
    layer = with_statistics(memnorm.MemorizedBatchNorm2d(3))
    before = copy.deepcopy(layer.state_dict())
    new = memnorm.convert(layer, decay=0.5, strength=0.25)
    before["strength"].fill_(0.25)
    assert new.decay == 0.5
    assert_bitwise(new.state_dict(), before)


def test_a_strength_set_by_a_schedule_survives_new_options():
    net = memnorm.convert(small_net())
    memnorm.StrengthSchedule(net, 10)
    memnorm.convert(net, memory_size=3)
    assert [layer.strength.item() for layer in memorized(net)] == [0.1, 0.1]


def test_options_that_are_not_given_stay():
    layer = memnorm.MemorizedBatchNorm2d(3, memory_size=5, decay=0.8, prior_weight=3.0, prior_from_init=True)
    new = memnorm.convert(layer, decay=0.7)
    kept = (new.memory_size, new.decay, new.prior_weight, new.prior_from_init)
    assert kept == (5, 0.7, 3.0, True)


def test_a_layer_without_statistics_ignores_a_new_strength():
    layer = memnorm.MemorizedBatchNorm2d(3, track_running_stats=False)
    assert memnorm.convert(layer, strength=0.25).strength is None


def test_a_memorized_layer_on_meta_can_be_resized():
    layer = memnorm.MemorizedBatchNorm2d(3, device="meta")
    assert memnorm.convert(layer, memory_size=3).memory_count.shape == (3,)
