"""Layers with a memory, and comparisons of their buffers."""

from __future__ import annotations

from typing import Any

import torch
from helpers.common import leaf, randomize
from torch import Tensor, nn

import memnorm

Layer = memnorm.MemorizedBatchNorm2d


C, DECAY, STRENGTH = 3, 0.7, 0.3


NAMES = [
    "weight",
    "bias",
    "running_mean",
    "running_var",
    "num_batches_tracked",
    "running_weight",
    "memory_mean",
    "memory_var",
    "memory_count",
    "strength",
]


MEMORY = ("running_weight", "memory_mean", "memory_var", "memory_count")


def batch(index: int, dtype: torch.dtype = torch.float64, *, channels: int = C) -> Tensor:
    """A batch whose size depends on the index."""
    return leaf((3 + index, channels, 4, 2), seed=index, dtype=dtype).detach()


def make(dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    layer = Layer(C, dtype=dtype, **{"memory_size": 5, "decay": DECAY, "strength": STRENGTH, **options})
    randomize(layer, seed=7)
    return layer


def trained(steps: int = 3, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """A memorized layer that has recorded the batches 0, 1, …"""
    layer = make(dtype, **options)
    for index in range(steps):
        layer(batch(index, dtype))
    return layer


def plain(dtype: torch.dtype = torch.float64, *, steps: int = 3, channels: int = C) -> nn.BatchNorm2d:
    """A batch norm of torch whose statistics and parameters differ from those of `trained`."""
    layer = nn.BatchNorm2d(channels, dtype=dtype)
    randomize(layer, seed=30)
    for index in range(steps):
        layer(2 * batch(10 + index, dtype, channels=channels) + 1)
    return layer


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_bitwise(state: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(state) == list(other)
    torch.testing.assert_close(state, other, rtol=0, atol=0, equal_nan=True)


def narrowed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.half() if value.is_floating_point() else value for name, value in state.items()}


def steps(layer: Any) -> None:
    for index in range(5):
        layer(batch(index)).sum().backward()
