"""Official files with their sizes and checksums, and how to download them.

A file is read only if its MD5 is the official one, so a half-written or foreign file is never used. Only `get` opens a
connection. The bytes that arrived are in `NAME.part`. After a broken attempt, the next one asks for the rest (`Range`);
if the server sends everything again, the part starts anew. Only a part with the official checksum is renamed to NAME.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import os
import re
import shutil
import tarfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from memnorm.lab.errors import DataCorrupt, DataMissing, LabError

Progress = Callable[[str, int, "int | None"], None]

CHUNK = 1 << 18
ATTEMPTS = 4  # failed attempts in a row without new bytes
PAUSE = 1.0  # seconds before the second attempt, twice as long before each further one
TIMEOUT = 30.0  # seconds of silence


@dataclass(frozen=True)
class File:
    """A file as the loader reads it. For a `.gz`, size and checksum are those of its content.

    So a recompressed file (Debian's has no name in the header) is still the official one.
    """

    path: str
    size: int
    md5: str

    def read(self, root: Path) -> bytes:
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
    from filelock import FileLock, Timeout  # a package of the lab, which `memnorm info` does without

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


class _Broken(Exception):
    """An attempt failed; another one may succeed."""


def download(url: str, target: Path, *, size: int, md5: str, progress: Progress | None = None) -> None:
    """Bring `url` to `target`, checked. Raises `LabError` (no connection) or `DataCorrupt` (not the official file)."""
    part = target.with_name(target.name + ".part")
    most, failures = _length(part), 0
    while _length(part) != size:
        try:
            _append(url, part, size, progress)
        except _Broken as broken:  # noqa: PERF203  # the network is slower
            arrived = _length(part)
            failures = 0 if arrived > most else failures + 1
            most = max(most, arrived)
            if failures >= ATTEMPTS:
                kept = f" The {arrived:,} bytes that arrived are kept; the same command resumes from there."
                raise LabError(
                    f"could not get {url}: {broken}.{kept if arrived else ''} Without a network: put the file at "
                    f"{target} by hand (MD5 {md5}) and give the same command again."
                ) from broken
            time.sleep(PAUSE * 2 ** max(failures - 1, 0))
    found = checksum(part)
    if found != md5:
        part.unlink()
        raise DataCorrupt(
            f"{url} arrived damaged: its MD5 is {found}, the official one {md5}. What arrived is deleted; "
            f"try again, or put the official file at {target}."
        )
    os.replace(part, target)


def checksum(path: Path) -> str:
    """MD5, the checksum that the data sets' own pages give."""
    digest = hashlib.md5(usedforsecurity=False)
    with open(path, "rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _append(url: str, part: Path, size: int, progress: Progress | None) -> None:
    have = _length(part)
    if have > size:  # part of another file
        part.unlink()
        have = 0
    with _open(url, have, part) as response:
        if response.status == 206:
            _check_range(response, have, size, part)
        else:
            have = 0
            _check_length(url, response, size)
        with open(part, "ab" if have else "wb") as out:
            while have < size and (chunk := _read(response, min(CHUNK, size - have))):
                out.write(chunk)
                have += len(chunk)
                if progress is not None:
                    progress(part.stem, have, size)
            out.flush()
            os.fsync(out.fileno())
    if have < size:
        raise _Broken(f"the connection ended after {have:,} of {size:,} bytes")


def _open(url: str, have: int, part: Path) -> Any:
    if not url.startswith(("http://", "https://")):
        raise LabError(f"data come over http or https; got {url}")
    request = urllib.request.Request(url, headers={"User-Agent": "memnorm"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        return _opener().open(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        with error:
            if error.code == 416:  # the part does not belong to this file
                part.unlink(missing_ok=True)
            elif error.code < 500 and error.code not in (408, 429):
                raise LabError(
                    f"could not get {url}: the server says {error.code} {error.reason}. If the file is elsewhere, put "
                    f"it at {part.with_suffix('')} and try again."
                ) from error
            raise _Broken(f"the server says {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _Broken(_reason(error)) from error


def _opener() -> urllib.request.OpenerDirector:
    """urllib's own, with its proxies and redirects, but for http and https alone: no file:, ftp: or data:."""
    opener = urllib.request.OpenerDirector()
    for kind in ("Proxy", "Unknown", "HTTP", "HTTPS", "HTTPDefaultError", "HTTPRedirect"):
        opener.add_handler(getattr(urllib.request, f"{kind}Handler")())
    opener.add_handler(urllib.request.HTTPErrorProcessor())
    return opener


def _read(response: IO[bytes], count: int) -> bytes:
    try:
        return response.read(count)
    except (OSError, http.client.HTTPException) as error:
        raise _Broken(_reason(error)) from error


def _check_range(response: Any, have: int, size: int, part: Path) -> None:
    given = response.headers.get("Content-Range", "")
    found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", given.strip())
    if not found or int(found[1]) != have or found[2] not in ("*", str(size)):
        part.unlink(missing_ok=True)
        raise _Broken(f"the server answered a request for bytes {have:,} to {size:,} with {given or 'no range'!r}")


def _check_length(url: str, response: Any, size: int) -> None:
    """Notice for example a login page of the network before it replaces the bytes so far."""
    given = response.headers.get("Content-Length", "")
    if given.isdigit() and int(given) != size:
        raise DataCorrupt(
            f"{url} is not the official file there: the server offers {int(given):,} bytes, the file has {size:,}. "
            "Does the network ask for a login first?"
        )


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _reason(error: BaseException) -> str:
    reason = getattr(error, "reason", None) or error
    return f"{reason}" or type(error).__name__
