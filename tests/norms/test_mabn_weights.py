"""The centred weights of moving average batch norm: which, with what effect, in checkpoints and on the way back."""

from copy import deepcopy

import pytest
import torch
from helpers.common import images, randn, small_net
from helpers.window import converted
from torch import nn
from torch.nn.utils import parametrize

from memnorm.norms.base import restored
from memnorm.norms.mabn import ENTRY, Centred, centre_weights, settle_weights


def run(module, x, probe):
    x = x.detach().clone().requires_grad_()
    y = module(x)
    return y, torch.autograd.grad((y * probe).sum(), [x, *module.parameters()])


def equal_mean_images(count, seed):
    """Images whose every position under a 3×3 filter has the same mean over the batch: periodic ones, all shifts."""
    base = randn(count, 3, 5, 5, seed=seed)
    base = base - base.mean((0, 2, 3), keepdim=True) + 0.7
    shifts = [base.roll((i, j), (2, 3)) for i in range(5) for j in range(5)]
    return torch.cat(shifts)


def test_behind_a_centred_convolution_one_iteration_is_batch_norm_in_output_and_every_parameter_gradient():
    conv = nn.Conv2d(3, 4, 3, bias=False, dtype=torch.float64)
    ours = converted(nn.Sequential(conv, nn.BatchNorm2d(4, dtype=torch.float64)), ENTRY, window=1, warmup=0, momentum=1)
    theirs = nn.Sequential(deepcopy(ours[0]), nn.BatchNorm2d(4, dtype=torch.float64))
    x = equal_mean_images(4, seed=0)
    probe = randn(100, 4, 3, 3, seed=1)
    mine, (_, *grads_mine) = run(ours, x, probe)
    other, (_, *grads_other) = run(theirs, x, probe)
    assert ours[0](x).mean((0, 2, 3)).abs().max() < 1e-12
    torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)
    torch.testing.assert_close(
        sorted(grads_mine, key=lambda g: g.shape), sorted(grads_other, key=lambda g: g.shape), rtol=0, atol=1e-9
    )


def test_conversion_centres_the_filters_before_norms_and_leaves_the_classifier():
    net = small_net()
    parameters = {id(parameter) for parameter in net.parameters()}
    before = net[0].weight.detach().clone()
    converted(net, ENTRY)
    assert [parametrize.is_parametrized(net[i]) for i in (0, 3, 8)] == [True, True, False]
    assert {id(parameter) for parameter in net.parameters()} == parameters
    torch.testing.assert_close(net[0].weight, before - before.mean((1, 2, 3), keepdim=True))
    assert net[0].weight.mean((1, 2, 3)).abs().max() < 1e-6
    assert net[1].running_mean.eq(0).all()
    centre_weights(net)
    assert len(net[0].parametrizations["weight"]) == 1


def test_each_norm_claims_one_layer_of_its_width_before_it():
    class Apart(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 5)
            self.hidden = nn.Linear(5, 4)
            self.norm1, self.norm2, self.norm3 = nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.BatchNorm1d(4)
            self.last = nn.Conv2d(4, 4, 1)

    net = converted(Apart(), ENTRY)
    centred = [name for name, module in net.named_modules() if parametrize.is_parametrized(module)]
    assert centred == ["conv1", "conv2", "hidden"]


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_filters_are_centred_per_output(groups):
    conv = nn.ConvTranspose2d(4, 6, 3, groups=groups)
    weight = Centred(conv)(conv.weight)
    ones = torch.ones(1, 4, 9, 9)
    inner = nn.functional.conv_transpose2d(ones, weight, None, groups=groups)[:, :, 3:-3, 3:-3]
    assert inner.abs().max() < 1e-5
    assert weight.shape == conv.weight.shape
    assert weight.abs().max() > 0


def test_a_filter_of_one_weight_is_left_alone():
    net = converted(nn.Sequential(nn.Conv2d(3, 3, 1, groups=3), nn.BatchNorm2d(3)), ENTRY)
    assert not parametrize.is_parametrized(net[0])


def test_checkpoints_load_from_the_converted_and_from_the_plain_model():
    plain, net = small_net(seed=1), converted(small_net(seed=2), ENTRY)
    plain(images(4, seed=0))
    net.load_state_dict(plain.state_dict())
    torch.testing.assert_close(net[0].parametrizations.weight.original, plain[0].weight)
    torch.testing.assert_close(net[1].running_var, plain[1].running_var)
    assert net[1].running_mean.eq(0).all()
    net(images(4, seed=1)).sum().backward()
    other = converted(small_net(seed=3), ENTRY)
    other.load_state_dict(net.state_dict())
    x = images(4, seed=2)
    torch.testing.assert_close(other.eval()(x), net.eval()(x), rtol=0, atol=0)
    again = deepcopy(net)
    again.load_state_dict(plain.state_dict())


def test_the_way_back_evaluates_the_same_in_plain_layers():
    net = converted(small_net(), ENTRY, warmup=1)
    for seed in range(3):
        net(images(4, seed=seed)).sum().backward()
    expected = net.eval()(images(4, seed=9))
    settle_weights(net)
    for index in (1, 4):
        net[index] = restored(net[index])
    assert not any(parametrize.is_parametrized(module) for module in net.modules())
    assert {type(net[1]), type(net[4])} == {nn.BatchNorm2d}
    assert set(net.state_dict()) == set(small_net().state_dict())
    torch.testing.assert_close(net(images(4, seed=9)), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("settled", ["copy", "original"])
def test_the_way_back_of_a_copy_leaves_the_original_as_it_was_and_the_other_way_round(settled):
    net = converted(small_net(), ENTRY).eval()
    pair = {"original": net, "copy": deepcopy(net)}
    x, y = images(4, seed=0), net(images(4, seed=0))
    settle_weights(pair[settled])
    assert not parametrize.is_parametrized(pair[settled][0])
    for each in pair.values():
        torch.testing.assert_close(each(x), y, rtol=0, atol=1e-6)
