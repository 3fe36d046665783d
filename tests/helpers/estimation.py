"""Data and networks whose statistics are known."""

import pytest
import torch
from helpers.common import randn
from torch import nn

import memnorm

NORMS = {
    "plain": lambda channels: nn.BatchNorm1d(channels, dtype=torch.float64),
    "memorized": lambda channels: memnorm.MemorizedBatchNorm1d(channels, dtype=torch.float64),
}


each_norm = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)


DATA = randn(29, 4, seed=0) * torch.tensor([1.0, 2.0, 0.1, 5.0]) + torch.tensor([0.0, 3.0, -1.0, 50.0])


def deep_net(norm, *, seed=0):
    """Three norms with nonlinear layers between them, for data (N, 4); statistics and affine maps differ from
    the defaults, and a memory is partly filled.
    """
    net = nn.Sequential(
        nn.Linear(4, 6), norm(6), nn.ReLU(), nn.Linear(6, 5), norm(5), nn.Tanh(), nn.Linear(5, 3), norm(3)
    ).double()
    with torch.no_grad():
        for index, parameter in enumerate(net.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=100 * seed + index))
    for step in range(3):
        net(randn(8, 4, seed=50 + step))
    return net


def batch_norms(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}


def moments(x):
    """Mean and biased variance of each column, from their definition."""
    mean = x.mean(0)
    return mean, (x - mean).square().mean(0)


def statistics(model):
    return {name: (layer.running_mean, layer.running_var) for name, layer in batch_norms(model).items()}


def inputs_of_norms(model, batches):
    """The concatenated inputs of each norm, in the current mode of the model."""
    seen = {name: [] for name in batch_norms(model)}
    handles = [
        layer.register_forward_pre_hook(lambda _module, args, name=name: seen[name].append(args[0].clone()))
        for name, layer in batch_norms(model).items()
    ]
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in seen.items()}


def condition(model):
    """Everything about a model that must not change."""
    modules = list(model.modules())
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "identity": [id(tensor) for tensor in (*model.parameters(), *model.buffers())],
        "modes": [module.training for module in modules],
        "recording": [getattr(module, "recording", None) for module in modules],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules],
    }


def assert_condition(model, before, *, state=True):
    now = condition(model)
    for name in ("identity", "modes", "recording", "hooks"):
        assert now[name] == before[name], name
    if state:
        torch.testing.assert_close(now["state"], before["state"], rtol=0, atol=0)


class Partial(nn.Module):
    """A network one of whose norms is never called."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.BatchNorm1d(4).double(), nn.BatchNorm1d(4).double()

    def forward(self, x):
        return self.used(x)


class Keyword(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, *, scale=1.0):
        return self.net(x * scale)


TARGET = torch.zeros(29)


def not_finite(value):
    batch = DATA[:7].clone()
    batch[2, 1] = value
    return batch


def mixed_net():
    """Plain and memorized norms, a frozen one of each, dropout, and a recorder that the user switched off."""
    net = nn.Sequential(deep_net(NORMS["plain"]), nn.Linear(3, 4), deep_net(NORMS["memorized"]), nn.Dropout(0.5))
    net = net.double()
    net[0][4].eval(), net[2][4].eval()
    net[2][1].recording = False
    net[0].register_forward_hook(lambda *_: None)
    return net
