"""Which activations a norm with a nonlinearity replaces, and which stay."""

import pytest
import torch
import torch.nn.functional as F
from helpers.batch_free import Wired
from helpers.common import images
from torch import nn

import memnorm
from memnorm.errors import MemnormWarning
from memnorm.lab import models
from memnorm.norms.frn import FilterResponseNorm


def modules(net, x):
    return net.relu2(net.norm2(net.conv2(net.relu1(net.norm1(net.conv1(x))))))


def tapped(net, x):
    y = net.norm1(net.conv1(x))
    return net.relu2(net.norm2(net.conv2(net.relu1(y)))) + y


def shared_elsewhere(net, x):
    x = net.relu1(net.norm1(net.conv1(x)))
    return net.relu1(x + net.norm2(net.conv2(x)))


def wired(forward, **more):
    """Two norms, connected by `forward`."""
    return Wired(
        forward,
        conv1=nn.Conv2d(3, 4, 3),
        norm1=nn.BatchNorm2d(4),
        conv2=nn.Conv2d(4, 4, 3, padding=1),
        **{"norm2": nn.BatchNorm2d(4), "relu1": nn.ReLU(), "relu2": nn.ReLU(), **more},
    )


def thresholds(net):
    """The norms that have a nonlinearity."""
    found = {name: one for name, one in net.named_modules() if isinstance(one, FilterResponseNorm)}
    return {name for name, one in found.items() if one.threshold is not None}


def relus(net):
    return [name for name, one in net.named_modules() if isinstance(one, nn.ReLU)]


# forward, the norms that get a nonlinearity, the modules that stay
WIRINGS = {
    "modules": (modules, {"norm1", "norm2"}, []),
    "functions": (
        lambda net, x: net.norm2(net.conv2(F.relu(net.norm1(net.conv1(x))))).relu(),
        {"norm1", "norm2"},
        ["relu1", "relu2"],
    ),
    "a module shared by norms": (
        lambda net, x: net.relu1(net.norm2(net.conv2(net.relu1(net.norm1(net.conv1(x)))))),
        {"norm1", "norm2"},
        ["relu2"],
    ),
    "a module also used elsewhere": (shared_elsewhere, {"norm1"}, ["relu1", "relu2"]),
    "the output of the norm is used": (tapped, {"norm2"}, ["relu1"]),
    "sizes": (lambda net, x: net.relu1(net.norm1(net.conv1(x))).view(x.size(0), -1), {"norm1"}, ["relu2"]),
}


@pytest.mark.parametrize(("forward", "activated", "kept"), WIRINGS.values(), ids=WIRINGS)
def test_an_activation_that_follows_norms_only_is_replaced(forward, activated, kept):
    net = memnorm.convert(wired(forward), "frn")
    assert thresholds(net) == activated
    assert relus(net) == kept
    assert net(images(2, seed=0)).isfinite().all()


def test_a_function_is_applied_after_the_threshold():
    net = memnorm.convert(wired(WIRINGS["functions"][0]), "frn")
    with torch.no_grad():
        net.norm2.threshold.fill_(-5)
    assert net(images(2, seed=0)).min() == 0


def test_a_module_with_a_hook_stays():
    net, seen = wired(modules), []
    net.relu1.register_forward_hook(lambda *args: seen.append(args))
    memnorm.convert(net, "frn")
    net(images(2, seed=0))
    assert relus(net) == ["relu1"]
    assert len(seen) == 1


def test_an_argument_with_a_default_can_be_traced():
    class Scaled(nn.Sequential):
        def forward(self, x, scale=None):
            return super().forward(x) * scale if scale else super().forward(x)

    net = memnorm.convert(Scaled(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Identity(), nn.ReLU()), "frn")
    assert thresholds(net) == {"1"}
    assert relus(net) == []


def untraceable(*parts):
    return Wired(lambda net, x: net.parts(x) if x.sum() > 0 else x, parts=nn.Sequential(*parts))


def test_without_a_graph_the_order_in_a_sequence_decides_and_a_warning_says_so():
    block = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    with pytest.warns(MemnormWarning, match=r"what follows 2 of 3 norms of Wired is unknown \(TraceError"):
        net = memnorm.convert(untraceable(block, wired(modules)), "frn")
    assert thresholds(net) == {"parts.0.1"}
    assert relus(net) == ["parts.1.relu1", "parts.1.relu2"]


def test_without_a_graph_a_shared_activation_stays():
    relu = nn.ReLU()
    first = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Identity(), relu)
    net = memnorm.convert(untraceable(first, nn.Sequential(nn.Conv2d(3, 3, 1), relu)), "frn")
    assert net.parts[0][3] is relu
    assert thresholds(net) == {"parts.0.1"}


def test_without_a_graph_a_shared_norm_has_no_threshold():
    norm = nn.BatchNorm2d(3)
    with pytest.warns(MemnormWarning, match="1 of 1 norms"):
        net = memnorm.convert(untraceable(nn.Sequential(norm, nn.ReLU()), nn.Sequential(norm)), "frn")
    assert thresholds(net) == set()
    assert relus(net) == ["parts.0.1"]


def test_the_order_decides_for_a_norm_that_the_trace_does_not_reach():
    spare = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    net = memnorm.convert(wired(modules, spare=spare), "frn")
    assert thresholds(net) == {"norm1", "norm2", "spare.1"}
    assert relus(net) == []


def test_another_activation_stays():
    net = memnorm.convert(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.PReLU()), "frn")
    assert isinstance(net[2], nn.PReLU)
    assert thresholds(net) == set()


def test_tracing_draws_no_random_number():
    net = wired(lambda net, x: modules(net, x) * float(torch.rand(())))
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    memnorm.convert(net, "frn")
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)
    assert relus(net) == []


def test_the_end_of_a_residual_branch_has_no_threshold():
    found = thresholds(memnorm.convert(models.build("resnet8", classes=5, image_shape=(3, 8, 8)), "frn"))
    assert "bn1" in found
    assert {name.rpartition(".")[2] for name in found if "layer" in name} == {"bn1"}
