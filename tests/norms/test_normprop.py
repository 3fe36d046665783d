"""Normalization Propagation: its equations and constants, moments on Gaussian data, and unsupported models."""

import math

import pytest
import torch
from helpers.batch_free import Wired
from helpers.common import images, labels, randn, small_net
from helpers.conversion import BatchNormAct2d
from torch import nn
from torch.nn import functional as F

import memnorm
from memnorm.errors import NothingToRecord, OptionError
from memnorm.norms import normprop
from memnorm.norms.normprop import NormProp, Standardize


class Literal:
    """conv – ReLU – max pooling 2×2 – conv – ReLU – average pooling 2 – mean – linear, by the paper's equations."""

    def __init__(self, net):
        self.values = [value.detach().clone().requires_grad_() for value in net.parameters()]

    def layer(self, x, w, gamma, beta):
        length = torch.sqrt((w * w).sum((1, 2, 3), keepdim=True))
        u = gamma[:, None, None] * F.conv2d(x, w / length) / 1.21 + beta[:, None, None]
        return (torch.clamp(u, min=0) - math.sqrt(1 / (2 * math.pi))) / math.sqrt(0.5 * (1 - 1 / math.pi))

    def __call__(self, x):
        w1, gamma1, beta1, w2, gamma2, beta2, w3, bias = self.values
        x = F.max_pool2d(self.layer(x, w1, gamma1, beta1), 2)
        mean, std = 1.0457555, 0.6709548  # of the largest of four Gaussians after ReLU
        x = (x - (mean - 0.39894228) / 0.58381937) / (std / 0.58381937)
        x = 2 * F.avg_pool2d(self.layer(x, w2, gamma2, beta2), 2, 1)
        return x.mean((2, 3)) @ w3.T + bias


def pooled_net():
    net = nn.Sequential(
        *(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 5, 2), nn.BatchNorm2d(5), nn.ReLU(), nn.Dropout(0.0), nn.AvgPool2d(2, 1)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 5)),
    )
    for index, value in enumerate(net.parameters()):
        value.data = 0.4 * randn(*value.shape, seed=index) + (1 if index in (2, 6) else 0)
    return memnorm.convert(net.double(), "normprop")


def test_trains_like_its_equations():
    net = pooled_net()
    literal = Literal(net)
    own = list(net.parameters())
    for step in range(20):
        x, target = images(6, seed=step, dtype=torch.float64), labels(6, seed=step)
        x_twin = x.clone().requires_grad_()
        x.requires_grad_()
        y, y_twin = net(x), literal(x_twin)
        torch.testing.assert_close(y, y_twin, rtol=0, atol=1e-6)
        grads = torch.autograd.grad(F.cross_entropy(y, target), [x, *own])
        grads_twin = torch.autograd.grad(F.cross_entropy(y_twin, target), [x_twin, *literal.values])
        for mine, theirs in zip(grads, grads_twin, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
        with torch.no_grad():
            for values, gradients in ((own, grads), (literal.values, grads_twin)):
                for value, gradient in zip(values, gradients[1:], strict=True):
                    value -= 0.05 * gradient


def moments(net, x):
    """Mean and variance of the output of every NormProp layer and every constant behind."""
    found = []

    def watch(_module, _inputs, y):
        found.append((float(y.detach().mean()), float(y.detach().var())))

    handles = [one.register_forward_hook(watch) for one in net.modules() if isinstance(one, (NormProp, Standardize))]
    with torch.no_grad():
        net(x)
    for handle in handles:
        handle.remove()
    return found


def wide_chain():
    layers, width = [], 16
    for _ in range(4):
        layers += [nn.Conv2d(width, 128, 3), nn.BatchNorm2d(128), nn.ReLU()]
        width = 128
    net = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Conv2d(128, 128, 1), nn.BatchNorm2d(128), nn.ReLU())
    for index, value in enumerate(net.parameters()):
        if value.dim() == 4:
            value.data = randn(*value.shape, seed=index).float()
    return net


