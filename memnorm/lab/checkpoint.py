"""Checkpoints of a run: the newest two, each named by its iteration and the hash of its bytes.

A file whose bytes do not match its name is not opened: after a torn write or a flipped bit the one before is used.
Loading accepts tensors and plain containers only.
"""

from __future__ import annotations

import hashlib
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from memnorm.lab.disk import replacing
from memnorm.lab.errors import first_line

KEPT = 2
PATTERN = re.compile(r"checkpoint-(\d{10})-([0-9a-f]{16})\.pt")


def save(folder: Path, iteration: int, state: dict[str, Any]) -> None:
    name = f"checkpoint-{iteration:010}"
    with replacing(folder / name, lambda file: f"{name}-{_digest(file)}.pt") as temporary:
        write(temporary, state)
    found = _checkpoints(folder)
    later = [path for path in found if path.name[: len(name)] > name]  # unreadable: the run did not resume there
    for superfluous in later + found[len(later) + KEPT :]:
        superfluous.unlink(missing_ok=True)


def write(path: Path, state: Any) -> None:
    """`torch.save` that raises the OSError behind torch's own error, for example on a full disk."""
    try:
        with path.open("wb") as file:
            torch.save(state, file)
    except RuntimeError as error:
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def readable(folder: Path, complain: Any) -> Iterator[dict[str, Any]]:
    """The states that can be loaded, newest first; `complain` gets a message about each of the others."""
    for path in _checkpoints(folder):
        try:
            if not path.is_file():
                raise ValueError("it is not a regular file")
            if _digest(path) != PATTERN.fullmatch(path.name)[2]:  # type: ignore[index]
                raise ValueError("its bytes do not match the hash in its name")
            state = torch.load(path, map_location="cpu", weights_only=True)
            if not isinstance(state, dict):
                raise ValueError("it holds no state of a run")
        except pickle.UnpicklingError:
            complain(f"{path.name} is not a checkpoint of this program and was not opened; using the one before")
            continue
        except Exception as error:  # torch.load raises anything on damaged input
            complain(f"{path.name} cannot be read ({first_line(error)}); using the one before")
            continue
        yield state


def reached(folder: Path) -> int:
    """The iteration of the newest checkpoint; 0 without one."""
    newest = _checkpoints(folder)[:1] if folder.is_dir() else []
    return int(PATTERN.fullmatch(newest[0].name)[1]) if newest else 0  # type: ignore[index]


def _checkpoints(folder: Path) -> list[Path]:
    return sorted((path for path in folder.iterdir() if PATTERN.fullmatch(path.name)), reverse=True)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()[:16]
