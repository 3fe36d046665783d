"""From batch norm to memorized batch norm and back, one layer at a time.

A replacement shares the contents of the `__dict__` of the replaced layer: parameters, hooks, mode, attributes set by
the user. The way back removes what was added and restores the original class.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, cast

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from memnorm.errors import InputError, OptionError
from memnorm.layers import (
    MemorizedBatchNorm,
    MemorizedBatchNorm1d,
    MemorizedBatchNorm2d,
    MemorizedBatchNorm3d,
    warn_of_dropped,
)
from memnorm.modules import is_real
from memnorm.norms.base import has_activation, takes_over

OPTIONS: dict[str, Any] = {"memory_size": 20, "decay": 0.9, "strength": 0.5}
OPTIONS |= {"prior_weight": 1.0, "prior_from_init": False, "sync": False}
OWN_ATTRIBUTES = {"memory_size", "decay", "prior_weight", "prior_from_init", "sync", "warmup", "_centered"}
OWN_ATTRIBUTES |= {"_initial_strength", "_source_class", "_rank", "ranks", "_plain_dtype", "_checked_strength"}


class MemorizedBatchNormNd(MemorizedBatchNorm2d):
    """Replaces a layer that takes data of any rank, such as SyncBatchNorm."""

    ranks: tuple[int, ...] = ()  # of the data seen last
    _rank: int | None = None
    _source_class: type[_BatchNorm]

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise InputError(f"{self._name}: expected at least 2-D input (N, C, …), got shape {tuple(input.shape)}")
        if self._rank != input.dim():
            self._rank = input.dim()
            self.ranks = (self._rank,)

    @property
    def plain_class(self) -> type[_BatchNorm]:  # type: ignore[override]
        """The plain class for the rank of the last data; if there was none, the class of the replaced layer."""
        by_rank = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
        return by_rank.get(self._rank or 0, self._source_class)


class MemorizedBatchNormAct2d(MemorizedBatchNorm2d):
    """Replaces a batch norm that applies its own `drop` and `act` layers, such as timm's BatchNormAct2d.

    Its instances are also instances of the replaced class (`with_activation`), which timm checks.
    """

    _source_class: type[_BatchNorm]
    drop: nn.Module
    act: nn.Module

    @property
    def plain_class(self) -> type[_BatchNorm]:  # type: ignore[override]
        return self._source_class

    def forward(self, input: Tensor, **more: Any) -> Tensor:
        output = super().forward(input, **more)
        return output if isinstance(input, fx.Proxy) else self.act(self.drop(output))  # a leaf for torch.fx

    def __reduce__(self) -> Any:
        return _new_with_activation, (type(self).__bases__[0], self._source_class), self.__getstate__()


@functools.cache
def with_activation(base: Any, source: Any) -> type[MemorizedBatchNormAct2d]:
    """A subclass of both `base` and `source`, the class of the replaced layer."""
    return type(base.__name__, (base, source), {"__module__": base.__module__})


def _new_with_activation(base: Any, source: Any) -> MemorizedBatchNormAct2d:
    cls = with_activation(base, source)
    return cls.__new__(cls)


class Family(NamedTuple):
    """The classes of a memorized norm by the data they take, and its options with their defaults."""

    norm: str
    by_rank: dict[type[_BatchNorm], type[MemorizedBatchNorm]]
    any_rank: type[MemorizedBatchNorm]
    activated: type[MemorizedBatchNorm]
    options: dict[str, Any]
    options_of_model: tuple[str, ...] = ()  # handled elsewhere

    def replace(self, layer: _BatchNorm, /, **options: Any) -> MemorizedBatchNorm:
        """The replacement of a batch norm. A layer of this family gets the options and keeps its memory."""
        unknown = options.keys() - self.options.keys()
        if unknown:
            raise OptionError(
                f"convert: unknown option {', '.join(sorted(unknown))} for norm {self.norm!r}; its options are "
                f"{', '.join((*self.options, *self.options_of_model))}"
            )
        if isinstance(layer, MemorizedBatchNorm):
            return self._with_options(layer, options) if options else layer
        new = takes_over(layer, self._class_for(layer))
        new._source_class = type(layer)
        new._install_memory(**{**self.options, **options})
        if is_real(new.running_mean) and new._drop_nonfinite():
            warn_of_dropped(type(layer).__name__)
        return cast(MemorizedBatchNorm, new)

    def _class_for(self, layer: _BatchNorm) -> type[MemorizedBatchNorm]:
        if has_activation(layer):
            kinds: Any = (self.activated, type(layer))
            return with_activation(*kinds)
        for plain, memorized in self.by_rank.items():
            if isinstance(layer, plain) and type(layer)._check_input_dim is plain._check_input_dim:
                return memorized
        return self.any_rank

    def _with_options(self, layer: MemorizedBatchNorm, options: dict[str, Any]) -> MemorizedBatchNorm:
        new: MemorizedBatchNorm = takes_over(layer, type(layer))
        current = {name: getattr(layer, name) for name in self.options if name != "strength"}
        new._install_memory(**{"strength": layer._initial_strength, **current, **options})
        if layer.running_mean is not None:
            new._plain_dtype = layer._plain_dtype
            new.load_state_dict(layer.state_dict())
            if "strength" in options:
                new.set_strength(options["strength"])
        return new


FAMILY = Family(
    "mbn",
    {
        nn.BatchNorm1d: MemorizedBatchNorm1d,
        nn.BatchNorm2d: MemorizedBatchNorm2d,
        nn.BatchNorm3d: MemorizedBatchNorm3d,
    },
    MemorizedBatchNormNd,
    MemorizedBatchNormAct2d,
    OPTIONS,
)


def plain(layer: MemorizedBatchNorm) -> _BatchNorm:
    """The batch norm that computes the same as `layer` in eval mode, of the class that `layer` replaced."""
    new = takes_over(layer, layer.plain_class)
    for name in layer.own_buffers:
        del new._buffers[name]
    for name in {*OWN_ATTRIBUTES, *layer._transient} & new.__dict__.keys():
        del new.__dict__[name]
    if not isinstance(new, nn.SyncBatchNorm):
        new.__dict__.pop("process_group", None)
    if new.running_mean is not None:
        new.running_mean = new.running_mean.to(layer._plain_dtype)
        new.running_var = new.running_var.to(layer._plain_dtype)
    return new


ENTRY: dict[str, Any] = {
    "name": "mbn",
    "title": "Memorized Batch Normalization",
    "paper": "Guo et al., Double Forward Propagation for Memorized Batch Normalization, AAAI 2018",
    "replace": FAMILY.replace,
    "records": True,
    "state": "moments of the last k batches and their union",
    "keeps_weights": True,
    "folds": True,
    "double_forward": "part of the method",
}
