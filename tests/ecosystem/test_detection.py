"""Torchvision's detectors with a frozen backbone: convert, train on boxes drawn on photographs, and return."""

import copy
import importlib.util
import math
from pathlib import Path

import pytest
import torch
from helpers.optional import library
from torch import nn

import memnorm
from memnorm.errors import NothingToConvert

models = library("torchvision.models")
Image = library("PIL.Image")
to_tensor = library("torchvision.transforms.functional").to_tensor
FrozenBatchNorm2d = library("torchvision.ops").FrozenBatchNorm2d
overwrite_eps = library("torchvision.models.detection._utils").overwrite_eps

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.filterwarnings("error::memnorm.MemnormWarning")]
SIZE = 160
DETECTORS = ["fasterrcnn_resnet50_fpn", "retinanet_resnet50_fpn"]


@pytest.fixture(scope="module")
def photographs():
    """Two photographs that come with ultralytics, small, as images (3, SIZE, SIZE) in [0, 1]."""
    package = importlib.util.find_spec("ultralytics")
    if package is None:
        pytest.skip("ultralytics is not installed, which has the photographs")
    files = sorted((Path(package.origin).parent / "assets").glob("*.jpg"))
    assert len(files) == 2
    return [to_tensor(Image.open(file).convert("RGB").resize((SIZE, SIZE))) for file in files]


def with_boxes(photographs, count):
    """`count` of the images with a filled red box on each, and their targets."""
    images, targets = [], []
    for index, photograph in enumerate(photographs[:count]):
        image, left, top = photograph.clone(), 20 + 40 * index, 30 + 20 * index
        image[:, top : top + 60, left : left + 70] = torch.tensor([1.0, 0.0, 0.0]).view(3, 1, 1)
        images.append(image)
        box = torch.tensor([[left, top, left + 70, top + 60]], dtype=torch.float32)
        targets.append({"boxes": box, "labels": torch.ones(1, dtype=torch.long)})
    return images, targets


@pytest.fixture
def detector(photographs, monkeypatch, record_property):
    """Build a detector as its factory does with pretrained weights. The weights are random, because the real ones are a
    download, with the statistics of the photographs. All tests of a detector are one in the record.
    """
    net = models.resnet50()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    net(torch.stack(photographs))
    weights = models.ResNet50_Weights.IMAGENET1K_V1
    monkeypatch.setattr(type(weights), "get_state_dict", lambda *_, **__: copy.deepcopy(net.state_dict()))

    def build(name):
        record_property("test", name)
        sizes = {"min_size": SIZE, "max_size": SIZE}
        every = {"box_score_thresh": 0.0} if name.startswith("faster") else {"score_thresh": 0.0}
        model = models.get_model(name, weights=None, weights_backbone=weights, num_classes=2, **sizes, **every)
        assert sum(isinstance(module, FrozenBatchNorm2d) for module in model.modules()) == 53
        return model

    return build


def features(model, images):
    """What the backbone computes in eval mode."""
    with torch.no_grad():
        return copy.deepcopy(model.backbone).eval()(torch.stack(images))


def train(model, images, targets, steps=10):
    """The losses of these steps."""
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.005, momentum=0.9)
    losses = []
    for _ in range(steps):
        loss = sum(model(images, targets).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("name", DETECTORS)
def test_without_the_option_the_error_names_it_and_counts_the_frozen_layers(detector, name):
    with pytest.raises(NothingToConvert, match=r'53 frozen layers, such as .*bn1 \(convert\(model, frozen="convert"\)'):
        memnorm.convert(detector(name), "two_way")


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", DETECTORS)
def test_a_frozen_detector_trains_and_returns(detector, photographs, name, batch, record_property):
    frozen = detector(name)
    model = memnorm.convert(copy.deepcopy(frozen), "two_way", frozen="convert")
    torch.testing.assert_close(features(model, photographs), features(frozen, photographs), rtol=1e-3, atol=1e-3)
    images, targets = with_boxes(photographs, batch)
    losses = train(model, images, targets)
    record_property("batch", batch)
    record_property("losses", [round(loss, 3) for loss in losses])
    assert all(map(math.isfinite, losses))
    assert sum(losses[-3:]) < sum(losses[:3])

    frozen.load_state_dict(memnorm.plain_state_dict(model))
    torch.testing.assert_close(features(frozen, images), features(model, images), rtol=1e-3, atol=1e-3)
    model.eval()
    before = model(images)
    plain = memnorm.to_batchnorm(model)
    assert sum(type(module) is nn.BatchNorm2d for module in plain.modules()) == 53
    assert len(before[0]["boxes"]) > 0
    torch.testing.assert_close(plain(images), before, rtol=0, atol=0)


def test_a_detector_with_eps_zero_trains_and_returns(detector, photographs):
    """Torchvision sets eps to 0 for the weights COCO_V1."""
    frozen = detector(DETECTORS[0])
    overwrite_eps(frozen, 0.0)
    model = memnorm.convert(copy.deepcopy(frozen), "two_way", frozen="convert")
    torch.testing.assert_close(features(model, photographs), features(frozen, photographs), rtol=1e-3, atol=1e-3)
    images, targets = with_boxes(photographs, 2)
    assert all(map(math.isfinite, train(model, images, targets, steps=2)))
    frozen.load_state_dict(memnorm.plain_state_dict(model))
    torch.testing.assert_close(features(frozen, images), features(model, images), rtol=1e-3, atol=1e-3)
