"""Base class of norms without batch statistics: γ and β per channel, and checks of the input.

They normalize each image separately, or the weights. Training and eval mode compute the same, and nothing is recorded.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from memnorm.errors import DTypeError, InputError, OptionError, is_number, is_whole
from memnorm.kernels import cpu
from memnorm.norms.base import as_leaf, check_options, with_affine

Layer = TypeVar("Layer", bound="BatchFreeNorm")


class BatchFreeNorm(nn.Module):
    """A norm over (N, C, …) with `weight` (γ) and `bias` (β) per channel. As a replacement it has the parameters of the
    batch norm, and no others.

    `OPTIONS` are the options of the norm with their defaults; they become attributes of the layer.
    """

    OPTIONS: ClassVar[dict[str, Any]] = {}

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self, num_features: int, *, affine: bool = True, device: Any = None, dtype: Any = None, **options: Any
    ) -> None:
        super().__init__()
        self.num_features = num_features
        for name, value in check_options(type(self).__name__, self.OPTIONS, options).items():
            setattr(self, name, value)
        for name in ("weight", "bias"):
            empty = nn.Parameter(torch.empty(num_features, device=device, dtype=dtype)) if affine else None
            self.register_parameter(name, empty)
        self._add_state(device, dtype)
        self.reset_parameters()

    @classmethod
    def replacing(cls, layer: _BatchNorm, /, **options: Any) -> nn.Module:
        """The replacement of a batch norm, with its parameters and its mode."""
        new = cls(layer.num_features, **check_options(cls.__name__, cls.OPTIONS, options))
        new.__dict__["_fresh"] = True
        return with_affine(layer, new)

    def _add_state(self, device: Any, dtype: Any) -> None:
        """Check the options, and register further parameters and buffers, which `reset_parameters` fills."""

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy):
            return as_leaf(self, input)
        self._check(input)
        return self._forward(input)

    def _forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _check(self, x: Tensor) -> None:
        check_channels(self, x)
        if not x.is_floating_point():
            raise DTypeError(f"{type(self).__name__}: expected floating-point input, got {x.dtype}")
        cpu.require_memory(x, *self._parameters.values())

    def _affine(self, x: Tensor, scale: Tensor | float | None = None) -> Tensor:
        """γ · scale · x + β in the dtype of x."""
        factor, shift = per_channel(self.weight, x), per_channel(self.bias, x)
        if scale is not None:
            factor = scale if factor is None else factor * scale
        if shift is None:
            return x if factor is None else (x * factor).to(x.dtype)
        return torch.addcmul(shift, x, factor).to(x.dtype)  # batch norm has no β without γ

    def extra_repr(self) -> str:
        own = "".join(f", {name}={getattr(self, name)}" for name in self.OPTIONS)
        return f"{self.num_features}{own}"


def check_channels(layer: Any, x: Tensor) -> None:
    if x.dim() < 2 or x.shape[1] != layer.num_features:
        raise InputError(
            f"{type(layer).__name__}: expected input (N, {layer.num_features}, …) with the channels of the layer; got "
            f"shape {tuple(x.shape)}"
        )


def per_channel(parameter: Tensor | None, x: Tensor) -> Any:
    """A vector over channels in a shape that broadcasts with x (N, C, …); None stays None."""
    return None if parameter is None else parameter.view(1, -1, *([1] * (x.dim() - 2)))


def fresh_layers(model: nn.Module, kind: type[Layer]) -> list[Layer]:
    """The layers of this kind that the current conversion has put into `model`. Each is returned only once."""
    return [one for one in model.modules() if isinstance(one, kind) and one.__dict__.pop("_fresh", False)]


def spatial_count(x: Tensor) -> int:
    """Values per image and channel."""
    return math.prod(x.shape[2:])


def choose_groups(channels: int, num_groups: int | None) -> int:
    """The number of groups of a layer: the largest divisor of its channels that is not above `num_groups`.

    None means up to 32 groups with at least two channels each, because one channel per group is instance norm.
    """
    if num_groups is not None and (not is_whole(num_groups) or num_groups < 1):
        raise OptionError(f"num_groups must be a whole number of at least 1, or None for up to 32; got {num_groups!r}")
    limit = max(1, min(32, channels // 2)) if num_groups is None else min(int(num_groups), channels)
    return next(count for count in range(limit, 0, -1) if channels % count == 0)


def check_eps(name: str, eps: Any) -> None:
    if not is_number(eps) or not eps > 0:
        raise OptionError(f"{name}: eps must be a positive number; got {eps!r}")
