"""One file over HTTP, resumed after a broken attempt.

The bytes so far are in `NAME.part`. A new attempt asks for the rest (`Range`); if the server sends everything again,
the part starts anew. Only a part with the official checksum is renamed to NAME.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from memnorm.lab.errors import DataCorrupt, LabError

Progress = Callable[[str, int, "int | None"], None]

CHUNK = 1 << 18
ATTEMPTS = 4  # failed attempts in a row without new bytes
PAUSE = 1.0  # seconds before the second attempt, twice as long before each further one
TIMEOUT = 30.0  # seconds of silence


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
