"""What the tests of the kernels share: inputs in every layout, a count of calls, and the reference as judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.common import LAYERS, randn, randomize
from torch import Tensor

from memnorm.functional import statistics_dtype
from memnorm.kernels import cpu
from memnorm.reference import ReferenceBatchNorm

needs_kernels = pytest.mark.skipif("not built" in cpu.description(), reason="the kernels were not built")

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
CHANNELS_LAST: dict[int, Any] = {4: torch.channels_last, 5: torch.channels_last_3d}


def last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=CHANNELS_LAST[x.dim()]) if x.dim() in CHANNELS_LAST else x


def offset(x: Tensor) -> Tensor:
    """The same data one value further in their storage: aligned to nothing but the value."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def every_second(x: Tensor) -> Tensor:
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"))
    wide[..., ::2] = x
    return wide[..., ::2]


LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "channels last": last,
    "offset": offset,
    "offset channels last": lambda x: offset(x.movedim(1, -1).contiguous()).movedim(-1, 1),
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "batch inside": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "sliced": every_second,
    "sliced channels": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "sliced channels last": lambda x: last(torch.cat([x, x], 1))[:, : x.shape[1]],
    "expanded images": lambda x: x[:1].expand_as(x),
    "expanded values": lambda x: x[..., :1].expand_as(x),
}


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often the compiled module computes, by name. A call that returns None leaves the tensors to Python."""
    calls: Counter[str] = Counter()

    def count(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            found = function(*arguments)
            calls[name.removesuffix("_prepared")] += found is not None
            return found

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("forward", "train", "train_prepared", "backward"):
            patch.setattr(cpu.module(), name, count(name, getattr(cpu.module(), name)))
        yield calls
        for name in [name for name, number in calls.items() if not number]:
            del calls[name]


@contextmanager
def in_torch() -> Iterator[None]:
    """Everything on torch operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "module", lambda: None)
        yield


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def data(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values whose channels differ by mean and deviation, none of them by much."""
    scale = 1 + (torch.arange(shape[1]) % 7).view(1, -1, *[1] * (len(shape) - 2))
    return (randn(*shape, seed=seed) * scale + scale / 2).to(dtype)


def layer_for(shape: Sequence[int], dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    layer = LAYERS[len(shape)][0](shape[1], dtype=statistics_dtype(dtype), **options)
    randomize(layer, seed=5)
    return layer


def judge(layer: Any) -> ReferenceBatchNorm:
    """The reference with the layer's options and parameters, in float64."""
    reference = ReferenceBatchNorm(
        layer.num_features,
        memory_size=layer.memory_size,
        decay=layer.decay,
        strength=float(layer.strength),
        eps=layer.eps,
    )
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            reference.get_parameter(name).copy_(parameter)
    return reference


def step(layer: Any, x: Tensor, gradient: Tensor, **options: Any) -> dict[str, Tensor]:
    """Output and gradients of a training forward on `x`."""
    x = x.detach().requires_grad_()
    y = layer(x, **options)
    wanted = {"x": x, **{name: one for name, one in layer.named_parameters() if one.requires_grad}}
    gradients = torch.autograd.grad(y, list(wanted.values()), gradient)
    return {"y": y.detach(), **dict(zip(wanted, gradients, strict=True))}


def assert_near(ours: dict[str, Tensor], exact: dict[str, Tensor], tolerance: float) -> None:
    """Within `tolerance` of each tensor's largest value, or of 1 if that is more."""
    for name, one in ours.items():
        wanted = exact[name].double()
        scale = float(wanted.abs().max().clamp(min=1)) if wanted.numel() else 1.0
        torch.testing.assert_close(
            one.double(), wanted, rtol=0, atol=tolerance * scale, msg=lambda m, name=name: f"{name}: {m}"
        )


def pooled(layer: Any) -> dict[str, Tensor]:
    return {"mean": layer.running_mean, "var": layer.running_var}


def assert_follows_reference(layer: Any, batches: Sequence[Tensor], gradients: Sequence[Tensor] | None = None) -> None:
    """Output, every gradient and the pooled memory are the reference's after each batch, and the kernels made them."""
    reference = judge(layer)
    tolerance = TOLERANCE[batches[0].dtype]
    state_tolerance = TOLERANCE[layer.running_mean.dtype]
    for index, x in enumerate(batches):
        gradient = randn(*x.shape, seed=50 + index).to(x.dtype) if gradients is None else gradients[index]
        ours = step(layer, x, gradient)
        exact = step(reference, x.double(), gradient.double())
        assert {one.dtype for name, one in ours.items() if name in ("x", "y")} == {x.dtype}
        assert_near(ours, {name: exact[name] for name in ours}, tolerance)
        mean, var = reference.moments(None)
        assert_near(pooled(layer), {"mean": mean, "var": var}, state_tolerance)
