"""Summaries and errors of the norms that are batch norm in eval mode."""

import copy

import pytest
import torch
from helpers.common import images, leaf, small_net
from helpers.conversion import assert_bitwise
from helpers.running_norms import NAMES, OPTIONS, built, drifting, each_norm, net_with
from torch import nn

import memnorm
from memnorm.errors import DTypeError, InputError, OptionError


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


def test_a_summary_has_the_options():
    layer = built("brn", r_max=2.0)
    assert note(layer) == "0 batches recorded, momentum 0.01, r_max 2.0, d_max 5.0, total_steps None"


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


@each_norm
def test_integers_are_an_error(name):
    with pytest.raises(DTypeError, match=r"expected floating-point input, got torch\.int64"):
        built(name)(torch.ones(8, 3, 5, 4, dtype=torch.long))


@each_norm
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


@each_norm
def test_recalibration_gives_it_batch_norms_statistics(name):
    net, plain = net_with(name, **OPTIONS[name]), small_net()
    batches = [images(6, seed=step) for step in range(3)]
    for model in (net, plain):
        memnorm.recalibrate(model, batches, passes="exact")
    for place in (1, 4):
        torch.testing.assert_close(net[place].running_var, plain[place].running_var, rtol=1e-6, atol=1e-7)


@each_norm
def test_a_new_layer_takes_the_arguments_of_a_batch_norm(name):
    layer = type(built(name))(3, 1e-3, 0.2, bias=False, dtype=torch.float64)
    assert (layer.eps, layer.momentum, layer.bias) == (1e-3, 0.2, None)
    assert layer.running_var.dtype == torch.float64
    assert layer(leaf((4, 3, 2), seed=0)).isfinite().all()
