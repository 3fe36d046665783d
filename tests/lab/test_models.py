"""The built-in networks: their size, their names, where their norms are, and which images they take.

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

COUNTS = {
    ("resnet8", 10): 75_290,
    ("resnet20", 10): 269_722,
    ("resnet20", 100): 275_572,
    ("resnet56", 10): 853_018,
    ("resnet110", 10): 1_727_962,
    ("nin", 10): 969_822,
    ("vgg16_cifar", 10): 14_728_266,
    ("small", 10): 14_746,
    ("resnet18", 1000): 11_689_512,
    ("resnet34", 1000): 21_797_672,
    ("resnet50", 1000): 25_557_032,
    ("vgg16_imagenet", 1000): 138_365_992,
    ("googlenet", 1000): 6_624_904,
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


@pytest.mark.parametrize(
    ("name", "size", "channels"),
    [
        (name, size, channels)
        for name in (*HANDY, *GIANTS)
        for size, channels in ((28, 1), (33, 1), (64, 3))
        if size >= models.get(name).least_size
    ],
)
def test_each_image_gets_a_value_per_class(name, size, channels):
    model = outline(name, size=size, channels=channels, classes=7).eval()
    assert model(torch.empty(2, channels, size, size, device="meta")).shape == (2, 7)


def test_an_image_need_not_be_square():
    model = models.build("resnet8", classes=10, image_shape=(1, 8, 12))
    assert model(randn(2, 1, 8, 12, seed=0, dtype=torch.float32)).shape == (2, 10)


@pytest.mark.parametrize("name", [*HANDY, *GIANTS])
def test_the_least_image_size_goes_through(name):
    size = models.get(name).least_size
    model = outline(name, size=size).eval()
    assert model(torch.empty(2, 3, size, size, device="meta")).shape == (2, 10)


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


@pytest.mark.parametrize("name", [*HANDY, *GIANTS])
def test_no_batch_norm_is_left_when_another_norm_is_asked_for(name):
    assert not layers(outline(name, size=32, norm_layer=one_group), _BatchNorm)


@pytest.mark.parametrize("name", HANDY)
def test_the_same_seed_gives_the_same_weights_whatever_the_norm(name):
    pairs = zip(
        drawn_weights(build(name)),
        drawn_weights(build(name, norm_layer=one_group)),
        strict=True,
    )
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("name", HANDY)
def test_another_seed_gives_other_weights(name):
    pairs = zip(drawn_weights(build(name)), drawn_weights(build(name, seed=1)), strict=True)
    assert all(not torch.equal(one, other) for one, other in pairs if one.dim() > 1)


@contextlib.contextmanager
def empty_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", models.available())
def test_on_the_meta_device_a_network_takes_no_memory(name):
    assert all(tensor.is_meta for tensor in outline(name, size=32).state_dict().values())


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


@pytest.mark.parametrize("network", SLOW_GIANTS, indirect=True)
def test_initial_weights_of_the_giants_have_the_intended_spread(network):
    slope = 0.25 if layers(network, nn.PReLU) else 0
    for layer in (layers(network, nn.Conv2d)[3], *layers(network, nn.Linear)[:2]):
        fan_out = layer.weight.shape[0] * layer.weight[0, 0].numel()
        std = (2 / (1 + slope**2) / fan_out) ** 0.5 if layer.weight.dim() == 4 else 0.01
        torch.testing.assert_close(layer.weight.std().item(), std, rtol=0.01, atol=0)
