"""EvoNorm-S0: a norm with an activation, found by an evolutionary search.

    y = x σ(v x)/√(s² + ε) · γ + β      σ the logistic function, v learned per channel

s² is the variance of a group of channels over the pixels of one image, as in group norm; x itself is not centered. If
no activation followed the batch norm, the layer is γ x + β, as in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from memnorm.errors import InputError
from memnorm.functional import statistics_dtype
from memnorm.norms.batch_free import (
    BatchFreeNorm,
    check_eps,
    choose_groups,
    fresh_layers,
    per_channel,
    spatial_count,
)
from memnorm.norms.wiring import absorb


class EvoNormS0(BatchFreeNorm):
    """EvoNorm-S0 over (N, C, …). If `gate` (v) is None, it is only the affine map.

    Args:
        num_groups: the largest number of groups; see `choose_groups`.
        eps: ε.
    """

    OPTIONS: ClassVar[dict[str, Any]] = {"num_groups": None, "eps": 1e-5}

    num_groups: int
    eps: float
    gate: nn.Parameter | None

    def _add_state(self, device: Any, dtype: Any) -> None:
        check_eps("EvoNormS0", self.eps)
        self.num_groups = choose_groups(self.num_features, self.num_groups)
        self.gate = nn.Parameter(torch.empty(self.num_features, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.gate is not None:
            nn.init.ones_(self.gate)

    def _forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self._affine(x)
        check_eps("EvoNormS0", self.eps)
        if self.num_features // self.num_groups * spatial_count(x) < 2:
            raise InputError(
                f"EvoNormS0: needs at least two values in each of its {self.num_groups} groups for a variance; got "
                f"shape {tuple(x.shape)}. Use fewer groups: "
                f'memnorm.convert(model, "evonorm_s0", num_groups={max(1, self.num_groups // 2)}).'
            )
        gated = x * torch.sigmoid(per_channel(self.gate, x) * x)
        return self._affine(gated, self._inverse_deviation(x)).to(x.dtype)

    def _inverse_deviation(self, x: Tensor) -> Tensor:
        """1/√(s² + ε) of the group of each channel, (N, C, 1, …)."""
        groups = x.to(statistics_dtype(x.dtype)).reshape(x.shape[0], self.num_groups, -1)
        inverse = torch.rsqrt(groups.var(2, correction=0) + self.eps)
        inverse = inverse.repeat_interleave(self.num_features // self.num_groups, dim=1)
        return inverse.view(*x.shape[:2], *([1] * (x.dim() - 2)))


def surgery(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Remove the ReLU or SiLU after a layer where that is safe. Layers without one become the affine map."""
    layers = fresh_layers(model, EvoNormS0)
    for layer in set(layers) - absorb(model, layers, (nn.ReLU, nn.SiLU)):
        layer.gate = None


ENTRY: dict[str, Any] = {
    "name": "evonorm_s0",
    "title": "EvoNorm-S0",
    "paper": "Liu, Brock, Simonyan and Le, Evolving Normalization-Activation Layers, NeurIPS 2020",
    "replace": EvoNormS0.replacing,
    "surgery": surgery,
}
