"""Which activations a norm with a nonlinearity replaces, and which stay."""

import pytest
import torch
import torch.nn.functional as F
from helpers.common import images
from torch import nn

import memnorm
from memnorm.errors import MemnormWarning
from memnorm.lab import models
from memnorm.norms.frn import FilterResponseNorm


class Net(nn.Module):
    """Two norms, called by hand."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()


class Modules(Net):
    def forward(self, x):
        return self.relu2(self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x))))))


class Functions(Net):
    def forward(self, x):
        return self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))).relu()


class SharedBehindNorms(Net):
    def forward(self, x):
        return self.relu1(self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x))))))


class SharedElsewhere(Net):
    def forward(self, x):
        x = self.relu1(self.norm1(self.conv1(x)))
        return self.relu1(x + self.norm2(self.conv2(x)))


class Tapped(Net):
    """The output of the norm is used as well as that of the activation."""

    def forward(self, x):
        y = self.norm1(self.conv1(x))
        return self.relu2(self.norm2(self.conv2(self.relu1(y)))) + y


class DataDependent(Net):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, x):
        x = self.relu1(self.norm1(self.conv1(x)))
        return self.block(x) if x.sum() > 0 else self.norm2(self.conv2(x))


class Called(Net):
    """A keyword argument with a default, sizes, and a module that only the training mode reaches."""

    def forward(self, x, scale=None):
        y = self.relu1(self.norm1(self.conv1(x)))
        if scale:
            y = y * scale
        return y.view(x.size(0), -1)


def thresholds(net):
    return {name: one.threshold is not None for name, one in net.named_modules() if isinstance(one, FilterResponseNorm)}


def relus(net):
    return [name for name, one in net.named_modules() if isinstance(one, nn.ReLU)]


def test_activation_modules_after_norms_are_removed():
    net = memnorm.convert(Modules(), "frn")
    assert thresholds(net) == {"norm1": True, "norm2": True}
    assert relus(net) == []
    assert isinstance(net.relu1, nn.Identity)
    assert net(images(2, seed=0)).min() >= 0


def test_activation_functions_stay_after_the_threshold():
    net = memnorm.convert(Functions(), "frn")
    assert thresholds(net) == {"norm1": True, "norm2": True}
    with torch.no_grad():
        net.norm2.threshold.fill_(-5)
    assert net(images(2, seed=0)).min() == 0


def test_a_module_shared_by_norms_goes():
    assert relus(memnorm.convert(SharedBehindNorms(), "frn")) == ["relu2"]


def test_a_module_that_is_also_used_elsewhere_stays():
    net = memnorm.convert(SharedElsewhere(), "frn")
    assert relus(net) == ["relu1", "relu2"]
    assert thresholds(net) == {"norm1": True, "norm2": False}


def test_a_norm_whose_own_output_is_used_has_no_threshold():
    net = memnorm.convert(Tapped(), "frn")
    assert thresholds(net) == {"norm1": False, "norm2": True}
    assert relus(net) == ["relu1"]


def test_a_module_with_a_hook_stays():
    net = Modules()
    seen = []
    net.relu1.register_forward_hook(lambda *args: seen.append(args))
    memnorm.convert(net, "frn")
    net(images(2, seed=0))
    assert relus(net) == ["relu1"]
    assert len(seen) == 1


def test_without_a_graph_the_place_in_a_sequence_decides_and_a_warning_says_so():
    with pytest.warns(MemnormWarning, match=r"what follows 2 of 3 norms of DataDependent is unknown \(TraceError"):
        net = memnorm.convert(DataDependent(), "frn")
    assert thresholds(net) == {"norm1": False, "norm2": False, "block.1": True}
    assert relus(net) == ["relu1", "relu2"]
    assert isinstance(net.block[2], nn.Identity)


class Untraceable(nn.Sequential):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


def test_without_a_graph_a_shared_activation_stays():
    relu = nn.ReLU()
    first = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Identity(), relu)
    net = Untraceable(first, nn.Sequential(nn.Conv2d(3, 3, 1), relu))
    memnorm.convert(net, "frn")
    assert net[0][3] is relu
    assert thresholds(net) == {"0.1": True}


def test_without_a_graph_a_shared_norm_has_no_threshold():
    norm = nn.BatchNorm2d(3)
    net = Untraceable(nn.Sequential(norm, nn.ReLU()), nn.Sequential(norm, nn.Conv2d(3, 3, 1)))
    with pytest.warns(MemnormWarning, match="1 of 1 norms"):
        memnorm.convert(net, "frn")
    assert thresholds(net) == {"0.0": False}
    assert relus(net) == ["0.1"]


def test_a_norm_that_the_trace_does_not_reach_is_judged_by_its_place():
    class Auxiliary(Modules):
        def __init__(self):
            super().__init__()
            self.spare = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())

    net = memnorm.convert(Auxiliary(), "frn")
    assert thresholds(net) == {"norm1": True, "norm2": True, "spare.1": True}
    assert relus(net) == []


def test_arguments_with_defaults_and_sizes_can_be_traced():
    net = memnorm.convert(Called(), "frn")
    assert thresholds(net) == {"norm1": True, "norm2": False}
    assert isinstance(net.relu1, nn.Identity)


def test_a_module_that_is_merely_called_relu_stays():
    net = nn.Sequential()
    for name, layer in (("conv", nn.Conv2d(3, 4, 1)), ("bn", nn.BatchNorm2d(4)), ("relu", nn.PReLU())):
        net.add_module(name, layer)
    memnorm.convert(net, "frn")
    assert isinstance(net.relu, nn.PReLU)
    assert net.bn.threshold is None


def test_tracing_draws_no_random_number():
    class Noisy(Modules):
        def forward(self, x):
            return super().forward(x) * float(torch.rand(()))

    net = Noisy()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    memnorm.convert(net, "frn")
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)
    assert relus(net) == []


def test_the_end_of_a_residual_branch_has_no_threshold():
    net = memnorm.convert(models.build("resnet8", classes=5, image_shape=(3, 8, 8)), "frn")
    found = thresholds(net)
    assert found["bn1"]
    assert {name.rpartition(".")[2]: value for name, value in found.items() if "layer" in name} == {
        "bn1": True,
        "bn2": False,
    }
