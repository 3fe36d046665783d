"""Networks of the studies that are more than a norm in a built-in network: `study.networks:resnet8_centred`."""

from __future__ import annotations

from torch import nn

import memnorm
from memnorm.lab import models


def resnet8_centred(num_classes: int, in_channels: int) -> nn.Module:
    """ResNet-8 with batch norm and centred gradients."""
    network = models.build("resnet8", classes=num_classes, image_shape=(in_channels, 32, 32))
    memnorm.center(network)
    return network