def test_gaussian_data_keep_mean_0_and_variance_1_in_every_layer():
    found = moments(memnorm.convert(wide_chain(), "normprop", ratio=1.0), randn(8, 16, 18, 18, seed=99).float())
    assert len(found) == 11
    for mean, var in found:
        assert mean == pytest.approx(0, abs=0.1)
        assert var == pytest.approx(1, abs=0.15)


def test_with_the_ratio_of_the_paper_gradients_keep_their_size():
    """The mean squared singular value of a wide layer's Jacobian is 1, and 1.21² without the ratio."""
    for ratio, expected in ((1.21, 1.0), (1.0, 1.21**2)):
        net = nn.Sequential(nn.Linear(200, 200), nn.BatchNorm1d(200), nn.ReLU())
        nn.init.normal_(net[0].weight, generator=torch.Generator().manual_seed(0))
        memnorm.convert(net, "normprop", ratio=ratio)
        jacobians = torch.func.vmap(torch.func.jacrev(net))(randn(50, 1, 200, seed=1).float()).detach()
        assert float(jacobians.square().sum() / 50 / 200) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("pool", "count"),
    [
        (nn.MaxPool2d(3), 9),
        (nn.MaxPool2d((2, 3)), 6),
        (nn.MaxPool1d(4), 4),
        (nn.MaxPool3d(2), 8),
        (nn.AvgPool2d(3, 2), 9),
        (nn.AvgPool1d(4), 4),
        (nn.AvgPool3d((1, 2, 2)), 4),
    ],
    ids=str,
)
def test_independent_values_are_normalized_after_any_pooling(pool, count):
    dims = int(type(pool).__name__[-2])
    shape = {1: (64, 8, 144), 2: (64, 8, 12, 12), 3: (64, 8, 4, 6, 6)}[dims]
    x = (randn(*shape, seed=0).clamp(min=0) - normprop.RELU_MEAN) / normprop.RELU_STD
    y = normprop.after_pooling(pool)(pool(x))
    assert float(y.mean()) == pytest.approx(0, abs=0.06)
    assert float(y.std()) == pytest.approx(1, abs=0.06)
    if isinstance(pool, nn.AvgPool2d):
        assert normprop.after_pooling(pool).std == pytest.approx(1 / math.sqrt(count))


def test_weights_stay_the_same_objects_under_the_same_names_and_biases_before_norms_go():
    plain = small_net()
    before = dict(plain.named_parameters())
    after = dict(memnorm.convert(plain, "normprop").named_parameters())
    assert set(before) - set(after) == {"0.bias", "3.bias"}
    assert all(after[name] is before[name] for name in after)


def test_convolutions_are_still_convolutions_and_keep_their_hooks():
    net = small_net()
    seen = []
    net[0].register_forward_hook(lambda *_: seen.append(1))
    net[2].register_forward_hook(lambda *_: seen.append(2))
    memnorm.convert(net, "normprop")
    net(images(2, seed=0))
    assert isinstance(net[0], nn.Conv2d)
    assert seen == [1, 2]


def test_a_global_average_and_a_relu_without_norm_are_unchanged():
    net = nn.Sequential(
        *(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        *(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)),
    )
    memnorm.convert(net, "normprop")
    assert [type(one).__name__ for one in net] == [
        *("UnitConv2d", "NormProp", "Sequential", "AdaptiveAvgPool2d", "Flatten", "Linear", "ReLU", "Linear"),
    ]


def test_a_norm_without_relu_is_not_followed_by_constants():
    net = memnorm.convert(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)), "normprop")
    assert [type(one).__name__ for one in net] == ["UnitConv2d", "NormProp", "Conv2d"]


@pytest.mark.parametrize("ratio", [0, -1.21, math.inf, math.nan, "1.21", True, None])
def test_the_ratio_must_be_a_positive_number(ratio):
    with pytest.raises(OptionError, match="ratio must be a positive number"):
        memnorm.convert(small_net(), "normprop", ratio=ratio)


