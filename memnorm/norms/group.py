"""Group normalization: the channels of each image in groups, each group with its own mean and variance.

    y = γ (x − μ)/√(σ² + ε) + β      μ, σ² over the C/G channels of a group and all pixels of one image

Torch's own `nn.GroupNorm` with batch norm's γ, β and ε.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from memnorm.norms.base import with_affine
from memnorm.norms.batch_free import choose_groups


def replace(layer: _BatchNorm, *, num_groups: int | None = None) -> nn.Module:
    """`num_groups`: the most groups a layer may have; it gets the largest number that divides its channels. None is up
    to 32, with two channels or more to a group.
    """

    def build(channels: int) -> nn.GroupNorm:
        return nn.GroupNorm(choose_groups(channels, num_groups), channels, eps=layer.eps, affine=layer.affine)

    return with_affine(layer, build)


ENTRY: dict[str, Any] = {
    "name": "group",
    "title": "Group Normalization",
    "paper": "Wu and He, Group Normalization, ECCV 2018",
    "replace": replace,
}
