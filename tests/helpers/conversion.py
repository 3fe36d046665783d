"""Models and norms that are converted in the tests."""

import copy
import inspect

import torch
from helpers.common import images, labels, leaf
from torch import nn
from torch.nn import functional as F

from memnorm.layers import MemorizedBatchNorm

VARIANTS = {
    "plain": {},
    "eps": {"eps": 1e-2},
    "affine=False": {"affine": False},
    "track_running_stats=False": {"track_running_stats": False},
    "momentum=None": {"momentum": None},
    "momentum=0.3": {"momentum": 0.3},
}
if "bias" in inspect.signature(nn.BatchNorm2d).parameters:  # not in torch 2.8
    VARIANTS["bias=False"] = {"bias": False}


class BatchNormAct2d(nn.BatchNorm2d):
    """As in timm: a batch norm followed by dropout and activation, with a copy of torch's forward."""

    def __init__(self, num_features, drop=None, act=None):
        super().__init__(num_features)
        self.drop = drop or nn.Identity()
        self.act = act or nn.ReLU(inplace=True)

    def forward(self, x):
        if self.training:
            self.num_batches_tracked.add_(1)
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return self.act(self.drop(x))


class FrozenBatchNorm2d(nn.Module):
    """As in torchvision: four buffers, no parameter. Checkpoints of batch norm load."""

    def __init__(self, num_features, eps=1e-5):
        super().__init__()
        self.eps = eps
        for name, fill in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((num_features,), fill))

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        state_dict.pop(prefix + "num_batches_tracked", None)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


def with_statistics(model, shape=(8, 3, 5, 4), *, dtype=torch.float32, steps=3):
    """The model after a few training forwards, with statistics and counters that differ from the defaults."""
    for step in range(steps):
        model(leaf(shape, seed=step, dtype=dtype))
    return model


def trained(model, *, steps=3, seed=0):
    """The network of `small_net`, trained; in training mode."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        train_step(model, optimizer, seed=seed + step)
    return model


def train_step(model, optimizer, *, seed):
    optimizer.zero_grad()
    F.cross_entropy(model(images(6, seed=seed)), labels(6, seed=seed)).backward()
    optimizer.step()


def evaluated(model, x):
    with torch.no_grad():
        return copy.deepcopy(model).eval()(x)


def memorized(model):
    return [module for module in model.modules() if isinstance(module, MemorizedBatchNorm)]


def assert_bitwise(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
