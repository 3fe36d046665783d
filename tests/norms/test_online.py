"""Online normalization: its forward and backward equations over whole trajectories, and when it writes its state."""

import pytest
import torch
from helpers.common import leaf, randn, randomize
from torch import nn
from torch.nn import functional as F

from memnorm.errors import OptionError
from memnorm.norms.online import OnlineNorm

EPS = 1e-5


def layer_of(channels=3, **options):
    layer = OnlineNorm(channels, dtype=torch.float64, **options)
    randomize(layer, seed=5)
    return layer


class Reference:
    """One sample and one channel at a time, in the order of the paper's equations."""

    def __init__(self, channels, *, momentum=0.001, backward_decay=0.99, compensation="layer_scaling", clamp=5.0):
        self.forward_decay, self.backward_decay = 1 - momentum, backward_decay
        self.compensation, self.limit = compensation, clamp
        self.mu, self.var = torch.zeros(channels).double(), torch.ones(channels).double()
        self.u, self.v = torch.zeros(channels).double(), torch.zeros(channels).double()

    def step(self, x, gamma, beta, grad):
        outputs, kept = zip(*[self.forward(sample, gamma, beta) for sample in x], strict=True)
        grads = [self.backward(g, gamma, saved) for g, saved in zip(grad, kept, strict=True)]
        grad_x, grad_gamma, grad_beta = zip(*grads, strict=True)
        return torch.stack(outputs), torch.stack(grad_x), sum(grad_gamma), sum(grad_beta)

    def forward(self, sample, gamma, beta):
        a = self.forward_decay
        y, scales = torch.empty_like(sample), torch.empty_like(self.mu)
        for c, values in enumerate(sample):
            scales[c] = (self.var[c] + EPS).sqrt()
            y[c] = (values - self.mu[c]) / scales[c]
            mean = values.mean()
            spread = (values - mean).square().mean()
            self.var[c] = a * self.var[c] + (1 - a) * spread + a * (1 - a) * (mean - self.mu[c]) ** 2
            self.mu[c] = a * self.mu[c] + (1 - a) * mean
        affine = torch.stack([gamma[c] * y[c] + beta[c] for c in range(len(y))])
        root = (affine.square().mean() + EPS).sqrt()
        z = {"layer_scaling": affine / root, "clamp": affine.clamp(-self.limit, self.limit), None: affine}
        return z[self.compensation], (y, scales, affine, root)

    def backward(self, grad, gamma, saved):
        y, scales, affine, root = saved
        b = self.backward_decay
        if self.compensation == "layer_scaling":
            z = affine / root
            grad = (grad - z * (grad * z).mean()) / root
        elif self.compensation == "clamp":
            grad = grad * (affine.abs() <= self.limit)
        grad_x = torch.empty_like(y)
        for c in range(len(y)):
            arrived = grad[c] * gamma[c]
            orthogonal = arrived - (1 - b) * self.v[c] * y[c]
            self.v[c] += (orthogonal * y[c]).mean()
            grad_x[c] = orthogonal / scales[c] - (1 - b) * self.u[c]
            self.u[c] += grad_x[c].mean()
        per_channel = [(grad[c] * y[c]).sum() for c in range(len(y))], [grad[c].sum() for c in range(len(y))]
        return grad_x, torch.stack(per_channel[0]), torch.stack(per_channel[1])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.1, "backward_decay": 0.8},
        {"momentum": 0.05, "compensation": "clamp", "clamp": 1.5},
        {"momentum": 0.2, "backward_decay": 0.9, "compensation": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("rest", [(), (5,), (3, 2), (2, 1, 2)], ids=str)
def test_a_trajectory_equals_the_papers_equations(rest, options):
    layer, reference = layer_of(**options), Reference(3, **options)
    for step in range(20):
        shape = (1 + (5 * step) % 4, 3, *rest)
        x, grad = leaf(shape, seed=step), randn(*shape, seed=1000 + step)
        y = layer(x)
        ours = [y, *torch.autograd.grad(y, [x, layer.weight, layer.bias], grad)]
        theirs = reference.step(x.detach(), layer.weight.detach(), layer.bias.detach(), grad)
        torch.testing.assert_close(ours, list(theirs), rtol=0, atol=1e-10)
        mine = [layer.running_mean, layer.running_var, layer.control_mean, layer.control_scale]
        torch.testing.assert_close(mine, [reference.mu, reference.var, reference.u, reference.v], rtol=0, atol=1e-10)


def test_eval_is_batch_norm_with_the_compensation():
    layer = layer_of(momentum=0.1)
    for seed in range(4):
        layer(leaf((4, 3, 2), seed=seed)).sum().backward()
    layer.eval()
    x = leaf((4, 3, 2), seed=9)
    y = layer(x)
    y.pow(3).sum().backward()
    plain = F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias, False, 0.0, EPS)
    expected = plain / (plain.square().mean((1, 2), keepdim=True) + EPS).sqrt()
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)


def test_momentum_none_averages_all_batches_and_normalizes_each_separately():
    layer = layer_of(compensation=None)
    layer.momentum = None
    layer.reset_running_stats()
    plain = nn.BatchNorm1d(3, momentum=None, dtype=torch.float64)
    plain.load_state_dict({name: layer.state_dict()[name] for name in plain.state_dict()})
    for seed in range(4):
        x = leaf((4, 3), seed=seed)
        torch.testing.assert_close(layer(x), plain(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.running_mean, plain.running_mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.running_var, plain.running_var, rtol=0, atol=1e-12)


def test_a_layer_without_affine_parameters_only_normalizes():
    layer = OnlineNorm(3, affine=False, compensation=None, dtype=torch.float64)
    x = leaf((1, 3, 4), seed=0)
    torch.testing.assert_close(layer(x), x / (1 + EPS) ** 0.5, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backward_decay": 1.5}, "backward_decay must lie in .0, 1.; got 1.5"),
        ({"compensation": "ls"}, "compensation must be 'layer_scaling', 'clamp' or None; got 'ls'"),
        ({"clamp": 0}, "clamp must be a positive number; got 0"),
        ({"alpha_fwd": 0.9}, "unknown option alpha_fwd; its options are backward_decay, compensation, clamp"),
    ],
)
def test_wrong_options_are_errors(options, message):
    with pytest.raises(OptionError, match=message):
        OnlineNorm(3, **options)
