"""The networks of the paper by name, with `norm_layer=` for their norms; and your own, as `package.module:factory`.

    build("resnet20", classes=10, image_shape=(3, 32, 32))
    build("resnet50", classes=1000, image_shape=(3, 224, 224), norm_layer=lambda channels: nn.GroupNorm(32, channels))
    build("mypackage.nets:make", classes=10, image_shape=(3, 32, 32))

The same `torch.manual_seed` gives the same weights whatever the norm, as long as the norm draws no random numbers.
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
from memnorm.lab.models.parts import NormLayer, Shape
from memnorm.text import suggestion

SMALL_IMAGE = 64  # largest image of vgg16_cifar


@dataclass(frozen=True)
class Model:
    """One entry of the registry. `build(classes, image_shape, norm_layer, **options)` makes the network.

    `image_size` is the published one. Below `least_size` not a pixel would be left for the last convolution or pooling.
    """

    name: str
    title: str
    build: Callable[..., nn.Module]
    image_size: int
    least_size: int
    paper: str

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the keyword arguments that the model takes."""
        parameters = inspect.signature(self.build).parameters.values()
        return tuple(one.name for one in parameters if one.kind is one.KEYWORD_ONLY)


def build(
    name: str,
    *,
    classes: int,
    image_shape: Shape,
    norm_layer: NormLayer = nn.BatchNorm2d,
    **options: Any,
) -> nn.Module:
    """A network with fresh weights.

    Args:
        name: one of `available()`, `resnet` with a depth of 6n + 2, or `package.module:factory`.
        classes: length of the output.
        image_shape: channels, height and width of the images it will see.
        norm_layer: makes each norm from its number of channels.
        options: of the model, such as `width` or `dropout`; of a factory of your own, anything it takes.
    """
    _check_request(classes, image_shape)
    if ":" in name:
        return own.build(name, classes, image_shape, norm_layer, options)
    model = get(name)
    if name == "vgg16":
        model = get("vgg16_cifar" if max(image_shape[1:]) <= SMALL_IMAGE else "vgg16_imagenet")
    unknown = sorted(options.keys() - set(model.options))
    if unknown:
        known = f"its options are {', '.join(model.options)}" if model.options else "it has no options"
        raise UsageError(f"model {model.name} takes no option {', '.join(unknown)}; {known}")
    size = min(image_shape[1:])
    if size < model.least_size:
        raise UsageError(
            f"model {model.name} needs images of at least {model.least_size}×{model.least_size} pixels; got "
            f"{image_shape[1]}×{image_shape[2]}. Models for such images: {', '.join(_fitting(size)) or 'none'}."
        )
    return model.build(classes, image_shape, norm_layer, **options)


def available() -> list[str]:
    """The built-in names. ResNets of any depth 6n + 2 exist as well."""
    return list(_MODELS)


def get(name: str) -> Model:
    """The entry of a built-in name."""
    depth = re.fullmatch(r"resnet([1-9]\d*)", name)
    if name not in _MODELS and depth and _is_depth(int(depth[1])):
        return _cifar_resnet(int(depth[1]))
    if name not in _MODELS:
        raise UsageError(_unknown(name))
    return _MODELS[name]


def _is_depth(depth: int) -> bool:
    return depth >= 8 and depth % 6 == 2


def _unknown(name: str) -> str:
    squeezed = re.sub(r"[^a-z0-9]", "", name.lower())
    near = [one for one in _MODELS if re.sub("_", "", one) == squeezed]
    depth = re.fullmatch(r"resnet0*(\d+)", squeezed)
    if depth and not near:
        below = max(8, (int(depth[1]) - 2) // 6 * 6 + 2)
        near = [f"resnet{one}" for one in ([below] if _is_depth(int(depth[1])) else [below, below + 6])]
    near = near or difflib.get_close_matches(name.lower(), _MODELS)
    return (
        f"unknown model {name!r}.{suggestion(near)} Available: {', '.join(available())}; resnet with any depth "
        "6n + 2; or your own as package.module:factory."
    )


def _fitting(size: int) -> list[str]:
    return [model.name for model in _MODELS.values() if model.least_size <= size]


def _check_request(classes: Any, image_shape: Any) -> None:
    if not _is_count(classes):
        raise UsageError(f"classes must be a whole number of at least 1; got {classes!r}")
    if not isinstance(image_shape, (tuple, list)) or len(image_shape) != 3 or not all(map(_is_count, image_shape)):
        raise UsageError(f"image_shape must be (channels, height, width), each at least 1; got {image_shape!r}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_RESNET = "He et al., Deep Residual Learning for Image Recognition, CVPR 2016"
_VGG = "Simonyan and Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition, ICLR 2015"


def _cifar_resnet(depth: int) -> Model:
    title = f"ResNet-{depth} for CIFAR, shortcuts without parameters"
    return Model(f"resnet{depth}", title, partial(cifar.resnet, depth), 32, 4, _RESNET)


_MODELS = {
    model.name: model
    for model in (
        Model("small", "Three convolutions for digits and quick trials", cifar.small, 8, 2, "none"),
        Model("nin", "Network in Network for CIFAR", cifar.nin, 32, 4, "Lin et al., Network In Network, ICLR 2014"),
        *(_cifar_resnet(depth) for depth in (8, 20, 32, 44, 56, 110)),
        Model("vgg16", "VGG-16: vgg16_cifar up to 64×64 pixels, vgg16_imagenet above", cifar.vgg16, 32, 16, _VGG),
        Model("vgg16_cifar", "VGG-16 for CIFAR, one linear layer", cifar.vgg16, 32, 16, _VGG),
        Model("vgg16_imagenet", "VGG-16", imagenet.vgg16, 224, 32, _VGG),
        *(
            Model(f"resnet{depth}", f"ResNet-{depth}", partial(imagenet.resnet, depth), 224, 32, _RESNET)
            for depth in imagenet.RESNETS
        ),
        Model(
            "googlenet",
            "GoogLeNet without auxiliary classifiers",
            imagenet.googlenet,
            224,
            32,
            "Szegedy et al., Going Deeper with Convolutions, CVPR 2015",
        ),
        Model(
            "prelu_net",
            "PReLU-net, the 19-layer model A",
            imagenet.prelu_net,
            224,
            16,
            "He et al., Delving Deep into Rectifiers, ICCV 2015",
        ),
    )
}
