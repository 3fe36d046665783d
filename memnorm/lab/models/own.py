"""A user's model: `package.module:factory`, imported from the current folder or from what is installed.

The factory gets what its signature names of `num_classes` (or `classes`), `in_channels`, `norm_layer`; and the run's
options. The model is tried on two blank images once, so that a wrong number of classes is found here and not in the
middle of a grid.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from memnorm.lab.errors import UsageError
from memnorm.lab.models.parts import Shape


def build(name: str, classes: int, image_shape: Shape, options: dict[str, Any], outputs: tuple[int, ...]) -> nn.Module:
    """The network of a factory. `outputs` is the shape of its answer for one image."""
    factory, attribute = imported("model", name), name.partition(":")[2]
    arguments = _arguments(factory, classes, image_shape) | options
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


def _arguments(factory: Callable[..., Any], classes: int, image_shape: Shape) -> dict[str, Any]:
    """The arguments that the signature names. A signature with **kwargs gets `num_classes`, as torchvision's do."""
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):  # for example written in C
        parameters = [inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)]
    named = {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    anything = any(one.kind is one.VAR_KEYWORD for one in parameters)
    of_classes = "classes" if "classes" in named and "num_classes" not in named else "num_classes"
    given = {of_classes: classes, "in_channels": image_shape[0], "norm_layer": nn.BatchNorm2d}
    return {name: value for name, value in given.items() if name in named or (anything and name == of_classes)}


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
