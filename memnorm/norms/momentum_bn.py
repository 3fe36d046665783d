"""Momentum Batch Normalization: the moments of a small batch are averaged with earlier ones, so that they have the
noise of a batch of the ideal size m₀.

    μ ← λμ + (1 − λ)μ_B      σ² ← λσ² + (1 − λ)σ_B²      y = γ(x − μ)/√(σ² + ε) + β
    λ = ρ^(T/(T − 1)·max(T − t, 0)) − ρ^T,  ρ = min(m/m₀, 1)^(1/T)      at step t of T, with m images in the batch
    inference:  running ← τ running + (1 − τ)(μ_B, σ_B²),  τ = τ₀^(m/m₀)

λ rises from 0, which is batch norm, to 1 − m/m₀. The gradient flows through μ_B and σ_B². Training has its own
averages, `momentum_mean` and `momentum_var`, in addition to `running_mean` and `running_var` for inference.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from memnorm.errors import OptionError, is_number
from memnorm.functional import Moments, batch_moments, normalize, snapshot
from memnorm.norms.base import ENTRY_OF_RUNNING_NORM, RunningNorm, blend, check_total_steps, store_finite

AVERAGES = {"momentum_mean": "running_mean", "momentum_var": "running_var"}


class MomentumBatchNorm(RunningNorm):
    """Momentum Batch Normalization over (N, C, …); the batch size is that of each input.

    Args:
        ideal_batch_size: m₀; training on batches of this size or larger is that of batch norm.
        total_steps: T, the steps of the training. None: λ has its final value from the start, and the first batches are
            averaged with equal weights.
        momentum: 1 − τ₀, the weight of a batch of the ideal size in the running statistics.
    """

    OPTIONS: ClassVar[dict[str, Any]] = {"ideal_batch_size": 32, "total_steps": None}
    MIN_VALUES = 2
    COUNTS_STEPS = True

    ideal_batch_size: float
    total_steps: int | None
    momentum_mean: Any
    momentum_var: Any

    def _install(self, **options: Any) -> None:
        ideal = options["ideal_batch_size"]
        if not is_number(ideal) or not ideal >= 1:
            raise OptionError(f"momentum_bn: ideal_batch_size must be a number of images, at least 1; got {ideal!r}")
        check_total_steps("momentum_bn", options["total_steps"])
        super()._install(**options)
        for name, source in AVERAGES.items():
            buffer = getattr(self, source)
            self.register_buffer(name, None if buffer is None else buffer.clone())

    def reset_running_stats(self) -> None:
        super().reset_running_stats()
        for name, source in AVERAGES.items():
            if self._buffers.get(name) is not None:
                self.get_buffer(name).copy_(self.get_buffer(source))

    def past_share(self, batch_size: int, batches: Any = None) -> Tensor:
        """λ for a batch of this size after this many recorded batches, by default those of the layer."""
        batches = self._as_float(self.num_batches_tracked if batches is None else batches)
        ratio = min(batch_size / self.ideal_batch_size, 1.0)
        if self.total_steps is None:
            return (batches / (batches + 1)).clamp(max=1 - ratio)
        # The equation above with t = batches + 1.
        left = (self.total_steps - 1 - batches).clamp(min=0) / max(self.total_steps - 1, 1)
        return ratio**left - ratio

    def _read(self) -> Moments:
        return Moments(snapshot(self.momentum_mean), snapshot(self.momentum_var), snapshot(self.num_batches_tracked))

    def _normalize(self, x: Tensor, state: Moments) -> tuple[Tensor, Moments]:
        """The output, and the batch's moments, their weight the number of images."""
        batch, now = batch_moments(x), 1 - self.past_share(x.shape[0], state.weight)
        mean = blend(state.mean.to(batch.mean), batch.mean, now)
        var = blend(state.var.to(batch.var), batch.var, now)
        y = normalize(x, self.weight, self.bias, Moments(mean, var, batch.weight), self.eps)
        return y, Moments(batch.mean.detach(), batch.var.detach(), x.shape[0])

    def _record(self, batch: Moments, state: Moments) -> None:
        size = int(batch.weight)
        now = 1 - self.past_share(size)
        averages = (self.momentum_mean, self.momentum_var)
        store_finite(averages, [blend(one, value, now) for one, value in zip(averages, batch[:2], strict=True)])
        share = self._share(self.num_batches_tracked)
        if self.momentum is not None:
            share = 1 - (1 - share) ** (size / self.ideal_batch_size)
        self._write(batch.mean, batch.var, share)

    def _complete_plain_state(self, state_dict: Any, prefix: str) -> None:
        """A checkpoint of plain batch norm has one pair of averages, which initializes both pairs."""
        for name, source in AVERAGES.items():
            saved = state_dict.get(prefix + source)
            if isinstance(saved, Tensor) and self._buffers.get(name) is not None:
                state_dict.setdefault(prefix + name, saved.clone())


ENTRY: dict[str, Any] = {
    **ENTRY_OF_RUNNING_NORM,
    "name": "momentum_bn",
    "title": "Momentum Batch Normalization",
    "paper": "Yong, Huang, Meng, Hua and Zhang, Momentum Batch Normalization for Deep Learning with Small Batch Size, "
    "ECCV 2020",
    "replace": MomentumBatchNorm.replacing,
    "state": "moving averages of mean and variance, one pair for training and one for inference",
    "learning_rate": "0.1 · batch size / 64",
    "scales_with_run": True,
}
