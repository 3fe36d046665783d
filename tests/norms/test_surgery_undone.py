"""`to_batchnorm` and statistics tools for norms that change more of the model than its norms."""

import copy

import pytest
import torch
from helpers.common import images, labels, small_net
from torch import nn
from torch.nn.utils import parametrize

import memnorm


def trained(name, **options):
    net = memnorm.convert(small_net(), name, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for seed in range(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images(4, seed=seed)), labels(4, seed=seed)).backward()
        optimizer.step()
    return net


@pytest.mark.parametrize("name", ["mabn", "cbn"])
def test_to_batchnorm_leaves_nothing_of_the_surgery_and_evaluates_the_same(name):
    net = trained(name)
    wanted = copy.deepcopy(net).eval()(images(4, seed=9))
    plain = memnorm.to_batchnorm(net).eval()
    torch.testing.assert_close(plain(images(4, seed=9)), wanted, rtol=0, atol=1e-6)
    assert {type(module).__module__.split(".")[0] for module in plain.modules()} == {"torch"}
    assert not any(parametrize.is_parametrized(module) for module in plain.modules())
    assert not any(module._forward_hooks for module in plain.modules())
    assert set(plain.state_dict()) == set(small_net().state_dict())


@pytest.mark.parametrize("name", ["mabn", "cbn"])
def test_another_conversion_takes_the_surgery_back(name):
    net = memnorm.convert(trained(name), "group")
    assert not any(parametrize.is_parametrized(module) for module in net.modules())
    assert not any(module._forward_hooks for module in net.modules())


def test_a_second_conversion_to_mabn_centres_each_weight_once():
    net = memnorm.convert(trained("mabn"), "mabn")
    assert [len(net[place].parametrizations.weight) for place in (0, 3)] == [1, 1]


def test_online_norm_cannot_become_batch_norm_where_it_does_more_in_eval():
    with pytest.raises(memnorm.MemnormError, match="computes something else than batch norm in eval mode"):
        memnorm.to_batchnorm(trained("online"))
    net = trained("online", compensation=None)
    wanted = copy.deepcopy(net).eval()(images(4, seed=9))
    torch.testing.assert_close(memnorm.to_batchnorm(net).eval()(images(4, seed=9)), wanted, rtol=0, atol=1e-6)


def test_recalibration_gives_mabn_the_second_moment_of_the_population():
    net = trained("mabn")
    inputs = []
    handle = net[1].register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach()))
    batches = [images(4, seed=seed) for seed in range(3)]
    memnorm.recalibrate(net, batches)
    handle.remove()
    seen = torch.cat(inputs).double()
    assert torch.equal(net[1].running_mean, torch.zeros(6))
    torch.testing.assert_close(net[1].running_var.double(), seen.square().mean((0, 2, 3)), rtol=1e-5, atol=0)
