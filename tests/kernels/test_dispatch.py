"""Who computes: the kernels where they may, torch operations for every tool that must see through a layer."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from helpers.kernels import assert_near, counted, data, in_torch, layer_for, needs_kernels
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

SHAPE = (4, 3, 5, 6)
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Standing(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Wrapped(torch.Tensor):
    """A subclass that changes nothing."""


def compiled(layer, x):
    torch._dynamo.reset()
    return torch.compile(layer, backend="aot_eager", fullgraph=True)(x)


def dual(layer, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(layer(forward_ad.make_dual(x, torch.ones_like(x)))).primal


def dispatched(layer, x):
    with Watching():
        return layer(x)


def vmapped(layer, x):
    layer.recording = False  # functorch forbids writing to captured buffers
    return torch.vmap(layer)(x[None])[0]


def differentiated(layer, x):
    """By functorch, which wants buffers that are written to as inputs."""

    def total(x, buffers):
        y = torch.func.functional_call(layer, buffers, (x,))
        return y.sum(), y

    return torch.func.grad(total, has_aux=True)(x, dict(layer.named_buffers()))[1]


def traced(layer, x):
    torch.jit.trace(layer, x, check_trace=False)


def made_fx(layer, x):
    make_fx(layer)(x)


SEEN_THROUGH = {
    "compile": compiled,
    "forward-mode AD": dual,
    "dispatch mode": dispatched,
    "make_fx": made_fx,
    "jit trace": traced,
    "subclass": lambda layer, x: layer(x.as_subclass(Wrapped)).as_subclass(torch.Tensor),
    "func.grad": differentiated,
    "vmap": vmapped,
}


@quiet
@needs_kernels
@pytest.mark.parametrize("tool", SEEN_THROUGH)
def test_a_tool_that_sees_through_a_layer_sees_torch_operations_and_the_same_results(tool):
    layer, other = trained(), trained()
    with counted() as calls:
        y = SEEN_THROUGH[tool](layer, data(SHAPE, 1))
    assert calls == {}
    other.recording = layer.recording
    wanted = other(data(SHAPE, 1))
    if y is not None:
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
    assert_near(layer.state_dict(), other.state_dict(), 1e-5)


def trained(**options):
    """A layer that has recorded a batch on torch operations, and looks for the kernels when it is called again."""
    layer = layer_for(SHAPE, **options)
    with in_torch():
        layer(data(SHAPE, 0))
    return layer


@needs_kernels
def test_a_backward_that_is_watched_runs_on_torch_operations():
    gradients = []
    for mode in (Watching, Standing):
        layer, x = trained(), data(SHAPE, 1).requires_grad_()
        with counted() as calls:
            y = layer(x, activation="relu", residual=data(SHAPE, 2))
            with mode():
                y.square().sum().backward()
        assert calls == ({"train": 1} if mode is Watching else {"train": 1, "backward": 1})
        gradients.append((x.grad, layer.weight.grad, layer.bias.grad))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-3)


@quiet
@needs_kernels
def test_batched_backward_gives_each_gradient_its_own():
    layer, x = trained(), data((4, 3, 5, 6), 1).requires_grad_()
    y = layer(x)
    probes = torch.stack([data(SHAPE, 3), data(SHAPE, 4)])
    batched = torch.autograd.grad(y, x, probes, is_grads_batched=True, retain_graph=True)[0]
    alone = [torch.autograd.grad(y, x, probe, retain_graph=True)[0] for probe in probes]
    torch.testing.assert_close(batched, torch.stack(alone), rtol=1e-5, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_segment_records_once_and_gets_the_plain_gradients(reentrant):
    """The one-call forward cannot be recomputed: its memory has moved on."""
    results = []
    for run in (lambda layer, x: layer(x), lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant)):
        layer = trained()
        with counted() as calls:
            for seed in range(3):
                x = data(SHAPE, seed).requires_grad_()
                run(layer, x).pow(3).sum().backward()
        results.append({"x": x.grad, "weight": layer.weight.grad, **layer.state_dict()})
    assert not calls["train"]
    assert_near(results[1], results[0], 1e-5)


@needs_kernels
def test_with_hooks_on_saved_tensors_gradients_and_memory_are_the_same():
    results = []
    for hooked in (False, True):
        layer, x = trained(), data(SHAPE, 1).requires_grad_()
        with counted() as calls:
            if hooked:
                with torch.autograd.graph.saved_tensors_hooks(lambda one: one.clone(), lambda one: one):
                    y = layer(x)
            else:
                y = layer(x)
            y.pow(3).sum().backward()
        assert calls["train"] == (not hooked)
        results.append({"x": x.grad, **layer.state_dict()})
    assert_near(results[1], results[0], 1e-5)


def run(program, **environment):
    """What a fresh process prints, and what it says on the other channel."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


