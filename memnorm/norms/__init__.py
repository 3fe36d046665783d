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
from memnorm.norms import (
    bn,
    brn,
    cbn,
    evonorm_s0,
    frn,
    ghost,
    group,
    instance,
    lagged_bn,
    layer,
    mabn,
    mbn,
    momentum_bn,
    moving_bn,
    normprop,
    online,
    two_way,
    weight_norm,
)


@dataclass(frozen=True)
class Norm:
    """One entry of the registry.

    Attributes:
        replace: from a batch norm and options to its replacement.
        records: its layers have the switch `recording`, which Double-Forward needs.
        state: what it keeps between batches, in words.
        batch_one: it trains on a single value per channel, as one image has behind a global pool. On one image of
            several pixels every norm trains.
        keeps_weights: a pretrained BN model evaluates the same after conversion.
        folds: in eval it is a fixed affine map per channel, which a convolution can absorb.
        double_forward: what Double-Forward is to it.
        learning_rate: what its authors recommend.
        refuse: the reason not to convert a model, or None.
        surgery: what else to change in the model, given the options, after the layers have been replaced.
        settle: undoes the surgery; the model computes the same.
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
    settle: Callable[[nn.Module], None] | None = None
    scales_with_run: bool = False


_MODULES = (
    *(two_way, mbn, bn, brn, lagged_bn, moving_bn, momentum_bn, ghost, mabn, cbn, online),
    *(group, layer, instance, frn, evonorm_s0, weight_norm, normprop),
)
_REGISTRY = {module.ENTRY["name"]: Norm(**module.ENTRY) for module in _MODULES}


def register(norm: Norm) -> Norm:
    """Add a norm of your own: from now on it goes by its name wherever a built-in one does."""
    if norm.name in _REGISTRY:
        raise OptionError(f"norms.register: there is a norm {norm.name!r} already; choose another name")
    _REGISTRY[norm.name] = norm
    return norm


def get(name: str) -> Norm:
    """The entry of a norm: its paper, what it needs, and the function that puts it in place of a batch norm."""
    if name not in _REGISTRY:
        raise OptionError(f"unknown norm {name!r}; available: {', '.join(available())}")
    return _REGISTRY[name]


def available() -> list[str]:
    """The names that `memnorm.convert` takes."""
    return sorted(_REGISTRY)
