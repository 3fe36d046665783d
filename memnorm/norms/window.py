"""What norms that remember recent iterations share: rows of statistics in buffers of fixed shape, and checkpoints of
plain batch norm that know nothing of them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from memnorm.errors import MemnormError, OptionError, is_whole
from memnorm.functional import statistics_dtype
from memnorm.norms.base import RunningNorm


class WindowedNorm(RunningNorm):
    """A running norm with buffers of its own, named in `MEMORY`. They are zero in a new layer, after
    `reset_running_stats` and after loading a checkpoint of plain batch norm.
    """

    MEMORY: ClassVar[tuple[str, ...]] = ()

    def _remember(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> None:
        """Register the buffer `name`, of zeros; None where no statistics are kept."""
        if self.running_mean is None:
            self.register_buffer(name, None)
            return
        dtype = dtype or statistics_dtype(self.running_mean.dtype)
        self.register_buffer(name, torch.zeros(shape, device=self.running_mean.device, dtype=dtype))

    def reset_running_stats(self) -> None:
        super().reset_running_stats()
        for name in self.MEMORY:
            if self._buffers.get(name) is not None:
                self.get_buffer(name).zero_()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """As for any module, but what is remembered stays float32 or wider."""
        before = {name: self._buffers.get(name) for name in self.MEMORY}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers.get(name)
            if old is not None and new is not None and new.is_floating_point():
                wide = statistics_dtype(new.dtype)
                self._buffers[name] = new if new.dtype == wide else old.to(device=new.device, dtype=wide)
        return self

    def _require_writing_backward(self) -> None:
        """For a norm that records in backward, too. A compiled backward does what `recording` said in the forward, in
        which Double-Forward turns it off.
        """
        if torch.compiler.is_compiling() and torch.is_grad_enabled() and not self.recording:
            raise MemnormError(
                f"{type(self).__name__} records in backward, which a graph compiled with recording off never does: "
                "compile without fullgraph, and it runs uncompiled, or train without Double-Forward"
            )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if prefix + "running_mean" in state_dict and not any(prefix + name in state_dict for name in self.MEMORY):
            self._from_plain(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _from_plain(self, state_dict: Any, prefix: str) -> None:
        """Complete the entries of a plain batch norm."""
        for name in self.MEMORY:
            if self._buffers.get(name) is not None:
                state_dict[prefix + name] = torch.zeros_like(self.get_buffer(name))


def push(rows: Tensor, newest: Tensor, valid: Tensor) -> None:
    """Put `newest` before the rows and drop the oldest, in place; nothing changes unless `valid`."""
    moved = torch.cat([newest[None].to(rows.dtype), rows])[: rows.shape[0]]
    rows.copy_(torch.where(valid, moved, rows))


def place(rows: Tensor, newest: Tensor, at: Tensor, valid: Tensor) -> None:
    """Put `newest` in the place of row `at`, in place; nothing changes unless `valid`. Where rows are large and their
    order does not matter, this is cheaper than `push`.
    """
    row = at[None]
    rows.index_copy_(0, row, torch.where(valid, newest[None].to(rows.dtype), rows.index_select(0, row)))


def count_up(counter: Tensor, valid: Tensor, limit: int) -> None:
    """One more, in place, until `limit` is reached."""
    counter.copy_((counter + valid.to(counter.dtype)).clamp(max=limit))


def check_whole(name: str, value: object, least: int) -> int:
    if not is_whole(value) or value < least:  # type: ignore[operator]
        raise OptionError(f"{name} must be a whole number, at least {least}; got {value!r}")
    return int(value)  # type: ignore[call-overload]
