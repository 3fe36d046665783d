"""Batch Renormalization: batch norm, corrected per channel to the normalization by moving averages.

    r = clip(σ_B/σ, 1/r_max, r_max)      d = clip((μ_B − μ)/σ, −d_max, d_max)      (both constants)
    y = γ((x − μ_B)/σ_B · r + d) + β     μ ← μ + α(μ_B − μ)      σ ← σ + α(σ_B − σ)

Every σ includes ε under the root, as in the paper's Algorithm 1. The standard deviation is averaged, but stored as
`running_var` with σ = √(running_var + ε), so that checkpoints and eval mode are those of batch norm. The limits are
relaxed from (1, 0), which is batch norm, to (r_max, d_max) as batches are recorded.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from torch import Tensor
from torch.nn import functional as F

from memnorm.errors import OptionError, is_number
from memnorm.functional import Moments, constant_moments
from memnorm.norms.base import ENTRY_OF_RUNNING_NORM, RunningNorm, blend, check_total_steps

# The published steps: batch norm until WARM_UP, r_max reached at R_FULL and d_max at D_FULL, of PUBLISHED in all.
WARM_UP, R_FULL, D_FULL, PUBLISHED = 5_000, 40_000, 25_000, 130_000


class BatchRenorm(RunningNorm):
    """Batch Renormalization over (N, C, …).

    Args:
        r_max: the largest corrected ratio between the standard deviations of batch and moving average, at least 1.
        d_max: the largest corrected distance between the means, in standard deviations. r_max=1, d_max=0 is batch norm.
        total_steps: length of the training, to which the published schedule is scaled; None uses the published steps.
    """

    OPTIONS: ClassVar[dict[str, Any]] = {"r_max": 3.0, "d_max": 5.0, "total_steps": None}
    MOMENTUM = 0.01
    MIN_VALUES = 2
    COUNTS_STEPS = True

    r_max: float
    d_max: float
    total_steps: int | None

    def _install(self, **options: Any) -> None:
        r_max, d_max = options["r_max"], options["d_max"]
        if not is_number(r_max) or not 1 <= r_max < math.inf:
            raise OptionError(f"brn: r_max must be finite and at least 1, which corrects no deviation; got {r_max!r}")
        if not is_number(d_max) or not 0 <= d_max < math.inf:
            raise OptionError(f"brn: d_max must be finite and not negative, in standard deviations; got {d_max!r}")
        check_total_steps("brn", options["total_steps"])
        super()._install(**options)

    def limits(self, batches: Any = None) -> tuple[Tensor, Tensor]:
        """(r_max, d_max) after this many recorded batches, by default those of the layer: linear, then constant."""
        batches = self._as_float(self.num_batches_tracked if batches is None else batches)
        scale = 1 if self.total_steps is None else self.total_steps / PUBLISHED
        past_warm_up = batches - WARM_UP * scale
        r_part = (past_warm_up / ((R_FULL - WARM_UP) * scale)).clamp(0, 1)
        d_part = (past_warm_up / ((D_FULL - WARM_UP) * scale)).clamp(0, 1)
        return 1 + (self.r_max - 1) * r_part, self.d_max * d_part

    def _normalize(self, x: Tensor, state: Moments) -> tuple[Tensor, Moments]:
        batch = constant_moments(x)
        r, d = self._correction(batch, state)
        if self.weight is not None:
            r, d = r * self.weight, d * self.weight
        bias = d if self.bias is None else d + self.bias
        return F.batch_norm(x, None, None, r, bias, True, 0.0, self.eps), batch

    def _correction(self, batch: Moments, state: Moments) -> tuple[Tensor, Tensor]:
        """r and d."""
        r_max, d_max = self.limits(state.weight)
        mean, deviation = state.mean.to(batch.mean.dtype), self._deviation(state.var.to(batch.var.dtype))
        r = (self._deviation(batch.var) / deviation).clamp(1 / r_max, r_max)
        return r, ((batch.mean - mean) / deviation).clamp(-d_max, d_max)

    def training_moments(self, batch: Moments) -> Moments:
        r, d = self._correction(batch, self._read())
        deviation = self._deviation(batch.var) / r
        return Moments(batch.mean - d * deviation, deviation.square() - self.eps, batch.weight)

    def _record(self, batch: Moments, state: Moments) -> None:
        share = self._share(self.num_batches_tracked)
        var = self.running_var.to(batch.var.dtype)
        deviation = self._deviation(var)
        step = share * (self._deviation(batch.var) - deviation)
        # (σ + step)² − ε without the cancellation.
        self._store(blend(self.running_mean, batch.mean, share), (var + step * (2 * deviation + step)).clamp(min=0))

    def _deviation(self, var: Tensor) -> Tensor:
        return (var + self.eps).sqrt()


ENTRY: dict[str, Any] = {
    **ENTRY_OF_RUNNING_NORM,
    "name": "brn",
    "title": "Batch Renormalization",
    "paper": "Ioffe, Batch Renormalization: Towards Reducing Minibatch Dependence in Batch-Normalized Models, "
    "NeurIPS 2017",
    "replace": BatchRenorm.replacing,
    "state": "moving averages of mean and deviation",
    "scales_with_run": True,
}