def block(*behind, first=None):
    return nn.Sequential(first or nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), *behind)


def wired(forward, *behind):
    return Wired(forward, block=block(*behind))


def used_twice(relu):
    return nn.Sequential(block(relu), nn.Conv2d(4, 4, 1), relu)


UNSUPPORTED = {
    "another activation": (lambda: block(nn.PReLU()), r"followed by 2 \(PReLU\); normprop supports ReLU only"),
    "pooling first": (lambda: block(nn.MaxPool2d(2), nn.ReLU()), r"followed by 2 \(MaxPool2d\)"),
    "no filters": (lambda: block(first=nn.ConvTranspose2d(3, 4, 1)), r"fed by 0 \(ConvTranspose2d\)"),
    "nothing before": (lambda: nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()), "fed by input; normprop needs a conv"),
    "tapped": (
        lambda: wired(lambda net, x: (net.block[1](y := net.block[0](x)), y)),
        "fed by a result that is also used elsewhere",
    ),
    "relu function": (lambda: wired(lambda net, x: F.relu(net.block(x))), "relu is called as a function"),
    "pooling function": (
        lambda: wired(lambda net, x: F.avg_pool2d(net.block(x), 2), nn.ReLU()),
        "is a pooling that cannot be normalized",
    ),
    "indices": (
        lambda: nn.Sequential(block(nn.ReLU()), nn.MaxPool2d(2, return_indices=True)),
        "is a pooling that cannot be normalized",
    ),
    "relu without norm": (lambda: used_twice(nn.ReLU()), r"0\.2 \(ReLU\) is also used without a norm before it"),
    "not traceable": (
        lambda: wired(lambda net, x: net.block(x) if x.sum() > 0 else x, nn.ReLU()),
        r"graph of the model, which cannot be traced \(TraceError",
    ),
    "branches": (lambda: wired(lambda net, x: net.block(x) + x[:, :1], nn.ReLU()), r"branches are joined \(add\)"),
    "single norm": (lambda: nn.BatchNorm2d(3), "a single norm has no filters"),
    "activated norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 1), BatchNormAct2d(4, act=nn.SiLU())),
        "its norms include SiLU",
    ),
}


@pytest.mark.parametrize(("build", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_an_unsupported_model_is_an_error_with_the_reason_and_stays_unchanged(build, message):
    net = build()
    before = [(name, type(one)) for name, one in net.named_modules()]
    with pytest.raises(OptionError, match=message):
        memnorm.convert(net, "normprop")
    assert [(name, type(one)) for name, one in net.named_modules()] == before


def test_a_norm_that_includes_relu_is_followed_by_constants():
    net = memnorm.convert(nn.Sequential(nn.Conv2d(3, 4, 1), BatchNormAct2d(4, act=nn.ReLU())), "normprop")
    assert isinstance(net[1][2][1], Standardize)


def test_a_relu_shared_by_norms_only_is_supported():
    relu = nn.ReLU()
    net = memnorm.convert(nn.Sequential(block(relu), block(relu, first=nn.Conv2d(4, 4, 1))), "normprop")
    assert net[0][2] is net[1][2]
    assert isinstance(net[0][2][1], Standardize)


def test_sizes_in_a_forward_are_no_branches():
    def forward(net, x):
        x = net.block(x)
        return net.fc(x.view(x.size(0), x.shape[1], -1).mean(2).view(x.shape[0], -1))

    net = Wired(forward, block=block(nn.ReLU()), fc=nn.Linear(4, 2))
    assert memnorm.convert(net, "normprop")(images(2, seed=0)).shape == (2, 2)


def test_there_is_nothing_to_record():
    net = memnorm.convert(small_net(), "normprop")
    with pytest.raises(NothingToRecord, match="its norms are NormProp"):
        memnorm.rerecord(net, images(2, seed=0))
