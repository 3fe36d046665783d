"""The norms `memnorm.convert` can put in place of batch norm, by name.

A norm is a function from a batch-norm layer (and options) to its replacement, with what users should know about it. The
replacement takes over the layer's parameters, statistics, mode, device and hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from memnorm.errors import OptionError
from memnorm.norms.mbn import memorize


@dataclass(frozen=True)
class Norm:
    """One entry of the registry.

    Attributes:
        replace: from a batch norm and options to its replacement.
        records: its layers have the switch `recording`, which Double-Forward needs.
        state: what it keeps between batches, in words.
        batch_one: it trains on one image per batch.
        keeps_weights: a pretrained BN model evaluates the same after conversion.
        folds: in eval it is a fixed affine map per channel, which a convolution can absorb.
        double_forward: what Double-Forward is to it.
        learning_rate: what its authors recommend.
        refuse: the reason not to convert a model, or None.
        surgery: what else to change in the model, given the options, after the layers have been replaced.
        scales_with_run: its options include `total_steps`, the length of the training.
    """

    name: str
    title: str
    paper: str
    replace: Callable[..., nn.Module]
    records: bool = False
    state: str = "none"
    batch_one: bool = True
    keeps_weights: bool = False
    folds: bool = False
    double_forward: Literal["no effect", "fresher statistics", "part of the method"] = "no effect"
    learning_rate: str = "as for BN"
    refuse: Callable[[nn.Module], str | None] | None = None
    surgery: Callable[[nn.Module, Mapping[str, Any]], None] | None = None
    scales_with_run: bool = False


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
        records=True,
        state="moments of the last k batches and their union",
        keeps_weights=True,
        folds=True,
        double_forward="part of the method",
    )
)
