"""Folders for segmentation: images/ and masks/ with equal names, in train/ and val/ (or test/).

A folder without train/ is split by itself: every fifth image, by name, is a test image. A mask is a PNG with one number
per pixel; the numbers that occur are the classes. Images and masks are scaled to a square and kept in memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from memnorm.lab.data import pictures
from memnorm.lab.data.folder import IMAGENET, splits
from memnorm.lab.data.source import Augmentation, Data, Plan, Source
from memnorm.lab.errors import DataCorrupt, DataMissing

SHAPE = (
    "A folder for segmentation has images/ and masks/ with PNG files of equal names, or these two in train/ and val/."
)
NUMBERED = ("1", "L", "P")  # Pillow's modes with one number of at most 8 bits per pixel
MIRROR = Augmentation(mirror=True)


@dataclass(eq=False)
class MaskedSource(Source):
    """uint8 images (N, 3, H, W) and masks (N, H, W) in memory. Images have no label: all are 0."""

    images: Tensor
    masks: Tensor

    def __post_init__(self) -> None:
        self.labels = torch.zeros(len(self.images), dtype=torch.int64)

    def subset(self, indices: Tensor) -> MaskedSource:
        return MaskedSource(self.images[indices], self.masks[indices])

    def batches(self, plan: Plan, *, workers: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        for indices, seed in plan:
            joint = torch.cat([IMAGENET(self.images[indices]), self.masks[indices].unsqueeze(1)], dim=1)
            joint = joint if seed is None else MIRROR(joint, seed)
            yield joint[:, :3].contiguous(), joint[:, 3].long()


def folder(path: Path, *, image_size: int) -> Data:
    if not path.is_dir():
        raise DataMissing(f"there is no folder {path}. {SHAPE}")
    if (path / "train").is_dir():
        train, test = (_pairs(path / split) for split in splits(path))
    else:
        pairs = _pairs(path)
        train, test = [one for place, one in enumerate(pairs) if place % 5 != 4], pairs[4::5]
    if not train or not test:
        raise DataCorrupt(f"{path} has too few images for training and test; it needs 5, or train/ and val/. {SHAPE}")
    images, values = zip(*(_read(*pair, image_size) for pair in (*train, *test)), strict=True)
    known, classes = np.unique(np.stack(values), return_inverse=True)
    pixels, masks = (
        torch.from_numpy(np.stack(images)),
        torch.from_numpy(classes.reshape(len(images), *[image_size] * 2)),
    )
    sources = [MaskedSource(pixels[part], masks.byte()[part]) for part in (slice(len(train)), slice(len(train), None))]
    return Data(str(path), len(known), (3, image_size, image_size), *sources)


def _pairs(path: Path) -> list[tuple[Path, Path]]:
    for name in ("images", "masks"):
        if not (path / name).is_dir():
            raise DataMissing(f"{path} has no folder {name}/. {SHAPE}")
    images, masks = ({file.name for file in (path / name).glob("[!.]*.png")} for name in ("images", "masks"))
    if images != masks:
        only = sorted(images ^ masks)
        raise DataCorrupt(f"{path}: every image needs a mask of the same name; {', '.join(only[:5])} has no partner")
    return [(path / "images" / name, path / "masks" / name) for name in sorted(images)]


def _read(image: Path, mask: Path, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(3, size, size) bytes of the image, and the numbers of its mask."""
    picture, numbers = pictures.decode(image), _decode_mask(mask)
    if picture.size != numbers.size:
        raise DataCorrupt(f"{mask} has {numbers.size} pixels and its image has {picture.size}; they must be equal")
    scaled = picture.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(scaled).transpose(2, 0, 1), np.asarray(numbers.resize((size, size), Image.Resampling.NEAREST))


def _decode_mask(path: Path) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=("PNG",)) as mask:
                mask.load()
                if mask.mode not in NUMBERED:
                    raise ValueError(f"pixels of kind {mask.mode}; a mask has one number from 0 to 255 per pixel")
                return Image.fromarray(np.asarray(mask).astype(np.uint8))
    except Exception as error:  # decoders raise many kinds of errors
        raise DataCorrupt(f"{path} cannot be read as a mask ({error}). Replace it or delete it.") from error
