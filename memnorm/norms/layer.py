"""Layer normalization: one mean and variance for all channels and pixels of an image.

    y = γ (x − μ)/√(σ² + ε) + β      μ, σ² over C, H, W … of one image; γ, β per channel

This is `nn.GroupNorm` with a single group, which for inputs (N, C) is `nn.LayerNorm(C)`.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from memnorm.norms import group


def replace(layer: _BatchNorm, /) -> nn.Module:
    return group.replace(layer, num_groups=1)


ENTRY: dict[str, Any] = {
    "name": "layer",
    "title": "Layer Normalization",
    "paper": "Ba, Kiros and Hinton, Layer Normalization, arXiv 2016",
    "replace": replace,
}
