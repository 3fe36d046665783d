"""Models of other libraries: the smallest of each family, and its way to two-way memory and back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import memnorm
from memnorm import centering
from memnorm.norms.two_way import TwoWayBatchNorm

LARGEST = 90_000_000  # parameters
Builders = dict[str, Callable[[], nn.Module]]


class Sample(NamedTuple):
    """The arguments of a model for one micro-batch of 2, in training and in eval mode."""

    training: tuple[Any, ...]
    eval: tuple[Any, ...]


def pictures(*shape: int, seed: int) -> Sample:
    """Uniform noise of shape (2, *shape)."""
    x = torch.rand(2, *shape, generator=torch.Generator().manual_seed(seed))
    return Sample((x,), (x,))


def check_family(builders: Builders, samples: Callable[[nn.Module], Iterable[Callable[[int], Sample]]], record) -> None:
    """Send the smallest model with batch norm through `round_trip`, or skip with the reason why there is none.
    `samples` yields functions from a seed to a sample, the smallest inputs first.
    """
    name = _smallest(builders, record)
    model = builders[name]()
    sample, error = _first_that_trains(model, samples(model))
    if sample is None:
        record("outcome", "fails without memnorm")
        pytest.skip(f"{name} does not train without memnorm: {error}")
    record("input", str([list(one.shape) for one in tree_leaves(sample(0).eval)]))
    round_trip(model, sample)


def _smallest(builders: Builders, record) -> str:
    """The name of the smallest model with batch norm."""
    sizes = {name: sum(one.numel() for one in model.parameters()) for name, model in _with_batch_norm(builders)}
    fitting = {name: size for name, size in sizes.items() if size < LARGEST}
    if not fitting:
        reason = "over 90 M parameters" if sizes else "no batch norm"
        record("outcome", reason)
        pytest.skip(reason)
    name = min(fitting, key=lambda one: fitting[one])
    record("model", name)
    record("parameters", sizes[name])
    return name


class _WithoutValues(TorchFunctionMode):
    """Skip the initialization of parameters, which takes most of the time."""

    INITIALIZING = ("normal_", "uniform_", "fill_", "zero_", "erfinv_", "clamp_", "mul_", "add_", "div_")
    SKIPPED = frozenset(getattr(Tensor, name) for name in INITIALIZING)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        skipped = function in self.SKIPPED and isinstance(args[0], nn.Parameter)
        return args[0] if skipped else function(*args, **(kwargs or {}))


def _with_batch_norm(builders: Builders) -> Iterable[tuple[str, nn.Module]]:
    for name, build in builders.items():
        with _WithoutValues():
            try:
                with torch.device("meta"):
                    model = build()
            except NotImplementedError:  # reads tensors to choose its widths
                model = build()
        if any(isinstance(one, _BatchNorm) for one in model.modules()):
            yield name, model


def _first_that_trains(model: nn.Module, samples: Iterable[Callable[[int], Sample]]) -> tuple[Any, Any]:
    """The first sample with which the plain model trains and has finite outputs in eval mode, and the last error."""
    error: Any = None
    for sample in samples:
        twin = copy.deepcopy(model)
        try:
            train(twin, sample)
            evaluated(twin, sample)
        except Exception as raised:  # each library has its own for inputs that are too small
            error = f"{type(raised).__name__}: {raised}"
        else:
            return sample, error
    return None, error


def train(model: nn.Module, sample: Callable[[int], Sample]) -> None:
    """Two updates, each of two accumulated micro-batches. The gradients of the last update are kept."""
    optimizer = torch.optim.SGD(model.train().parameters(), lr=1e-3)
    for step in range(2):
        optimizer.zero_grad()
        for number in range(2):
            loss = loss_of(model(*sample(2 * step + number).training))
            assert loss.isfinite(), "the loss is not finite"
            loss.backward()
        optimizer.step()


def loss_of(output: Any) -> Tensor:
    """A number that depends on everything differentiable in an output of any structure."""
    parts = [one for one in tree_leaves(output) if isinstance(one, Tensor) and one.requires_grad]
    return sum((one.square().mean() for one in parts), torch.zeros(()))


def evaluated(model: nn.Module, sample: Callable[[int], Sample]) -> list[Tensor]:
    """The outputs in eval mode for the micro-batch that was trained on last."""
    with torch.no_grad():
        leaves = [one for one in tree_leaves(model.eval()(*sample(3).eval)) if isinstance(one, Tensor)]
    assert leaves
    assert all(one.isfinite().all() for one in leaves if one.is_floating_point()), "outputs are not finite"
    return leaves


def round_trip(model: nn.Module, sample: Callable[[int], Sample]) -> None:
    """Convert to two-way memory with centred gradients, train two steps of two micro-batches, and return. Each update
    must age each memory once, and the plain model must have its old classes and the same outputs.
    """
    before = _described(model)
    memnorm.convert(model, "two_way", center="gradients", warmup=4)
    assert not any(isinstance(one, _BatchNorm) and not isinstance(one, TwoWayBatchNorm) for one in model.modules())
    train(model, sample)
    _assert_centred(model)
    layers = [one for one in model.modules() if isinstance(one, TwoWayBatchNorm)]
    used = [one for one in layers if int(one.num_batches_tracked)]
    assert used
    assert {int(one.num_updates) for one in used} == {2}
    expected = evaluated(model, sample)
    memnorm.to_batchnorm(model)
    torch.testing.assert_close(evaluated(model, sample), expected, rtol=0, atol=0)
    assert _described(model) == before


def _described(model: nn.Module) -> tuple[dict[str, type], dict[str, torch.Size]]:
    """The classes of the modules and the shapes of the state, by name."""
    shapes = {name: one.shape for name, one in model.state_dict().items() if isinstance(one, Tensor)}
    return {name: type(one) for name, one in model.named_modules()}, shapes


def _assert_centred(model: nn.Module) -> None:
    """The gradients of the layers before the norms have no mean over what an output channel is made of."""
    layers = [one for one in model.modules() if centering.ATTRIBUTE in vars(one)]
    assert layers
    for weight, groups in ((one.weight, centering.groups_of(one)) for one in layers):
        if weight.grad is not None:
            bound = 1e-5 * float(weight.grad.abs().max())
            torch.testing.assert_close(centering.centred(weight.grad, groups), weight.grad, rtol=0, atol=bound)


def sizes(default: int) -> list[int]:
    """Edges of square inputs to try, up to the default of a model. At 32 pixels the last layers of most networks see a
    single one, and the outputs of deep random networks in eval mode overflow, with plain batch norm as well.
    """
    return [*range(64, default, 32), default]
