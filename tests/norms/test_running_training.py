"""The norms that are batch norm in eval mode, in a training loop."""

import copy

import pytest
import torch
from helpers.common import SHAPES, assert_same_state, images, leaf
from helpers.conversion import assert_bitwise, train_step
from helpers.running_norms import NAMES, OPTIONS, built, drifting, each_norm, gradients, net_with, warmed
from torch import nn
from torch.utils.checkpoint import checkpoint

import memnorm


class Section(nn.Module):
    """A norm between two maps, run under activation checkpointing or not."""

    def __init__(self, norm, how):
        super().__init__()
        self.norm, self.how = norm, how

    def forward(self, x):
        if self.how is None:
            return self.norm(x.tanh()).square()
        return checkpoint(lambda x: self.norm(x.tanh()).square(), x, use_reentrant=self.how == "reentrant")


@each_norm
@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_a_checkpointed_section_has_the_same_gradients_and_records_once(name, how):
    layers = [warmed(name), warmed(name)]
    results = []
    for layer, way in zip(layers, (None, how), strict=True):
        section, xs = Section(layer, way), [drifting((8, 3, 5, 4), step) for step in (7, 8)]
        total = sum(section(x).mean() for x in xs)  # two forwards, then both backwards
        results.append(torch.autograd.grad(total, xs) if how != "reentrant" else backward_into(total, xs))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert_same_state(*layers)


def backward_into(total, xs):
    total.backward()
    return [x.grad for x in xs]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "brn"])  # its r and d are constants by decree
@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 3)], ids=str)
def test_gradcheck(name, shape):
    layer = warmed(name, rank=len(shape))
    layer.recording = False
    x = leaf(shape, seed=3)

    def function(x, weight, bias):
        return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))

    assert torch.autograd.gradcheck(function, (x, layer.weight, layer.bias))


@each_norm
def test_double_forward_records_in_the_second_forward(name):
    """The statistics after a step are those of a twin with the new weights, called once."""
    net = net_with(name, **OPTIONS[name])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    memnorm.double_forward(net, optimizer)
    for step in range(2):
        twin = copy.deepcopy(net)
        train_step(net, optimizer, seed=step)
        for ours, theirs in zip(twin.parameters(), net.parameters(), strict=True):
            ours.data.copy_(theirs)
        twin(images(6, seed=step))
        assert_same_state(twin, net, atol=1e-6)


@each_norm
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_data_of_any_rank(name, shape):
    layer = warmed(name, rank=len(shape), steps=2)
    flat = copy.deepcopy(layer)
    x = drifting(shape, 2)
    if name == "ghost" and len(shape) == 2:
        x = x[:6]  # no remainder that is a single value only in 2-D
    wide = x.reshape(*x.shape, 1)
    assert_bitwise(layer(x), flat(wide).reshape(x.shape))
    assert_same_state(layer, flat)


@each_norm
def test_under_autocast_the_output_is_narrow_and_the_statistics_wide(name):
    net = net_with(name, **OPTIONS[name])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for step in range(3):
            net(images(6, seed=step)).float().sum().backward()
        assert net[1](net[0](images(6, seed=9))).dtype == torch.bfloat16
    assert net[1].running_var.dtype == torch.float32
    exact = net_with(name, **OPTIONS[name])
    for step in (0, 1, 2, 9):
        exact(images(6, seed=step))
    torch.testing.assert_close(net[1].running_var, exact[1].running_var, rtol=0.05, atol=0.02)


@each_norm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_model_trains_and_evaluates(name, dtype):
    layer = built(name, dtype=torch.float32, **OPTIONS[name]).to(dtype)
    for step in range(3):
        x = drifting((8, 3, 5, 4), step).detach().to(dtype).requires_grad_()
        y = layer(x)
        y.sum().backward()
        assert (y.dtype, x.grad.dtype, layer.running_var.dtype) == (dtype, dtype, dtype)
    assert layer.eval()(x).dtype == dtype


@each_norm
def test_half_a_model_moves_and_keeps_its_numbers(name):
    layer = warmed(name)
    moved = copy.deepcopy(layer).float().double()
    assert_same_state(moved, layer, atol=1e-5)
    assert all(buffer.dtype in (torch.float64, torch.int64) for buffer in moved.buffers())


@pytest.mark.slow
@each_norm
def test_compiled_as_a_whole_it_trains_as_it_does_eagerly(name):
    torch.compiler.reset()
    layers = [warmed(name), warmed(name)]
    compiled = torch.compile(layers[0], backend="aot_eager", fullgraph=True)
    for step in range(6, 9):
        x = drifting((8, 3, 5, 4), step)
        results = [gradients(layer, x, layers[i].parameters()) for i, layer in enumerate((compiled, layers[1]))]
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert_same_state(*layers, atol=1e-11)
