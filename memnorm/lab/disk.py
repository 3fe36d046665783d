"""Atomic writes: to a temporary file in the same folder, flushed to the disk, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from memnorm.lab.errors import DiskFull, LabError

FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def replacing(path: Path, name: Callable[[Path], str] | None = None) -> Iterator[Path]:
    """A temporary path to write to. It replaces `path` if the block succeeds and is deleted if not. `name`, called with
    the finished file, returns another name in the same folder.
    """
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            temporary.touch(exist_ok=False)
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path.with_name(name(temporary)) if name else path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8. The name of a file may hold bytes that are none; they are escaped."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def append_line(path: Path, line: str) -> None:
    """Append a line in one write, after ending a line that was cut short by a kill or a full disk."""
    with explained(path), path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            line = line if file.read(1) == b"\n" else "\n" + line
        file.write(line.encode() + b"\n")


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Raise errors of the file system as errors of the lab with a hint."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise DiskFull(
                f"the disk is full: {path} could not be written. Nothing saved before is lost: free some space and "
                "give the same command again; it resumes from the last checkpoint."
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise LabError(f"no permission to write {path}; choose another folder") from error
        raise LabError(f"{path} could not be written: {error}") from error


def sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut, if the system supports it."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
