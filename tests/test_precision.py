"""Layouts, narrow dtypes and autocast: how exact moments are, wide statistics, narrow outputs, skipped steps."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.common import (
    assert_same_output_and_gradients,
    assert_same_state,
    images,
    labels,
    leaf,
    randn,
    twins,
)
from helpers.torch_tools import Layer, compute_on, residual_net
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

import memnorm
from memnorm.functional import batch_moments, constant_moments

STEPS = 5  # more than the memory holds

narrow = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
fused = pytest.mark.parametrize("fused", [False, True], ids=["norm", "norm, shortcut and relu"])


@pytest.fixture(params=["kernels", "torch"], autouse=True)
def _path(request, monkeypatch):
    compute_on(request.param, monkeypatch)


def rounding(dtype: torch.dtype) -> float:
    """The distance between neighbouring numbers near 1."""
    return torch.finfo(dtype).eps


def call(layer: nn.Module, x: torch.Tensor, fused: bool) -> torch.Tensor:
    """With a shortcut of the input's own dtype, if `fused`."""
    return layer(x, activation="relu", residual=x.detach().flip(0)) if fused else layer(x)


@fused
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@narrow
def test_the_output_has_the_inputs_dtype(dtype, given, training, fused):
    layer = Layer(3).train(training)
    x = leaf((4, 3, 4, 4), seed=0, dtype=given)
    with torch.autocast("cpu", dtype=dtype):
        assert call(layer, x, fused).dtype == given


@fused
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@narrow
def test_statistics_and_outputs_are_those_of_the_narrow_input_computed_in_float32(dtype, memory_format, fused):
    layer, wide = Layer(3, memory_size=3), Layer(3, memory_size=3)
    for seed in range(STEPS):
        x = leaf((4, 3, 4, 4), seed=seed, dtype=dtype).detach().contiguous(memory_format=memory_format)
        with torch.autocast("cpu", dtype=dtype):
            y = call(layer, x, fused)
        expected = call(wide, x.float(), fused)
        torch.testing.assert_close(y.float(), expected, rtol=rounding(dtype), atol=2 * rounding(dtype))
    assert_same_state(layer, wide, atol=1e-6)


@fused
@narrow
def test_gradients_are_those_of_float32_to_the_precision_of_the_narrow_dtype(dtype, fused):
    layer, wide = Layer(3), Layer(3)
    probe = randn(4, 3, 4, 4, seed=1, dtype=torch.float32).to(dtype)
    for seed in range(STEPS):
        x = leaf((4, 3, 4, 4), seed=seed, dtype=dtype)
        expected = x.detach().float().requires_grad_()
        with torch.autocast("cpu", dtype=dtype):
            call(layer, x, fused).backward(probe)
        call(wide, expected, fused).backward(probe.float())
    assert x.grad.dtype == dtype
    torch.testing.assert_close(x.grad.float(), expected.grad, rtol=rounding(dtype), atol=rounding(dtype))
    assert layer.weight.grad.dtype == torch.float32
    torch.testing.assert_close(layer.weight.grad, wide.weight.grad, rtol=rounding(dtype), atol=rounding(dtype))


@narrow
def test_a_step_that_the_scaler_skips_records_nothing_and_the_next_one_does(dtype):
    net = residual_net(torch.float32)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    memnorm.double_forward(net, optimizer, scaler=scaler)
    scaled_step(net, optimizer, scaler, dtype, 0)
    before = copy.deepcopy(net.state_dict())
    scaled_step(net, optimizer, scaler, dtype, 1, overflow=True)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert scaler.get_scale() == 2.0**9
    scaled_step(net, optimizer, scaler, dtype, 2)
    counts = [layer.memory_count.tolist() for layer in net.modules() if isinstance(layer, _BatchNorm)]
    assert counts == [[144.0, 144.0, 0.0]] * 2, "of the first and the third batch"


def scaled_step(net, optimizer, scaler, dtype, seed, overflow=False):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=dtype):
        loss = F.cross_entropy(net(images(4, seed=seed)), labels(4, seed=seed))
    scaler.scale(loss).backward()
    if overflow:
        next(net.parameters()).grad[0].fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "sliced", "expanded", "transposed"])
@pytest.mark.parametrize("rank", [3, 4, 5])
def test_any_memory_layout_gives_the_numbers_and_the_output_layout_of_batch_norm(rank, layout):
    shape = {3: (4, 6, 5), 4: (4, 6, 5, 3), 5: (4, 6, 5, 3, 2)}[rank]
    x = leaf(shape, seed=0).detach()
    if layout == "channels_last":
        x = {3: lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)}.get(
            rank, lambda t: t.to(memory_format=torch.channels_last if rank == 4 else torch.channels_last_3d)
        )(x)
    elif layout == "sliced":
        x = leaf((shape[0], 2 * shape[1], *shape[2:]), seed=0).detach()[:, ::2]
    elif layout == "expanded":
        x = leaf((shape[0], shape[1], *shape[2:-1], 1), seed=0).detach().expand(shape)
    elif layout == "transposed":
        x = leaf((*shape[:-2], shape[-1], shape[-2]), seed=0).detach().transpose(-1, -2)
    ours, torchs = twins(shape, strength=0.0)
    assert_same_output_and_gradients(ours, torchs, x, atol=1e-12)
    assert ours(x).stride() == torchs(x).stride()
    assert ours.eval()(x).stride() == torchs.eval()(x).stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_of_narrow_inputs_is_the_wide_one_rounded(dtype):
    layer, wide = (memnorm.MemorizedBatchNorm2d(3, dtype=d) for d in (dtype, torch.float64))
    for seed in range(3):
        layer(leaf((8, 3, 4, 4), seed=seed, dtype=dtype)), wide(leaf((8, 3, 4, 4), seed=seed, dtype=dtype).double())
    x, probe = leaf((8, 3, 4, 4), seed=7, dtype=dtype), randn(8, 3, 4, 4, seed=8).to(dtype)
    (ours,) = torch.autograd.grad(layer(x), x, probe)
    (expected,) = torch.autograd.grad(wide(x.double()), x, probe.double())
    torch.testing.assert_close(ours.double(), expected.double(), rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("mean", [0.0, 1e3, 1e6])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0])
def test_moments_are_exact_to_the_last_digits_of_the_data(layout, mean, spread):
    x = (mean + spread * randn(16, 4, 32, 32, seed=0)).float().contiguous(memory_format=layout)
    moments = constant_moments(x)
    var, average = torch.var_mean(x.double(), [0, 2, 3], correction=0)
    torch.testing.assert_close(moments.mean.double(), average, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(moments.var.double(), var, rtol=1e-6, atol=0)
    assert moments.weight == 16 * 32 * 32


@pytest.mark.parametrize("shape", [(5, 3), (1, 3), (4, 3, 6), (2, 3, 4, 5), (2, 3, 2, 3, 2)])
def test_moments_without_a_gradient_are_those_with_one(shape):
    x = leaf(shape, seed=0)
    before = x.detach().clone()
    constant = constant_moments(x)
    assert not constant.mean.requires_grad
    assert not constant.var.requires_grad
    torch.testing.assert_close(tuple(constant), tuple(batch_moments(x)), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(x.detach(), before, rtol=0, atol=0)
