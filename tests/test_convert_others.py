"""What convert meets besides torch's batch norm: memorized layers, SyncBatchNorm, other factories, nothing at all."""

import copy

import pytest
import torch
from helpers.common import LAYERS, SHAPES, assert_same_state, images, leaf, small_net
from helpers.conversion import BatchNormAct2d, assert_bitwise, evaluated, memorized, seasoned, trained
from torch import nn
from torch.nn import functional as F

import memnorm
from memnorm.errors import InputError, NothingToConvert, WrappedModelError
from memnorm.layers import MemorizedBatchNorm


def test_a_factory_builds_the_replacement_for_each_layer():
    net = memnorm.convert(small_net(), lambda channels: nn.GroupNorm(2, channels))
    assert [type(net[i]) for i in (1, 4)] == [nn.GroupNorm] * 2
    assert [net[i].num_channels for i in (1, 4)] == [6, 4]


def test_a_factory_is_given_the_options():
    net = memnorm.convert(small_net(), lambda channels, groups: nn.GroupNorm(groups, channels), groups=2)
    assert net[1].num_groups == 2


def test_what_a_factory_builds_takes_over_statistics():
    net = trained(small_net())
    expected = evaluated(net, images(5, seed=9))
    memnorm.convert(net, lambda channels: nn.BatchNorm2d(channels, momentum=0.01))
    assert net[1].momentum == 0.01
    assert_bitwise(evaluated(net, images(5, seed=9)), expected)


def test_what_a_factory_builds_takes_over_mode_and_dtype():
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
        pytest.param(
            lambda channels: memnorm.convert(BatchNormAct2d(channels)),
        ),
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


def test_a_smaller_memory_keeps_the_newest_entries():
    layer = seasoned(memnorm.MemorizedBatchNorm2d(3, memory_size=8), steps=5)
    new = memnorm.convert(layer, memory_size=3)
    assert new.memory_size == 3
    assert_bitwise(new.memory_mean, layer.memory_mean[:3])
    assert_bitwise(new.memory_var, layer.memory_var[:3])
    assert_bitwise(new.memory_count, layer.memory_count[:3])


def test_a_smaller_memory_goes_on_like_one_that_was_always_that_small():
    shape = (8, 3, 5, 4)
    resized = seasoned(memnorm.MemorizedBatchNorm2d(3, memory_size=8, dtype=torch.float64), dtype=torch.float64)
    small = seasoned(memnorm.MemorizedBatchNorm2d(3, memory_size=2, dtype=torch.float64), dtype=torch.float64)
    resized = memnorm.convert(resized, memory_size=2)
    assert_same_state(resized, small, atol=1e-12)
    for seed in (7, 8):
        x = leaf(shape, seed=seed)
        torch.testing.assert_close(resized(x), small(x), rtol=0, atol=1e-12)


def test_a_larger_memory_keeps_every_entry():
    layer = seasoned(memnorm.MemorizedBatchNorm2d(3, memory_size=2), steps=5)
    new = memnorm.convert(layer, memory_size=4)
    assert_bitwise(new.memory_count, torch.tensor([160.0, 160.0, 0.0, 0.0]))
    assert_bitwise(new.memory_mean[:2], layer.memory_mean)
    assert_bitwise((new.running_mean, new.running_weight), (layer.running_mean, layer.running_weight))


def test_a_new_decay_keeps_the_memory_whole():
    layer = seasoned(memnorm.MemorizedBatchNorm2d(3))
    before = copy.deepcopy(layer.state_dict())
    new = memnorm.convert(layer, decay=0.5)
    assert new.decay == 0.5
    assert_bitwise(new.state_dict(), before)


def test_a_new_strength_replaces_the_old_one_only():
    layer = seasoned(memnorm.MemorizedBatchNorm2d(3))
    before = copy.deepcopy(layer.state_dict())
    new = memnorm.convert(layer, strength=0.25)
    before["strength"].fill_(0.25)
    assert_bitwise(new.state_dict(), before)


def test_a_strength_set_by_a_schedule_outlives_new_options():
    net = memnorm.convert(small_net())
    memnorm.StrengthSchedule(net, 10)
    memnorm.convert(net, memory_size=3)
    assert [layer.strength.item() for layer in memorized(net)] == [0.1, 0.1]


def test_options_that_are_not_given_stay():
    layer = memnorm.MemorizedBatchNorm2d(
        3, memory_size=5, decay=0.8, prior_weight=3.0, prior_from_init=True, shift=False
    )
    new = memnorm.convert(layer, decay=0.7)
    kept = (new.memory_size, new.decay, new.prior_weight, new.prior_from_init, new.shift)
    assert kept == (5, 0.7, 3.0, True, False)


