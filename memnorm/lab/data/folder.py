"""Image folders: train/CLASS/IMAGE and val/CLASS/IMAGE (or test/), decoded by worker processes.

Workers get whole batches and return bytes. Each image draws from its own generator, seeded by the batch's
seed and the position in the batch, so the number of workers does not change the result.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from memnorm.lab.data import pictures
from memnorm.lab.data.source import Data, Normalization, Plan, Source, mix
from memnorm.lab.errors import DataCorrupt, DataMissing, LabError, UsageError

IMAGENET = Normalization((123.675, 116.28, 103.53), (58.395, 57.12, 57.375))


class FolderSource(Source):
    """Image files, decoded on demand."""

    def __init__(self, paths: Sequence[str], labels: Tensor, image_size: int) -> None:
        self.labels = labels
        self.paths = paths
        self._image_size = image_size

    def subset(self, indices: Tensor) -> FolderSource:
        return FolderSource([self.paths[index] for index in indices.tolist()], self.labels[indices], self._image_size)

    def batches(self, plan: Plan, *, workers: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        requests = ((indices.tolist(), seed) for indices, seed in plan)
        for indices, images in _in_workers(_Decoder(self.paths, self._image_size), requests, workers):
            yield IMAGENET(images), self.labels[torch.tensor(indices)]


@dataclass
class _Decoder(Dataset[Any]):
    """Whole batches as bytes, in a worker. Errors are sent as values: raised there, they would arrive as tracebacks."""

    paths: Sequence[str]
    size: int

    def __getitem__(self, request: tuple[list[int], int | None]) -> Any:
        indices, seed = request
        try:
            views = [self._view(self.paths[index], seed, place) for place, index in enumerate(indices)]
        except DataCorrupt as error:
            return error
        return indices, torch.from_numpy(np.stack(views))

    def _view(self, path: str, seed: int | None, place: int) -> np.ndarray:
        if seed is None:
            return pictures.evaluation_view(path, self.size)
        return pictures.training_view(path, self.size, random.Random(mix(seed, place)))


@dataclass
class _Checker(Dataset[Any]):
    """The problem with an image file, or an empty string."""

    paths: Sequence[str]

    def __getitem__(self, index: int) -> str:
        try:
            pictures.decode(self.paths[index])
        except DataCorrupt as error:
            return str(error)
        return ""


def _in_workers(dataset: Dataset[Any], requests: Iterator[Any] | range, workers: int) -> Iterator[Any]:
    """The items of `dataset` for these requests, in order."""
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=requests,
        num_workers=min(workers, os.cpu_count() or 1),  # torch warns about more
        collate_fn=_identity,
        generator=torch.Generator(),  # the global one would disturb the run
    )
    failure = yield from _until_failure(iter(loader))
    if failure is not None:
        raise failure


def _until_failure(answers: Iterator[Any]) -> Generator[Any, None, LabError | None]:
    """Yield the answers before the first error and return the error: raised here, its traceback would keep the workers
    alive.
    """
    try:
        for answer in answers:
            if isinstance(answer, LabError):
                return answer
            yield answer
    except RuntimeError as error:
        if "DataLoader worker (pid" not in str(error):
            raise
        return LabError(f"a process that decodes images died: {error}. Fewer workers, or none, may help.")
    return None


def _identity(item: Any) -> Any:
    return item


def folder(path: Path, *, name: str | None = None, image_size: int = 224) -> Data:
    (names, train), (test_names, test) = (_scan(path / split) for split in splits(path))
    if names != test_names:
        only = sorted(set(names) ^ set(test_names))
        raise DataCorrupt(
            f"{path}: the class folders of training and test differ, for example {', '.join(only[:5])}. "
            "Both need the same ones: the names are the classes."
        )
    sources = [
        FolderSource(
            [file for files in split for file in files],
            torch.arange(len(names)).repeat_interleave(torch.tensor([len(files) for files in split])),
            image_size,
        )
        for split in (train, test)
    ]
    return Data(name or str(path), len(names), (3, image_size, image_size), *sources)


def splits(path: Path) -> tuple[str, str]:
    """The names of the two folders, or an error that says what a data folder looks like."""
    shape = "A data folder has train/ and val/ (or test/), and in each a folder of images per class."
    if not path.exists():
        raise DataMissing(f"there is no folder {path}. {shape}")
    if not path.is_dir():
        raise UsageError(f"{path} is a file. {shape} Give the folder.")
    if not (path / "train").is_dir():
        raise DataMissing(f"{path} has no folder train/. {shape}")
    for name in ("val", "test"):
        if (path / name).is_dir():
            return "train", name
    raise DataMissing(f"{path} has neither val/ nor test/. {shape}")


def problems(path: Path) -> list[str]:
    try:
        data = folder(path)
    except LabError as error:
        return [str(error)]
    sources = [source for source in (data.train, data.test) if isinstance(source, FolderSource)]
    paths = [file for source in sources for file in source.paths]
    return [problem for problem in _in_workers(_Checker(paths), range(len(paths)), os.cpu_count() or 1) if problem]


def _scan(path: Path) -> tuple[list[str], list[list[str]]]:
    """Names of the classes and the images of each, sorted. Hidden files and other files are ignored."""
    names = sorted(entry.name for entry in _entries(path, os.DirEntry.is_dir))
    if not names:
        raise DataCorrupt(f"{path} has no class folders: put the images of each class into a folder of their own.")
    files = [_images(path / name) for name in names]
    empty = [name for name, found in zip(names, files, strict=True) if not found]
    if empty:
        kinds = " ".join(sorted(SUFFIX.lstrip(".") for SUFFIX in pictures.SUFFIXES))
        raise DataCorrupt(
            f"{path}: no images in {len(empty)} of {len(names)} class folders: {', '.join(empty[:5])}"
            f"{', …' if len(empty) > 5 else ''}. Images lie directly in the class folder and end in one of {kinds}; "
            "delete a folder that is no class."
        )
    return names, files


def _images(path: Path) -> list[str]:
    return sorted(
        entry.path
        for entry in _entries(path, os.DirEntry.is_file)
        if os.path.splitext(entry.name)[1].lower() in pictures.SUFFIXES
    )


def _entries(path: Path, is_wanted: Callable[[os.DirEntry[str]], bool]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as found:
            return [entry for entry in found if not entry.name.startswith(".") and _holds(is_wanted, entry)]
    except OSError as error:
        raise LabError(f"cannot look into {path}: {error}") from error


def _holds(is_wanted: Callable[[os.DirEntry[str]], bool], entry: os.DirEntry[str]) -> bool:
    """Return False, with a warning, for an entry that the system cannot follow, such as a loop of symbolic links."""
    try:
        return is_wanted(entry)
    except OSError as error:
        warnings.warn(f"skipped {entry.path!r}: {error.strerror}", stacklevel=2)
        return False
