"""What can go wrong, as exceptions that say what was required, what arrived and what to do.

Every error is a `MemnormError`, hence a `RuntimeError`; the ones about a value the caller chose are `ValueError` or
`TypeError` as well, so code written around `torch.nn.BatchNorm` keeps catching what it caught.
"""

from __future__ import annotations

import sys
import warnings


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
