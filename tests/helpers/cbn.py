"""What the tests of cross-iteration batch norm share: layers before a norm, and steps that change their weights."""

import torch
from helpers.common import randn, randomize
from torch import nn

from memnorm.norms.cbn import CrossIterationBatchNorm, take_source, watch_sources

EPS = 1e-5
FEEDERS = {
    "linear": (lambda: nn.Linear(5, 4), (6, 5)),
    "linear without bias": (lambda: nn.Linear(5, 4, bias=False), (6, 5)),
    "1-d": (lambda: nn.Conv1d(3, 4, 3, padding=1), (5, 3, 6)),
    "2-d strided, no bias": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False), (4, 3, 7, 6)),
    "2-d grouped, dilated": (lambda: nn.Conv2d(4, 4, 2, dilation=2, groups=2), (4, 4, 6, 5)),
    "2-d depthwise, same": (lambda: nn.Conv2d(4, 4, (2, 3), padding="same", groups=4), (4, 4, 5, 5)),
    "2-d reflected": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), (4, 3, 5, 5)),
    "2-d valid": (lambda: nn.Conv2d(3, 4, 3, padding="valid"), (4, 3, 5, 5)),
    "3-d": (lambda: nn.Conv3d(2, 4, 2), (3, 2, 3, 3, 3)),
}


def fed(feeder="2-d strided, no bias", **options):
    """A layer followed by the norm, in float64, and the shape of its data."""
    build, shape = FEEDERS[feeder]
    torch.manual_seed(3)
    net = nn.Sequential(build(), CrossIterationBatchNorm(4, **options)).double()
    randomize(net[1], seed=5)
    watch_sources(net)
    return net, shape


def step(net, x, seed, lr=0.05):
    """One step of a training that moves the weights; the output and all gradients."""
    point = x.detach().clone().requires_grad_()
    y = net(point)
    probe = randn(*y.shape, seed=seed)
    grads = torch.autograd.grad((y * probe).sum(), [point, *net.parameters()])
    with torch.no_grad():
        for parameter, grad in zip(net.parameters(), grads[1:], strict=True):
            parameter.sub_(lr * grad)
    return [y, *grads]


def column(vector, x):
    return vector.view(1, -1, *[1] * (x.dim() - 2))


def read_memory(net, x):
    """What a training forward reads, without the forward."""
    out = net[0](x)
    net[1]._feed = take_source(out), out.detach()
    try:
        return net[1]._read()
    finally:
        net[1]._feed = None
