"""The state of the norms that are batch norm in eval mode: recording, copies, checkpoints."""

import copy
import pickle

import pytest
import torch
from helpers.common import assert_same_state, leaf
from helpers.conversion import assert_bitwise, evaluated, with_statistics
from helpers.running_norms import NAMES, OPTIONS, built, drifting, each_norm, gradients, warmed
from torch import nn

import memnorm


@each_norm
def test_a_checkpoint_of_batch_norm_loads_strictly_and_evaluates_the_same(name):
    plain = with_statistics(nn.BatchNorm2d(3))
    layer = type(built(name))(3)
    layer.load_state_dict(plain.state_dict(), strict=True)
    x = leaf((4, 3, 2, 2), seed=9, dtype=torch.float32)
    assert_bitwise(evaluated(layer, x), evaluated(plain, x))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "momentum_bn"])
def test_the_state_has_the_keys_of_batch_norm(name):
    assert list(built(name).state_dict()) == list(nn.BatchNorm2d(3).state_dict())


def through_pickle(layer):
    return pickle.loads(pickle.dumps(layer))


def through_state_dict(layer):
    fresh = copy.deepcopy(layer)
    with torch.no_grad():
        for tensor in (*fresh.parameters(), *fresh.buffers()):
            tensor.fill_(3)
    fresh.load_state_dict(copy.deepcopy(layer.state_dict()))
    return fresh


@each_norm
@pytest.mark.parametrize("way", [copy.deepcopy, through_pickle, through_state_dict])
def test_a_copy_trains_like_the_original(name, way):
    layer = warmed(name)
    other = way(layer)
    for step in range(6, 9):
        assert_bitwise(other(drifting((8, 3, 5, 4), step)), layer(drifting((8, 3, 5, 4), step)))
    assert_same_state(other, layer)


@each_norm
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


@each_norm
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


@each_norm
def test_a_layer_on_meta_can_be_initialized(name):
    layer = type(built(name))(3, device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    fresh = type(built(name))(3)
    assert_same_state(layer, fresh)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ghost"])  # its parts are those of the order
def test_the_statistics_of_equal_data_are_equal_in_any_order_of_the_images(name):
    layers = [warmed(name), warmed(name)]
    x = drifting((8, 3, 5, 4), 9).detach()
    turned = x.flip(0)
    torch.testing.assert_close(layers[0](x).flip(0), layers[1](turned), rtol=1e-10, atol=1e-10)
    assert_same_state(*layers, atol=1e-12)
