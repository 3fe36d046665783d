"""The CUDA kernels: on a GPU where there is one, and everywhere with stand-ins for torch's operations."""

from types import SimpleNamespace

import pytest
import torch
from helpers.common import LAYERS, SHAPES, leaf, randn, randomize
from helpers.cuda import STAND_INS, batch_norm_update_stats, by_schema
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memnorm.functional import memorized_batch_norm
from memnorm.kernels import cpu, cuda
from memnorm.reference import ReferenceBatchNorm

ATOL = 1e-10
FORWARD = ["batch_norm_update_stats", "batch_norm_elemt"]
BACKWARD = ["batch_norm_backward_reduce", "batch_norm_backward_elemt"]
LAYOUTS = [torch.contiguous_format, torch.channels_last]
ROUNDING = {torch.float32: 2**-16, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(params=["stand-ins", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernels(request, monkeypatch):
    """The device on which the kernels run, and which of them were called. With stand-ins the dispatch takes the CPU
    for a CUDA device.
    """
    found = SimpleNamespace(device=torch.device("cuda" if request.param == "cuda" else "cpu"), calls=[])
    monkeypatch.delenv("MEMNORM_KERNELS", raising=False)
    monkeypatch.setattr(cuda, "_wanted", cuda._wanted.__wrapped__)
    if request.param == "stand-ins":
        monkeypatch.setattr(cpu, "module", lambda: None)
        monkeypatch.setattr(cuda, "DEVICE", "cpu")
    for stand_in in STAND_INS:
        name = stand_in.__name__
        kernel = getattr(torch, name) if request.param == "cuda" else by_schema(stand_in)

        def called(*arguments, name=name, kernel=kernel):
            found.calls.append(name)
            return kernel(*arguments)

        monkeypatch.setattr(torch, name, called)
    return found


def with_statistics(shape, device, dtype=torch.float64, **options):
    """A layer and the reference that remember the same two batches, with the same affine map."""
    layer, reference = LAYERS[len(shape)][0](shape[1], dtype=dtype, **options), ReferenceBatchNorm(shape[1])
    randomize(layer, seed=100)
    layer.to(device)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            reference.get_parameter(name).copy_(parameter)
    for seed in (1, 2):
        x = leaf(shape, seed=seed).detach().to(dtype)
        layer(x.to(device)), reference(x.double())
    return layer, reference


def output_and_gradients(module, x, probe):
    """The output, and the gradients of a random projection of it in x and every parameter."""
    y = module(x)
    return [y, *torch.autograd.grad(y, [x, *module.parameters()], probe)]


def assert_equal_to_reference(layer, reference, x, probe, **tolerance):
    """Outputs and gradients on the device against those of the reference in float64 on the CPU."""
    ours = output_and_gradients(layer, x, probe)
    point = x.detach().cpu().double().requires_grad_()
    theirs = output_and_gradients(reference, point, probe.cpu().double())
    for mine, other in zip(ours, theirs, strict=False):  # a layer without affine map has less to compare
        torch.testing.assert_close(mine.cpu().double(), other, **tolerance)
    return ours


@pytest.mark.parametrize("memory_size", [2, None])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_thirty_steps_equal_the_reference_in_outputs_gradients_and_statistics(kernels, shape, memory_size):
    options = {"memory_size": memory_size, "decay": 0.9, "strength": 0.5}
    layer_type = LAYERS[len(shape)][0]
    fast = nn.Sequential(*(layer_type(shape[1], dtype=torch.float64, **options) for _ in "ab")).to(kernels.device)
    slow = nn.Sequential(*(ReferenceBatchNorm(shape[1], **options) for _ in "ab"))
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.3) for net in (fast, slow)]
    for step in range(30):
        sizes = (2 + step % 4, *shape[1:])
        x, target = leaf(sizes, seed=step).detach(), randn(*sizes, seed=1000 + step)
        results = []
        for net, optimizer in zip((fast, slow), optimizers, strict=True):
            device = next(net.parameters()).device
            point = x.to(device, copy=True).requires_grad_()
            y = net(point)
            optimizer.zero_grad()
            (y.tanh() - target.to(device)).square().mean().backward()
            gradients = [parameter.grad.cpu() for parameter in net.parameters()]
            optimizer.step()
            results.append([y.detach().cpu(), point.grad.cpu(), *gradients])
        torch.testing.assert_close(*results, rtol=0, atol=ATOL)
    for ours, reference in zip(fast, slow, strict=True):
        assert int(ours.num_batches_tracked) == 30
        x = leaf(shape, seed=5000).detach()
        torch.testing.assert_close(ours.eval()(x.to(kernels.device)).cpu(), reference.eval()(x), rtol=0, atol=ATOL)
    assert kernels.calls == 30 * (2 * FORWARD + 2 * BACKWARD)


@pytest.mark.parametrize("of_gradient", LAYOUTS, ids=str)
@pytest.mark.parametrize("of_input", LAYOUTS, ids=str)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_every_layout_of_input_and_gradient_equals_the_reference(kernels, of_input, of_gradient, affine):
    shape = (4, 3, 5, 6)
    layer, reference = with_statistics(shape, kernels.device, affine=affine)
    x = leaf(shape, seed=3).detach().to(kernels.device).contiguous(memory_format=of_input).requires_grad_()
    probe = randn(*shape, seed=4).to(kernels.device).contiguous(memory_format=of_gradient)
    kernels.calls.clear()
    y, grad_x, *_ = assert_equal_to_reference(layer, reference, x, probe, rtol=0, atol=ATOL)
    assert kernels.calls == FORWARD + BACKWARD
    assert y.is_contiguous(memory_format=of_input)
    assert grad_x.is_contiguous(memory_format=of_input)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("narrow_layer", [False, True], ids=["float32 layer", "narrow layer"])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_narrow_data_is_rounded_once_and_remembered_in_float32(kernels, dtype, narrow_layer, layout):
    shape = (4, 3, 5, 6)
    layer, reference = with_statistics(shape, kernels.device, dtype=dtype if narrow_layer else torch.float32)
    x = leaf(shape, seed=3).detach().to(kernels.device, dtype).contiguous(memory_format=layout).requires_grad_()
    probe = randn(*shape, seed=4).to(kernels.device, dtype)
    kernels.calls.clear()
    y, grad_x, *grads = assert_equal_to_reference(layer, reference, x, probe, rtol=ROUNDING[dtype], atol=2e-5)
    assert kernels.calls == FORWARD + BACKWARD
    assert (y.dtype, grad_x.dtype) == (dtype, dtype)
    assert [grad.dtype for grad in grads] == [layer.weight.dtype] * 2
    assert layer.running_mean.dtype == layer.memory_var.dtype == torch.float32


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("with_weight", [True, False], ids=["weight", "no weight"])
def test_weight_and_bias_are_optional_one_by_one(kernels, with_weight, with_bias):
    """A memory of 20 values per channel is as good as those values in the batch."""
    device = kernels.device
    remembered, x = leaf((20, 3), seed=1).detach().to(device), leaf((6, 3), seed=2).detach().to(device)
    probe, weight, bias = randn(6, 3, seed=3).to(device), randn(3, seed=4).to(device), randn(3, seed=5).to(device)
    points = [point.requires_grad_() for point in (x, *[weight] * with_weight, *[bias] * with_bias)]
    weight, bias = weight if with_weight else None, bias if with_bias else None
    y = memorized_batch_norm(x, weight, bias, remembered.mean(0), remembered.var(0, correction=0), 20.0)
    gradients = torch.autograd.grad(y, points, probe)
    assert kernels.calls == FORWARD + BACKWARD
    everything = torch.cat([x, remembered])
    expected = (x - everything.mean(0)) / (everything.var(0, correction=0) + 1e-5).sqrt()
    expected = expected if weight is None else expected * weight
    expected = expected if bias is None else expected + bias
    torch.testing.assert_close(y, expected, rtol=0, atol=ATOL)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, points, probe), rtol=0, atol=ATOL)


