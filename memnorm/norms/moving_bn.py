"""Moving averages only: training normalizes as eval mode does, and the statistics follow the batches.

    y = γ(x − μ)/√(σ² + ε) + β,  dx = γ/√(σ² + ε) · g          then μ, σ² ← moving averages, as in torch

Neither the output nor the gradient depends on the statistics of the batch, so a step can change the scale of the layer
before the statistics follow. Training may diverge; this norm is an example of that.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from memnorm.functional import Moments, constant_moments
from memnorm.norms.base import ENTRY_OF_RUNNING_NORM, RunningNorm


class MovingBatchNorm(RunningNorm):
    """Batch norm that uses its running statistics in training, too, beginning with the initial (0, 1)."""

    MIN_VALUES = 2

    def _normalize(self, x: Tensor, state: Moments) -> tuple[Tensor, Moments]:
        y = F.batch_norm(x, state.mean, state.var, self.weight, self.bias, False, 0.0, self.eps)
        return y, constant_moments(x)

    def training_moments(self, batch: Moments) -> Moments:
        return Moments(self.running_mean.to(batch.mean), self.running_var.to(batch.var), batch.weight)


ENTRY: dict[str, Any] = {
    **ENTRY_OF_RUNNING_NORM,
    "name": "moving_bn",
    "title": "Moving averages alone",
    "paper": "as an example of what fails: Ioffe, Batch Renormalization, NeurIPS 2017",
    "replace": MovingBatchNorm.replacing,
}
