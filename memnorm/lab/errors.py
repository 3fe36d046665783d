"""What can go wrong in the lab. Each error knows the exit code of the command that meets it."""

from __future__ import annotations

from memnorm.errors import MemnormError

OK, FAILED, USAGE, DATA_MISSING, INTERRUPTED = 0, 1, 2, 3, 130


class LabError(MemnormError):
    """A run, a file or a machine let the command down."""

    exit_code = FAILED


class UsageError(LabError, ValueError):
    """The command cannot mean what it says: unknown name, value out of range, options that contradict each other."""

    exit_code = USAGE


class DataMissing(LabError):
    """A data set is not where it was looked for. The message holds the command that gets it."""

    exit_code = DATA_MISSING


class DeviceMissing(UsageError):
    """The device asked for is not on this machine, or not to be had."""


class DataCorrupt(LabError):
    """A data file is there and is not what it should be."""


class DiskFull(LabError):
    """There is no room for a file; what was saved before is untouched."""


class RunHeld(LabError):
    """Another process works on the run."""


class Interrupted(LabError):
    """The user asked to stop; everything so far is saved."""

    exit_code = INTERRUPTED
