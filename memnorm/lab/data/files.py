"""Official files with their sizes and checksums, and how to download them.

A file is read only if its MD5 is the official one, so a half-written or foreign file is never used. Only `get` opens a
connection.
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
    """A file as the loader reads it. For a `.gz`, size and checksum are those of its content.

    So a recompressed file (Debian's has no name in the header) is still the official one.
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
        """The problem with the file, or None."""
        try:
            self.read(root)
        except LabError as error:
            return str(error)
        return None


@dataclass(frozen=True)
class Download:
    """A download: an archive of files, or a file that is used as it is."""

    url: str
    path: str
    size: int
    md5: str
    files: tuple[File, ...]

    @property
    def is_archive(self) -> bool:
        return self.path.endswith(".tar.gz")


def get(downloads: tuple[Download, ...], root: Path, *, lock: str, progress: Progress | None = None) -> None:
    """Download missing and wrong files, check them, unpack them. A second process waits for the first."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{lock}.lock", progress):
            for item in downloads:
                if any(file.problem(root) for file in item.files):
                    _obtain(item, root, progress)
    except OSError as error:
        raise LabError(f"cannot write to {root}: {error}. Choose another place with --data-root.") from error


def _obtain(item: Download, root: Path, progress: Progress | None) -> None:
    target = root / item.path
    target.parent.mkdir(parents=True, exist_ok=True)
    present = target.is_file() and target.stat().st_size == item.size and checksum(target) == item.md5
    if not present:
        with _mention_wrong_file(target):
            download(item.url, target, size=item.size, md5=item.md5, progress=progress)
    if item.is_archive:
        unpack(target, item.files, root)
        if not present:  # keep an archive that the user put there
            target.unlink()


def unpack(archive: Path, files: tuple[File, ...], root: Path) -> None:
    """Extract exactly these files from a tar archive: regular files of the right size and checksum."""
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
def _locked(path: Path, progress: Progress | None) -> Iterator[None]:
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
    """If the download fails and a wrong file is in its place, mention that file in the error."""
    try:
        yield
    except LabError as error:
        if target.is_file():
            raise type(error)(f"{error} (The file there now has the MD5 {checksum(target)}.)") from error
        raise


def _words(found: int, size: int) -> str:
    return "more" if found > size else f"{found:,}"
