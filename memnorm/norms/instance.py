"""Instance normalization: every channel of every image has its own mean and variance.

y = γ (x − μ)/√(σ² + ε) + β      μ, σ² over the pixels of one channel of one image
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from memnorm.errors import InputError
from memnorm.norms.base import as_leaf, with_affine
from memnorm.norms.batch_free import check_channels, check_eps, spatial_count


class InstanceNorm(_InstanceNorm):
    """Torch's instance norm for inputs (N, C, …) with at least one spatial dimension.

    Torch's own classes treat an input with one dimension less as a single image: they would normalize (N, C) along the
    channels without an error.
    """

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy):
            return as_leaf(self, input)
        self._check_input_dim(input)
        if not input.numel():  # torch's instance norm raises for a batch without images, its batch norm does not
            return F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)
        return self._apply_instance_norm(input)

    def _check_input_dim(self, input: Tensor) -> None:
        check_channels(self, input)
        if spatial_count(input) < 2:
            raise InputError(
                "InstanceNorm: needs at least two values per image and channel for a variance; got shape "
                f"{tuple(input.shape)}. Use larger images, or a norm over several channels: "
                'memnorm.convert(model, "group") or "layer".'
            )


def replace(layer: _BatchNorm, /) -> nn.Module:
    check_eps("InstanceNorm", layer.eps)
    return with_affine(layer, InstanceNorm(layer.num_features, eps=layer.eps, affine=layer.affine))


ENTRY: dict[str, Any] = {
    "name": "instance",
    "title": "Instance Normalization",
    "paper": "Ulyanov, Vedaldi and Lempitsky, Instance Normalization: The Missing Ingredient for Fast Stylization, "
    "arXiv 2016",
    "batch_one": False,
    "replace": replace,
}
