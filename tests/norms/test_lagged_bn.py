"""Lagged batch norm against the equations of Real NVP's appendix, debiased in the form of sums."""

import pytest
import torch
from helpers.running_norms import Literal, built, follow, moments

from memnorm.errors import OptionError


class Debiased(Literal):
    """μ' = ρμ + (1 − ρ)μ_B from zero, divided by the sum of its weights, 1 − ρ^t."""

    def __init__(self, momentum):
        super().__init__(momentum)
        self.var = torch.zeros_like(self.var)
        self.weight = 0.0

    def __call__(self, x, gamma, beta):
        mean, var, _ = moments(x)
        rho, new = (1, 1) if self.momentum is None else (1 - self.momentum, self.momentum)
        self.steps += 1
        self.weight = rho * self.weight + new
        mean, var = rho * self.mean + new * mean, rho * self.var + new * var
        self.mean, self.var = mean.detach(), var.detach()
        return self.output(x, gamma, beta, mean / self.weight, var / self.weight)

    def state(self):
        return {
            "running_mean": self.mean / self.weight,
            "running_var": self.var / self.weight,
            "num_batches_tracked": self.steps,
        }


@pytest.mark.parametrize("momentum", [0.01, 0.1, 0.6, 1.0, None])
def test_a_trajectory_equals_the_papers_equations_debiased(momentum):
    follow(built("lagged_bn", momentum=momentum), Debiased(momentum))


def test_a_momentum_of_zero_is_an_error():
    with pytest.raises(OptionError, match="must be positive, or None; got 0"):
        built("lagged_bn", momentum=0)
