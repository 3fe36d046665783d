"""Autocast to bfloat16 and float16: wide statistics, narrow outputs, the new weights in the second forward, skipped
steps. On the kernels of the processor, and without them.
"""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.common import assert_same_state, images, labels, leaf, randn, small_net
from helpers.torch_tools import Layer, compute_on, residual_net, step, trained
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

import memnorm

STATISTICS = ("running_mean", "running_var", "running_weight", "memory_mean", "memory_var", "memory_count")
STEPS = 5  # more than the memory holds

narrow = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
fused = pytest.mark.parametrize("fused", [False, True], ids=["norm", "norm, shortcut and relu"])


@pytest.fixture(params=["kernels", "torch"], autouse=True)
def _path(request, monkeypatch):
    compute_on(request.param, monkeypatch)


def rounding(dtype: torch.dtype) -> float:
    """How far a number near 1 may be from the narrow one beside it."""
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


@narrow
def test_the_statistics_of_a_training_are_float32(dtype):
    net = trained(residual_net(torch.float32), STEPS, amp=dtype)
    norms = [module for module in net.modules() if isinstance(module, _BatchNorm)]
    assert {layer.get_buffer(name).dtype for layer in norms for name in STATISTICS} == {torch.float32}
    assert {parameter.dtype for parameter in net.parameters()} == {torch.float32}


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
def test_inside_one_autocast_the_second_forward_sees_the_new_weights(dtype):
    """Autocast keeps narrow copies of weights until it ends: a second forward on those would record old moments."""
    net = memnorm.convert(small_net(), memory_size=2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    x, old = images(4, seed=0), copy.deepcopy(net[0])
    with torch.autocast("cpu", dtype=dtype), memnorm.double_forward(net, optimizer):
        F.cross_entropy(net(x).float(), labels(4, seed=0)).backward()
        optimizer.step()
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        new_mean, old_mean = [conv(x).float().mean((0, 2, 3)) for conv in (net[0], old)]
    torch.testing.assert_close(net[1].memory_mean[0], new_mean, rtol=0, atol=1e-5)
    assert (new_mean - old_mean).abs().max() > 1e-3


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


@pytest.mark.parametrize("amp", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("twice", [False, True], ids=["single", "double-forward"])
def test_a_training_writes_its_buffers_in_place(amp, twice):
    net = residual_net(torch.float32)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if twice:
        memnorm.double_forward(net, optimizer)
    before = {name: (buffer, buffer.data_ptr(), buffer.clone()) for name, buffer in net.named_buffers()}
    for seed in range(STEPS):
        step(net, optimizer, seed, amp=amp)
    for name, buffer in net.named_buffers():
        same, address, value = before[name]
        assert buffer is same, name
        assert buffer.data_ptr() == address, name
        assert name.endswith("strength") or not torch.equal(buffer, value), f"{name} was not written"
