"""Official files: what they are called, how large they are, their checksums, and how to come by them.

A file counts as present when its MD5 is the official one, so a half-written or foreign file is never read. Nothing here
opens a connection except `get`.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from memnorm.lab.data.transfer import Progress, checksum, download
from memnorm.lab.errors import DataCorrupt, DataMissing, LabError


@dataclass(frozen=True)
class File:
    """A file as the loader reads it. Of a `.gz`, size and checksum are those of what is inside.

    So a file that somebody compressed again (Debian does, without the name in the header) is still the official one.
    """

    path: str
    size: int
    md5: str

    def read(self, root: Path) -> bytes:
        """The whole content, checked."""
        path = root / self.path
        try:
            with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as stream:
                content = stream.read(self.size + 1)
        except FileNotFoundError as error:
            raise DataMissing(f"{path} is missing") from error
        except (OSError, EOFError, zlib.error) as error:
            raise DataCorrupt(f"{path} cannot be read ({error})") from error
        if len(content) != self.size:
            raise DataCorrupt(f"{path} should hold {self.size:,} bytes and holds {_words(len(content), self.size)}")
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != self.md5:
            raise DataCorrupt(f"{path} is not the official file: its MD5 is {found} instead of {self.md5}")
        return content

    def problem(self, root: Path) -> str | None:
        """What is wrong with the file, or None."""
        try:
            self.read(root)
        except LabError as error:
            return str(error)
        return None


@dataclass(frozen=True)
class Download:
    """Something to fetch: an archive with files in it, or a file that is used as it comes."""

    url: str
    path: str
    size: int
    md5: str
    files: tuple[File, ...]

    @property
    def is_archive(self) -> bool:
        return self.path.endswith(".tar.gz")


def get(downloads: tuple[Download, ...], root: Path, *, lock: str, progress: Progress | None = None) -> None:
    """Fetch what is not there or not right, check it, unpack it. A second process waits for the first."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _alone(root / f".{lock}.lock", progress):
            for item in downloads:
                if any(file.problem(root) for file in item.files):
                    _obtain(item, root, progress)
    except OSError as error:
        raise LabError(f"cannot write to {root}: {error}. Choose another place with --data-root.") from error


def _obtain(item: Download, root: Path, progress: Progress | None) -> None:
    target = root / item.path
    target.parent.mkdir(parents=True, exist_ok=True)
    at_hand = target.is_file() and target.stat().st_size == item.size and checksum(target) == item.md5
    if not at_hand:
        with _mention_wrong_file(target):
            download(item.url, target, size=item.size, md5=item.md5, progress=progress)
    if item.is_archive:
        unpack(target, item.files, root)
        if not at_hand:  # an archive that somebody put there stays
            target.unlink()


def unpack(archive: Path, files: tuple[File, ...], root: Path) -> None:
    """Take exactly these files out of a tar archive: regular ones, of the right size and checksum, nothing else."""
    wanted = {file.path: file for file in files}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                file = wanted.pop(member.name, None)
                if file is None:
                    continue
                stream = tar.extractfile(member) if member.isreg() and member.size == file.size else None
                if stream is None:
                    raise DataCorrupt(
                        f"{archive}: {member.name} is not a plain file of {file.size:,} bytes. Delete it."
                    )
                _write(root, file, stream)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataCorrupt(f"{archive} is damaged ({error}). Delete it and get the data again.") from error
    if wanted:
        raise DataCorrupt(f"{archive} lacks {', '.join(wanted)}. Delete it and get the data again.")


def _write(root: Path, file: File, stream: IO[bytes]) -> None:
    target = root / file.path
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    with open(part, "wb") as out:
        shutil.copyfileobj(stream, out, 1 << 20)
        out.flush()
        os.fsync(out.fileno())
    found = checksum(part)
    if found != file.md5:
        part.unlink()
        raise DataCorrupt(f"{file.path} of the archive has the MD5 {found} instead of {file.md5}")
    os.replace(part, target)


@contextlib.contextmanager
def _alone(path: Path, progress: Progress | None) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if progress is not None:
            progress("waiting for another process that gets the same data", 0, None)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _mention_wrong_file(target: Path) -> Iterator[None]:
    """Who put a wrong file by hand hears of it together with the failed download."""
    try:
        yield
    except LabError as error:
        if target.is_file():
            raise type(error)(f"{error} (The file there now has the MD5 {checksum(target)}.)") from error
        raise


def _words(found: int, size: int) -> str:
    return "more" if found > size else f"{found:,}"
