"""The memory of a layer: its weight, what a forward reads of it, and how a batch enters it.

Everything exists twice, with the same result: in torch operations without a branch or a look at the device, for any
device and for compilers; and on the kernels of the processor, where numbers are at hand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memnorm.functional import Moments, as_scalar, merge, pool, snapshot
from memnorm.kernels import cpu
from memnorm.state import POOLED, SLOTS


class Remembering:
    """What a memorized layer does with its buffers; `memnorm.state` lists them."""

    running_mean: Any  # Tensor, or None without track_running_stats
    running_var: Any
    num_batches_tracked: Any
    running_weight: Tensor
    memory_mean: Tensor
    memory_var: Tensor
    memory_count: Tensor
    strength: Tensor
    memory_size: int | None
    decay: float
    prior_weight: float
    prior_from_init: bool
    momentum: float | None
    _buffers: Any
    _known_memory: cpu.Memory | None = None  # as the kernels last wrote it
    _outgoing: list[Moments] | None = None  # batches recorded for `memnorm.distributed.exchange_memory` to share
    shift: bool = True  # here for layers pickled before there was the option

    @property
    def _decay_per_batch(self) -> float:
        """The factor by which remembered batches fade when a batch is recorded."""
        return self.decay

    def _read(self, count: Tensor | float, at_once: bool = False) -> Moments:
        """The memory as this forward sees it, its weight multiplied by the strength; a copy, unless read `at_once`.

        With `momentum=None` torch's tools accumulate statistics over batches that are each normalised on their own; so
        do we.
        """
        if at_once:
            known = 0.0 if self.momentum is None else self._known_weight(float(count))
            return Moments(self.running_mean, self.running_var, self.strength.item() * known)
        weight = self.strength * (0 if self.momentum is None else self._weight_now(count))
        return Moments(snapshot(self.running_mean), snapshot(self.running_var), snapshot(weight))

    def _known_weight(self, count: float) -> float:
        """`_weight_now` as a number, for the kernels of the processor: there it costs no synchronisation."""
        weight = self.running_weight.item()
        return weight if weight else self.prior_weight * count * bool(self._stands_in())

    def _weight_now(self, count: Tensor | float) -> Tensor:
        """W, where nothing is recorded yet the weight of the statistics that stand in. Tensors all the way: no host
        sync, no branch.
        """
        prior = self._stands_in().to(self.running_weight.dtype) * (self.prior_weight * count)
        return torch.where(self.running_weight == 0, prior, self.running_weight)

    def _stands_in(self) -> Tensor:
        trained: Tensor = (self.running_mean != 0).any() | (self.running_var != 1).any()
        return torch.ones_like(trained) if self.prior_from_init and self.momentum is not None else trained

    def _record(self, batch: Moments) -> None:
        """Make `batch` the newest remembered one and pool the memory again. Every buffer changes in place; a batch that
        is not finite changes none. If the memory is exchanged between processes, the batch waits for that.
        """
        if self._outgoing is not None and self.momentum is not None:
            self._outgoing.append(batch)
            return
        self._remember(batch)

    def _remember_shared(self, _name: str, union: Moments, batches: Tensor) -> None:
        """Remember what all processes have recorded in a step, as one entry of the weight of their average batch."""
        self._remember(Moments(union.mean, union.var, union.weight / batches))

    @torch.no_grad()
    def _remember(self, batch: Moments) -> None:
        memory = self._kernels_memory() if cpu.takes(batch.mean, self.running_mean.dtype) else None
        if memory is not None:
            cpu.record(memory, batch.mean, batch.var, float(batch.weight))
            return
        batch = Moments(batch.mean.to(self.running_mean.dtype), batch.var.to(self.running_mean.dtype), batch.weight)
        weight = self._weight_now(batch.weight)
        slots = self._shifted(batch, weight)
        if self.momentum is None or self.memory_size is None:
            fade = 1.0 if self.momentum is None else self._decay_per_batch
            pooled = merge(Moments(self.running_mean, self.running_var, weight * fade), batch, shift=self.shift)
        else:
            age = torch.arange(self.memory_size, device=weight.device, dtype=self.memory_count.dtype)
            pooled = pool(slots[0], slots[1], slots[2] * self.decay**age, shift=self.shift)
        finite = (pooled.mean.isfinite() & pooled.var.isfinite()).all()
        old = [self._buffers[name] for name in (POOLED + SLOTS if slots else POOLED)]
        new = [torch.where(finite, value, buffer) for value, buffer in zip((*pooled, *slots), old, strict=True)]
        # Not buffer.copy_: a compiled graph loses that for a float64 scalar on the CPU, which running_weight may be.
        torch._foreach_copy_(old, new)
        self.num_batches_tracked.add_(finite)

    def _kernels_memory(self) -> cpu.Memory | None:
        """The memory for the kernels; None if they cannot write it."""
        evenly = self.momentum is None
        rules = cpu.Rules(
            self._decay_per_batch, self.prior_weight, self.prior_from_init and not evenly, evenly, self.shift
        )
        known = self._known_memory
        if known is None or not known.still(self._buffers, rules):
            known = cpu.Memory(self._buffers, rules)
            if not known.writable():
                return None
            vars(self)["_known_memory"] = known
        return known

    def _shifted(self, batch: Moments, weight: Tensor) -> tuple[Tensor, ...]:
        """The slots with `batch` in front of them; statistics that stood in for an empty memory become its oldest
        entry.
        """
        if not self.memory_size:
            return ()
        stood_in = (self.running_weight == 0) & (weight > 0)
        newest = (batch.mean, batch.var, as_scalar(batch.weight, weight.dtype, weight.device))
        prior = (self.running_mean, self.running_var, weight)
        slots = (self.memory_mean, self.memory_var, self.memory_count)
        second = (torch.where(stood_in, value, slot[0]) for value, slot in zip(prior, slots, strict=True))
        rows = zip(newest, second, slots, strict=True)
        return tuple(torch.cat([a[None], b[None], slot[1:]])[: self.memory_size] for a, b, slot in rows)
