"""Batch Renormalization against its paper's Algorithm 1, and its relaxation."""

import copy

import pytest
import torch
from helpers.common import SHAPES, assert_same_output_and_gradients, leaf
from helpers.running_norms import Literal, built, drifting, follow, moments, per_channel

import memnorm
from memnorm.errors import OptionError
from memnorm.norms.brn import BatchRenorm


class Algorithm1(Literal):
    """Algorithm 1 of the paper: r and d are constants for the gradient, and sigma itself is averaged."""

    def __init__(self, alpha, limits, eps=1e-5):
        super().__init__(alpha, eps)
        self.var = (self.var + eps).sqrt()  # sigma
        self.limits = limits

    def __call__(self, x, gamma, beta):
        mu, var, _ = moments(x)
        sigma = (var + self.eps).sqrt()
        r_max, d_max = self.limits(self.steps)
        r = torch.clip(sigma.detach() / self.var, 1 / r_max, r_max)
        d = torch.clip((mu.detach() - self.mean) / self.var, -d_max, d_max)
        x_hat = (x - per_channel(mu, x)) / per_channel(sigma, x) * per_channel(r, x) + per_channel(d, x)
        self.average(mu, sigma)
        return per_channel(gamma, x) * x_hat + per_channel(beta, x)

    def state(self):
        return {**super().state(), "running_var": self.var.square() - self.eps}


def published(step, r_max=3.0, d_max=5.0):
    """Batch norm for 5,000 steps, then evenly up to r_max at 40,000 and d_max at 25,000."""
    r = 1 + (r_max - 1) * min(max((step - 5_000) / 35_000, 0), 1)
    return r, d_max * min(max((step - 5_000) / 20_000, 0), 1)


@pytest.mark.parametrize("alpha", [0.01, 0.2, None])
def test_a_trajectory_equals_the_papers_equations_while_the_limits_are_relaxed(alpha):
    def scaled(step):
        return published(step * 130_000 / 60)

    follow(built("brn", momentum=alpha, total_steps=60), Algorithm1(alpha, scaled), steps=30)


def test_a_trajectory_equals_the_papers_equations_with_limits_that_bind():
    layer = built("brn", momentum=0.3, total_steps=1, r_max=1.1, d_max=0.2)
    reference = Algorithm1(0.3, lambda step: published(130_000 * step, 1.1, 0.2))
    follow(layer, reference, steps=20)
    layer.weight.data.fill_(1), layer.bias.data.fill_(0)
    y = layer(drifting((8, 3, 4, 3), 40) * 5)
    assert (y.mean([0, 2, 3]) - 0.2).abs().max() < 1e-12  # d at its limit in every channel


def test_a_trajectory_equals_the_papers_equations_with_a_large_epsilon():
    """Every sigma has epsilon under its root, the moving one too."""
    layer = built("brn", momentum=0.3, total_steps=10, plain={"eps": 0.5})
    follow(layer, Algorithm1(0.3, lambda step: published(13_000 * step), eps=0.5), steps=20)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_limits_of_one_and_zero_are_batch_norm(shape, affine):
    ours = built("brn", rank=len(shape), r_max=1.0, d_max=0.0, total_steps=1, plain={"affine": affine})
    torchs = memnorm.to_batchnorm(copy.deepcopy(ours))
    for step in range(3):
        assert_same_output_and_gradients(ours, torchs, drifting(shape, step), atol=1e-12)


@pytest.mark.parametrize("affine", [True, False])
def test_fully_relaxed_the_training_output_is_evals(affine):
    """Where nothing is clipped, r and d turn the batch's normalisation into the moving averages'."""
    layer = built("brn", total_steps=1, r_max=1e6, d_max=1e6, plain={"affine": affine})
    for step in range(3):
        layer(drifting((8, 3, 4), step))
    x = drifting((8, 3, 4), 5)
    with memnorm.recording(layer, False):
        torch.testing.assert_close(layer(x), copy.deepcopy(layer).eval()(x), rtol=1e-9, atol=1e-9)


LIMITS = {0: (1, 0), 4_999: (1, 0), 15_000: (1 + 2 * 10 / 35, 2.5), 25_000: (1 + 2 * 20 / 35, 5), 40_000: (3, 5)}


@pytest.mark.parametrize(("total_steps", "scale"), [(None, 1), (1300, 100)], ids=["published steps", "scaled"])
@pytest.mark.parametrize("step", LIMITS)
def test_the_limits_are_relaxed_at_the_published_steps_or_in_proportion_to_the_run(step, total_steps, scale):
    layer = BatchRenorm(3, dtype=torch.float64, total_steps=total_steps)
    r_max, d_max = layer.limits(torch.tensor(step / scale))
    assert (float(r_max), float(d_max)) == pytest.approx(LIMITS[step])


def test_statistics_that_have_settled_stay_to_the_last_bit():
    """Deviations become variances and back again without drift."""
    layer = built("brn", dtype=torch.float32, momentum=1.0)
    x = leaf((8, 3, 4), seed=0, dtype=torch.float32)
    layer(x), layer(x)
    before = layer.running_var.clone()
    layer.momentum = 0.01
    for _ in range(100):
        layer(x)
    torch.testing.assert_close(layer.running_var, before, rtol=2e-7, atol=0)


BAD = {
    "r_max below 1": ({"r_max": 0.9}, "r_max must be finite and at least 1"),
    "r_max of text": ({"r_max": "3"}, "r_max must be finite and at least 1"),
    "r_max not a number": ({"r_max": float("nan")}, "r_max must be finite and at least 1"),
    "d_max negative": ({"d_max": -1}, "d_max must be finite and not negative"),
    "r_max infinite": ({"r_max": float("inf")}, "r_max must be finite and at least 1"),
    "d_max infinite": ({"d_max": float("inf")}, "d_max must be finite and not negative"),
    "total_steps zero": ({"total_steps": 0}, "total_steps must be the number of steps"),
    "total_steps broken": ({"total_steps": 10.5}, "total_steps must be the number of steps"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
def test_wrong_options_are_errors(options, message):
    with pytest.raises(OptionError, match=message):
        built("brn", **options)
