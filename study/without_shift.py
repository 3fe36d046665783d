"""The ablation of the paper's correction term: variances averaged without the shift between means (Eq. 4, not Eq. 6).

The recorded run, "MBN-2 shift=False", was made when this was an option of the layer. A test compares it with Eq. 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from memnorm.functional import Moments, as_scalar, batch_moments, normalize
from memnorm.layers import MemorizedBatchNorm2d


class MemorizedBatchNormWithoutShift2d(MemorizedBatchNorm2d):
    """A memorized batch norm whose variance is the weighted mean of the batches' variances."""

    def forward(self, input: Tensor, **_: object) -> Tensor:
        return self._forward_in_torch(input) if self.training else self._plain_forward(input)

    def _forward_in_torch(self, input: Tensor) -> Tensor:
        batch = batch_moments(input)
        memory = self._read(batch.weight)
        output = normalize(input, self.weight, self.bias, _average(memory, batch), self.eps)
        if self.recording:
            self._remember(Moments(batch.mean.detach(), batch.var.detach(), batch.weight))
        return output

    @torch.no_grad()
    def _remember(self, batch: Moments) -> None:
        super()._remember(batch)
        age_K = torch.arange(len(self.memory_count), dtype=self.memory_count.dtype)
        weight_K1 = (self.memory_count * self.decay**age_K)[:, None]
        self.running_var.copy_((weight_K1 * self.memory_var).sum(0) / weight_K1.sum())


def _average(memory: Moments, batch: Moments) -> Moments:
    share = as_scalar(batch.weight / (batch.weight + memory.weight), batch.mean.dtype, batch.mean.device)
    means = torch.lerp(memory.mean, batch.mean, share), torch.lerp(memory.var, batch.var, share)
    return Moments(*means, batch.weight + memory.weight)
