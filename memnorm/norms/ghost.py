"""Ghost batch norm: a large batch is normalized in parts, like several small batches.

    ghost batches of g images in order;  each:  y = γ(x − μ_l)/√(σ_l² + ε) + β
    running ← (1 − momentum)·running + momentum·(μ_l, σ_l² n/(n − 1))      for each ghost batch in turn

A training forward computes in one call what torch's batch norm computes on one ghost batch after the other. The
remainder is a smaller ghost batch; a single value, which has no variance, is added to the last whole one.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from memnorm.errors import InputError, OptionError, is_whole
from memnorm.functional import Moments, count_per_channel, statistics_dtype
from memnorm.norms.base import ENTRY_OF_RUNNING_NORM, RunningNorm


class GhostBatchNorm(RunningNorm):
    """Ghost batch norm over (N, C, …).

    Args:
        ghost_size: images per ghost batch. A batch that is not larger is normalized as in batch norm.
    """

    OPTIONS: ClassVar[dict[str, Any]] = {"ghost_size": 32}
    MIN_VALUES = 2
    READS_STATISTICS = False

    ghost_size: int

    def _install(self, **options: Any) -> None:
        if not is_whole(options["ghost_size"]) or options["ghost_size"] < 1:
            raise OptionError(f"ghost: ghost_size must be a positive number of images; got {options['ghost_size']!r}")
        super()._install(**options)

    def _normalize(self, x: Tensor, state: Moments) -> tuple[Tensor, Moments]:
        """The output, and the mean and unbiased variance of each ghost batch in a row."""
        whole = self._whole_ghosts(x)
        images = whole * self.ghost_size
        parts = [self._ghosts(x[:images], whole)] if whole else []
        if images < x.shape[0]:
            parts.append(self._ghosts(x[images:], 1))
        y = parts[0][0] if len(parts) == 1 else torch.cat([part[0] for part in parts])
        if x.dim() in (4, 5):  # the parts were rearranged
            layout = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
            y = y.contiguous(memory_format=layout) if x.is_contiguous(memory_format=layout) else y
        means, variances = (torch.cat([part[i] for part in parts]) for i in (1, 2))
        return y, Moments(means, variances, len(means))

    def _whole_ghosts(self, x: Tensor) -> int:
        """The number of ghost batches of exactly `ghost_size` before the remainder."""
        images, values = x.shape[0], count_per_channel(x) // x.shape[0]
        if self.ghost_size * values == 1:
            raise InputError(
                f"GhostBatchNorm: ghost batches of {self.ghost_size} have one value per channel in an input of shape "
                f"{tuple(x.shape)}, and one value has no variance: choose a larger ghost_size"
            )
        whole, left = divmod(images, self.ghost_size)
        return whole - 1 if left * values == 1 else whole

    def _ghosts(self, x: Tensor, ghosts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Normalize ghost batches of equal size, as batch norm with one channel per channel and ghost batch. Also
        return their means and unbiased variances.
        """
        dtype = statistics_dtype(x.dtype)
        weight, bias = (None if p is None else p.to(dtype).repeat(ghosts) for p in (self.weight, self.bias))
        mean, var = torch.zeros(2, ghosts * x.shape[1], device=x.device, dtype=dtype)
        wide = x if ghosts == 1 else x.unflatten(0, (ghosts, -1)).transpose(0, 1).flatten(1, 2)
        y = F.batch_norm(wide, mean, var, weight, bias, True, 1.0, self.eps)
        if ghosts > 1:
            y = y.unflatten(1, (ghosts, -1)).transpose(0, 1).flatten(0, 1)
        return y, mean.view(ghosts, -1), var.view(ghosts, -1)

    def _record(self, batch: Moments, state: Moments) -> None:
        """Apply the updates of all ghost batches at once, each with its weight after those that follow."""
        ghosts, dtype = int(batch.weight), batch.mean.dtype
        position = torch.arange(ghosts, device=batch.mean.device, dtype=dtype)
        kept: Any
        if self.momentum is None:
            before = self._as_float(self.num_batches_tracked)
            shares, kept = torch.ones_like(position) / (before + ghosts), before / (before + ghosts)
        else:
            shares = self.momentum * (1 - self.momentum) ** (ghosts - 1 - position)
            kept = (1 - self.momentum) ** ghosts
        mean, var = (
            kept * buffer.to(dtype) + (shares.unsqueeze(1) * values).sum(0)
            for buffer, values in ((self.running_mean, batch.mean), (self.running_var, batch.var))
        )
        self._store(mean, var, ghosts)


ENTRY: dict[str, Any] = {
    **ENTRY_OF_RUNNING_NORM,
    "name": "ghost",
    "title": "Ghost Batch Normalization",
    "paper": "Hoffer, Hubara and Soudry, Train Longer, Generalize Better: Closing the Generalization Gap in Large "
    "Batch Training of Neural Networks, NeurIPS 2017",
    "replace": GhostBatchNorm.replacing,
    "learning_rate": "small-batch rate · √(batch size / small batch size)",
}
