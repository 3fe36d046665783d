"""What the tests of the lab's data share: a web server that misbehaves on request, archives, pickles, image folders."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.server
import io
import pickle
import re
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from memnorm.lab.data import files, registry
from memnorm.lab.data.files import Download, File


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def noise(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


PAGE = noise(5000)


def impatient(monkeypatch: Any) -> None:
    """Transfers without pauses, in small chunks, and straight to the server."""
    monkeypatch.setattr(files, "PAUSE", 0.0)
    monkeypatch.setattr(files, "CHUNK", 512)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


class Site:
    """What a local web server offers, how it behaves, and what it was asked.

    `moods` are used up one per request: an HTTP status, "cut" (ends after `cut` bytes), "spoil" (right length, wrong
    bytes), "whole" (ignores Range), "stuck" (both whole and cut), "shifted" (answers Range with another one), "silent"
    (no Content-Length), "hang up" (no answer at all), "babble" (no HTTP), "elsewhere" (redirects to /moved plus the
    path), "astray" (redirects to ftp).
    """

    def __init__(self) -> None:
        self.pages = {"/file.bin": PAGE, "/moved/file.bin": PAGE}
        self.moods: list[str | int] = []
        self.always: str | None = None
        self.asked: list[tuple[str, str | None]] = []
        self.cut = 1000
        self.url = ""


class _Handler(http.server.BaseHTTPRequestHandler):
    site: Site

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        site, wanted = self.site, self.headers.get("Range")
        site.asked.append((self.path, wanted))
        mood = site.moods.pop(0) if site.moods else site.always
        page = site.pages.get(self.path)
        if mood == "hang up":
            return
        if mood == "babble":
            self.wfile.write(b"hello, hello\r\n\r\n")
        elif mood in ("elsewhere", "astray"):
            place = f"/moved{self.path}" if mood == "elsewhere" else "ftp://127.0.0.1/x"
            self._head(302, {"Location": place, "Content-Length": "0"})
        elif isinstance(mood, int) or page is None:
            self._head(mood if isinstance(mood, int) else 404, {"Content-Length": "0"})
        else:
            self._send(page, wanted, mood)

    def _send(self, page: bytes, wanted: str | None, mood: str | None) -> None:
        found = re.fullmatch(r"bytes=(\d+)-", wanted or "")
        start = int(found[1]) if found and mood not in ("whole", "stuck") else 0
        if start > len(page):
            self._head(416, {"Content-Length": "0"})
            return
        if start and mood == "shifted":
            start += 1
        body = page[start:]
        headers = {} if mood == "silent" else {"Content-Length": str(len(body))}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(page) - 1}/{len(page)}"
        self._head(206 if start else 200, headers)
        if mood == "spoil":
            body = bytes(byte ^ 1 for byte in body)
        self.wfile.write(body[: self.site.cut] if mood in ("cut", "stuck") else body)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


@contextlib.contextmanager
def serving() -> Iterator[Site]:
    site = Site()
    handler = type("Handler", (_Handler,), {"site": site})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        site.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield site
        finally:
            server.shutdown()
            thread.join()


def tar(members: dict[str, bytes | tarfile.TarInfo]) -> bytes:
    """A tar.gz; a TarInfo is put in as it is."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                archive.addfile(content)
                continue
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def cifar_batch(count: int, *, classes: int = 10, key: str = "labels", seed: int = 0, **changes: Any) -> bytes:
    """A small file of CIFAR's form; `changes` replace entries."""
    draw = np.random.default_rng(seed)
    table = {
        "data": draw.integers(0, 256, (count, 3072), dtype=np.uint8),
        key: [int(label) for label in draw.integers(0, classes, count)],
        "filenames": [f"{number}.png" for number in range(count)],
    }
    return pickle.dumps(table | changes, protocol=2)


def small_cifar10(**changes: Any) -> dict[str, bytes]:
    """Content of the files of a CIFAR-10 with 20 + 8 images; `changes` go into data_batch_3."""
    folder = "cifar-10-batches-py"
    content = {f"{folder}/data_batch_{n}": cifar_batch(4, seed=n) for n in range(1, 6)}
    content[f"{folder}/test_batch"] = cifar_batch(8, seed=6)
    if changes:
        content[f"{folder}/data_batch_3"] = cifar_batch(4, seed=3, **changes)
    return content


def registered(monkeypatch: Any, name: str, content: dict[str, bytes], url: str = "http://127.0.0.1:9") -> bytes:
    """Make `content` the official files of a data set, inside an archive, which is returned."""
    entry = registry.DATA_SETS[name]
    archive = tar(content)
    files = tuple(File(path, len(one), md5(one)) for path, one in content.items())
    item = Download(f"{url}/{name}.tar.gz", f"{name}.tar.gz", len(archive), md5(archive), files)
    monkeypatch.setitem(registry.DATA_SETS, name, dataclasses.replace(entry, downloads=(item,)))
    return archive


def write(root: Path, content: dict[str, bytes]) -> None:
    for path, one in content.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(one)


def picture(width: int, height: int, *, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """A smooth random image."""
    draw = np.random.default_rng(seed)
    coarse = Image.fromarray(draw.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BILINEAR).convert(mode)


def image_folder(root: Path, classes: tuple[str, ...] = ("bird", "cat"), *, train: int = 4, val: int = 2) -> Path:
    """An image folder of small PNG files."""
    for split, count in (("train", train), ("val", val)):
        for place, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                seed = 1000 * place + 100 * (split == "val") + number
                picture(40 + 3 * number, 30, seed=seed).save(root / split / name / f"{number}.png")
    return root
