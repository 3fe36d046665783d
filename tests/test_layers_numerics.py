"""Layouts, narrow types, and how exact moments are."""

import pytest
import torch
from helpers.common import assert_same_output_and_gradients, leaf, randn, twins

import memnorm
from memnorm.functional import batch_moments, constant_moments


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("parameters", ["same", "float32"])
def test_narrow_inputs_keep_wide_statistics_and_narrow_outputs(dtype, parameters):
    layer = memnorm.MemorizedBatchNorm2d(3, dtype=dtype if parameters == "same" else torch.float32)
    wide = memnorm.MemorizedBatchNorm2d(3, dtype=torch.float64)
    for seed in range(4):
        x = leaf((8, 3, 4, 4), seed=seed, dtype=dtype)
        y = layer(x)
        expected = wide(x.detach().double())
        assert y.dtype == dtype
        torch.testing.assert_close(
            y.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps
        )
    y.square().sum().backward()
    assert x.grad.dtype == dtype
    assert layer.weight.grad.dtype == layer.weight.dtype
    for name, buffer in layer.named_buffers():
        if buffer.is_floating_point():
            assert buffer.dtype in (torch.float32, torch.float64), name
    torch.testing.assert_close(layer.running_var.double(), wide.running_var, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        layer.eval()(x).double(),
        wide.eval()(x.double()),
        rtol=2 * torch.finfo(dtype).eps,
        atol=4 * torch.finfo(dtype).eps,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_of_narrow_inputs_is_the_wide_one_rounded(dtype):
    layer, wide = (memnorm.MemorizedBatchNorm2d(3, dtype=d) for d in (dtype, torch.float64))
    for seed in range(3):
        layer(leaf((8, 3, 4, 4), seed=seed, dtype=dtype)), wide(leaf((8, 3, 4, 4), seed=seed, dtype=dtype).double())
    x, probe = leaf((8, 3, 4, 4), seed=7, dtype=dtype), randn(8, 3, 4, 4, seed=8).to(dtype)
    (ours,) = torch.autograd.grad(layer(x), x, probe)
    (expected,) = torch.autograd.grad(wide(x.double()), x, probe.double())
    torch.testing.assert_close(ours.double(), expected.double(), rtol=torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("channels_last", [False, True])
def test_variance_is_accurate_far_from_zero(channels_last):
    x = 1e4 + randn(16, 4, 32, 32, seed=0)
    layer = memnorm.MemorizedBatchNorm2d(4)
    narrow = x.float().contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    layer(narrow)
    exact = narrow.double().transpose(0, 1).flatten(1).var(1, correction=0)
    torch.testing.assert_close(layer.memory_var[0].double(), exact, rtol=1e-5, atol=0)


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
