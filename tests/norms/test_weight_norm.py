"""Weight normalization against its equations, its first batch, and which weights it changes."""

import copy

import pytest
import torch
from helpers.batch_free import Wired
from helpers.common import images, labels, leaf, randn, small_net
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import memnorm
from memnorm.lab import models
from memnorm.norms.weight_norm import WeightNormAffine


def batch(seed, count=8):
    return images(count, seed=seed, dtype=torch.float64), labels(count, seed=seed)


def filters(v):
    length = torch.stack([torch.sqrt((one**2).sum()) for one in v])
    return v / length.reshape([-1] + [1] * (v.dim() - 1))


class Literal:
    """The small network with w = g v/‖v‖ written out, its parameters in a list: v1, g1, b1, v2, g2, b2, v3, g3, c."""

    def __init__(self, net):
        def take(value):
            return value.detach().clone().requires_grad_()

        last = net[8].weight.detach()
        self.values = [
            *(take(net[0].weight), take(torch.ones(6, dtype=torch.float64)), take(torch.zeros(6, dtype=torch.float64))),
            *(take(net[3].weight), take(torch.ones(4, dtype=torch.float64)), take(torch.zeros(4, dtype=torch.float64))),
            *(take(last), take(last.norm(dim=1)), take(net[8].bias)),
        ]
        self.first = True

    def __call__(self, x):
        v1, g1, b1, v2, g2, b2, v3, g3, c = self.values
        for v, g, b in ((v1, g1, b1), (v2, g2, b2)):
            t = F.conv2d(x, filters(v))
            if self.first:
                values = t.detach().transpose(0, 1).flatten(1)
                mean = values.mean(1)
                std = torch.sqrt(((values - mean[:, None]) ** 2).mean(1))
                with torch.no_grad():
                    g.copy_(1 / std)
                    b.copy_(-mean / std)
            x = torch.relu(g[:, None, None] * t + b[:, None, None])
        self.first = False
        return (g3[:, None] * filters(v3)) @ x.mean((2, 3)).T, c

    def scores(self, x):
        product, c = self(x)
        return product.T + c


