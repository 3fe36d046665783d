"""Layers of ours that have become SyncBatchNorm since: `convert_sync_batchnorm` takes every batch norm, the memorized
ones as well, and says nothing. Double-Forward and the schedule notice at their next step, the model when it is saved.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from memnorm.errors import NothingToRecord, warn

ADVICE = (
    "If SyncBatchNorm.convert_sync_batchnorm was called after memnorm.convert, it has replaced the memorized layers: "
    "call memnorm.convert(model) last."
)


def check_kept(model: nn.Module, names: Iterable[str], caller: str, modules: Iterable[nn.Module]) -> None:
    """Complain if any of the named layers, which recorded once, is a SyncBatchNorm now. `modules`: all that do not
    record.
    """
    if nn.SyncBatchNorm not in map(type, modules):
        return
    now = dict(model.named_modules())
    lost = [name for name in names if type(now.get(name)) is nn.SyncBatchNorm]
    if lost:
        raise NothingToRecord(f"{caller}: {_listing(lost)} of {type(model).__name__} no longer record. {ADVICE}")


def watch_saving(model: nn.Module) -> None:
    """Let `model.state_dict()` say so, too: a training without Double-Forward and schedule has no other moment."""
    model.register_state_dict_pre_hook(report_stripped)


def unwatch_saving(model: nn.Module) -> None:
    """Undo `watch_saving` in the whole model."""
    for module in model.modules():
        hooks = module._state_dict_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is report_stripped]:
            del hooks[key]


def report_stripped(model: nn.Module, _prefix: str, _keep_vars: bool) -> None:
    """`convert` leaves no SyncBatchNorm behind, so one that is there came later."""
    lost = [name for name, layer in model.named_modules() if type(layer) is nn.SyncBatchNorm and not _changed(layer)]
    if lost:
        warn(f"state_dict: {_listing(lost)} of {type(model).__name__} came after memnorm.convert. {ADVICE}")


def _changed(layer: Any) -> bool:
    """Whether someone gave the layer a forward of its own, for which `convert` leaves it alone."""
    return "forward" in layer.__dict__


def _listing(names: list[str], limit: int = 3) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return f"the SyncBatchNorm {', '.join(map(repr, names[:limit]))}{more}"