def test_a_constant_input_costs_no_gradient_of_it(kernels):
    layer, _ = with_statistics((8, 3), kernels.device)
    y = layer(leaf((8, 3), seed=3).detach().to(kernels.device))
    kernels.calls.clear()
    y.square().sum().backward()
    assert kernels.calls == BACKWARD[:1]


def test_the_second_derivative_is_that_of_the_formula(kernels):
    device = kernels.device
    mean, var = randn(3, seed=1).to(device), 1 + randn(3, seed=2).square().to(device)
    points = [leaf((4, 3, 2), seed=3), randn(3, seed=4).requires_grad_(), randn(3, seed=5).requires_grad_()]
    points = [point.detach().to(device).requires_grad_() for point in points]
    assert torch.autograd.gradgradcheck(lambda *p: memorized_batch_norm(*p, mean, var, 5.0), points)
    assert set(kernels.calls) == set(FORWARD)


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def watched(layer, x):
    with Watching():
        return layer(x)


def with_tangents(layer, x):
    with torch.autograd.forward_ad.dual_level():
        return torch.autograd.forward_ad.unpack_dual(layer(x)).primal


ELSEWHERE = {
    "strided": lambda layer, x: layer(x.repeat_interleave(2, -1)[..., ::2]),
    "a dispatch mode": watched,
    "forward-mode AD": with_tangents,
    "functorch": lambda layer, x: torch.func.vjp(layer, x)[0],
    "a compiler": lambda layer, x: torch.compile(layer, backend="eager", fullgraph=True)(x),
}


