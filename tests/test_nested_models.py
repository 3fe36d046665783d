"""Models like those for detection and segmentation: several inputs, lists and dictionaries of them, nested outputs."""

from typing import Any, NamedTuple

import pytest
import torch
from helpers.common import assert_same_state, randn, randomize
from torch import Tensor, nn
from torch.nn import functional as F

import memnorm


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1))


class Detector(Trunk):
    """A list of images of different sizes and a list of targets in; in training, a dictionary of losses out."""

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        maps = [self.features(image[None])[0] for image in images]
        boxes = [F.mse_loss(m[:2].mean((1, 2)), t["center"]) for m, t in zip(maps, targets, strict=True)]
        kinds = [F.mse_loss(m[2].mean(), t["kind"]) for m, t in zip(maps, targets, strict=True)]
        return {"boxes": torch.stack(boxes).sum(), "kinds": torch.stack(kinds).sum()}


class Levels(NamedTuple):
    fine: Tensor
    coarse: tuple[Tensor, dict[str, Tensor]]


class Segmenter(Trunk):
    """A dictionary in, a named tuple with a dictionary inside out."""

    def forward(self, scene: dict[str, Any]) -> Levels:
        fine = self.features(torch.cat([scene["image"], scene["depth"]["map"]], 1))
        return Levels(fine, (F.avg_pool2d(fine, 2), {"mean": fine.mean((2, 3))}))


def scene(seed: int, *, size: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    images = [randn(2, 4 + index, size, seed=10 * seed + index, dtype=torch.float32) + index for index in range(3)]
    targets = [{"center": image.mean((1, 2)), "kind": image.amax()} for image in images]
    return images, targets


def detect(seed: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    images, targets = scene(seed, size=5)
    return (images,), {"targets": targets}, lambda losses: sum(losses.values())


def segment(seed: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    image, depth = (randn(2, 1, 6, 6, seed=10 * seed + index, dtype=torch.float32) for index in range(2))
    batch = {"image": image, "depth": {"map": depth, "unit": "m"}, "names": ["a", "b"]}

    def loss(levels: Levels) -> Tensor:
        return levels.coarse[1]["mean"].square().sum() + levels.coarse[0].square().mean()

    return (batch,), {}, loss


@pytest.mark.parametrize(("kind", "data"), [(Detector, detect), (Segmenter, segment)])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_double_forward_is_the_loop_by_hand(kind, data, accumulate):
    model, by_hand = (memnorm.convert(kind(), memory_size=4) for _ in range(2))
    for each in (model, by_hand):
        randomize(each, seed=2)
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.02) for each in (model, by_hand))
    memnorm.double_forward(model, optimizer)
    for step in range(3):
        batches = [data(2 * step + index) for index in range(accumulate)]
        for args, kwargs, loss in batches:
            loss(model(*args, **kwargs)).backward()
            with memnorm.recording(by_hand, False):
                loss(by_hand(*args, **kwargs)).backward()
        optimizer.step()
        other.step()
        for args, kwargs, _ in batches:
            memnorm.rerecord(by_hand, *args, **kwargs)
        optimizer.zero_grad()
        other.zero_grad()
    assert_same_state(model, by_hand)
    calls = 3 if kind is Detector else 1  # the detector normalises image by image
    assert int(model.features[1].num_batches_tracked) == 3 * accumulate * calls


@pytest.mark.parametrize(("kind", "data"), [(Detector, detect), (Segmenter, segment)])
def test_an_output_of_which_one_tensor_is_used_counts_as_used(kind, data):
    """Backward goes through a single leaf of the nested output."""
    model = memnorm.convert(kind())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    memnorm.double_forward(model, optimizer)
    args, kwargs, _ = data(1)
    output = model(*args, **kwargs)
    part = output["kinds"] if kind is Detector else output.coarse[1]["mean"].sum()
    part.backward()
    optimizer.step()
    assert int(model.features[1].num_batches_tracked) == (3 if kind is Detector else 1)


def test_of_two_forwards_only_the_one_whose_nested_output_went_into_the_step_is_remembered():
    model = memnorm.convert(Segmenter())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    memnorm.double_forward(model, optimizer)
    (used, _, loss), (unused, _, _) = segment(1), segment(2)
    output = model(*used)
    model(*unused)
    loss(output).backward()
    optimizer.step()
    assert int(model.features[1].num_batches_tracked) == 1
