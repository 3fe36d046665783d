"""The built-in networks layer by layer: blocks, maps, pooling, rectifiers, dropout, initial weights."""

import pytest
import torch
from helpers.common import randn
from helpers.networks import CONVOLUTIONS, build, layers, one_group, outline
from torch import nn

import memnorm
from memnorm.lab import models
from memnorm.lab.models.cifar import Subsample
from memnorm.lab.models.imagenet import Pyramid


def test_shortcuts_of_a_cifar_resnet_have_no_parameters():
    model = outline("resnet20")
    assert len(layers(model, Subsample)) == 2
    assert not [name for name, _ in model.named_parameters() if "downsample" in name]


def test_the_shortcut_takes_every_second_pixel_and_adds_channels_of_zeros():
    x = randn(2, 3, 5, 6, seed=0)
    y = Subsample(2, 4)(x)
    assert torch.equal(y[:, :3], x[:, :, ::2, ::2])
    assert y.shape == (2, 7, 3, 3)
    assert not y[:, 3:].any()


@pytest.mark.parametrize(("name", "last"), [("resnet20", "bn2"), ("resnet18", "bn2"), ("resnet50", "bn3")])
def test_a_block_whose_last_norm_is_silent_returns_its_rectified_shortcut(name, last):
    model = build(name, size=32).eval()
    first, second = (model.get_submodule(f"layer2.{index}") for index in (0, 1))
    x = randn(1, first.conv1.in_channels, 8, 8, seed=0, dtype=torch.float32)
    with torch.no_grad():
        for block in (first, second):
            getattr(block, last).weight.zero_()
        y = first(x)
        assert torch.equal(y, first.downsample(x).relu())
        assert torch.equal(second(y - 0.5), (y - 0.5).relu())


def test_the_maps_of_a_cifar_resnet_have_16_32_and_64_channels_and_shrink_twice():
    model = outline("resnet20", size=32)
    x, shapes = torch.empty(1, 3, 32, 32, device="meta"), []
    for name, part in model.named_children():
        x = part(x)
        shapes += [x.shape[1:]] if name.startswith("layer") else []
    assert shapes == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]


@pytest.mark.parametrize(("name", "expected"), [("vgg16_cifar", (512, 4, 4)), ("vgg16_imagenet", (512, 3, 3))])
def test_pooling_rounds_up_in_cifars_vgg_and_down_in_imagenets(name, expected):
    features = outline(name, size=97).features
    assert features(torch.empty(1, 3, 97, 97, device="meta")).shape[1:] == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("small", [nn.AdaptiveAvgPool2d]),
        ("resnet20", [nn.AdaptiveAvgPool2d]),
        ("nin", [nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d]),
        ("vgg16_cifar", [*[nn.MaxPool2d] * 5, nn.AdaptiveAvgPool2d]),
        ("vgg16_imagenet", [*[nn.MaxPool2d] * 5, nn.AdaptiveAvgPool2d]),
        ("prelu_net", [*[nn.MaxPool2d] * 3, Pyramid]),
    ],
)
def test_pooling_is_of_the_published_kind(name, expected):
    model = outline(name, size=32)
    assert [type(module) for module in model.modules() if type(module) in {*expected, nn.MaxPool2d}] == expected


@pytest.mark.parametrize("name", ["small", "nin", "vgg16_cifar", "vgg16_imagenet", "googlenet", "prelu_net"])
def test_every_norm_is_followed_by_a_rectifier(name):
    model = outline(name, size=32, norm_layer=one_group)
    kind = nn.PReLU if name == "prelu_net" else nn.ReLU
    order = layers(model, nn.Conv2d, nn.GroupNorm, nn.ReLU, nn.PReLU)[: 3 * CONVOLUTIONS[name]]
    assert [type(module) for module in order] == [nn.Conv2d, nn.GroupNorm, kind] * CONVOLUTIONS[name]


@pytest.mark.parametrize("name", ["resnet8", "resnet18"])
def test_a_resnet_rectifies_before_its_first_block(name):
    parts = [part for part, _ in outline(name, size=32).named_children()]
    assert parts[:3] == ["conv1", "bn1", "relu"]


