"""The interface of data sets: two sources of batches, and a few facts.

A source yields the batches of a *plan*: for each batch the indices of its images and a seed. The seed alone determines
the augmentation (None: no augmentation), so the same plan gives every norm the same pixels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `memnorm data list` does without torch
    from torch import Tensor

Plan = Iterable["tuple[Tensor, int | None]"]


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
    about: str
