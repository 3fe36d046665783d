"""Momentum Batch Normalization against the algorithm of its paper."""

import copy

import pytest
import torch
from helpers.common import SHAPES, assert_same_output_and_gradients, leaf
from helpers.conversion import assert_bitwise
from helpers.running_norms import built, drifting, follow, moments, per_channel
from torch import nn

import memnorm
from memnorm.errors import OptionError
from memnorm.norms.momentum_bn import MomentumBatchNorm


class Literal:
    """The training and inference steps of the paper; t counts from 1 to T, m is the number of images."""

    def __init__(self, total, ideal=32, tau0=0.9, eps=1e-5):
        self.mean, self.var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        self.mean_inf, self.var_inf = self.mean.clone(), self.var.clone()
        self.total, self.ideal, self.tau0, self.eps, self.t = total, ideal, tau0, eps, 0

    def momentum(self, m):
        T, t = self.total, self.t
        rho = min(m / self.ideal, 1) ** (1 / T)
        return rho ** (T / (T - 1) * max(T - t, 0)) - rho**T

    def __call__(self, x, gamma, beta):
        self.t += 1
        m = len(x)
        lam, tau = self.momentum(m), self.tau0 ** (m / self.ideal)
        mean_b, var_b, _ = moments(x)
        mean = lam * self.mean + (1 - lam) * mean_b
        var = lam * self.var + (1 - lam) * var_b
        self.mean, self.var = mean.detach(), var.detach()
        self.mean_inf = tau * self.mean_inf + (1 - tau) * mean_b.detach()
        self.var_inf = tau * self.var_inf + (1 - tau) * var_b.detach()
        return per_channel(gamma, x) * (x - per_channel(mean, x)) / per_channel(
            (var + self.eps).sqrt(), x
        ) + per_channel(beta, x)

    def state(self):
        return {
            "momentum_mean": self.mean,
            "momentum_var": self.var,
            "running_mean": self.mean_inf,
            "running_var": self.var_inf,
            "num_batches_tracked": self.t,
        }


class Constant(Literal):
    """Without the length of the training: the final λ, or the mean of all batches while that gives less weight."""

    def momentum(self, m):
        return min(1 - min(m / self.ideal, 1), (self.t - 1) / self.t)


@pytest.mark.parametrize("ideal", [6, 32, 500])
def test_a_trajectory_equals_the_papers_equations(ideal):
    follow(built("momentum_bn", ideal_batch_size=ideal, total_steps=20), Literal(20, ideal), steps=30)


def test_a_trajectory_equals_the_papers_equations_with_another_momentum_of_inference():
    follow(built("momentum_bn", momentum=0.4, total_steps=40), Literal(40, tau0=0.6))


def test_without_total_steps_the_momentum_is_the_final_one():
    follow(built("momentum_bn"), Constant(None), steps=40)


@pytest.mark.parametrize(("batch_size", "final"), [(2, 1 - 2 / 32), (8, 0.75), (32, 0), (128, 0)])
def test_the_weight_of_earlier_batches_rises_from_0_to_what_the_batch_size_lacks(batch_size, final):
    layer = MomentumBatchNorm(3, total_steps=100, dtype=torch.float64)
    assert float(layer.past_share(batch_size)) == 0
    shares = [float(layer.past_share(batch_size, torch.tensor(step))) for step in (99, 100, 10_000_000)]
    assert shares == pytest.approx([final] * 3)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_batch_of_the_ideal_size_is_batch_norm(shape):
    ours = built("momentum_bn", rank=len(shape), ideal_batch_size=shape[0], total_steps=2)
    torchs = memnorm.to_batchnorm(copy.deepcopy(ours))
    for step in range(4):
        assert_same_output_and_gradients(ours, torchs, drifting(shape, step), atol=1e-11)


def test_a_plain_checkpoint_loads_and_both_averages_begin_with_it():
    plain = nn.BatchNorm2d(3)
    for step in range(3):
        plain(leaf((8, 3, 4, 2), seed=step, dtype=torch.float32))
    layer = MomentumBatchNorm(3)
    layer.load_state_dict(plain.state_dict(), strict=True)
    assert_bitwise(layer.momentum_mean, plain.running_mean)
    assert_bitwise(layer.momentum_var, plain.running_var)
    layer(leaf((8, 3, 4, 2), seed=9, dtype=torch.float32))
    assert not torch.equal(layer.momentum_mean, layer.running_mean)


def test_converting_a_trained_batch_norm_starts_both_averages_from_it():
    plain = nn.BatchNorm2d(3)
    plain(leaf((8, 3, 4, 2), seed=0, dtype=torch.float32))
    layer = MomentumBatchNorm.replacing(plain)
    assert_bitwise(layer.momentum_var, plain.running_var)
    layer(leaf((8, 3, 4, 2), seed=1, dtype=torch.float32))
    assert layer.momentum_var is not layer.running_var
    assert not torch.equal(layer.momentum_var, layer.running_var)


def test_resetting_resets_both_averages():
    layer = built("momentum_bn")
    layer(drifting((8, 3, 4), 1))
    layer.reset_running_stats()
    assert float(layer.momentum_mean.abs().max()) == 0
    assert float((layer.momentum_var - 1).abs().max()) == 0


BAD = {
    "no image": ({"ideal_batch_size": 0}, "ideal_batch_size must be a number of images"),
    "text": ({"ideal_batch_size": "32"}, "ideal_batch_size must be a number of images"),
    "no step": ({"total_steps": 0}, "momentum_bn: total_steps must be the number of steps"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
def test_wrong_options_are_errors(options, message):
    with pytest.raises(OptionError, match=message):
        built("momentum_bn", **options)