def test_a_layer_without_statistics_takes_a_new_strength_in_its_stride():
    layer = memnorm.MemorizedBatchNorm2d(3, track_running_stats=False)
    assert memnorm.convert(layer, strength=0.25).strength is None


def test_a_memorized_layer_on_meta_can_be_resized():
    layer = memnorm.MemorizedBatchNorm2d(3, device="meta")
    assert memnorm.convert(layer, memory_size=3).memory_count.shape == (3,)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sync_batch_norm_becomes_a_layer_for_data_of_any_rank(shape):
    new = memnorm.convert(nn.SyncBatchNorm(3))
    x = leaf(shape, seed=0, dtype=torch.float32)
    torch.testing.assert_close(new(x), LAYERS[len(shape)][1](3)(x), rtol=0, atol=1e-5)
    assert int((new.memory_count > 0).sum()) == 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sync_batch_norm_comes_back_as_the_batch_norm_for_the_data_it_saw(shape):
    model = seasoned(memnorm.convert(nn.Sequential(nn.SyncBatchNorm(3))), shape)
    x = leaf(shape, seed=9, dtype=torch.float32)
    expected = evaluated(model, x)
    plain = memnorm.to_batchnorm(model)
    assert type(plain[0]) is LAYERS[len(shape)][1]
    assert "process_group" not in plain[0].__dict__
    assert_bitwise(evaluated(plain, x), expected)


def test_a_sync_batch_norm_that_saw_no_data_comes_back_as_itself():
    layer = memnorm.to_batchnorm(memnorm.convert(nn.SyncBatchNorm(3)))
    assert type(layer) is nn.SyncBatchNorm
    assert layer.process_group is None


def test_a_sync_batch_norm_checkpoint_loads_into_the_converted_layer():
    checkpoint = nn.SyncBatchNorm(3)
    checkpoint.load_state_dict(seasoned(nn.BatchNorm2d(3)).state_dict())
    new = memnorm.convert(nn.SyncBatchNorm(3))
    new.load_state_dict(checkpoint.state_dict(), strict=True)
    x = leaf((4, 3, 2, 2), seed=9, dtype=torch.float32)
    assert_bitwise(evaluated(new, x), evaluated(checkpoint, x))


def test_one_dimensional_data_is_refused_in_words_after_a_sync_batch_norm():
    with pytest.raises(InputError, match=r"expected at least 2-D input \(N, C, …\), got shape \(3,\)"):
        memnorm.convert(nn.SyncBatchNorm(3))(torch.zeros(3))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.Linear(2, 2)), "Sequential has no batch norm; it has no norm"),
        (nn.Sequential(nn.GroupNorm(1, 2)), "has no batch norm; its norms are GroupNorm"),
        (nn.Sequential(nn.LayerNorm(2), nn.GroupNorm(1, 2)), "its norms are GroupNorm, LayerNorm"),
        (nn.Sequential(nn.InstanceNorm2d(2, track_running_stats=True)), "its norms are InstanceNorm2d"),
        (nn.Linear(2, 2), "Linear has no batch norm"),
    ],
    ids=["none", "GroupNorm", "two kinds", "InstanceNorm", "one layer"],
)
def test_a_model_without_batch_norm_is_refused_with_the_norms_it_has(model, words):
    with pytest.raises(NothingToConvert, match=words):
        memnorm.convert(model)


@pytest.mark.parametrize("build", [small_net, lambda: nn.BatchNorm2d(3)], ids=["network", "layer"])
def test_to_batchnorm_of_a_plain_model_is_refused(build):
    with pytest.raises(NothingToConvert, match=r"to_batchnorm: .* has no memorized layer; it is a plain model already"):
        memnorm.to_batchnorm(build())


@pytest.fixture
def process_group(tmp_path):
    """A group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("nested", [False, True], ids=["wrapped", "a wrapped part"])
@pytest.mark.parametrize("call", [memnorm.convert, memnorm.to_batchnorm])
@pytest.mark.usefixtures("process_group")
def test_a_model_wrapped_for_distributed_training_is_refused_with_what_to_do(call, nested):
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), memnorm.MemorizedBatchNorm1d(3)))
    words = rf"wrapped in DistributedDataParallel, .* DistributedDataParallel\(memnorm\.{call.__name__}\(model\)\)"
    with pytest.raises(WrappedModelError, match=words):
        call(nn.Sequential(model) if nested else model)


def test_a_model_wrapped_in_fsdp_is_refused_with_what_to_do():
    class FullyShardedDataParallel(nn.Sequential):
        """A stand-in: the real one needs more than one process to say the same."""

    with pytest.raises(WrappedModelError, match=r"FullyShardedDataParallel\(memnorm\.convert\(model\)\)"):
        memnorm.convert(FullyShardedDataParallel(nn.BatchNorm2d(3)))
