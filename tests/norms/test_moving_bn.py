"""Moving averages only: output and gradient of eval mode, with statistics that follow."""

import copy

import pytest
import torch
from helpers.common import SHAPES, leaf, small_net
from helpers.conversion import assert_bitwise
from helpers.running_norms import Literal, built, drifting, follow, gradients, moments
from torch import nn

import memnorm
from memnorm.norms.moving_bn import MovingBatchNorm


class Moving(Literal):
    """Normalize by the averages of the earlier batches, then average."""

    def __call__(self, x, gamma, beta):
        y = self.output(x, gamma, beta, self.mean, self.var)
        mean, var, count = moments(x)
        self.average(mean, var * count / (count - 1))
        return y


@pytest.mark.parametrize("momentum", [0.1, 0.5, None])
def test_a_trajectory_equals_the_equations(momentum):
    follow(built("moving_bn", momentum=momentum), Moving(momentum))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_training_computes_what_eval_does(shape):
    layer = built("moving_bn", rank=len(shape))
    for step in range(3):
        x = drifting(shape, step)
        in_eval = gradients(copy.deepcopy(layer).eval(), x, [])
        for mine, theirs in zip(gradients(layer, x, []), in_eval, strict=True):
            assert_bitwise(mine, theirs)


def grown(norm):
    """The growth of the weights before the norm in a training for larger outputs."""
    net = memnorm.convert(small_net(), norm)
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    x = leaf((8, 3, 8, 8), seed=0, dtype=torch.float32).detach()
    first = float(net[0].weight.detach().norm())
    for _ in range(4):
        optimizer.zero_grad()
        (-net[1](net[0](x)).square().mean()).backward()
        optimizer.step()
    return float(net[0].weight.detach().norm()) / first


def test_the_weights_before_the_norm_grow_without_bound():
    """The gradient of batch norm is orthogonal to these weights; without batch statistics they grow."""
    assert grown(nn.BatchNorm2d) < 1.1
    assert grown(MovingBatchNorm) > 1.5
