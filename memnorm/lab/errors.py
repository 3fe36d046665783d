"""Errors of the lab. Each has the exit code of the command that raises it."""

from __future__ import annotations

from memnorm.errors import MemnormError

OK, FAILED, USAGE, DATA_MISSING, INTERRUPTED = 0, 1, 2, 3, 130


def first_line(error: BaseException) -> str:
    """The beginning of an error's text, for messages of one line."""
    return (str(error) or type(error).__name__).splitlines()[0][:200]


class LabError(MemnormError):
    """A run, a file or the machine failed."""

    exit_code = FAILED


class UsageError(LabError, ValueError):
    """Wrong usage: unknown name, value out of range, contradictory options."""

    exit_code = USAGE


class DataMissing(LabError):
    """A data set is missing. The message contains the command that downloads it."""

    exit_code = DATA_MISSING


class DeviceMissing(UsageError):
    """The requested device does not exist on this machine or cannot be used."""


class DataCorrupt(LabError):
    """A data file exists and has the wrong content."""


class DiskFull(LabError):
    """The disk is full. What was saved before is untouched."""


class RunHeld(LabError):
    """Another process is working on the run."""


class Interrupted(LabError):
    """The user asked to stop; everything so far is saved."""

    exit_code = INTERRUPTED