@pytest.mark.parametrize("how", ELSEWHERE)
def test_what_the_kernels_cannot_take_is_composed_of_torch_operations(kernels, how):
    layer, reference = with_statistics((4, 3, 5), kernels.device)
    layer.recording = False  # under functorch nothing can be written in place
    x = leaf((4, 3, 5), seed=3).detach()
    kernels.calls.clear()
    y = ELSEWHERE[how](layer, x.to(kernels.device))
    torch.testing.assert_close(y.detach().cpu(), reference(x).detach(), rtol=0, atol=ATOL)
    assert kernels.calls == []


def test_the_environment_switches_them_off(kernels, monkeypatch):
    monkeypatch.setenv("MEMNORM_KERNELS", "off")
    layer, reference = with_statistics((4, 3, 5), kernels.device)
    x = leaf((4, 3, 5), seed=3)
    probe = randn(4, 3, 5, seed=4).to(kernels.device)
    point = x.detach().to(kernels.device).requires_grad_()
    assert_equal_to_reference(layer, reference, point, probe, rtol=0, atol=ATOL)
    assert kernels.calls == []


@pytest.mark.parametrize("kernels", ["stand-ins"], indirect=True)
def test_nothing_reads_the_device(kernels, monkeypatch):
    """Meta tensors have no values: reading one is an error."""
    monkeypatch.setattr(cuda, "DEVICE", "meta")
    layer = LAYERS[4][0](3, device="meta")
    x = torch.empty(4, 3, 5, 6, device="meta", requires_grad=True)
    layer(x).sum().backward()
    assert kernels.calls == FORWARD + BACKWARD
    assert x.grad.shape == x.shape


@pytest.mark.gpu
@pytest.mark.parametrize("memory_size", [2, None])
def test_a_step_never_waits_for_the_gpu(memory_size):
    layer = LAYERS[4][0](3, memory_size=memory_size, device="cuda")
    x = torch.randn(4, 3, 5, 6, device="cuda", requires_grad=True)
    layer(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).sum().backward()
        memorized_batch_norm(x, None, None, layer.running_mean, layer.running_var, 5.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_variance_of_data_far_from_zero_does_not_cancel(layout):
    """In float32 a sum of squares would have no correct digit here; running means leave at least three."""
    x = (randn(16, 8, 14, 14, seed=0) + 1e4).float().contiguous(memory_format=layout)
    _, var = cuda.moments(x.cuda())
    torch.testing.assert_close(var.cpu().double(), x.double().var((0, 2, 3), correction=0), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_variance_of_torchs_kernel_is_the_biased_one(dtype):
    """Torch has this one of the four operations for the CPU, too."""
    x = leaf((8, 3, 5), seed=0, dtype=dtype).detach()
    torch.testing.assert_close(cuda.moments(x), batch_norm_update_stats(x, None, None, 0.0))
