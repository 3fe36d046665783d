"""A model for the trainers, its data, and the plain loop that every trainer must equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.common import assert_same_state, randn, randomize
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import memnorm

STEPS, BATCH = 6, 4
OPTIONS = {"memory_size": 3, "decay": 0.7}


class Segmenter(nn.Module):
    """Inputs by name; a dictionary out, with a list of levels in it."""

    def __init__(self) -> None:
        super().__init__()
        self.color = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.depth = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout2d(0.25))
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, image: Tensor, depth: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        fine = self.head(self.color(image) + self.depth(depth))
        levels = [{"logits": fine}, {"logits": F.avg_pool2d(fine, 2)}]
        if labels is None:
            return {"levels": levels}
        return {"loss": F.cross_entropy(fine, labels), "levels": levels}


class Scenes(Dataset):
    """Colour, depth and a label for each pixel."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        image, depth = (randn(channels, 6, 6, seed=index, dtype=torch.float32) for channels in (3, 1))
        return {"image": image + index % 3, "depth": depth, "labels": (image[0] > depth[0]).long()}


def scenes(accumulate: int = 1) -> DataLoader:
    """The loader has its own generator, so that dropout draws the same random numbers in every loop."""
    return DataLoader(Scenes(BATCH * accumulate * STEPS), batch_size=BATCH, generator=torch.Generator())


def segmenter() -> Any:
    model = Segmenter()
    randomize(model, seed=3)
    return memnorm.convert(model, **OPTIONS)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def plain_loop(
    *,
    accumulate: int = 1,
    dtype: torch.dtype | None = None,
    schedule: Any = None,
    dropout: float = 0.25,
    **options: Any,
) -> Any:
    """The loop that a user would write by hand. Dropout draws from torch's generator, seeded here."""
    model = segmenter()
    model.depth[2].p = dropout
    torch.manual_seed(7)
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer, **options)
    strength = memnorm.StrengthSchedule(model, STEPS, **(schedule or {}))
    for number, batch in enumerate(scenes(accumulate), 1):
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(**batch)["loss"]
        (loss / accumulate).backward()
        if number % accumulate == 0:
            optimizer.step()
            strength.step()
            optimizer.zero_grad()
    return model


def two_way_segmenter() -> Any:
    model = Segmenter()
    randomize(model, seed=3)
    return memnorm.convert(model, "two_way", warmup=2, decay=0.7)


def assert_two_way_loop(model: Any, accumulate: int) -> None:
    """The model is that of the plain loop with two-way memory, which needs only the conversion. Every micro-batch of an
    update has the update's age.
    """
    twin = two_way_segmenter()
    torch.manual_seed(7)
    optimizer = sgd(twin)
    for number, batch in enumerate(scenes(accumulate), 1):
        (twin(**batch)["loss"] / accumulate).backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(model, twin)
    weight = two_way_weight(accumulate)
    assert float(model.color[1].running_weight) == pytest.approx(weight)
    assert float(model.color[1].backward_weight) == pytest.approx(weight)


def two_way_weight(accumulate: int) -> float:
    """W of a norm after that loop: every micro-batch of an update has the update's age."""
    return BATCH * 36 * accumulate * sum(0.7**age for age in range(1, STEPS + 1))
