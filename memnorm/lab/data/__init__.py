"""Data sets by name, or by the path of an image folder.

    data = load("cifar10")                                     # checked files from the data root
    plan = order(data.train.labels, batch_size=128, iterations=1000, seed=0)
    for images, labels in data.train.batches(plan): ...        # float32, normalised, augmented

    source ← {builtin, pictures ← folder} ← load        files ← registry ← get, verify

Only `get` opens a connection.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

from memnorm.lab.data import files
from memnorm.lab.data.files import Progress
from memnorm.lab.data.plans import epoch_length, order, sweep
from memnorm.lab.data.registry import DATA_SETS, DataSet
from memnorm.lab.data.source import Data, Source
from memnorm.lab.errors import DataMissing, UsageError
from memnorm.text import suggestion

EVALUATION_BATCH = 250  # images per batch; the result does not depend on it

__all__ = ["DATA_SETS", "EVALUATION_BATCH", "Data", "DataSet", "Source", "default_root", "epoch_length"]
__all__ += ["checked_options", "get", "load", "order", "sweep", "verify"]


def default_root() -> Path:
    """The default folder of data sets: MEMNORM_DATA, else the user's cache."""
    if chosen := os.environ.get("MEMNORM_DATA"):
        return Path(chosen).expanduser()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "memnorm" / "data"


def load(name: str, root: Path | str | None = None, **options: Any) -> Data:
    """A built-in data set from `root`, or the image folder at the path `name`."""
    from memnorm.lab.data import builtin, folder  # numpy and Pillow, which `memnorm info` does without

    entry = DATA_SETS.get(name)
    if entry is None:
        values = checked_options(f"the image folder {name}", {"image_size": 224}, options)
        return folder.folder(_folder_path(name), name=name, **values)
    values = checked_options(name, entry.options, options)
    if not entry.folder:
        return builtin.LOADERS[name](entry, _root(root), **values)
    if not entry.present(_root(root)):
        raise entry.missing(_root(root))
    return folder.folder(_root(root) / entry.folder, name=name, **values)


def get(name: str, root: Path | str | None = None, progress: Progress | None = None) -> None:
    """Download, check and unpack a built-in data set. Resumes a broken download; a no-op if all files are there."""
    if name not in DATA_SETS:
        raise UsageError(f"{_unknown(name)} An image folder is used where it is; there is nothing to get.")
    entry, root = DATA_SETS[name], _root(root)
    if entry.folder and not entry.present(root):
        raise entry.missing(root)
    if entry.downloads:
        files.get(entry.downloads, root, lock=entry.name, progress=progress)


def verify(name: str, root: Path | str | None = None) -> list[str]:
    """Problems with a data set's files: wrong checksums, or images that cannot be decoded."""
    from memnorm.lab.data.folder import problems

    entry, root = DATA_SETS.get(name), _root(root)
    if entry is None:
        return problems(_folder_path(name))
    if not entry.folder:
        return [problem for file in entry.files if (problem := file.problem(root))]
    return problems(root / entry.folder) if entry.present(root) else [str(entry.missing(root))]


def _root(root: Path | str | None) -> Path:
    return default_root() if root is None else Path(root).expanduser()


def _folder_path(name: str) -> Path:
    path = Path(name).expanduser()
    if path.exists():
        return path
    if os.sep in name or name.startswith(("~", ".")):
        raise DataMissing(
            f"there is no folder {path}. A data folder has train/ and val/ (or test/), a folder per class."
        )
    raise UsageError(f"{_unknown(name)} The path of an image folder with train/ and val/ works too.")


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, DATA_SETS, n=2)
    return f"unknown data set {name!r}.{suggestion(near)} There are {', '.join(DATA_SETS)}."


def checked_options(name: str, defaults: dict[str, int], given: dict[str, Any]) -> dict[str, int]:
    """Defaults and what was given; every option is a whole number of at least 1."""
    for option, value in given.items():
        if option not in defaults:
            known = f"it takes {', '.join(defaults)}" if defaults else "it takes none"
            raise UsageError(f"unknown option {option!r} for {name}; {known}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{name}: {option} must be a whole number of at least 1; got {value!r}")
    return {**defaults, **given}
