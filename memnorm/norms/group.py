"""Group normalization: the channels of each image are divided into groups with their own mean and variance.

    y = γ (x − μ)/√(σ² + ε) + β      μ, σ² over the C/G channels of a group and all pixels of one image

This is `nn.GroupNorm` with γ, β and ε of the batch norm.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from memnorm.norms.base import with_affine
from memnorm.norms.batch_free import check_eps, choose_groups


def replace(layer: _BatchNorm, /, *, num_groups: int | None = None) -> nn.Module:
    """Replace a batch norm by group norm; for `num_groups`, see `choose_groups`."""
    check_eps("group norm", layer.eps)
    groups = choose_groups(layer.num_features, num_groups)
    return with_affine(layer, nn.GroupNorm(groups, layer.num_features, eps=layer.eps, affine=layer.affine))


ENTRY: dict[str, Any] = {
    "name": "group",
    "title": "Group Normalization",
    "paper": "Wu and He, Group Normalization, ECCV 2018",
    "replace": replace,
}
