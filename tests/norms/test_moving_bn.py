"""Moving averages only: output and gradient of eval mode, with statistics that follow."""

import copy

import pytest
import torch
from helpers.common import SHAPES, leaf, small_net
from helpers.conversion import assert_bitwise
from helpers.running_norms import built, drifting, follow, gradients, moments, per_channel
from torch import nn

import memnorm
from memnorm.norms.moving_bn import MovingBatchNorm


class Literal:
    """x is normalised by the averages of the batches before; then they take it in."""

    def __init__(self, momentum, eps=1e-5):
        self.mean, self.var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        self.momentum, self.eps, self.steps = momentum, eps, 0

    def __call__(self, x, gamma, beta):
        y = per_channel(gamma / (self.var + self.eps).sqrt(), x) * (x - per_channel(self.mean, x)) + per_channel(
            beta, x
        )
        mean, var, count = moments(x.detach())
        self.steps += 1
        momentum = 1 / self.steps if self.momentum is None else self.momentum
        self.mean = self.mean + momentum * (mean - self.mean)
        self.var = self.var + momentum * (var * count / (count - 1) - self.var)
        return y

    def state(self):
        return {"running_mean": self.mean, "running_var": self.var, "num_batches_tracked": self.steps}


@pytest.mark.parametrize("momentum", [0.1, 0.5, None])
def test_a_trajectory_equals_the_equations(momentum):
    follow(built("moving_bn", momentum=momentum), Literal(momentum))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_training_computes_what_eval_does(shape):
    layer = built("moving_bn", rank=len(shape))
    for step in range(3):
        x = drifting(shape, step)
        in_eval = gradients(copy.deepcopy(layer).eval(), x, [])
        for mine, theirs in zip(gradients(layer, x, []), in_eval, strict=True):
            assert_bitwise(mine, theirs)


def grown(norm):
    """How much larger the weights before the norm are after steps on a loss that asks for larger outputs."""
    net = memnorm.convert(small_net(), norm)
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    x = leaf((8, 3, 8, 8), seed=0, dtype=torch.float32).detach()
    first = float(net[0].weight.detach().norm())
    for _ in range(4):
        optimizer.zero_grad()
        (-net[1](net[0](x)).square().mean()).backward()
        optimizer.step()
    return float(net[0].weight.detach().norm()) / first


def test_nothing_holds_the_scale_of_the_weights_before_it():
    """Batch norm's gradient is orthogonal to them; without the batch's own statistics they run away."""
    assert grown(nn.BatchNorm2d) < 1.1
    assert grown(MovingBatchNorm) > 1.5
