"""The networks of the paper by name, with `norm_layer=` for their norms; and your own, as `package.module:factory`.

    build("resnet20", classes=10, image_shape=(3, 32, 32))
    build("resnet50", classes=1000, image_shape=(3, 224, 224), norm_layer=lambda channels: nn.GroupNorm(32, channels))
    build("mypackage.nets:make", classes=10, image_shape=(3, 32, 32))

The same `torch.manual_seed` gives the same weights whatever the norm, as long as the norm draws no random numbers.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memnorm.lab.errors import UsageError
from memnorm.lab.models import cifar, imagenet
from memnorm.lab.models.parts import NormLayer, Shape
from memnorm.text import suggestion

DENSE = {"fcn": "memnorm.lab.models.cifar:fcn"}  # networks with an answer per pixel
SMALL_IMAGE = 64  # largest image of vgg16_cifar


@dataclass(frozen=True)
class Model:
    """One entry of the registry. `build(classes, image_shape, norm_layer, **options)` makes the network.

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
    norm_layer: NormLayer = nn.BatchNorm2d,
    outputs: tuple[int, ...] | None = None,
    **options: Any,
) -> nn.Module:
    """A network with fresh weights.

    Args:
        name: one of `available()`, `resnet` with a depth of 6n + 2, `fcn` (segmentation), or `package.module:factory`.
        classes: length of the output.
        image_shape: channels, height and width of the images it will see.
        norm_layer: makes each norm from its number of channels.
        outputs: shape of the answer for one image, by default a value per class.
        options: of the model, such as `width` or `dropout`; of a factory of your own, anything it takes.
    """
    if ":" in name or name in DENSE:
        return _build_own(DENSE.get(name, name), classes, image_shape, norm_layer, options, outputs or (classes,))
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
    return model.build(classes, image_shape, norm_layer, **options)


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


def _build_own(
    name: str,
    classes: int,
    image_shape: Shape,
    norm_layer: NormLayer,
    options: dict[str, Any],
    outputs: tuple[int, ...],
) -> nn.Module:
    """The network of a factory. `outputs` is the shape of its answer for one image."""
    factory, attribute = imported("model", name), name.partition(":")[2]
    arguments = _arguments(name, factory, classes, image_shape, norm_layer) | options
    try:
        model = factory(**arguments)
    except Exception as error:
        given = ", ".join(
            f"{key}={getattr(value, '__name__', None) or repr(value)}" for key, value in arguments.items()
        )
        raise UsageError(
            f"model {name}: {attribute}({given}) raised {_words(error)}. num_classes, in_channels and norm_layer are "
            "filled in where the signature names them; values for further parameters go into the model's options."
        ) from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"model {name}: a factory must return a torch.nn.Module; got {type(model).__name__}")
    _check_output(name, model, outputs, image_shape)
    return model


def imported(kind: str, name: str) -> Callable[..., Any]:
    """The function or class that `name`, package.module:factory, stands for. `kind` is model or task, for errors."""
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise UsageError(
            f"{kind} {name!r}: write your own {kind} as package.module:factory, with dots "
            "between packages; my_nets/small.py with a function make() is my_nets.small:make"
        )
    found: Any = _module(f"{kind} {name}", module)
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [one for one in dir(found) if not one.startswith("_") and callable(getattr(found, one))]
            near = difflib.get_close_matches(part, names, n=3) or names[:8]
            raise UsageError(
                f"{kind} {name}: {module} has no {attribute!r}; it has {', '.join(near) or 'nothing to call'}"
            )
        found = getattr(found, part)
    if isinstance(found, nn.Module) or not callable(found):
        raise UsageError(
            f"{kind} {name}: {attribute} is {type(found).__name__}; name a function (or class) that makes a {kind}, "
            "since each run starts with fresh weights"
        )
    return found


def _module(what: str, module: str) -> Any:
    here = os.getcwd()
    if not {here, ""} & set(sys.path):
        sys.path.insert(0, here)  # for good: a model may import more when it runs
        importlib.invalidate_caches()
    try:
        with torch.random.fork_rng(devices=[]):  # the first import may draw random numbers, later ones do not
            return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and (module == missing or module.startswith(f"{missing}.")):
            raise UsageError(
                f"{what}: there is no module {missing!r} in {here} or among the installed packages. Run the "
                f"command in the folder that holds it, or add that folder to PYTHONPATH."
            ) from error
        raise UsageError(f"{what}: importing {module} raised {_words(error)}") from error


def _arguments(
    name: str, factory: Callable[..., Any], classes: int, image_shape: Shape, norm_layer: NormLayer
) -> dict[str, Any]:
    """The arguments that the signature names. A signature with **kwargs gets `num_classes`, as torchvision's do, and a
    `norm_layer` that is not batch norm.
    """
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):  # for example written in C
        parameters = [inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)]
    named = {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    of_classes = "classes" if "classes" in named and "num_classes" not in named else "num_classes"
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        named |= {of_classes} if norm_layer is nn.BatchNorm2d else {of_classes, "norm_layer"}
    if "norm_layer" not in named and norm_layer is not nn.BatchNorm2d:
        raise UsageError(
            f"model {name}: the factory takes no norm_layer; give it one, or replace its batch norms with "
            f"memnorm.convert"
        )
    given = {of_classes: classes, "in_channels": image_shape[0], "norm_layer": norm_layer}
    return {name: value for name, value in given.items() if name in named}


def _check_output(name: str, model: nn.Module, outputs: tuple[int, ...], image_shape: Shape) -> None:
    modes = [(module, module.training) for module in model.modules()]
    first = next(model.parameters(), None)
    device, dtype = (None, None) if first is None else (first.device, first.dtype)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            output = model.eval()(torch.zeros(2, *image_shape, device=device, dtype=dtype))
    except Exception as error:
        shape = "×".join(map(str, image_shape))
        raise UsageError(
            f"model {name}: it was given two images of shape {shape} (channels, height, width) and raised "
            f"{_words(error)}. Choose data of the shape it is made for, or let the factory take in_channels."
        ) from error
    finally:
        for module, mode in modes:
            module.training = mode  # one by one: a layer that was put in eval stays there
    if not isinstance(output, Tensor) or output.shape != (2, *outputs):
        got = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise UsageError(
            f"model {name}: for two images it must return a tensor of shape {(2, *outputs)}, a value per class; got "
            f"{got}. A factory that takes num_classes gets the number."
        )


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
