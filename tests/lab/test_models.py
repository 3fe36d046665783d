"""The built-in networks: size, names, layers, norms, images and options.

Counts and shapes are taken on torch's meta device, where a network has shapes and no memory.
"""

import contextlib
import hashlib
import importlib

import pytest
import torch
from helpers.common import randn
from helpers.networks import CONVOLUTIONS, GIANTS, HANDY, SLOW_GIANTS, build, layers, one_group, outline
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import memnorm
from memnorm.lab import models
from memnorm.lab.errors import UsageError
from memnorm.lab.models.cifar import Subsample
from memnorm.lab.models.imagenet import Pyramid

COUNTS = {
    ("resnet8", 10): 75_290,
    ("resnet20", 10): 269_722,
    ("resnet20", 100): 275_572,
    ("resnet56", 10): 853_018,
    ("resnet110", 10): 1_727_962,
    ("nin", 10): 969_822,
    ("vgg16_cifar", 10): 14_728_266,
    ("small", 10): 14_746,
    ("prelu_net", 1000): 178_038_568,
}
# of names and shapes in torchvision's state_dict, and of its output for known weights
TORCHVISION_NAMES = {
    "resnet18": "761022b221a39ceb",
    "resnet34": "1a060acae7a42530",
    "resnet50": "3fa57287149b51c4",
    "vgg16_imagenet": "5f99e428d932f79e",
    "googlenet": "2da49e8b3dc68c7d",
}
TORCHVISION_OUTPUTS = {
    "resnet18": [1.6127244494829203, -0.623943597110364, -0.20591635653493662, 0.23851587833527127],
    "resnet50": [79.31314397921233, -18.101540532552477, -37.27234396151042, 6.821658951167045],
    "googlenet": [0.01731305769116709, -0.04156207782286177, -0.20836787639919235, -0.0078096297674269954],
}


def drawn_weights(model):
    kept = {id(parameter) for norm in layers(model, _BatchNorm, nn.GroupNorm) for parameter in norm.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in kept]


@pytest.fixture(scope="module", params=[*HANDY, *SLOW_GIANTS])
def network(request):
    """Each network once, in 32×32 or what it needs, with statistics that are not those of the start, in eval mode."""
    model = build(request.param, size=32)
    with torch.no_grad():
        for number, norm in enumerate(layers(model, _BatchNorm)):
            norm.running_mean.copy_(0.1 * randn(norm.num_features, seed=number))
            norm.running_var.copy_(1 + 0.1 * randn(norm.num_features, seed=1000 + number).abs())
    return model.eval()


