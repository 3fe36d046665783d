"""Building blocks of the networks: layers, the residual block, VGG's convolutions.

Torch initializes a layer when it is made, and most networks initialize it again. For the hundred million weights of
VGG's first linear layer that wastes a second. Here a layer is made empty and initialized once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import skip_init

from memnorm.lab.errors import UsageError
from memnorm.layers import MemorizedBatchNorm

NormLayer = Callable[[int], nn.Module]
Shape = tuple[int, int, int]  # channels, height, width of an image


def conv(
    inputs: int,
    outputs: int,
    kernel: int,
    stride: int = 1,
    *,
    bias: bool = False,
    slope: float = 0.0,
    std: float | None = None,
) -> nn.Conv2d:
    """A convolution padded so that only its stride shrinks the image.

    The weights are Gaussian with deviation `std`, or else that of He et al. (ICCV 2015) for a ReLU of this slope
    below zero: √(2 / ((1 + slope²) · fan out)).
    """
    shape = (inputs, outputs, kernel, stride, kernel // 2)
    layer: nn.Conv2d = skip_init(nn.Conv2d, *shape, bias=bias, device=torch.get_default_device())
    if std is None:
        nn.init.kaiming_normal_(layer.weight, a=slope, mode="fan_out")
    else:
        nn.init.normal_(layer.weight, std=std)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def linear(inputs: int, outputs: int, *, std: float = 0.01) -> nn.Linear:
    """A linear layer with Gaussian weights, for the wide ones before a classifier."""
    layer: nn.Linear = skip_init(nn.Linear, inputs, outputs, device=torch.get_default_device())
    nn.init.normal_(layer.weight, std=std)
    nn.init.zeros_(layer.bias)
    return layer


def norm_relu(norm: nn.Module, x: Tensor, shortcut: Tensor | None = None, *, fused: bool = True) -> Tensor:
    """relu(norm(x) + shortcut), in one pass over the data if `fused` and the norm supports it."""
    if fused and isinstance(norm, MemorizedBatchNorm):
        return norm(x, activation="relu", residual=shortcut)
    y = norm(x)
    return F.relu(y if shortcut is None else y + shortcut, inplace=True)


class Residual(nn.Module):
    """relu(x + F(x)): convolutions with a norm each, ReLUs between them, and a shortcut.

    `plan` holds (inputs, outputs, kernel, stride) of each convolution. The names conv1, bn1, conv2, bn2 … and
    downsample are torchvision's; without `shortcut` the input itself is added.
    """

    def __init__(
        self, plan: Iterable[tuple[int, int, int, int]], norm_layer: NormLayer, shortcut: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.fused = True
        self.depth = 0
        for inputs, outputs, kernel, stride in plan:
            self.depth += 1
            self.add_module(f"conv{self.depth}", conv(inputs, outputs, kernel, stride))
            self.add_module(f"bn{self.depth}", norm_layer(outputs))
        self.downsample = shortcut

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        for index in range(1, self.depth + 1):
            convolved = getattr(self, f"conv{index}")(x)
            added = shortcut if index == self.depth else None
            x = norm_relu(getattr(self, f"bn{index}"), convolved, added, fused=self.fused)
        return x


def residual_stages(
    channels: int, width: int, repeats: Iterable[int], block: Callable[[int, int, int], Residual], expansion: int = 1
) -> dict[str, nn.Module]:
    """layer1, layer2 …, each of `repeats` blocks(inputs, width, stride); from the second on, a stage is twice as wide
    and halves the image.
    """
    stages: dict[str, nn.Module] = {}
    for stage, count in enumerate(repeats):
        blocks = nn.Sequential()
        for index in range(count):
            blocks.append(block(channels, width << stage, 2 if stage and not index else 1))
            channels = expansion * width << stage
        stages[f"layer{stage + 1}"] = blocks
    return stages


def chain(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


def vgg16_features(channels: int, norm_layer: NormLayer, *, ceil_mode: bool) -> nn.Sequential:
    """VGG-16's thirteen 3×3 convolutions, each with a norm and a ReLU, and five poolings that halve the image."""
    layers: list[nn.Module] = []
    for width, repeats in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(repeats):
            layers += [conv(channels, width, 3, bias=True), norm_layer(width), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2, ceil_mode=ceil_mode))
    return nn.Sequential(*layers)


def check_dropout(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise UsageError(f"dropout must be at least 0 and below 1; got {value!r}")
    return value


def check_width(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"width must be a whole number of at least 1; got {value!r}")
    return value
