"""Compiled training equals eager training, and a changing strength does not recompile."""

import copy

import pytest
import torch
from support import assert_same_state, images, labels, small_net
from torch import nn

import memnorm


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_training_is_the_eager_one_and_compiles_once(backend):
    """Gradients first of all: a compiled graph may recompute in backward what it reads from buffers changed since."""
    torch._dynamo.reset()
    eager = memnorm.convert(small_net(dtype=torch.float64), memory_size=3)
    inner = copy.deepcopy(eager)
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    compiled = torch.compile(inner, fullgraph=True, backend=backend)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (eager, inner)]
    schedules = [memnorm.StrengthSchedule(net, 6) for net in (eager, inner)]
    for step in range(6):
        for net, optimizer, schedule in zip((eager, compiled), optimizers, schedules, strict=True):
            optimizer.zero_grad()
            x = images(4, seed=step, dtype=torch.float64)
            nn.functional.cross_entropy(net(x), labels(4, seed=step)).backward()
            optimizer.step()
            schedule.step()
        assert_same_state(inner, eager, atol=1e-12)
    assert graphs["unique_graphs"] - before == 1
    x = images(4, seed=99, dtype=torch.float64)
    torch.testing.assert_close(compiled.eval()(x), eager.eval()(x), rtol=0, atol=1e-12)


def train(call, optimizer, steps, dtype=torch.float32):
    for step in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(call(images(4, seed=step, dtype=dtype)), labels(4, seed=step)).backward()
        optimizer.step()


def test_double_forward_of_the_compiled_module_is_the_eager_one():
    torch._dynamo.reset()
    eager = memnorm.convert(small_net(dtype=torch.float64), memory_size=3)
    inner = copy.deepcopy(eager)
    compiled = torch.compile(inner, fullgraph=True, backend="aot_eager")
    for net in (eager, compiled):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        memnorm.double_forward(net, optimizer)
        train(net, optimizer, steps=5, dtype=torch.float64)
    assert_same_state(inner, eager, atol=1e-12)


def test_a_module_compiled_before_the_hook_is_an_error_that_says_what_to_pass():
    torch._dynamo.reset()
    model = memnorm.convert(small_net())
    compiled = torch.compile(model, backend="eager")
    compiled(images(4, seed=0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memnorm.double_forward(model, optimizer)
    with pytest.raises(memnorm.MemnormError, match=r"never called \(its layers ran without it\).*torch.compile"):
        train(compiled, optimizer, steps=1)