def test_the_maps_of_network_in_network_shrink_twice_by_two():
    model = outline("nin", size=32)
    shapes = [model[:end](torch.empty(1, 3, 32, 32, device="meta")).shape[1:] for end in (10, 21, 31)]
    assert shapes == [(96, 16, 16), (192, 8, 8), (10, 8, 8)]


def test_the_small_network_has_16_32_and_32_channels_and_halves_the_image_once():
    plan = [(conv.out_channels, conv.stride[0], conv.bias) for conv in layers(outline("small"), nn.Conv2d)]
    assert plan == [(16, 1, None), (32, 2, None), (32, 1, None)]


@pytest.mark.parametrize(
    ("name", "default"),
    [("nin", [0.5, 0.5]), ("vgg16_imagenet", [0.5, 0.5]), ("googlenet", [0.2]), ("prelu_net", [0.5, 0.5])],
)
def test_dropout_is_as_published_unless_asked_otherwise(name, default):
    assert [module.p for module in layers(outline(name), nn.Dropout)] == default
    assert [module.p for module in layers(outline(name, dropout=0.1), nn.Dropout)] == [0.1] * len(default)


@pytest.mark.parametrize(("name", "eps"), [("googlenet", 1e-3), ("resnet18", 1e-5), ("nin", 1e-5)])
@pytest.mark.parametrize("norm_layer", [nn.BatchNorm2d, memnorm.MemorizedBatchNorm2d])
def test_epsilon_is_a_thousandth_in_googlenet_only(name, eps, norm_layer):
    norms = layers(build(name, norm_layer=norm_layer), norm_layer)
    assert {norm.eps for norm in norms} == {eps}


def test_rectifiers_of_prelu_net_learn_a_slope_per_channel_from_a_quarter():
    with torch.device("meta"):
        slopes = layers(models.build("prelu_net", classes=10, image_shape=(3, 32, 32)), nn.PReLU)
    assert [one.num_parameters for one in slopes] == [96, *[256] * 5, *[512] * 10, 4096, 4096]
    assert {one.init for one in slopes} == {0.25}


def test_the_maps_of_prelu_net_are_those_of_the_paper():
    model = outline("prelu_net", size=224)
    shapes, x = [], torch.empty(1, 3, 224, 224, device="meta")
    for module in model.features:
        x = module(x)
        shapes += [tuple(x.shape[1:])] if isinstance(module, nn.Conv2d) else []
    expected = [(96, 112, 112), *[(256, 56, 56)] * 5, *[(512, 28, 28)] * 5, *[(512, 14, 14)] * 5]
    assert shapes == expected
    assert model.pyramid(x).shape == (1, 512 * 63)
    assert model.pyramid.levels == (7, 3, 2, 1)


def test_the_pyramid_holds_the_maxima_of_its_tiles_whatever_the_image_size():
    x = randn(2, 3, 6, 6, seed=0)
    y = Pyramid((2, 1))(x)
    tiles = [x[:, :, row : row + 3, column : column + 3].amax((2, 3)) for row in (0, 3) for column in (0, 3)]
    assert torch.equal(y[:, :12].reshape(2, 3, 4), torch.stack(tiles, 2))
    assert torch.equal(y[:, 12:], x.amax((2, 3)))
    assert Pyramid((2, 1))(x[:, :, :1, :1]).shape == y.shape


@pytest.mark.parametrize(
    ("name", "layer", "std"),
    [
        ("resnet20", "layer3.0.conv1", (2 / (64 * 9)) ** 0.5),
        ("resnet18", "conv1", (2 / (64 * 49)) ** 0.5),
        ("googlenet", "inception3a.branch2.1.conv", (2 / (128 * 9)) ** 0.5),
        ("googlenet", "fc", 0.01),
        ("vgg16_cifar", "features.3", (2 / (64 * 9)) ** 0.5),
        ("nin", "3", 0.05),
        ("nin", "11", 0.05),
    ],
)
def test_initial_weights_have_the_intended_spread(name, layer, std):
    weight = build(name).get_submodule(layer).weight.detach()
    torch.testing.assert_close(weight.std().item(), std, rtol=0.05, atol=0)
    torch.testing.assert_close(weight.mean().item(), 0.0, rtol=0, atol=0.05 * std)


@pytest.mark.parametrize("name", ["nin", "vgg16_cifar"])
def test_biases_start_at_zero(name):
    assert not any(conv.bias.any() for conv in layers(build(name), nn.Conv2d))
