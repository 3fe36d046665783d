"""Loaders of the data sets that are held in memory.

The constants are mean and standard deviation of each set's training images per channel, in pixel values.
"""

from __future__ import annotations

import codecs
import io
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from memnorm.lab.data.registry import DataSet
from memnorm.lab.data.source import Augmentation, Data, MemorySource, Normalization
from memnorm.lab.errors import DataCorrupt

Split = tuple[Tensor, Tensor]

CROP_AND_MIRROR = Augmentation(padding=4, mirror=True)
NORMALIZATION = {
    "digits": Normalization((4.8947,), (6.0220,)),  # pixel values go from 0 to 16
    "cifar10": Normalization((125.3069, 122.9504, 113.8654), (62.9932, 62.0887, 66.7049)),
    "cifar100": Normalization((129.3042, 124.0700, 112.4341), (68.1702, 65.3918, 70.4184)),
    "fashion-mnist": Normalization((72.9404,), (90.0212,)),
}


def digits(entry: DataSet, root: Path) -> Data:
    """The digits in a fixed random order; the first 500 are the test images. A mirrored 2 is no digit, so there is no
    augmentation.
    """
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    raw = load_digits()
    order = torch.randperm(len(raw.target), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(raw.images).to(torch.uint8)[order].unsqueeze(1)
    labels = torch.from_numpy(raw.target).long()[order]
    return _data(entry, 10, (images[500:], labels[500:]), (images[:500], labels[:500]), Augmentation())


def cifar10(entry: DataSet, root: Path) -> Data:
    content = entry.read(root)
    batches = [_cifar(content[f"data_batch_{number}"], f"data_batch_{number}", "labels", 10) for number in range(1, 6)]
    train = (torch.cat([images for images, _ in batches]), torch.cat([labels for _, labels in batches]))
    return _data(entry, 10, train, _cifar(content["test_batch"], "test_batch", "labels", 10), CROP_AND_MIRROR)


def cifar100(entry: DataSet, root: Path) -> Data:
    content = entry.read(root)
    train, test = (_cifar(content[split], split, "fine_labels", 100) for split in ("train", "test"))
    return _data(entry, 100, train, test, CROP_AND_MIRROR)


def fashion_mnist(entry: DataSet, root: Path) -> Data:
    content = entry.read(root)
    train, test = (
        _idx_split(content[f"{split}-images-idx3-ubyte.gz"], content[f"{split}-labels-idx1-ubyte.gz"], split)
        for split in ("train", "t10k")
    )
    (mean,), (std,) = NORMALIZATION[entry.name].mean, NORMALIZATION[entry.name].std
    black = Augmentation(padding=4, mirror=True, fill=-mean / std)  # the background of these images
    return _data(entry, 10, train, test, black)


def synthetic(
    entry: DataSet, root: Path, *, classes: int, channels: int, image_size: int, train: int, test: int
) -> Data:
    """A smooth random pattern per class under noise of its own size, so that there is something to learn.

    The sum stays within a byte: patterns are at most 127, noise at most 128.
    """
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(classes, channels, 4, 4, generator=generator)
    smooth = nn.functional.interpolate(coarse, size=(image_size, image_size), mode="bilinear")
    patterns = (smooth * 127).to(torch.uint8)

    def split(count: int) -> Split:
        labels = torch.arange(count).remainder(classes)[torch.randperm(count, generator=generator)]
        shape = (count, channels, image_size, image_size)
        return torch.randint(0, 129, shape, generator=generator, dtype=torch.uint8).add_(patterns[labels]), labels

    normalization = Normalization((127.5,) * channels, (45.0,) * channels)
    augmentation = Augmentation(padding=image_size // 8, mirror=True)
    return _data(entry, classes, split(train), split(test), augmentation, normalization)


def _data(
    entry: DataSet,
    classes: int,
    train: Split,
    test: Split,
    augmentation: Augmentation,
    normalization: Normalization | None = None,
) -> Data:
    normalization = normalization or NORMALIZATION[entry.name]
    sources = [MemorySource(*split, normalization, augmentation) for split in (train, test)]
    channels, height, width = train[0].shape[1:]
    return Data(entry.name, classes, (channels, height, width), *sources)


class _Unpickler(pickle.Unpickler):
    """Admits arrays and plain containers only: a second barrier behind the checksum."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {"ndarray": np.ndarray, "dtype": np.dtype, "_reconstruct": np.empty(0).__reduce__()[0]}
        if name in allowed and module.split(".")[0] == "numpy":
            return allowed[name]
        if (module, name) != ("_codecs", "encode"):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}; nothing was run")
        return codecs.encode


def _cifar(content: bytes, name: str, key: str, classes: int) -> Split:
    try:
        table = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a damaged pickle may fail in any way
        raise DataCorrupt(f"{name} is not a pickle of arrays ({type(error).__name__}: {error}). Delete it.") from error
    if not isinstance(table, dict):
        raise DataCorrupt(f"{name} should hold a dictionary; it holds {type(table).__name__}")
    # Python 2 wrote the keys as bytes, Python 3 as text.
    pixels, labels = (table.get(wanted.encode(), table.get(wanted)) for wanted in ("data", key))
    if pixels is None or labels is None:
        missing = "data" if pixels is None else key
        raise DataCorrupt(f"{name} has no entry {missing!r}")
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (3072,):
        found = f"{pixels.dtype} {pixels.shape}" if isinstance(pixels, np.ndarray) else type(pixels).__name__
        raise DataCorrupt(f"{name}: images should be uint8 rows of 3,072 values; found {found}")
    if not isinstance(labels, list) or len(labels) != len(pixels):
        raise DataCorrupt(f"{name}: there should be a list of {len(pixels):,} labels")
    _check_labels(labels, classes, name)
    return torch.tensor(pixels).view(-1, 3, 32, 32), torch.tensor(labels)


def _check_labels(labels: list[Any], classes: int, name: str) -> None:
    strange = next((label for label in labels if type(label) is not int or not 0 <= label < classes), None)
    if strange is not None:
        raise DataCorrupt(f"{name}: labels should be 0 to {classes - 1}; found {strange!r}")


def _idx_split(images: bytes, labels: bytes, name: str) -> Split:
    pixels, classes = _idx(images, 3, f"{name}-images"), _idx(labels, 1, f"{name}-labels")
    if len(pixels) != len(classes):
        raise DataCorrupt(f"{name}: {len(pixels):,} images and {len(classes):,} labels")
    _check_labels(classes.tolist(), 10, name)
    return pixels.unsqueeze(1), classes.long()


def _idx(content: bytes, dimensions: int, name: str) -> Tensor:
    """The IDX format: two zeros, the kind (8: unsigned bytes), the number of dimensions, their sizes, the values."""
    start = 4 + 4 * dimensions
    if content[:4] != bytes((0, 0, 8, dimensions)) or len(content) < start:
        raise DataCorrupt(f"{name} is not an IDX file of unsigned bytes in {dimensions} dimensions")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    values = np.frombuffer(content, np.uint8, offset=start)
    if values.size != np.prod(shape, dtype=np.uint64):
        raise DataCorrupt(f"{name} should hold {shape} values; it holds {values.size:,}")
    return torch.tensor(values).view(shape)


LOADERS: dict[str, Callable[..., Data]] = {
    "digits": digits,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "fashion-mnist": fashion_mnist,
    "synthetic": synthetic,
}
