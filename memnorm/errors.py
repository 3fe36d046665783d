"""Exceptions. Their messages say what was required, what was passed and what to do.

Every error is a `MemnormError`, which is a `RuntimeError`. Errors about arguments are also `ValueError` or `TypeError`,
so that code written for `torch.nn.BatchNorm` still catches them.
"""

from __future__ import annotations

import numbers
import sys
import warnings

from torch import nn


class MemnormError(RuntimeError):
    """Base of every error raised by memnorm."""


class InputError(MemnormError, ValueError):
    """A layer cannot normalize the batch: wrong number of dimensions or channels, empty, or too few values."""


class DTypeError(MemnormError, TypeError):
    """An argument of the wrong type or dtype, such as an integer tensor."""


class OptionError(MemnormError, ValueError):
    """An option is out of range or contradicts another option."""


class NothingToConvert(MemnormError, ValueError):
    """`convert` found no batch norm that it can replace."""


class NothingToRecord(MemnormError, ValueError):
    """No layer would record anything."""


class WrappedModelError(MemnormError, ValueError):
    """The model is already wrapped for distributed training."""


class MemnormWarning(UserWarning):
    """memnorm did not do something that the caller may expect."""


def warn(message: str) -> None:
    """Warn, pointing at the first line outside this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == __package__:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, MemnormWarning, stacklevel=level)


def check_module(model: object, caller: str) -> None:
    if not isinstance(model, nn.Module):
        got = (
            f"the class {model.__name__}: create an instance of it" if isinstance(model, type) else type(model).__name__
        )
        raise DTypeError(f"{caller}: expected a torch.nn.Module, got {got}")


def check_callable(function: object, caller: str, argument: str) -> None:
    if not callable(function):
        raise DTypeError(f"{caller}: {argument} must be a function; got {function!r}")


def is_number(value: object) -> bool:
    """Return True for a real number of Python or numpy that a float can hold, but not for a bool."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def is_whole(value: object) -> bool:
    """Return True for an integer of Python or numpy that torch can hold (64 bits), but not for a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and -(2**63) <= int(value) < 2**63
