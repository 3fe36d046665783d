"""A network for segmentation: an answer per class and pixel."""

from __future__ import annotations

from torch import nn

from memnorm.lab.models.parts import NormLayer, check_width


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
