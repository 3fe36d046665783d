"""The registry of the norms that `memnorm.convert` knows by name.

An entry has a function that replaces a batch norm, given options, and metadata for users. The replacement keeps the
parameters, statistics, mode, device and hooks of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from memnorm.errors import DTypeError, OptionError, check_callable
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
        replace: returns the replacement of a batch norm, given options.
        records: its layers have the attribute `recording`, which Double-Forward needs.
        state: what it keeps between batches, as text.
        batch_one: it trains on a single value per channel, such as one image after global pooling. On one image of
            several pixels every norm trains.
        keeps_weights: a pretrained batch norm model computes the same in eval mode after conversion.
        folds: in eval mode it is a fixed affine map per channel, which can be folded into a convolution.
        double_forward: the effect of Double-Forward.
        learning_rate: the recommendation of its authors.
        refuse: returns the reason why a model cannot be converted, or None.
        surgery: changes the model beyond its norms, given the options, after the layers have been replaced.
        settle: undoes the surgery without changing what the model computes.
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
    """Register a norm, so that its name can be used like that of a built-in one."""
    if not isinstance(norm, Norm):
        raise DTypeError(f"norms.register: expected a memnorm.norms.Norm, got {type(norm).__name__}: Norm(name=…, …)")
    if not isinstance(norm.name, str) or not norm.name:
        raise OptionError(f"norms.register: name must be a word for memnorm.convert(model, name); got {norm.name!r}")
    check_callable(norm.replace, f"norms.register: {norm.name}", "replace")
    for name in ("refuse", "surgery", "settle"):
        if getattr(norm, name) is not None:
            check_callable(getattr(norm, name), f"norms.register: {norm.name}", name)
    if norm.name in _REGISTRY:
        raise OptionError(f"norms.register: there is already a norm {norm.name!r}; choose another name")
    _REGISTRY[norm.name] = norm
    return norm


def get(name: str) -> Norm:
    """Return the registry entry of a norm."""
    if not isinstance(name, str) or name not in _REGISTRY:
        raise OptionError(f"unknown norm {name!r}; available: {', '.join(available())}")
    return _REGISTRY[name]


def available() -> list[str]:
    """Return the names of all registered norms."""
    return sorted(_REGISTRY)
