"""Statistics far from zero: the variance keeps its digits, on the kernels and on torch operations."""

import contextlib

import pytest
import torch
from helpers.common import randn
from helpers.kernels import LAYOUTS, in_torch, layer_for, needs_kernels, threads

pytestmark = needs_kernels
BACKENDS = {"kernels": contextlib.nullcontext, "torch": in_torch}
SHAPES = [(8, 3, 40, 40), (4096, 5), (2, 65, 33, 65), (64, 64, 4, 4), (5, 1, 100, 90), (40, 1000)]
both = pytest.mark.parametrize("backend", BACKENDS)


def far(shape, seed, outliers=0):
    """Values around 1e4 with deviation 1, the first `outliers` of every channel 0."""
    x = (randn(*shape, seed=seed) + 1e4).float()
    first = x if x.dim() == 2 else x[0].flatten(1).T
    first[:outliers] = 0
    return x


def exact(x):
    return torch.var_mean(x.double(), [0, *range(2, x.dim())], correction=0)


def assert_exact(var, wanted):
    error = ((var.double() - wanted) / wanted).abs().max()
    assert error <= 1e-5, error


@both
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("outliers", [0, 1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_variance_of_a_batch_far_from_zero_is_exact_to_1e5(shape, outliers, layout, backend):
    x = LAYOUTS[layout](far(shape, 0, outliers))
    for team in (1, 3):
        layer = layer_for(shape, memory_size=2)
        with BACKENDS[backend](), threads(team):
            layer(x)
        var, mean = exact(x)
        assert_exact(layer.memory_var[0], var)
        assert_exact(layer.running_var, var)
        torch.testing.assert_close(layer.running_mean.double(), mean, rtol=2e-7, atol=0)


@both
@pytest.mark.parametrize("memory_size", [5, 20, None], ids=str)
def test_the_memory_of_many_batches_far_from_zero_is_exact_to_1e5(memory_size, backend):
    shape = (4, 3, 64, 64)
    batches = [far(shape, seed) for seed in range(30)]
    layer = layer_for(shape, memory_size=memory_size)
    with BACKENDS[backend]():
        for x in batches:
            layer(x)
    assert_exact(layer.running_var, union(batches[::-1][:memory_size], 0.9)[1])


@both
@pytest.mark.parametrize("when", [0, 15, 29])
@pytest.mark.parametrize("memory_size", [20, 40, None], ids=str)
def test_an_outlying_batch_in_the_memory_costs_no_digits(memory_size, when, backend):
    shape = (4, 3, 32, 32)
    batches = [far(shape, seed) for seed in range(30)]
    batches[when] = randn(2, 3, 1, 1, seed=77).float()
    layer = layer_for(shape, memory_size=memory_size)
    with BACKENDS[backend]():
        for x in batches:
            layer(x)
    assert_exact(layer.running_var, union(batches[::-1][:memory_size], 0.9)[1])


@both
def test_a_long_memory_whose_newest_batch_is_far_from_the_others_is_exact_to_1e5(backend):
    shape = (4, 3, 16, 16)
    batches = [far(shape, seed) for seed in range(999)] + [randn(*shape, seed=0).float()]
    layer = layer_for(shape, memory_size=1000, decay=1.0)
    with BACKENDS[backend]():
        for x in batches:
            layer(x)
    assert_exact(layer.running_var, union(batches[::-1], 1.0)[1])


def union(batches, decay):
    """Mean and variance of batches, newest first, in float64 from the batches' own moments."""
    moments = [exact(x) for x in batches]
    weights = torch.tensor([x.numel() / x.shape[1] * decay**age for age, x in enumerate(batches)]).double()
    shares = (weights / weights.sum()).unsqueeze(1)
    var, mean = (torch.stack(parts) for parts in zip(*moments, strict=True))
    centre = (shares * mean).sum(0)
    return centre, (shares * (var + (mean - centre).square())).sum(0)


@both
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
def test_outputs_far_from_zero_are_those_of_float64(layout, backend):
    x = LAYOUTS[layout](far((8, 3, 40, 40), 0))
    layer, wide = layer_for(x.shape), layer_for(x.shape, torch.float64)
    with BACKENDS[backend]():
        torch.testing.assert_close(layer(x).double(), wide(x.double()), rtol=0, atol=2e-3)  # x's own digits: 1e-3
