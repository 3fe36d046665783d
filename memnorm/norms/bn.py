"""Torch's batch norm whose recording can be turned off, so that it can be used with Double-Forward (BN-2).

    y = γ(x − μ_B)/√(σ_B² + ε) + β
    running ← (1 − momentum)·running + momentum·(μ_B, σ_B² n/(n − 1))

A training forward is torch's own operation on copies of the running statistics; recording writes the copies back.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from memnorm.functional import Moments, count_per_channel
from memnorm.norms.base import ENTRY_OF_RUNNING_NORM, RunningNorm


class RecordingBatchNorm(RunningNorm):
    """`torch.nn.BatchNorm1d/2d/3d` with `recording`; while it is off, training forwards do not change the layer."""

    MIN_VALUES = 2
    READS_STATISTICS = False

    def _normalize(self, x: Tensor, state: Moments) -> tuple[Tensor, Moments]:
        """The output, and the running statistics that torch would have after it."""
        # For momentum=None, torch also reads the counter on the host.
        momentum = 1 / (float(state.weight) + 1) if self.momentum is None else self.momentum
        y = F.batch_norm(x, state.mean, state.var, self.weight, self.bias, True, momentum, self.eps)
        return y, Moments(state.mean, state.var, count_per_channel(x))

    def training_moments(self, batch: Moments) -> Moments:
        return batch

    def _record(self, batch: Moments, state: Moments) -> None:
        self._store(batch.mean, batch.var)


ENTRY: dict[str, Any] = {
    **ENTRY_OF_RUNNING_NORM,
    "name": "bn",
    "title": "Batch Normalization",
    "paper": "Ioffe and Szegedy, Batch Normalization: Accelerating Deep Network Training by Reducing Internal "
    "Covariate Shift, ICML 2015",
    "replace": RecordingBatchNorm.replacing,
}
