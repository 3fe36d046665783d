"""Networks for small images: 32×32 as they were published, and from the digits' 8×8 up to 64×64.

Each ends in a global average, so the image size changes no parameter; `fcn`, for segmentation, answers per pixel.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from memnorm.lab.models.parts import (
    NormLayer,
    Residual,
    Shape,
    chain,
    check_dropout,
    check_width,
    conv,
    residual_stages,
    vgg16_features,
)


class Subsample(nn.Module):
    """The shortcut without parameters where a stage halves the image and widens: every second pixel, and zeros for
    the channels that are new (He et al.'s option A).
    """

    def __init__(self, stride: int, new_channels: int) -> None:
        super().__init__()
        self.stride, self.new_channels = stride, new_channels

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))

    def extra_repr(self) -> str:
        return f"stride={self.stride}, new_channels={self.new_channels}"


def resnet(depth: int, classes: int, image_shape: Shape, norm_layer: NormLayer, *, width: int = 16) -> nn.Sequential:
    """ResNet of 6n + 2 layers: a convolution, three stages of n blocks with 16, 32 and 64 channels, a classifier.

    All shortcuts are free of parameters; ResNet-20 has 269,722 parameters for 10 classes and ResNet-56 has 853,018.
    """
    width = check_width(width)

    def block(inputs: int, outputs: int, stride: int) -> Residual:
        shortcut = Subsample(stride, outputs - inputs) if stride > 1 else None
        return Residual([(inputs, outputs, 3, stride), (outputs, outputs, 3, 1)], norm_layer, shortcut)

    return chain(
        conv1=conv(image_shape[0], width, 3),
        bn1=norm_layer(width),
        relu=nn.ReLU(inplace=True),
        **residual_stages(width, width, [(depth - 2) // 6] * 3, block),
        avgpool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc=nn.Linear(4 * width, classes),
    )


def nin(classes: int, image_shape: Shape, norm_layer: NormLayer, *, dropout: float = 0.5) -> nn.Sequential:
    """Network in Network: three times a convolution and two 1×1 convolutions; the last one's channels are the classes,
    averaged over the image. No linear layer.

    Pooling is 3×3 with stride 2, first of the maximum, then of the average, as in the authors' CIFAR-10 model. A norm
    and a ReLU follow each convolution, the last included, and weights are drawn with deviation 0.05: the usual
    batch-normalised form. So one norm has as many channels as there are classes.
    """
    plans = (
        ((image_shape[0], 192, 5), (192, 160, 1), (160, 96, 1)),
        ((96, 192, 5), (192, 192, 1), (192, 192, 1)),
        ((192, 192, 3), (192, 192, 1), (192, classes, 1)),
    )
    ends: tuple[list[nn.Module], ...] = (
        [nn.MaxPool2d(3, 2, ceil_mode=True), nn.Dropout(check_dropout(dropout))],
        [nn.AvgPool2d(3, 2, ceil_mode=True), nn.Dropout(dropout)],
        [nn.AdaptiveAvgPool2d(1), nn.Flatten()],
    )
    layers: list[nn.Module] = []
    for plan, end in zip(plans, ends, strict=True):
        for inputs, outputs, kernel in plan:
            convolution = conv(inputs, outputs, kernel, bias=True, std=0.05)
            layers += [convolution, norm_layer(outputs), nn.ReLU(inplace=True)]
        layers += end
    return nn.Sequential(*layers)


def vgg16(classes: int, image_shape: Shape, norm_layer: NormLayer) -> nn.Sequential:
    """VGG-16 for small images: the thirteen convolutions of the original, and one linear layer 512 → classes.

    The original's three linear layers expect 7×7 maps of a 224×224 image and hold nine tenths of its weights. On 32×32
    the maps have shrunk to a single pixel, and the common form of VGG-BN on CIFAR keeps the classifier alone. Pooling
    rounds up, which changes nothing at 32×32 and leaves a pixel of a 28×28 image.
    """
    return chain(
        features=vgg16_features(image_shape[0], norm_layer, ceil_mode=True),
        avgpool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        classifier=nn.Linear(512, classes),
    )


def small(classes: int, image_shape: Shape, norm_layer: NormLayer, *, width: int = 16) -> nn.Sequential:
    """Three convolutions for handwritten digits and quick trials, with torch's own initial weights."""
    width = check_width(width)
    layers: list[nn.Module] = []
    for inputs, outputs, stride in (
        (image_shape[0], width, 1),
        (width, 2 * width, 2),
        (2 * width, 2 * width, 1),
    ):
        layers += [
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            norm_layer(outputs),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, classes))


def fcn(num_classes: int, in_channels: int, norm_layer: NormLayer = nn.BatchNorm2d, width: int = 16) -> nn.Sequential:
    """Six convolutions, fully convolutional: two halvings of the image, two doublings, and a classifier per pixel. The
    sides of the image must be multiples of 4.
    """
    width = check_width(width)

    def block(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
        return [
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            norm_layer(outputs),
            nn.ReLU(inplace=True),
        ]

    return nn.Sequential(
        *block(in_channels, width),
        *block(width, 2 * width, 2),
        *block(2 * width, 4 * width, 2),
        nn.Upsample(scale_factor=2),
        *block(4 * width, 2 * width),
        nn.Upsample(scale_factor=2),
        *block(2 * width, width),
        nn.Conv2d(width, num_classes, 1),
    )
