"""One model of every module of torchvision that has batch norm, detectors and video models included."""

import functools
import inspect

import pytest
import torch
from helpers.ecosystem import Sample, check_family, pictures, sizes
from helpers.optional import library

models = library("torchvision.models")
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.filterwarnings("error::memnorm.MemnormWarning")]

FAMILIES = {}
for name in models.list_models():
    FAMILIES.setdefault(models.get_model_builder(name).__module__.removeprefix("torchvision.models."), []).append(name)


def build(name):
    """Without weights, which would be downloaded. Detectors take small images and return a few boxes of any score."""
    options = {"weights": None}
    if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
        options |= {"weights_backbone": None, "num_classes": 2}
    model = models.get_model(name, **options)
    if hasattr(model, "transform"):
        model.transform.min_size, model.transform.max_size = (128,), 128
        head = getattr(model, "roi_heads", model)
        head.score_thresh, head.detections_per_img = 0.0, 4
    return model


def detection(size, seed):
    """Two images with a box each, its mask and its keypoints."""
    images = list(pictures(3, size, size, seed=seed).eval[0])
    box = torch.tensor([[size / 8, size / 8, size / 2, size / 2]])
    mask = torch.zeros(1, size, size, dtype=torch.uint8)
    mask[:, size // 8 : size // 2, size // 8 : size // 2] = 1
    target = {"boxes": box, "labels": torch.ones(1, dtype=torch.long), "masks": mask}
    target["keypoints"] = torch.tensor([[[size / 4, size / 4, 1.0]] * 17])
    return Sample((images, [dict(target) for _ in images]), (images,))


def flow(size, seed):
    pair = (*pictures(3, size, size, seed=seed).eval, *pictures(3, size, size, seed=seed + 1).eval)
    return Sample(pair, pair)


def samples(family):
    for size in sizes(320):
        if family.startswith("detection"):
            yield lambda seed, size=size: detection(size, seed)
        elif family.startswith("optical_flow"):
            yield lambda seed, size=size: flow(size, seed)
        elif family.startswith("video"):
            yield lambda seed, size=size: pictures(3, 16, size, size, seed=seed)
        else:
            yield lambda seed, size=size: pictures(3, size, size, seed=seed)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_trains_two_way_and_returns(family, record_property):
    builders = {name: functools.partial(build, name) for name in FAMILIES[family]}
    check_family(builders, lambda _model: samples(family), record_property)