@pytest.mark.parametrize(("name", "classes"), COUNTS)
def test_the_number_of_parameters_is_the_published_one(name, classes):
    model = outline(name, size=224, classes=classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == COUNTS[name, classes]


@pytest.mark.parametrize("name", TORCHVISION_NAMES)
def test_names_and_shapes_of_the_state_are_torchvisions(name):
    state = outline(name, size=224, classes=1000).state_dict()
    text = "".join(f"{key} {tuple(value.shape)}\n" for key, value in state.items())
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == TORCHVISION_NAMES[name]


def known(shape, number):
    """Numbers in [-1, 1) from integer arithmetic alone, the same on every machine."""
    count = torch.arange(torch.Size(shape).numel())
    return ((count * 2654435761 + number * 40503) % 2**32).double().reshape(shape) / 2**31 - 1


@pytest.mark.parametrize("name", TORCHVISION_OUTPUTS)
def test_the_output_for_known_weights_is_torchvisions(name):
    model = build(name, size=48).double().eval()  # at 48 pixels it matters whether a pooling rounds up
    with torch.no_grad():
        for number, (key, value) in enumerate(model.state_dict().items()):
            if value.dim() > 1:
                value.copy_(known(value.shape, number) * (6 / value[0].numel()) ** 0.5)
            elif key.endswith(("running_var", "weight")):
                value.copy_(1 + known(value.shape, number) / 2)
            elif value.is_floating_point():
                value.copy_(known(value.shape, number) / 4)
        output = model(known((1, 3, 48, 48), 7))
    expected = torch.tensor(TORCHVISION_OUTPUTS[name], dtype=torch.float64)
    torch.testing.assert_close(output[0, :4], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", TORCHVISION_NAMES)
def test_torchvision_computes_the_same_with_the_same_weights(name):
    try:
        torchvision = importlib.import_module("torchvision")
        options = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
        theirs = getattr(torchvision.models, name.replace("_imagenet", "_bn"))(weights=None, **options).eval()
    except Exception as error:
        pytest.skip(f"no working torchvision: {error}")
    ours = build(name, size=224, classes=1000).eval()
    ours.load_state_dict(theirs.state_dict())
    images = randn(1, 3, 224, 224, seed=0, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*HANDY, *GIANTS])
def test_each_image_from_the_least_size_on_gets_a_value_per_class(name):
    least = models.get(name).least_size
    for size, channels in ((least, 3), (28, 1), (33, 1), (64, 3)):
        if size >= least:
            model = outline(name, size=size, channels=channels, classes=7).eval()
            assert model(torch.empty(2, channels, size, size, device="meta")).shape == (2, 7)


@pytest.mark.parametrize("name", [*models.available(), "resnet14"])
def test_a_smaller_image_is_refused_with_the_least_size(name):
    least = models.get(name).least_size
    with pytest.raises(UsageError, match=f"at least {least}×{least} pixels; got {least}×{least - 1}"):
        models.build(name, classes=10, image_shape=(3, least, least - 1))


def test_the_refusal_of_a_small_image_names_networks_that_take_it():
    with pytest.raises(UsageError, match=r"Models for such images: small, nin, resnet8, .*resnet110\.$"):
        models.build("resnet18", classes=10, image_shape=(1, 4, 4))


@pytest.mark.parametrize("name", ["small", "nin", "resnet8"])
def test_digits_of_8_by_8_train(name):
    model = build(name, size=8, channels=1)
    model(randn(2, 1, 8, 8, seed=0, dtype=torch.float32)).sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_every_convolution_is_followed_by_a_norm_of_its_channels(name):
    model = outline(name, size=32, norm_layer=one_group)
    calls = []
    with contextlib.ExitStack() as hooks:
        for module in layers(model, nn.Conv2d, nn.GroupNorm):
            hooks.enter_context(module.register_forward_hook(lambda module, *_: calls.append(module)))
        model(torch.empty(2, 3, 32, 32, device="meta"))
    pairs = list(zip(calls[::2], calls[1::2], strict=True))
    assert len(pairs) == CONVOLUTIONS[name]
    for convolution, norm in pairs:
        assert isinstance(convolution, nn.Conv2d)
        assert norm.num_channels == convolution.out_channels


@pytest.mark.parametrize("name", HANDY)
def test_the_same_seed_gives_the_same_weights_whatever_the_norm(name):
    pairs = zip(
        drawn_weights(build(name)),
        drawn_weights(build(name, norm_layer=one_group)),
        strict=True,
    )
    assert all(torch.equal(one, other) for one, other in pairs)


@contextlib.contextmanager
def empty_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", HANDY)
def test_no_weight_is_left_as_memory_happened_to_be(name):
    with empty_memory_is_nan():
        model = build(name)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_a_converted_network_evaluates_bit_for_bit_as_before(network):
    images = randn(2, 3, 32, 32, seed=0, dtype=torch.float32)
    with torch.no_grad():
        before = network(images)
        memnorm.convert(network)
        try:
            assert torch.equal(network(images), before)
        finally:
            memnorm.to_batchnorm(network)


def test_gradients_reach_every_parameter(network):
    # In eval mode: in training a norm takes a constant off again, so that the bias before it has no gradient.
    assert not network.training
    loss = network(randn(2, 3, 32, 32, seed=1, dtype=torch.float32)).square().mean()
    gradients = torch.autograd.grad(loss, list(network.parameters()))
    still = [name for (name, _), one in zip(network.named_parameters(), gradients, strict=True) if not one.any()]
    assert not still


def test_the_shortcut_takes_every_second_pixel_and_adds_channels_of_zeros():
    x = randn(2, 3, 5, 6, seed=0)
    y = Subsample(2, 4)(x)
    assert torch.equal(y[:, :3], x[:, :, ::2, ::2])
    assert y.shape == (2, 7, 3, 3)
    assert not y[:, 3:].any()


@pytest.mark.parametrize(("name", "last"), [("resnet20", "bn2"), ("resnet18", "bn2"), ("resnet50", "bn3")])
def test_a_block_whose_last_norm_is_silent_returns_its_shortcut_after_relu(name, last):
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


@pytest.mark.parametrize("name", ["small", "nin", "vgg16_cifar", "vgg16_imagenet", "googlenet", "prelu_net"])
def test_every_norm_is_followed_by_a_relu(name):
    model = outline(name, size=32, norm_layer=one_group)
    kind = nn.PReLU if name == "prelu_net" else nn.ReLU
    order = layers(model, nn.Conv2d, nn.GroupNorm, nn.ReLU, nn.PReLU)[: 3 * CONVOLUTIONS[name]]
    assert [type(module) for module in order] == [nn.Conv2d, nn.GroupNorm, kind] * CONVOLUTIONS[name]


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


def test_prelu_net_learns_a_slope_per_channel_from_a_quarter():
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


@pytest.mark.parametrize("depth", [8, 14, 26, 62, 1202])
def test_a_resnet_of_any_depth_6n_plus_2_is_known_by_its_name(depth):
    assert models.get(f"resnet{depth}")
    if depth < 100:
        assert len(layers(outline(f"resnet{depth}"), nn.Conv2d)) == depth - 1


@pytest.mark.parametrize(("size", "head"), [(32, 1), (64, 1), (65, 3), (224, 3)])
def test_vgg16_is_cifars_up_to_64_pixels_and_imagenets_above(size, head):
    assert len(layers(outline("vgg16", size=size), nn.Linear)) == head


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ResNet-56", "Did you mean resnet56"),
        ("resnet_50", "Did you mean resnet50"),
        ("VGG-16", "Did you mean vgg16"),
        ("gogglenet", "Did you mean googlenet"),
        ("prelunet", "Did you mean prelu_net"),
        ("zzz", "unknown model 'zzz'. Available: small, nin, resnet8,"),
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