def test_trains_like_its_equations_from_the_first_batch_on():
    plain = small_net(dtype=torch.float64)
    literal = Literal(plain)
    net = memnorm.convert(plain, "weight_norm")
    own = [
        *(net[0].parametrizations.weight.original1, net[1].weight, net[1].bias),
        *(net[3].parametrizations.weight.original1, net[4].weight, net[4].bias),
        *(net[8].parametrizations.weight.original1, net[8].parametrizations.weight.original0, net[8].bias),
    ]
    for step in range(20):
        x, target = batch(step)
        x_twin = x.clone().requires_grad_()
        x.requires_grad_()
        y, y_twin = net(x), literal.scores(x_twin)
        torch.testing.assert_close(y, y_twin, rtol=0, atol=1e-10)
        grads = torch.autograd.grad(F.cross_entropy(y, target), [x, *own])
        grads_twin = torch.autograd.grad(F.cross_entropy(y_twin, target), [x_twin, *literal.values])
        for mine, theirs in zip(grads, grads_twin, strict=True):
            torch.testing.assert_close(mine.reshape(theirs.shape), theirs, rtol=0, atol=1e-10)
        with torch.no_grad():
            for values, gradients in ((own, grads), (literal.values, grads_twin)):
                for value, gradient in zip(values, gradients[1:], strict=True):
                    value -= 0.1 * gradient
    for mine, theirs in zip(own, literal.values, strict=True):
        torch.testing.assert_close(mine.reshape(theirs.shape), theirs, rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", [(9, 6), (4, 6, 5), (3, 6, 4, 3), (2, 6, 2, 3, 2)], ids=str)
def test_the_first_training_batch_gets_mean_0_and_deviation_1(shape):
    layer = WeightNormAffine(6, dtype=torch.float64)
    y = layer(leaf(shape, seed=0)).transpose(0, 1).flatten(1)
    torch.testing.assert_close(y.mean(1), torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(y.std(1, correction=0), torch.ones(6, dtype=torch.float64), rtol=0, atol=1e-12)
    assert layer.initialized


def test_only_the_first_training_batch_sets_anything():
    layer = WeightNormAffine(6, dtype=torch.float64)
    layer.eval()(leaf((4, 6, 5), seed=0))
    assert not layer.initialized
    assert layer.weight.tolist() == [1] * 6
    layer.train()(leaf((4, 6, 5), seed=1))
    before = copy.deepcopy(layer.state_dict())
    layer(leaf((4, 6, 5), seed=2))
    for name, value in layer.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_a_checkpoint_says_whether_the_first_batch_is_past():
    layer, other = WeightNormAffine(6, dtype=torch.float64), WeightNormAffine(6, dtype=torch.float64)
    layer(leaf((4, 6, 5), seed=0))
    other.load_state_dict(layer.state_dict())
    other(leaf((4, 6, 5), seed=1))
    torch.testing.assert_close(other.weight, layer.weight, rtol=0, atol=0)
    layer.load_state_dict(WeightNormAffine(6, dtype=torch.float64).state_dict())
    assert layer.weight.tolist() == [1] * 6
    layer(leaf((4, 6, 5), seed=1))
    assert layer.initialized
    assert layer.weight.tolist() != [1] * 6


def test_without_data_init_the_batch_norms_parameters_are_kept():
    net = memnorm.convert(small_net(), "weight_norm", data_init=False)
    before = net[1].weight.detach().clone()
    net(images(4, seed=0))
    torch.testing.assert_close(net[1].weight, before, rtol=0, atol=0)


def test_a_batch_that_is_not_finite_or_has_one_value_leaves_the_initialization_to_the_next():
    layer = WeightNormAffine(6, dtype=torch.float64)
    layer(leaf((1, 6), seed=0))
    layer(leaf((4, 6), seed=0) * float("nan"))
    assert not layer.initialized
    assert layer.weight.tolist() == [1] * 6
    layer(leaf((4, 6), seed=0))
    assert layer.initialized


def test_a_constant_channel_is_centred_and_not_scaled():
    layer = WeightNormAffine(2)
    x = torch.stack([torch.full((4,), 3.0), torch.arange(4.0)], 1)
    y = layer(x)
    assert layer.weight[0] == 1
    assert y[:, 0].tolist() == [0] * 4
    assert y.isfinite().all()


def test_a_layer_that_feeds_no_norm_keeps_its_output_and_learns_its_length():
    plain = small_net()
    weight, bias = plain[8].weight.detach().clone(), plain[8].bias
    net = memnorm.convert(plain, "weight_norm")
    torch.testing.assert_close(net[8].weight, weight, rtol=0, atol=1e-6)
    assert net[8].bias is bias
    assert net[8].parametrizations.weight.original0.requires_grad


def test_a_residual_network_has_all_its_norms_paired():
    net = memnorm.convert(models.build("resnet8", classes=5, image_shape=(3, 8, 8)), "weight_norm")
    convs = [one for one in net.modules() if isinstance(one, nn.Conv2d)]
    assert len(convs) == 7
    assert not any(conv.parametrizations.weight.original0.requires_grad for conv in convs)


WIRINGS = {
    "the norm follows a sum": lambda net, x: net.norm(net.conv(x) + x),
    "the convolution is used without the norm as well": lambda net, x: net.conv(net.norm(net.conv(x))),
    "the result of the convolution is used elsewhere as well": lambda net, x: net.norm(y := net.conv(x)) + y,
    "the model cannot be traced": lambda net, x: net.norm(net.conv(x)) if x.sum() > -1e9 else x,
}


@pytest.mark.parametrize("wiring", WIRINGS.values(), ids=WIRINGS)
def test_a_convolution_that_feeds_more_than_one_norm_keeps_its_length_and_its_bias(wiring):
    net = memnorm.convert(Wired(wiring, conv=nn.Conv2d(3, 3, 1), norm=nn.BatchNorm2d(3)), "weight_norm")
    assert net.conv.parametrizations.weight.original0.requires_grad
    assert net.conv.bias is not None
    assert net(images(4, seed=0)).isfinite().all()
    assert net.norm.initialized


def test_tied_parametrized_and_zero_weights_are_unchanged():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    nn.init.zeros_(net[3].weight)
    nn.utils.parametrizations.spectral_norm(net[4])
    memnorm.convert(net, "weight_norm")
    assert net[1].weight is net[0].weight
    assert not parametrize.is_parametrized(net[3])
    assert len(net[4].parametrizations.weight) == 1
    assert net(randn(3, 4, seed=0).float()).isfinite().all()


@pytest.mark.parametrize(
    ("layer", "dimension"),
    [(nn.ConvTranspose2d(3, 4, 2), 1), (nn.Conv1d(3, 4, 2), 0), (nn.Conv3d(3, 4, 1), 0), (nn.Linear(3, 4), 0)],
    ids=lambda value: type(value).__name__,
)
def test_there_is_one_length_per_output_channel(layer, dimension):
    kind = {3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}.get(layer.weight.dim(), nn.BatchNorm1d)
    net = memnorm.convert(nn.Sequential(layer, kind(4)), "weight_norm")
    lengths = net[0].weight.detach().transpose(0, dimension).flatten(1).norm(dim=1)
    torch.testing.assert_close(lengths, torch.ones(4), rtol=0, atol=1e-6)


def test_a_transposed_convolution_with_groups_keeps_its_length():
    net = memnorm.convert(nn.Sequential(nn.ConvTranspose2d(4, 4, 2, groups=2), nn.BatchNorm2d(4)), "weight_norm")
    assert net[0].parametrizations.weight.original0.requires_grad


def test_a_batch_norm_without_affine_map_gets_scale_and_bias():
    net = memnorm.convert(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False)), "weight_norm")
    assert net[1].weight.tolist() == [1] * 4
    assert net[1].bias.requires_grad
