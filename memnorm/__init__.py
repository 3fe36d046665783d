"""Batch normalization with a memory: Memorized Batch Normalization and Double-Forward for PyTorch.

model = memnorm.convert(model)                            # every batch norm gets a memory, weights and statistics kept
memnorm.double_forward(model, optimizer)                  # the training loop stays as it is
schedule = memnorm.StrengthSchedule(model, total_steps)   # then schedule.step() after optimizer.step()
deploy = memnorm.to_batchnorm(model)                      # plain torch.nn.BatchNorm again, same outputs in eval mode
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memnorm import distributed as distributed
    from memnorm import errors as errors
    from memnorm import estimate as estimate
    from memnorm import functional as functional
    from memnorm import layers as layers
    from memnorm import norms as norms
    from memnorm import reference as reference
    from memnorm import replay as replay
    from memnorm import schedule as schedule
    from memnorm.centering import center
    from memnorm.convert import convert, summary, to_batchnorm
    from memnorm.diagnose import diagnose
    from memnorm.double_forward import double_forward
    from memnorm.errors import MemnormError, MemnormWarning
    from memnorm.estimate import adapt, recalibrate
    from memnorm.layers import MemorizedBatchNorm1d, MemorizedBatchNorm2d, MemorizedBatchNorm3d
    from memnorm.norms.two_way import TwoWayBatchNorm1d, TwoWayBatchNorm2d, TwoWayBatchNorm3d
    from memnorm.replay import recording, rerecord
    from memnorm.schedule import StrengthSchedule

__version__ = "0.1.0"

__all__ = [
    "MemnormError",
    "MemnormWarning",
    "MemorizedBatchNorm1d",
    "MemorizedBatchNorm2d",
    "MemorizedBatchNorm3d",
    "StrengthSchedule",
    "TwoWayBatchNorm1d",
    "TwoWayBatchNorm2d",
    "TwoWayBatchNorm3d",
    "adapt",
    "center",
    "convert",
    "diagnose",
    "double_forward",
    "recalibrate",
    "recording",
    "rerecord",
    "summary",
    "to_batchnorm",
]

_HOMES = {
    "centering": ("center",),
    "convert": ("convert", "summary", "to_batchnorm"),
    "diagnose": ("diagnose",),
    "double_forward": ("double_forward",),
    "errors": ("MemnormError", "MemnormWarning"),
    "estimate": ("adapt", "recalibrate"),
    "layers": ("MemorizedBatchNorm1d", "MemorizedBatchNorm2d", "MemorizedBatchNorm3d"),
    "norms.two_way": ("TwoWayBatchNorm1d", "TwoWayBatchNorm2d", "TwoWayBatchNorm3d"),
    "replay": ("recording", "rerecord"),
    "schedule": ("StrengthSchedule",),
}
_MODULES = ("distributed", "errors", "estimate", "functional", "layers", "norms", "reference", "replay", "schedule")


class _Package(types.ModuleType):
    """Loads a public name when it is first used, so that what needs no torch (the lab's reports) does without it."""

    def __getattr__(self, name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        for home, names in _HOMES.items():
            if name in names:
                value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
                vars(self)[name] = value
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        """`memnorm.convert` is the function, also after the import system has loaded the module of that name."""
        if not (name in __all__ and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *__all__, *_MODULES})


sys.modules[__name__].__class__ = _Package
