"""Asking for a built-in network: its names and options, and which requests are refused."""

import pytest
import torch
from helpers.networks import layers, outline
from torch import nn

from memnorm.lab import models
from memnorm.lab.errors import UsageError


@pytest.mark.parametrize("name", models.available())
def test_an_entry_says_what_it_is_and_where_it_comes_from(name):
    entry = models.get(name)
    assert entry.name == name
    assert entry.title
    assert entry.paper
    assert entry.least_size <= entry.image_size


@pytest.mark.parametrize("depth", [8, 14, 26, 62, 1202])
def test_a_resnet_of_any_depth_6n_plus_2_is_known_by_its_name(depth):
    entry = models.get(f"resnet{depth}")
    assert entry.name == f"resnet{depth}"
    if depth < 100:
        assert len(layers(outline(entry.name), nn.Conv2d)) == depth - 1


@pytest.mark.parametrize("depth", [18, 34, 50])
def test_resnets_of_imagenet_keep_their_names(depth):
    assert models.get(f"resnet{depth}").image_size == 224


@pytest.mark.parametrize(("size", "head"), [(32, 1), (64, 1), (65, 3), (224, 3)])
def test_vgg16_is_cifars_up_to_64_pixels_and_imagenets_above(size, head):
    assert len(layers(outline("vgg16", size=size), nn.Linear)) == head


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("resnet21", "Did you mean resnet20 or resnet26?"),
        ("resnet2", "Did you mean resnet8 or resnet14?"),
        ("resnet020", "Did you mean resnet20?"),
        ("ResNet-56", "Did you mean resnet56?"),
        ("resnet_50", "Did you mean resnet50?"),
        ("VGG-16", "Did you mean vgg16?"),
        ("gogglenet", "Did you mean googlenet?"),
        ("prelunet", "Did you mean prelu_net?"),
        ("zzz", "unknown model 'zzz'. Available: small, nin, resnet8,"),
        ("", "unknown model ''. Available"),
        ("nets.mine", "package.module:factory"),
    ],
)
def test_an_unknown_name_gets_the_nearest_ones(name, hint):
    with pytest.raises(UsageError) as caught:
        models.build(name, classes=10, image_shape=(3, 32, 32))
    assert hint in str(caught.value)
    assert "prelu_net" in str(caught.value)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"name": "nin", "width": 3}, "model nin takes no option width; its options are dropout"),
        ({"name": "resnet20", "depth": 56}, "model resnet20 takes no option depth; its options are width"),
        ({"name": "resnet18", "width": 3, "deep": 1}, "model resnet18 takes no option deep, width; it has no options"),
        ({"name": "vgg16", "dropout": 0.1}, "model vgg16_cifar takes no option dropout"),
        ({"name": "nin", "dropout": 1}, "dropout must be at least 0 and below 1; got 1"),
        ({"name": "prelu_net", "dropout": "half"}, "dropout must be at least 0 and below 1; got 'half'"),
        ({"name": "resnet20", "width": 0}, "width must be a whole number of at least 1; got 0"),
        ({"name": "small", "width": 1.5}, "width must be a whole number of at least 1; got 1.5"),
        ({"name": "small", "classes": 0}, "classes must be a whole number of at least 1; got 0"),
        ({"name": "small", "classes": True}, "classes must be a whole number"),
        ({"name": "small", "image_shape": (3, 32)}, "image_shape must be (channels, height, width)"),
        ({"name": "small", "image_shape": (0, 32, 32)}, "image_shape must be (channels, height, width)"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(request_, message):
    with pytest.raises(UsageError) as caught:
        models.build(**{"classes": 10, "image_shape": (3, 32, 32), **request_})
    assert message in str(caught.value)


@pytest.mark.parametrize(("name", "widths"), [("resnet8", [4, 8, 16]), ("small", [4, 8, 8])])
def test_width_scales_every_stage(name, widths):
    model = outline(name, width=4)
    seen = [conv.out_channels for conv in layers(model, nn.Conv2d)]
    assert sorted(set(seen)) == sorted(set(widths))
    assert model(torch.empty(2, 3, 8, 8, device="meta")).shape == (2, 10)
