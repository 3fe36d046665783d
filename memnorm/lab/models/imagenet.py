"""Networks for ImageNet, 224×224 as published and any image from 32×32 on.

ResNet, VGG and GoogLeNet name and shape their parameters as torchvision does, so its weights load with strict=True.
(Those of its GoogLeNet were trained on images scaled to [-1, 1], not to ImageNet's mean and deviation.)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from memnorm.lab.models.parts import (
    NormLayer,
    Residual,
    Shape,
    chain,
    check_dropout,
    conv,
    linear,
    residual_stages,
    vgg16_features,
)

RESNETS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}

# GoogLeNet's blocks by stage: channels of the 1×1, the 3×3 and its reduction before it, the same of the 5×5, pooling
INCEPTIONS = {
    "3": ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
    "4": (
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
    ),
    "5": ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
}

SLOPE = 0.25  # initial slope of PReLU-net's activations below zero
PYRAMID = (7, 3, 2, 1)


def resnet(depth: int, classes: int, image_shape: Shape, norm_layer: NormLayer) -> nn.Sequential:
    """ResNet-18 and -34 of two 3×3 convolutions per block, ResNet-50 of bottlenecks 1×1, 3×3 (with the stride), 1×1.

    Where a block changes the shape, its shortcut is a 1×1 convolution with a norm.
    """
    expansion = 4 if depth >= 50 else 1

    def block(inputs: int, width: int, stride: int) -> Residual:
        outputs = expansion * width
        plain = [(inputs, width, 3, stride), (width, width, 3, 1)]
        bottleneck = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        shortcut = None
        if stride > 1 or inputs != outputs:
            shortcut = nn.Sequential(conv(inputs, outputs, 1, stride), norm_layer(outputs))
        return Residual(bottleneck if expansion > 1 else plain, norm_layer, shortcut)

    return chain(
        conv1=conv(image_shape[0], 64, 7, 2),
        bn1=norm_layer(64),
        relu=nn.ReLU(inplace=True),
        maxpool=nn.MaxPool2d(3, 2, padding=1),
        **residual_stages(64, 64, RESNETS[depth], block, expansion),
        avgpool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc=nn.Linear(expansion * 512, classes),
    )


def vgg16(classes: int, image_shape: Shape, norm_layer: NormLayer, *, dropout: float = 0.5) -> nn.Sequential:
    """VGG-16 with a norm after each convolution. Maps are averaged (or, of small images, repeated) to 7×7."""
    dropout = check_dropout(dropout)
    return chain(
        features=vgg16_features(image_shape[0], norm_layer, ceil_mode=False),
        avgpool=nn.AdaptiveAvgPool2d(7),
        flatten=nn.Flatten(),
        classifier=nn.Sequential(
            linear(512 * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            linear(4096, classes),
        ),
    )


class Inception(nn.Module):
    """Four branches side by side, their channels joined: 1×1; 1×1 then 3×3, twice; pooling then 1×1.

    The third branch has a 3×3 convolution where the paper has 5×5: torchvision's weights are so.
    """

    def __init__(self, inputs: int, widths: tuple[int, ...], norm_layer: NormLayer) -> None:
        super().__init__()
        one, reduced, three, reduced_again, five, pooled = widths
        self.branch1 = _unit(inputs, one, 1, norm_layer)
        self.branch2 = nn.Sequential(_unit(inputs, reduced, 1, norm_layer), _unit(reduced, three, 3, norm_layer))
        self.branch3 = nn.Sequential(
            _unit(inputs, reduced_again, 1, norm_layer), _unit(reduced_again, five, 3, norm_layer)
        )
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, 1, padding=1), _unit(inputs, pooled, 1, norm_layer))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


def googlenet(classes: int, image_shape: Shape, norm_layer: NormLayer, *, dropout: float = 0.2) -> nn.Sequential:
    """GoogLeNet with a norm after each convolution and without the auxiliary classifiers, for which norms leave no
    need.
    """
    blocks: dict[str, nn.Module] = {}
    channels = 192
    for stage, plans in INCEPTIONS.items():
        for letter, widths in zip("abcde", plans, strict=False):
            blocks[f"inception{stage}{letter}"] = Inception(channels, widths, norm_layer)
            channels = widths[0] + widths[2] + widths[4] + widths[5]
        if stage != "5":
            blocks[f"maxpool{stage}"] = nn.MaxPool2d(3 if stage == "3" else 2, 2, ceil_mode=True)
    return chain(
        conv1=_unit(image_shape[0], 64, 7, norm_layer, stride=2),
        maxpool1=nn.MaxPool2d(3, 2, ceil_mode=True),
        conv2=_unit(64, 64, 1, norm_layer),
        conv3=_unit(64, 192, 3, norm_layer),
        maxpool2=nn.MaxPool2d(3, 2, ceil_mode=True),
        **blocks,
        avgpool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        dropout=nn.Dropout(check_dropout(dropout)),
        fc=linear(channels, classes),
    )


def _unit(inputs: int, outputs: int, kernel: int, norm_layer: NormLayer, stride: int = 1) -> nn.Sequential:
    """Convolution, norm and ReLU of GoogLeNet. Its batch norms have ε = 0.001."""
    norm = norm_layer(outputs)
    if isinstance(norm, _BatchNorm):
        norm.eps = 0.001
    return chain(conv=conv(inputs, outputs, kernel, stride), bn=norm, relu=nn.ReLU(inplace=True))


class Pyramid(nn.Module):
    """Spatial pyramid pooling: the maxima of n×n tiles for each n, side by side, as many for every image size.

    The tiles are those of torch's adaptive pooling, which leave no pixel out.
    """

    def __init__(self, levels: tuple[int, ...]) -> None:
        super().__init__()
        self.levels = levels

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([F.adaptive_max_pool2d(x, level).flatten(1) for level in self.levels], 1)

    def extra_repr(self) -> str:
        return f"levels={self.levels}"


def prelu_net(classes: int, image_shape: Shape, norm_layer: NormLayer, *, dropout: float = 0.5) -> nn.Sequential:
    """The 19-layer model A of the PReLU paper, with a norm after each convolution, which the paper had none of.

    A 7×7 convolution with stride 2 and three times five 3×3 convolutions, each five after a pooling that halves the
    image; pyramid pooling with 7, 3, 2 and 1 tiles a side; three linear layers. A PReLU with one learned slope per
    channel, initially 0.25, follows each layer but the last. 178,038,568 parameters for 1,000 classes and RGB images,
    132 million of them in the first linear layer.
    """
    dropout = check_dropout(dropout)
    layers: list[nn.Module] = []
    channels = image_shape[0]
    for width, kernel, stride, repeats in ((96, 7, 2, 1), (256, 3, 1, 5), (512, 3, 1, 5), (512, 3, 1, 5)):
        if layers:
            layers.append(nn.MaxPool2d(2))
        for _ in range(repeats):
            layers += [conv(channels, width, kernel, stride, slope=SLOPE), norm_layer(width), nn.PReLU(width, SLOPE)]
            channels = width
    return chain(
        features=nn.Sequential(*layers),
        pyramid=Pyramid(PYRAMID),
        classifier=nn.Sequential(
            linear(channels * sum(level * level for level in PYRAMID), 4096),
            nn.PReLU(4096, SLOPE),
            nn.Dropout(dropout),
            linear(4096, 4096),
            nn.PReLU(4096, SLOPE),
            nn.Dropout(dropout),
            linear(4096, classes),
        ),
    )
