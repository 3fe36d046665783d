"""Lagged batch norm (Real NVP, Appendix E): normalize by the moving averages that include the current batch.

    μ̃ ← (1 − a)μ̃ + a μ_B      σ̃² ← (1 − a)σ̃² + a σ_B²      y = γ(x − μ̃)/√(σ̃² + ε) + β

The gradient flows through μ_B and σ_B²; earlier batches are constants. The averages are debiased: with momentum m, the
t-th batch has a_t = m/(1 − (1 − m)^t). So a_1 = 1, the initial (0, 1) has no weight, and the first training step is
that of batch norm.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from memnorm.functional import Moments, batch_moments, normalize
from memnorm.norms.base import ENTRY_OF_RUNNING_NORM, RunningNorm, blend


class LaggedBatchNorm(RunningNorm):
    """Batch statistics combined with moving averages in training, moving averages in eval."""

    MIN_VALUES = 2
    DEBIASED = True

    def _normalize(self, x: Tensor, state: Moments) -> tuple[Tensor, Moments]:
        batch = batch_moments(x)
        y = normalize(x, self.weight, self.bias, self._blended(batch, state, state.weight), self.eps)
        return y, Moments(batch.mean.detach(), batch.var.detach(), batch.weight)

    def _blended(self, batch: Moments, past: Any, batches: Any) -> Moments:
        """The averages after this batch."""
        share, mean, var = self._share(batches), past[0].to(batch.mean), past[1].to(batch.var)
        return Moments(blend(mean, batch.mean, share), blend(var, batch.var, share), batch.weight)

    def training_moments(self, batch: Moments) -> Moments:
        return self._blended(batch, (self.running_mean, self.running_var), self.num_batches_tracked)

    def _record(self, batch: Moments, state: Moments) -> None:
        self._write(batch.mean, batch.var)


ENTRY: dict[str, Any] = {
    **ENTRY_OF_RUNNING_NORM,
    "name": "lagged_bn",
    "title": "Lagged Batch Normalization",
    "paper": "Dinh, Sohl-Dickstein and Bengio, Density Estimation Using Real NVP, ICLR 2017, Appendix E",
    "replace": LaggedBatchNorm.replacing,
}
