"""Moving average batch norm: its equations over whole trajectories, and the centred weights."""

from copy import deepcopy

import pytest
import torch
from helpers.common import LAYERS, SHAPES, assert_same_state, images, leaf, randn, randomize, small_net
from torch import nn
from torch.nn.utils import parametrize

import memnorm
from memnorm.errors import OptionError
from memnorm.norms.mabn import Centred, MovingAverageBatchNorm, centre_weights, settle_weights

EPS = 1e-5


def layer_of(channels=3, **options):
    layer = MovingAverageBatchNorm(channels, dtype=torch.float64, **options)
    randomize(layer, seed=5)
    return layer


def column(vector, x):
    return vector.view(1, -1, *[1] * (x.dim() - 2))


class Reference:
    """The method with every earlier χ² and Ψ kept, in the order of the authors' equations."""

    def __init__(self, *, window=32, max_ratio=5.0, warmup=100, correct_after=1000, momentum=0.02):
        self.window, self.max_ratio, self.momentum = window, max_ratio, momentum
        self.warmup, self.correct_after = warmup, max(warmup, correct_after)
        self.sizes, self.squares, self.products = [], [], []
        self.moving, self.weight = torch.ones(3, dtype=torch.float64), 0.0

    def average(self, history):
        """Over the newest batches that hold at most `window` images together; the newest in any case."""
        images, total = 0, 0.0
        for size, value in zip(reversed(self.sizes), reversed(history), strict=True):
            if images and images + size > self.window:
                break
            images, total = images + size, total + size * value
        return total / images

    def move(self, average):
        """The moving average is a sum of decaying weights divided by the sum of the weights."""
        decayed = (1 - self.momentum) * self.weight
        self.moving = (decayed * self.moving + self.momentum * average) / (decayed + self.momentum)
        self.weight = decayed + self.momentum

    def step(self, x, gamma, beta, grad):
        dims = [0, *range(2, x.dim())]
        before = len(self.sizes)
        self.sizes.append(len(x))
        self.squares.append(x.square().mean(dims))
        chi2 = self.average(self.squares) if before >= self.warmup else self.squares[-1]
        ratio = torch.ones_like(chi2)
        if before >= self.correct_after:
            ratio = ((chi2 + EPS) / (self.moving + EPS)).sqrt().clamp(1 / self.max_ratio, self.max_ratio)
        self.move(chi2)
        y = x / column((chi2 + EPS).sqrt(), x)
        z = column(gamma * ratio, x) * y + column(beta, x)
        grad_y = grad * column(gamma * ratio, x)
        self.products.append((grad_y * y).mean(dims))
        psi = self.average(self.products) if before >= self.warmup else self.products[-1]
        grad_x = (grad_y - y * column(psi, x)) / column((chi2 + EPS).sqrt(), x)
        return z, grad_x, (grad * column(ratio, x) * y).sum(dims), grad.sum(dims)


