"""Sources of batches: the interface, images in memory, normalisation, augmentation, and seeds.

A source yields the batches of a *plan*: for each batch the indices of its images and a seed. The seed alone determines
the augmentation (None: no augmentation), so the same plan gives every norm the same pixels.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Plan = Iterable[tuple[Tensor, int | None]]


def mix(*parts: int | str) -> int:
    """A seed in [0, 2**63) made from these parts, the same on every machine: `mix(seed, "augment", iteration)`.

    Adding instead of hashing would make run 1 at iteration 0 draw what run 0 draws at iteration 1.
    """
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class Source(ABC):
    """One split of a data set. `labels` is an int64 tensor, one entry per image."""

    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def subset(self, indices: Tensor) -> Source:
        """The images with these indices, in this order."""

    @abstractmethod
    def batches(self, plan: Plan, *, workers: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """For each (indices, seed) of the plan: float32 images (n, C, H, W), normalised per channel, and their labels.

        They are augmented, each image on its own, where the seed is not None. `workers` processes decode image files;
        data in memory needs none. The number of workers changes nothing in the result.
        """


@dataclass(frozen=True)
class Data:
    """A data set, ready to train on. `shape` is (channels, height, width) of what `batches` gives."""

    name: str
    classes: int
    shape: tuple[int, int, int]
    train: Source
    test: Source


@dataclass(frozen=True)
class Normalization:
    """(x − mean) / std per channel, in the units of the stored pixels."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, images_NCHW: Tensor) -> Tensor:
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return images_NCHW.float().sub_(mean).div_(std)


@dataclass(frozen=True)
class Augmentation:
    """Per image: a crop of the original size after `padding` pixels were added on each side, and mirrored or not.

    `fill` is the value of the added pixels. As in the ResNet paper they are added after normalisation, so zeros are
    the mean colour, not black.
    """

    padding: int = 0
    mirror: bool = False
    fill: float = 0.0

    def __call__(self, images_NCHW: Tensor, seed: int) -> Tensor:
        if not (self.padding or self.mirror):
            return images_NCHW
        generator = torch.Generator().manual_seed(seed)
        count = len(images_NCHW)
        top_left = torch.randint(0, 2 * self.padding + 1, (2, count), generator=generator)
        mirrored = torch.randint(0, 2, (count,), generator=generator).bool() & self.mirror
        return crop(images_NCHW, self.padding, self.fill, top_left, mirrored)


def crop(images_NCHW: Tensor, padding: int, fill: float, top_left_2N: Tensor, mirrored_N: Tensor) -> Tensor:
    """Pad, then cut from each image the window of the old size at its own place, mirrored where asked.

    One gather: the index of each pixel's origin in the padded plane is row · width + column.
    """
    count, channels, height, width = images_NCHW.shape
    padded = nn.functional.pad(images_NCHW, (padding,) * 4, value=fill)
    columns_W = torch.arange(width)
    row_NH1 = (top_left_2N[0].unsqueeze(1) + torch.arange(height)).unsqueeze(2)
    column_NW = top_left_2N[1].unsqueeze(1) + torch.where(mirrored_N.unsqueeze(1), width - 1 - columns_W, columns_W)
    origin_NHW = row_NH1 * padded.shape[3] + column_NW.unsqueeze(1)
    origin = origin_NHW.view(count, 1, -1).expand(-1, channels, -1)
    return padded.flatten(2).gather(2, origin).view_as(images_NCHW)


@dataclass(eq=False)
class MemorySource(Source):
    """uint8 images (N, C, H, W) in memory. Subsets share them."""

    images: Tensor
    labels: Tensor
    normalization: Normalization
    augmentation: Augmentation
    rows: Tensor | None = None  # of each label's image; None where they correspond

    def subset(self, indices: Tensor) -> MemorySource:
        rows = indices if self.rows is None else self.rows[indices]
        return MemorySource(self.images, self.labels[indices], self.normalization, self.augmentation, rows)

    def batches(self, plan: Plan, *, workers: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        for indices, seed in plan:
            rows = indices if self.rows is None else self.rows[indices]
            images = self.normalization(self.images[rows])
            yield images if seed is None else self.augmentation(images, seed), self.labels[indices]