TRAINING = """
    import torch, memnorm
    from memnorm.kernels import cpu
    layer = memnorm.MemorizedBatchNorm2d(3)
    x = (torch.arange(360.0).view(4, 3, 5, 6) * 0.7).sin().requires_grad_()
    for _ in range(3):
        layer(x, activation="relu", residual=x).pow(2).sum().backward()
    print(cpu.module() is not None, cpu.description(), x.grad.norm().item(), sep="|")
"""
MISSING = """
    import sys
    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if name == "memnorm.kernels._cpu":
                raise ImportError("no such module")
    sys.meta_path.insert(0, Blocked())
"""


@needs_kernels
def test_switched_off_or_missing_the_kernels_give_way_to_torch_operations():
    (built, _), (off, quiet_off), (missing, said) = (
        run(TRAINING, MEMNORM_KERNELS=""),
        run(TRAINING, MEMNORM_KERNELS="off"),
        run(MISSING + TRAINING, MEMNORM_KERNELS=""),
    )
    found, names, norms = zip(*(line.split("|") for line in (built, off, missing)), strict=True)
    assert found == ("True", "False", "False")
    assert names == (
        "C++ kernels for the CPU",
        "torch operations: MEMNORM_KERNELS=off",
        "torch operations: not built",
    )
    torch.testing.assert_close(*[torch.tensor(float(norm)) for norm in norms[:2]], rtol=1e-5, atol=0)
    assert norms[1] == norms[2]
    assert "MemnormWarning" not in quiet_off
    assert said.count("MemnormWarning: memnorm's CPU kernels are missing") == 1
    assert "set MEMNORM_KERNELS=off to hide this" in said


@needs_kernels
@pytest.mark.slow
def test_a_forked_worker_of_a_parent_that_used_threads_trains_a_layer():
    """A data loader's worker runs on one thread, which needs nobody of the team that stayed with the parent."""
    program = """
        import torch, memnorm
        from torch.utils.data import DataLoader
        layer = memnorm.MemorizedBatchNorm1d(3)
        torch.set_num_threads(2)
        layer(torch.randn(100_000, 3))
        class Data(torch.utils.data.Dataset):
            def __len__(self): return 2
            def __getitem__(self, index): return layer(torch.randn(100_000, 3)).detach().std()
        loader = DataLoader(Data(), num_workers=1, multiprocessing_context="fork", timeout=60)
        print(len([one for batch in loader for one in batch]))
    """
    assert run(program)[0] == "2"


@needs_kernels
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits its own memory")
def test_with_however_little_memory_a_call_on_threads_works_or_raises():
    program = """
        import resource
        import torch
        from memnorm.kernels import cpu
        channels, pages = 300_000, resource.getpagesize()
        x, mean, var = torch.randn(2, channels), torch.zeros(channels), torch.ones(channels)
        def call():
            return cpu.module().forward(x, None, None, None, False, 1e-5, mean, var, 4.0)[0]
        y = call()
        wanted, used = y.clone(), int(open("/proc/self/statm").read().split()[0]) * pages
        worked = []
        for extra in range(100):
            resource.setrlimit(resource.RLIMIT_AS, (used + extra * 2**20, resource.RLIM_INFINITY))
            try:
                y = call()
                worked.append(True)
            except (MemoryError, RuntimeError):  # ours, or torch's for the output
                worked.append(False)
        assert torch.equal(y, wanted)
        print(worked[0], worked[-1])
    """
    assert run(program)[0] == "False True"
