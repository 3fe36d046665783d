"""What can go wrong, as exceptions that say what was required, what arrived and what to do.

Every error is a `MemnormError`, hence a `RuntimeError`; the ones about a value the caller chose are `ValueError` or
`TypeError` as well, so code written around `torch.nn.BatchNorm` keeps catching what it caught.
"""

from __future__ import annotations

import numbers
import sys
import warnings

from torch import nn


class MemnormError(RuntimeError):
    """Base of every error raised by memnorm."""


class InputError(MemnormError, ValueError):
    """A batch a layer cannot normalise: wrong rank, wrong channel count, empty, or too few values."""


class DTypeError(MemnormError, TypeError):
    """A tensor of a kind the layer does not take, such as integers."""


class OptionError(MemnormError, ValueError):
    """An option outside its range, or options that contradict each other."""


class NothingToConvert(MemnormError, ValueError):
    """`convert` found no batch norm it may replace."""


class NothingToRecord(MemnormError, ValueError):
    """A second forward was asked for, but no layer would record anything."""


class WrappedModelError(MemnormError, ValueError):
    """The model is inside a wrapper that has already looked at its layers."""


class MemnormWarning(UserWarning):
    """Something was left alone that the caller may have expected to change."""


def warn(message: str) -> None:
    """Warn about the caller's line: the first one outside this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == __package__:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, MemnormWarning, stacklevel=level)


def check_module(model: object, caller: str) -> None:
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}: make an instance of it" if isinstance(model, type) else type(model).__name__
        raise DTypeError(f"{caller}: expected a torch.nn.Module, got {got}")


def is_number(value: object) -> bool:
    """A real number of Python or numpy; True and False are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
