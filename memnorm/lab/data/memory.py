"""Images held in memory as bytes: a batch is a gather, a normalisation and an augmentation."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from memnorm.lab.data.augment import Augmentation, Normalization
from memnorm.lab.data.source import Plan, Source


class MemorySource(Source):
    """uint8 images (N, C, H, W). Subsets share them."""

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        normalization: Normalization,
        augmentation: Augmentation,
        rows: Tensor | None = None,
    ) -> None:
        self.labels = labels
        self._images = images
        self._rows = rows  # of each label's image; None where they correspond
        self._normalization = normalization
        self._augmentation = augmentation

    def subset(self, indices: Tensor) -> MemorySource:
        rows = indices if self._rows is None else self._rows[indices]
        return MemorySource(self._images, self.labels[indices], self._normalization, self._augmentation, rows)

    def batches(self, plan: Plan, *, workers: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        for indices, seed in plan:
            rows = indices if self._rows is None else self._rows[indices]
            images = self._normalization(self._images[rows])
            yield images if seed is None else self._augmentation(images, seed), self.labels[indices]
