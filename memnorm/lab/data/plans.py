"""The order of the training images: which ones make up batch i, and the seed of its augmentation.

The plan of iteration i depends on the seed and i alone, never on what was drawn before, so a resumed run uses
`start=i`. An epoch is one pass over the images:

- `shuffle`: a random permutation cut into batches; the last one may be smaller.
- `sorted`: the same with all images of a class in a row; the order of the classes and within a class is random.
- `few-classes`: every batch holds images of at most `classes_per_batch` classes, each image once per epoch. Each class
  is shuffled and cut into runs of batch_size/classes_per_batch images; the runs, sorted by class in random class order,
  are laid out in classes_per_batch columns, each column is shuffled, and a row is a batch. So a batch has one run from
  each part of the class list; where the last run of a class is short, so is its batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from memnorm.lab.data.source import mix
from memnorm.lab.errors import UsageError


def order(
    labels: Tensor,
    *,
    sampler: str = "shuffle",
    batch_size: int,
    iterations: int,
    seed: int,
    start: int = 0,
    classes_per_batch: int = 2,
    augment: bool = True,
) -> Iterator[tuple[Tensor, int | None]]:
    """Indices and augmentation seed of the iterations from `start` up to `iterations`."""
    length = epoch_length(labels, sampler=sampler, batch_size=batch_size, classes_per_batch=classes_per_batch)

    def plan() -> Iterator[tuple[Tensor, int | None]]:
        epoch, batches = -1, []
        for iteration in range(start, iterations):
            if iteration // length != epoch:
                epoch = iteration // length
                generator = torch.Generator().manual_seed(mix(seed, "order", epoch))
                batches = _epoch(labels, sampler, batch_size, classes_per_batch, generator)
            yield batches[iteration % length], mix(seed, "augment", iteration) if augment else None

    return plan()


def epoch_length(labels: Tensor, *, sampler: str = "shuffle", batch_size: int, classes_per_batch: int = 2) -> int:
    """Batches in an epoch."""
    _check(labels, sampler, batch_size, classes_per_batch)
    if sampler != "few-classes":
        return -(-len(labels) // batch_size)
    columns = min(classes_per_batch, batch_size)
    runs = -(-torch.bincount(labels) // (batch_size // columns))
    return -(-int(runs.sum()) // columns)


def sweep(count: int, batch_size: int) -> Iterator[tuple[Tensor, None]]:
    """Every image once, in order, not augmented: the plan of an evaluation."""
    return ((indices, None) for indices in torch.arange(count).split(batch_size))


def _check(labels: Tensor, sampler: str, batch_size: int, classes_per_batch: int) -> None:
    if not 1 <= batch_size <= len(labels):
        raise UsageError(
            f"batch_size must be between 1 and the number of training images, {len(labels):,}; got {batch_size}"
        )
    if sampler == "few-classes" and batch_size > classes_per_batch and batch_size % classes_per_batch:
        raise UsageError(
            f"the sampler few-classes gives each class the same part of a batch: batch_size must be a multiple of "
            f"classes_per_batch; got {batch_size} and {classes_per_batch}"
        )


def _epoch(
    labels: Tensor, sampler: str, batch_size: int, classes_per_batch: int, generator: torch.Generator
) -> list[Tensor]:
    if sampler == "shuffle":
        return list(torch.randperm(len(labels), generator=generator).split(batch_size))
    indices, place = _by_class(labels, generator)
    if sampler == "sorted":
        return list(indices.split(batch_size))
    return _few_classes(indices, place, batch_size, min(classes_per_batch, batch_size), generator)


def _by_class(labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """All indices, class after class in random order, and the place of each one's class in that order."""
    shuffled = torch.randperm(len(labels), generator=generator)
    place_of_class = torch.randperm(int(labels.max()) + 1, generator=generator)
    place, by_place = place_of_class[labels[shuffled]].sort(stable=True)
    return shuffled[by_place], place


def _few_classes(
    indices: Tensor, place: Tensor, batch_size: int, columns: int, generator: torch.Generator
) -> list[Tensor]:
    share = batch_size // columns
    counts = torch.bincount(place)
    first = counts.cumsum(0) - counts
    runs = -(-counts // share)
    run = (runs.cumsum(0) - runs)[place] + (torch.arange(len(place)) - first[place]) // share
    rows = -(-int(runs.sum()) // columns)
    shuffle = torch.stack([torch.randperm(rows, generator=generator) for _ in range(columns)])
    batch, by_batch = shuffle[run // rows, run % rows].sort(stable=True)
    return list(indices[by_batch].split(torch.bincount(batch, minlength=rows).tolist()))
