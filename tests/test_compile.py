"""Compiled training equals eager training, and a changing strength does not recompile."""

import contextlib
import copy
import shutil

import pytest
import torch
from helpers.common import assert_same_state, images, small_net
from helpers.torch_tools import double, residual_net, resnet, step

import memnorm

STEPS = 6  # more than the memory holds
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself
compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def assert_compiled_is_eager(build, backend, *, twice):
    """Outputs, gradients and state of every step, with a strength that changes; and then in eval mode.

    Gradients first of all: a compiled graph may recompute in backward what it reads from buffers changed since.
    """
    torch._dynamo.reset()
    eager = build()
    inner = copy.deepcopy(eager)
    compiled = torch.compile(inner, fullgraph=True, backend=backend)
    before, seen, outputs, buffers = graphs(), [], {}, addresses(inner)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (eager, inner)]
    schedules = [memnorm.StrengthSchedule(net, STEPS) for net in (eager, inner)]
    with contextlib.ExitStack() as attached:
        for call, optimizer in zip((eager, compiled), optimizers, strict=True):
            if twice:
                attached.enter_context(memnorm.double_forward(call, optimizer))
        for seed in range(STEPS):
            for call, optimizer, schedule in zip((eager, compiled), optimizers, schedules, strict=True):
                outputs[call] = step(call, optimizer, seed)
                schedule.step()
            torch.testing.assert_close(outputs[compiled], outputs[eager], rtol=0, atol=1e-12)
            assert_same_gradients(inner, eager)
            assert_same_state(inner, eager, atol=1e-12)
            seen.append(graphs() - before)
    assert seen == [2 if twice else 1] * STEPS, "the first step compiles: a graph that records, and one that does not"
    assert addresses(inner) == buffers, "buffers change in place"
    assert_same_evaluation(compiled, inner, eager)


def addresses(net):
    return {name: (id(buffer), buffer.data_ptr()) for name, buffer in net.named_buffers()}


def assert_same_gradients(net, other):
    for (name, ours), theirs in zip(net.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad, theirs.grad, rtol=0, atol=1e-12, msg=lambda m, name=name: f"gradient of {name}: {m}"
        )


def assert_same_evaluation(compiled, inner, eager):
    before = copy.deepcopy(inner.state_dict())
    for net in (compiled, inner, eager):
        net.eval()
    x = images(4, seed=99, dtype=double)
    torch.testing.assert_close(compiled(x), eager(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(inner.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("twice", [False, True], ids=["single", "double-forward"])
def test_a_compiled_training_is_the_eager_one_and_compiles_in_the_first_step_only(twice):
    assert_compiled_is_eager(residual_net, "aot_eager", twice=twice)


@pytest.mark.slow
@compiler
@pytest.mark.parametrize(("build", "twice"), [(residual_net, False), (residual_net, True), (resnet, True)])
def test_a_training_compiled_by_inductor_is_the_eager_one_and_compiles_in_the_first_step_only(build, twice):
    assert_compiled_is_eager(build, "inductor", twice=twice)


def test_a_module_compiled_before_the_hook_is_an_error_that_says_what_to_pass():
    torch._dynamo.reset()
    model = memnorm.convert(small_net())
    compiled = torch.compile(model, backend="eager")
    compiled(images(4, seed=0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memnorm.double_forward(model, optimizer)
    with pytest.raises(memnorm.MemnormError, match=r"never called \(its layers ran without it\).*torch.compile"):
        step(compiled, optimizer, seed=0)
