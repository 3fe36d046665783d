"""The registry entry of each norm is true."""

import copy

import pytest
import torch
from helpers.common import images, labels
from helpers.norms import EACH, chain, each_norm, step
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

import memnorm
from memnorm import norms


def pretrained():
    """Batch norm with random affine maps and trained statistics."""
    net = chain()
    for seed in range(5):
        net(2 * images(8, seed=seed) + 1)
    with torch.no_grad():
        for layer in net.modules():
            if isinstance(layer, _BatchNorm):
                layer.weight.uniform_(0.5, 2, generator=torch.Generator().manual_seed(1))
                layer.bias.uniform_(-1, 1, generator=torch.Generator().manual_seed(2))
    return net


def test_the_norms_are_these():
    wanted = (
        "bn brn lagged_bn moving_bn weight_norm normprop group layer instance ghost frn evonorm_s0 momentum_bn mabn"
    )
    assert sorted(f"mbn two_way cbn online {wanted}".split()) == EACH


@each_norm
def test_every_field_of_the_metadata_is_filled(name):
    entry = norms.get(name)
    assert entry.name == name
    assert all(len(text) > 3 for text in (entry.title, entry.paper, entry.state, entry.learning_rate))
    assert any(character.isdigit() for character in entry.paper), "a paper has a year"


@each_norm
def test_double_forward_accepts_only_norms_that_record(name):
    net = memnorm.convert(chain(), name)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    if norms.get(name).records:
        memnorm.double_forward(net, optimizer)
        nn.functional.cross_entropy(net(images(4, seed=0)), labels(4, seed=0)).backward()
        optimizer.step()
    else:
        with pytest.raises(memnorm.MemnormError, match="no layer that records"):
            memnorm.double_forward(net, optimizer)


@each_norm
def test_a_norm_that_does_not_profit_from_double_forward_has_nothing_to_record(name):
    assert (norms.get(name).double_forward == "no effect") == (not norms.get(name).records)


@each_norm
def test_pretrained_weights_are_kept_if_the_registry_says_so(name):
    net = pretrained()
    wanted = copy.deepcopy(net).eval()(images(4, seed=0))
    found = memnorm.convert(net, name).eval()(images(4, seed=0))
    assert torch.allclose(found, wanted, atol=1e-6) == norms.get(name).keeps_weights


@each_norm
def test_a_norm_that_folds_is_a_fixed_affine_map_per_channel_in_eval(name):
    net = memnorm.convert(pretrained(), name)
    step(net, 8)
    net.eval()
    layer, before = net[1], net[0](images(4, seed=0)).detach()
    with torch.no_grad():
        outputs = [layer(before * scale) for scale in (0.0, 1.0, 2.0)]
    affine = torch.allclose(outputs[2] - outputs[1], outputs[1] - outputs[0], atol=1e-4)
    other = before.clone()
    other[1:] += 3.0  # other images, and other places
    with torch.no_grad():
        local = torch.allclose(layer(other)[:1], outputs[1][:1], atol=1e-5)
    assert (affine and local) == norms.get(name).folds


@each_norm
def test_one_image_of_several_pixels_trains(name):
    net = memnorm.convert(chain(), name)
    step(net, 1)
    assert all(bool(parameter.isfinite().all()) for parameter in net.parameters())


@each_norm
def test_one_value_per_channel_trains_if_the_registry_says_so(name):
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    net[1].running_mean.fill_(0.1)  # a model that has been trained
    net = memnorm.convert(net, name)
    x = torch.randn(1, 6, generator=torch.Generator().manual_seed(0))
    try:
        nn.functional.cross_entropy(net(x), torch.tensor([0])).backward()
        trains = all(bool(p.grad.isfinite().all()) for p in net.parameters() if p.grad is not None)
    except ValueError:
        trains = False
    assert trains == norms.get(name).batch_one


@each_norm
def test_a_norm_that_scales_with_the_run_takes_its_length(name):
    if norms.get(name).scales_with_run:
        memnorm.convert(chain(), name, total_steps=10)
    else:
        with pytest.raises((memnorm.MemnormError, TypeError)):
            memnorm.convert(chain(), name, total_steps=10)


@each_norm
def test_fx_traces_a_converted_model(name):
    net = memnorm.convert(chain(), name)
    step(net, 4)
    net.eval()
    traced = fx.symbolic_trace(net)
    assert torch.equal(traced(images(4, seed=0)), net(images(4, seed=0)))


@each_norm
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_section_trains_the_same(name, reentrant):
    """Forwards are recomputed inside backward, after the statistics have changed."""
    plain, checkpointed = memnorm.convert(chain(), name), memnorm.convert(chain(), name)
    for seed in range(4):
        for net in (plain, checkpointed):
            x = images(4, seed=seed).requires_grad_()
            hidden = net[:7](x) if net is plain else checkpoint(net[:7], x, use_reentrant=reentrant)
            nn.functional.cross_entropy(net[7:](hidden), labels(4, seed=seed)).backward()
            torch.optim.SGD(net.parameters(), lr=0.05).step()
            net.zero_grad()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(checkpointed.state_dict()[key], value, rtol=1e-4, atol=1e-5)


@each_norm
def test_frozen_parameters_get_no_gradient_and_channels_last_changes_nothing(name):
    nets = []
    for layout in (torch.contiguous_format, torch.channels_last):
        net = chain()
        for layer in (net[0], net[1]):
            layer.requires_grad_(False)
        net = memnorm.convert(net, name)
        for seed in range(2):
            x = images(4, seed=seed).contiguous(memory_format=layout)
            nn.functional.cross_entropy(net(x), labels(4, seed=seed)).backward()
        nets.append(net)
    for ours, other in zip(*(net.parameters() for net in nets), strict=True):
        assert (ours.grad is None) == (not ours.requires_grad)
        if ours.grad is not None:
            torch.testing.assert_close(other.grad, ours.grad, rtol=1e-4, atol=1e-5)
    assert sum(not parameter.requires_grad for parameter in nets[0].parameters()) >= 3


@each_norm
def test_without_affine_map_or_running_statistics_it_trains_and_evaluates(name):
    net = chain()
    net[1], net[5] = nn.BatchNorm2d(8, affine=False), nn.BatchNorm2d(8, track_running_stats=False)
    net = memnorm.convert(net, name)
    for seed in range(3):
        step(net, 4, seed=seed)
    assert net.eval()(images(4, seed=0)).isfinite().all()
    assert copy.deepcopy(net).load_state_dict(net.state_dict()).missing_keys == []
