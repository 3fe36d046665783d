"""The built-in networks for tests: how many convolutions each has, and how to get at its layers."""

import functools

import pytest
import torch
from torch import nn

from memnorm.lab import models

CONVOLUTIONS = {
    "small": 3,
    "nin": 9,
    "resnet8": 7,
    "resnet20": 19,
    "vgg16_cifar": 13,
    "resnet18": 20,
    "resnet50": 53,
    "vgg16_imagenet": 13,
    "googlenet": 57,
    "prelu_net": 16,
}
GIANTS = ("vgg16_imagenet", "prelu_net")
HANDY = [name for name in CONVOLUTIONS if name not in (*GIANTS, "resnet20")]
SLOW_GIANTS = [pytest.param(name, marks=pytest.mark.slow) for name in GIANTS]


def build(name, *, size=None, channels=3, classes=10, seed=0, **options):
    size = size or max(models.get(name).least_size, 8)
    torch.manual_seed(seed)
    return models.build(name, classes=classes, image_shape=(channels, size, size), **options)


@functools.cache
def outline(name, **request):
    """A network without memory, not to be changed."""
    with torch.device("meta"):
        return build(name, **request)


def one_group(channels):
    return nn.GroupNorm(1, channels)


def layers(model, *kinds):
    return [module for module in model.modules() if isinstance(module, kinds)]
