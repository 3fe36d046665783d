"""Torch's batch norm with `recording`: equal to torch bit for bit, and nothing written while it is off."""

import copy

import pytest
import torch
from helpers.common import assert_same_state, randomize, small_net
from helpers.conversion import VARIANTS, assert_bitwise, train_step
from helpers.running_norms import ENTRIES, Literal, built, drifting, follow, gradients, moments, net_with
from torch import nn

import memnorm


class BatchNorm(Literal):
    """Ioffe and Szegedy's Algorithm 1 and torch's moving averages."""

    def __call__(self, x, gamma, beta):
        mean, var, count = moments(x)
        self.average(mean, var * count / (count - 1))
        return self.output(x, gamma, beta, mean, var)


@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
def test_a_trajectory_equals_the_papers_equations(momentum):
    follow(built("bn", momentum=momentum), BatchNorm(momentum))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [*VARIANTS.values(), {"momentum": 0.0}], ids=[*VARIANTS, "momentum=0"])
def test_a_trajectory_equals_torchs_bit_for_bit(options, dtype):
    torchs = nn.BatchNorm2d(3, dtype=dtype, **options)
    randomize(torchs, seed=100)
    ours = ENTRIES["bn"]["replace"](copy.deepcopy(torchs))
    for step in range(20):
        x = drifting((4, 3, 2, 5), step).detach().to(dtype).requires_grad_()
        results = [gradients(layer, x, layer.parameters()) for layer in (ours, torchs)]
        for mine, theirs in zip(*results, strict=True):
            assert_bitwise(mine, theirs)
        assert_same_state(ours, torchs)


def test_bn_2_trains_with_the_gradients_of_bn_1():
    """Batch norm's training forward does not read its statistics: only they differ."""
    nets = [net_with("bn"), small_net()]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    memnorm.double_forward(nets[0], optimizers[0])
    for step in range(4):
        for net, optimizer in zip(nets, optimizers, strict=True):
            train_step(net, optimizer, seed=step)
    for ours, theirs in zip(*(net.parameters() for net in nets), strict=True):
        assert_bitwise(ours, theirs)
    assert int(nets[0][1].num_batches_tracked) == int(nets[1][1].num_batches_tracked) == 4
