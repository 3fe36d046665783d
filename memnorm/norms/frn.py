"""Filter Response Normalization with a thresholded linear unit (TLU): no mean is subtracted, no batch is needed.

    ν² = mean of x² over the pixels of one channel of one image
    y  = γ x/√(ν² + ε) + β          ε = 10⁻⁶, or 10⁻⁶ + |ε'| with ε' learned
    z  = max(y, τ)                  τ learned per channel, instead of 0 in ReLU

Without centering, a fixed threshold at zero may cut off everything or nothing, so the norm includes the activation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from memnorm.errors import InputError, OptionError
from memnorm.functional import statistics_dtype
from memnorm.norms.batch_free import BatchFreeNorm, check_eps, fresh_layers, per_channel, spatial_count
from memnorm.norms.wiring import absorb


class FilterResponseNorm(BatchFreeNorm):
    """Filter Response Normalization over (N, C, …) with TLU. If `threshold` is None, it is only the normalization.

    Args:
        eps: the constant part of ε.
        learned_eps: add the absolute value of a learned number to ε, one per layer, initially 0.0001. Maps with a
            single pixel need it: with a small ε, x/√(x² + ε) is almost the sign of x.
    """

    OPTIONS: ClassVar[dict[str, Any]] = {"eps": 1e-6, "learned_eps": False}

    eps: float
    learned_eps: bool
    threshold: nn.Parameter | None
    added_eps: nn.Parameter | None

    def _add_state(self, device: Any, dtype: Any) -> None:
        check_eps("FilterResponseNorm", self.eps)
        if not isinstance(self.learned_eps, bool):
            raise OptionError(f"FilterResponseNorm: learned_eps must be True or False; got {self.learned_eps!r}")
        added = nn.Parameter(torch.empty((), device=device, dtype=dtype)) if self.learned_eps else None
        self.threshold = nn.Parameter(torch.empty(self.num_features, device=device, dtype=dtype))
        self.register_parameter("added_eps", added)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.threshold is not None:
            nn.init.zeros_(self.threshold)
        if self.added_eps is not None:
            nn.init.constant_(self.added_eps, 1e-4)

    def _forward(self, x: Tensor) -> Tensor:
        check_eps("FilterResponseNorm", self.eps)
        if self.added_eps is None and spatial_count(x) == 1:
            raise InputError(
                f"FilterResponseNorm: a single value per image and channel (shape {tuple(x.shape)}) would be "
                'reduced to its sign. Use memnorm.convert(model, "frn", learned_eps=True), or larger images.'
            )
        eps: Any = self.eps if self.added_eps is None else self.eps + self.added_eps.abs()
        wide = x.to(statistics_dtype(x.dtype))
        power = wide.square().mean(list(range(2, x.dim())), keepdim=True) if x.dim() > 2 else wide.square()
        y = self._affine(x, torch.rsqrt(power + eps))
        return y if self.threshold is None else torch.maximum(y, per_channel(self.threshold, y).to(y.dtype))


def surgery(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Remove the ReLU after a layer where that is safe. Layers without one have no TLU."""
    layers = fresh_layers(model, FilterResponseNorm)
    for layer in set(layers) - absorb(model, layers, (nn.ReLU,)):
        layer.threshold = None


ENTRY: dict[str, Any] = {
    "name": "frn",
    "title": "Filter Response Normalization with TLU",
    "paper": "Singh and Krishnan, Filter Response Normalization Layer: Eliminating Batch Dependence in the Training of "
    "Deep Neural Networks, CVPR 2020",
    "batch_one": False,
    "replace": FilterResponseNorm.replacing,
    "surgery": surgery,
    "learning_rate": "as for BN, after a warm-up",
}
