"""Lagged batch norm against the equations of Real NVP's appendix, debiased in the form of sums."""

import copy

import pytest
import torch
from helpers.common import SHAPES, assert_same_output_and_gradients
from helpers.running_norms import built, drifting, follow, moments, per_channel

import memnorm
from memnorm.errors import OptionError


class Literal:
    """mu' = rho·mu + (1 − rho)·mu_B from zero, divided by the weight it has gathered, 1 − rho^t."""

    def __init__(self, momentum, eps=1e-5):
        self.mean, self.var = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
        self.rho, self.eps, self.steps = 1 - momentum, eps, 0

    def __call__(self, x, gamma, beta):
        mean_b, var_b, _ = moments(x)
        self.steps += 1
        gathered = 1 - self.rho**self.steps
        mean = (self.rho * self.mean + (1 - self.rho) * mean_b) / gathered
        var = (self.rho * self.var + (1 - self.rho) * var_b) / gathered
        self.mean, self.var = (gathered * mean).detach(), (gathered * var).detach()
        x_hat = (x - per_channel(mean, x)) / per_channel((var + self.eps).sqrt(), x)
        return per_channel(gamma, x) * x_hat + per_channel(beta, x)

    def state(self):
        gathered = 1 - self.rho**self.steps
        return {
            "running_mean": self.mean / gathered,
            "running_var": self.var / gathered,
            "num_batches_tracked": self.steps,
        }


class Cumulative(Literal):
    """momentum=None: the plain mean over all batches."""

    def __call__(self, x, gamma, beta):
        mean_b, var_b, _ = moments(x)
        self.steps += 1
        mean, var = (self.mean + mean_b) / self.steps, (self.var + var_b) / self.steps
        self.mean, self.var = self.mean + mean_b.detach(), self.var + var_b.detach()
        x_hat = (x - per_channel(mean, x)) / per_channel((var + self.eps).sqrt(), x)
        return per_channel(gamma, x) * x_hat + per_channel(beta, x)

    def state(self):
        return {
            "running_mean": self.mean / self.steps,
            "running_var": self.var / self.steps,
            "num_batches_tracked": self.steps,
        }


@pytest.mark.parametrize("momentum", [0.01, 0.1, 0.6, 1.0])
def test_a_trajectory_equals_the_papers_equations_debiased(momentum):
    follow(built("lagged_bn", momentum=momentum), Literal(momentum))


def test_without_a_momentum_all_batches_count_the_same():
    follow(built("lagged_bn", momentum=None), Cumulative(0.5))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_first_step_is_batch_norm(shape):
    """Whatever the statistics say before: the initial ones never count."""
    ours = built("lagged_bn", rank=len(shape))
    torchs = memnorm.to_batchnorm(copy.deepcopy(ours))
    ours.running_mean.fill_(7), ours.running_var.fill_(0.01)
    with memnorm.recording(ours, False):
        assert_same_output_and_gradients(ours, torchs, drifting(shape, 0), atol=1e-12)


def test_the_training_output_is_evals_after_the_batch_was_recorded():
    layer = built("lagged_bn")
    for step in range(3):
        x = drifting((8, 3, 4), step)
        y = layer(x)
        torch.testing.assert_close(y, copy.deepcopy(layer).eval()(x), rtol=1e-9, atol=1e-9)


def test_a_momentum_of_zero_is_an_error():
    with pytest.raises(OptionError, match="must be positive, or None; got 0"):
        built("lagged_bn", momentum=0)
