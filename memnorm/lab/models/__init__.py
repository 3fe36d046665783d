"""The networks of the paper by name, with batch norm; and your own, as `package.module:factory`.

build("resnet20", classes=10, image_shape=(3, 32, 32))
build("mypackage.nets:make", classes=10, image_shape=(3, 32, 32))
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from memnorm.lab.errors import UsageError
from memnorm.lab.models import cifar, imagenet, own
from memnorm.lab.models.parts import Shape
from memnorm.text import suggestion

DENSE = {"fcn": "memnorm.lab.models.cifar:fcn"}  # networks with an answer per pixel
SMALL_IMAGE = 64  # largest image of vgg16_cifar


@dataclass(frozen=True)
class Model:
    """One entry of the registry. `build(classes, image_shape, **options)` makes the network.

    For images below `least_size`, no pixel would be left for the last convolution or pooling.
    """

    build: Callable[..., nn.Module]
    least_size: int

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the keyword arguments that the model takes."""
        parameters = inspect.signature(self.build).parameters.values()
        return tuple(one.name for one in parameters if one.kind is one.KEYWORD_ONLY)


MODELS = {
    "small": Model(cifar.small, 2),
    "nin": Model(cifar.nin, 4),
    **{f"resnet{depth}": Model(partial(cifar.resnet, depth), 4) for depth in (8, 20, 32, 44, 56, 110)},
    "vgg16": Model(cifar.vgg16, 16),  # vgg16_cifar up to 64×64 pixels, vgg16_imagenet above
    "vgg16_cifar": Model(cifar.vgg16, 16),
    "vgg16_imagenet": Model(imagenet.vgg16, 32),
    **{f"resnet{depth}": Model(partial(imagenet.resnet, depth), 32) for depth in imagenet.RESNETS},
    "googlenet": Model(imagenet.googlenet, 32),
    "prelu_net": Model(imagenet.prelu_net, 16),
}


def build(
    name: str,
    *,
    classes: int,
    image_shape: Shape,
    outputs: tuple[int, ...] | None = None,
    **options: Any,
) -> nn.Module:
    """A network with fresh weights.

    Args:
        name: one of `available()`, `resnet` with a depth of 6n + 2, `fcn` (segmentation), or `package.module:factory`.
        classes: length of the output.
        image_shape: channels, height and width of the images it will see.
        outputs: shape of the answer for one image, by default a value per class.
        options: of the model, such as `width` or `dropout`; of a factory of your own, anything it takes.
    """
    if ":" in name or name in DENSE:
        return own.build(DENSE.get(name, name), classes, image_shape, options, outputs or (classes,))
    if outputs not in (None, (classes,)):
        raise UsageError(
            f"model {name} gives a value per class for an image, and the task needs the shape {outputs}; "
            f"{', '.join(DENSE)} is for segmentation, or name your own as package.module:factory"
        )
    if name == "vgg16":
        name = "vgg16_cifar" if max(image_shape[1:]) <= SMALL_IMAGE else "vgg16_imagenet"
    model, size = get(name), min(image_shape[1:])
    unknown = sorted(options.keys() - set(model.options))
    if unknown:
        known = f"its options are {', '.join(model.options)}" if model.options else "it has no options"
        raise UsageError(f"model {name} takes no option {', '.join(unknown)}; {known}")
    if size < model.least_size:
        fitting = ", ".join(other for other, one in MODELS.items() if one.least_size <= size)
        raise UsageError(
            f"model {name} needs images of at least {model.least_size}×{model.least_size} pixels; got "
            f"{image_shape[1]}×{image_shape[2]}. Models for such images: {fitting or 'none'}."
        )
    return model.build(classes, image_shape, **options)


def available() -> list[str]:
    """The built-in names. ResNets of any depth 6n + 2 exist as well."""
    return list(MODELS)


def get(name: str) -> Model:
    """The entry of a built-in name."""
    depth = re.fullmatch(r"resnet([1-9]\d*)", name)
    if name not in MODELS and depth and int(depth[1]) >= 8 and int(depth[1]) % 6 == 2:
        return Model(partial(cifar.resnet, int(depth[1])), 4)
    if name not in MODELS:
        near = difflib.get_close_matches(name.lower().replace("-", ""), MODELS)
        raise UsageError(
            f"unknown model {name!r}.{suggestion(near)} Available: {', '.join(MODELS)}; resnet with any depth 6n + 2; "
            "or your own as package.module:factory."
        )
    return MODELS[name]
