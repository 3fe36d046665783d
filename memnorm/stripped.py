"""Detect memorized layers that `convert_sync_batchnorm` has replaced: it replaces every batch norm without a warning.

Double-Forward and the strength schedule check this at every step, and the model when it is saved.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from memnorm.errors import NothingToRecord, warn
from memnorm.selection import LEFT_OUT

ADVICE = (
    "If SyncBatchNorm.convert_sync_batchnorm was called after memnorm.convert, it has replaced the memorized layers: "
    "call memnorm.convert(model) last."
)


def check_kept(model: nn.Module, names: Iterable[str], caller: str, modules: Iterable[nn.Module]) -> None:
    """Raise an error if any of the named layers is now a SyncBatchNorm. `modules` are all that do not record."""
    if nn.SyncBatchNorm not in map(type, modules):
        return
    now = dict(model.named_modules())
    lost = [name for name in names if type(now.get(name)) is nn.SyncBatchNorm]
    if lost:
        raise NothingToRecord(f"{caller}: {_listing(lost)} of {type(model).__name__} no longer record. {ADVICE}")


def watch_saving(model: nn.Module) -> None:
    """Check for replaced layers in `model.state_dict()`, too, for training without Double-Forward and schedule."""
    model.register_state_dict_pre_hook(report_stripped)


def unwatch_saving(model: nn.Module) -> None:
    """Undo `watch_saving` in the whole model."""
    for module in model.modules():
        hooks = module._state_dict_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is report_stripped]:
            del hooks[key]


def report_stripped(model: nn.Module, _prefix: str, _keep_vars: bool) -> None:
    """Warn about every SyncBatchNorm: `convert` leaves none in the model, so it was created later."""
    lost = [
        name for name, layer in model.named_modules() if type(layer) is nn.SyncBatchNorm and not _was_skipped(layer)
    ]
    if lost:
        warn(f"state_dict: {_listing(lost)} of {type(model).__name__} came after memnorm.convert. {ADVICE}")


def _was_skipped(layer: Any) -> bool:
    """Return True if the layer has its own forward or was excluded, so that `convert` has left it as it was."""
    return "forward" in layer.__dict__ or LEFT_OUT in layer.__dict__


def _listing(names: list[str], limit: int = 3) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"the SyncBatchNorm {', '.join(map(repr, names[:limit]))}{more}"