def assert_step_equals_the_reference(layer, reference, shape, step):
    x, grad = leaf(shape, seed=step), randn(*shape, seed=5000 + step)
    x.data.mul_(1 + 0.5 * (step % 4))
    y = layer(x)
    ours = [y, *torch.autograd.grad(y, [x, layer.weight, layer.bias], grad)]
    theirs = reference.step(x.detach(), layer.weight.detach(), layer.bias.detach(), grad)
    torch.testing.assert_close(ours, list(theirs), rtol=0, atol=1e-11)
    torch.testing.assert_close(layer.running_var, reference.moving, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 12, "warmup": 3, "correct_after": 9, "momentum": 0.3},
        {"window": 1, "warmup": 0, "correct_after": 0, "momentum": 0.1},
        {"window": 18, "warmup": 0, "correct_after": 1, "momentum": 0.02, "max_ratio": 1.1},
        {"window": 12, "warmup": 5, "correct_after": 2, "momentum": 0.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("rest", [(), (5,), (4, 3), (2, 3, 2)], ids=str)
def test_a_trajectory_equals_the_papers_equations(rest, options):
    layer, reference = layer_of(**options), Reference(**options)
    for step in range(25):
        assert_step_equals_the_reference(layer, reference, (1 + (5 * step) % 7, 3, *rest), step)
        remembered = min(step + 1, layer.window - 1)
        for rows, sizes, history in (
            (layer.memory_square, layer.memory_square_images, reference.squares),
            (layer.memory_product, layer.memory_product_images, reference.products),
        ):
            torch.testing.assert_close(list(rows[:remembered]), history[::-1][:remembered], rtol=0, atol=1e-11)
            assert sizes[:remembered].tolist() == reference.sizes[::-1][:remembered]
            assert not rows[remembered:].any()
            assert not sizes[remembered:].any()
    assert layer.running_mean.eq(0).all()


def test_the_defaults_are_those_of_the_authors():
    layer = MovingAverageBatchNorm(3)
    options = (layer.window, layer.warmup, layer.correct_after, layer.max_ratio, layer.momentum)
    assert options == (32, 100, 1000, 5.0, 0.02)


def centred_batch(shape, seed):
    x = leaf(shape, seed=seed).detach()
    return (x - x.mean([0, *range(2, x.dim())], keepdim=True)).requires_grad_()


def run(module, x, probe):
    x = x.detach().clone().requires_grad_()
    y = module(x)
    return y, torch.autograd.grad((y * probe).sum(), [x, *module.parameters()])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_on_channels_of_mean_zero_a_window_of_one_batch_is_batch_norm_up_to_the_mean_of_the_gradient(shape):
    ours = layer_of(window=1, max_ratio=1.0, momentum=1.0)
    torchs = LAYERS[len(shape)][1](3, dtype=torch.float64)
    torchs.load_state_dict({name: ours.state_dict()[name] for name in torchs.state_dict()})
    dims = [0, *range(2, len(shape))]
    for seed in range(3):
        x, probe = centred_batch(shape, seed), randn(*shape, seed=50 + seed)
        mine, (grad_mine, *rest_mine) = run(ours, x, probe)
        theirs, (grad_theirs, *rest_theirs) = run(torchs, x, probe)
        torch.testing.assert_close([mine, *rest_mine], [theirs, *rest_theirs], rtol=0, atol=1e-11)
        torch.testing.assert_close(grad_mine - grad_mine.mean(dims, keepdim=True), grad_theirs, rtol=0, atol=1e-11)
        probe = probe - probe.mean(dims, keepdim=True)
        torch.testing.assert_close(run(ours, x, probe)[1][0], run(torchs, x, probe)[1][0], rtol=0, atol=1e-11)


def test_a_replacement_of_a_trained_batch_norm_starts_with_its_variance_and_a_warm_up():
    plain = nn.BatchNorm1d(3, dtype=torch.float64)
    for seed in range(500):
        plain(leaf((4, 3), seed=seed % 7))
    mean, var = plain.running_mean.clone(), plain.running_var.clone()
    layer = MovingAverageBatchNorm.replacing(plain, window=12, warmup=2)
    assert layer.running_mean.eq(0).all()
    torch.testing.assert_close([plain.running_mean, layer.running_var], [mean, var], rtol=0, atol=0)
    x = leaf((4, 3), seed=9).detach()
    square = x.square().mean(0)
    torch.testing.assert_close(layer(x), x / (square + EPS).sqrt(), rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.running_var, 0.98 * var + 0.02 * square, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch about itself
def test_compiled_with_batches_and_images_of_any_size_it_trains_as_eagerly():
    eager = layer_of(window=12, warmup=1, correct_after=2)
    other = deepcopy(eager)
    compiled = torch.compile(other, backend="aot_eager", dynamic=True, fullgraph=True)
    for seed, shape in enumerate([(4, 3, 5), (2, 3, 5), (7, 3, 4), (13, 3, 6), (3, 3, 6)]):
        x = leaf(shape, seed=seed)
        point = x.detach().clone().requires_grad_()
        eager(x).square().sum().backward()
        compiled(point).square().sum().backward()
        torch.testing.assert_close(point.grad, x.grad, rtol=0, atol=1e-12)
        assert_same_state(other, eager, atol=1e-12)


def test_momentum_none_averages_all_batches_and_normalizes_each_separately():
    layer = layer_of(window=12, warmup=0, correct_after=1)
    layer.momentum = None
    layer.reset_running_stats()
    batches = [leaf((4, 3), seed=seed).detach() for seed in range(5)]
    outputs = [layer(batch) for batch in batches]
    torch.testing.assert_close(layer.running_var, torch.cat(batches).square().mean(0), rtol=0, atol=1e-12)
    own = batches[-1] / (batches[-1].square().mean(0) + EPS).sqrt()
    torch.testing.assert_close(outputs[-1], own * layer.weight + layer.bias, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be a whole number, at least 1; got 0"),
        ({"window": 2.5}, "window must be a whole number"),
        ({"warmup": -1}, "warmup must be a whole number, at least 0"),
        ({"correct_after": 0.5}, "correct_after must be a whole number, at least 0"),
        ({"max_ratio": 0.5}, "max_ratio must be a number, at least 1; got 0.5"),
        ({"momentum": 0}, "momentum, the weight of the new batch, must be positive"),
        ({"batch_size": 4}, "unknown option batch_size; its options are window, max_ratio, warmup, correct_after"),
    ],
)
def test_wrong_options_are_errors(options, message):
    with pytest.raises(OptionError, match=message):
        MovingAverageBatchNorm(3, **options)


def test_conversion_centres_the_filters_before_norms_and_leaves_the_classifier():
    net = small_net()
    parameters = {id(parameter) for parameter in net.parameters()}
    before = net[0].weight.detach().clone()
    memnorm.convert(net, "mabn")
    assert [parametrize.is_parametrized(net[i]) for i in (0, 3, 8)] == [True, True, False]
    assert {id(parameter) for parameter in net.parameters()} == parameters
    torch.testing.assert_close(net[0].weight, before - before.mean((1, 2, 3), keepdim=True))
    assert net[0].weight.mean((1, 2, 3)).abs().max() < 1e-6
    assert net[1].running_mean.eq(0).all()
    centre_weights(net)
    assert len(net[0].parametrizations["weight"]) == 1


def test_each_norm_claims_one_layer_of_its_width_before_it():
    class Apart(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 5)
            self.hidden = nn.Linear(5, 4)
            self.norm1, self.norm2, self.norm3 = nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.BatchNorm1d(4)
            self.last = nn.Conv2d(4, 4, 1)

    net = memnorm.convert(Apart(), "mabn")
    centred = [name for name, module in net.named_modules() if parametrize.is_parametrized(module)]
    assert centred == ["conv1", "conv2", "hidden"]


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_filters_are_centred_per_output(groups):
    conv = nn.ConvTranspose2d(4, 6, 3, groups=groups)
    weight = Centred(conv)(conv.weight)
    ones = torch.ones(1, 4, 9, 9)
    inner = nn.functional.conv_transpose2d(ones, weight, None, groups=groups)[:, :, 3:-3, 3:-3]
    assert inner.abs().max() < 1e-5
    assert weight.shape == conv.weight.shape
    assert weight.abs().max() > 0


def test_a_filter_of_one_weight_is_left_alone():
    net = memnorm.convert(nn.Sequential(nn.Conv2d(3, 3, 1, groups=3), nn.BatchNorm2d(3)), "mabn")
    assert not parametrize.is_parametrized(net[0])


def test_checkpoints_load_from_the_converted_and_from_the_plain_model():
    plain, net = small_net(seed=1), memnorm.convert(small_net(seed=2), "mabn")
    plain(images(4, seed=0))
    net.load_state_dict(plain.state_dict())
    torch.testing.assert_close(net[0].parametrizations.weight.original, plain[0].weight)
    torch.testing.assert_close(net[1].running_var, plain[1].running_var)
    assert net[1].running_mean.eq(0).all()
    net(images(4, seed=1)).sum().backward()
    other = memnorm.convert(small_net(seed=3), "mabn")
    other.load_state_dict(net.state_dict())
    x = images(4, seed=2)
    torch.testing.assert_close(other.eval()(x), net.eval()(x), rtol=0, atol=0)
    again = deepcopy(net)
    again.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("settled", ["copy", "original"])
def test_undoing_the_centring_of_a_copy_leaves_the_original_unchanged_and_vice_versa(settled):
    net = memnorm.convert(small_net(), "mabn").eval()
    pair = {"original": net, "copy": deepcopy(net)}
    x, y = images(4, seed=0), net(images(4, seed=0))
    settle_weights(pair[settled])
    assert not parametrize.is_parametrized(pair[settled][0])
    for each in pair.values():
        torch.testing.assert_close(each(x), y, rtol=0, atol=1e-6)
