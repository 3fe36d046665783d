"""The norms `memnorm.convert` can put in place of batch norm, by name.

A norm is a function from a batch-norm layer (and options) to its replacement, with a line about where it comes from.
The replacement takes over the layer's parameters, statistics, mode, device and hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from memnorm.errors import OptionError
from memnorm.norms.mbn import memorize


@dataclass(frozen=True)
class Norm:
    """One entry of the registry."""

    name: str
    title: str
    paper: str
    replace: Callable[..., nn.Module]


_REGISTRY: dict[str, Norm] = {}


def register(norm: Norm) -> Norm:
    if norm.name in _REGISTRY:
        raise OptionError(f"norms.register: there is a norm {norm.name!r} already; choose another name")
    _REGISTRY[norm.name] = norm
    return norm


def get(name: str) -> Norm:
    if name not in _REGISTRY:
        raise OptionError(f"unknown norm {name!r}; available: {', '.join(available())}")
    return _REGISTRY[name]


def available() -> list[str]:
    return sorted(_REGISTRY)


register(
    Norm(
        name="mbn",
        title="Memorized Batch Normalization",
        paper="Guo et al., Double Forward Propagation for Memorized Batch Normalization, AAAI 2018",
        replace=memorize,
    )
)
