"""Norms with running statistics, and the comparison with a literal reference over a trajectory."""

import pytest
import torch
from helpers.common import LAYERS, SHAPES, leaf, randn, randomize, small_net

from memnorm.norms import bn, brn, ghost, lagged_bn, mabn, momentum_bn, moving_bn, online

NAMES = ["bn", "brn", "ghost", "lagged_bn", "momentum_bn", "moving_bn"]
RECORDERS = [*NAMES, "mabn", "online"]
MODULES = (bn, brn, ghost, lagged_bn, mabn, momentum_bn, moving_bn, online)
ENTRIES = {module.ENTRY["name"]: module.ENTRY for module in MODULES}
# Options with which a short trajectory sees all of a norm: relaxed limits, a strong past, several ghost batches.
OPTIONS = {
    "bn": {},
    "brn": {"total_steps": 30, "momentum": 0.2},
    "ghost": {"ghost_size": 3},
    "lagged_bn": {},
    "mabn": {"window": 12, "warmup": 1, "correct_after": 2},
    "momentum_bn": {"ideal_batch_size": 32, "total_steps": 12},
    "moving_bn": {},
    "online": {"momentum": 0.1},
}
each_norm = pytest.mark.parametrize("name", NAMES)
each_recorder = pytest.mark.parametrize("name", RECORDERS)


def replace(layer, name):
    return ENTRIES[name]["replace"](layer, **OPTIONS[name])


def built(name, channels=3, *, rank=4, dtype=torch.float64, seed=100, plain=None, **options):
    """The replacement of a batch norm with random affine parameters; `plain` are options of the batch norm."""
    layer = LAYERS[rank][1](channels, dtype=dtype, **(plain or {}))
    randomize(layer, seed=seed)
    return ENTRIES[name]["replace"](layer, **options)


def warmed(name, *, steps=6, rank=4, **options):
    """The layer after some training steps, with statistics that differ from the initial ones."""
    layer = built(name, rank=rank, **{**OPTIONS[name], **options})
    for step in range(steps):
        layer(drifting(SHAPES[rank - 2], step))
    return layer


def net_with(name, **options):
    """`common.small_net` with its batch norms replaced."""
    net = small_net()
    for place in (1, 4):
        net[place] = ENTRIES[name]["replace"](net[place], **options)
    return net


def drifting(shape, step):
    """Data whose moments change from step to step."""
    return (leaf(shape, seed=step).detach() * (1 + 0.05 * step) + 0.2 * step).requires_grad_()


def gradients(function, x, parameters):
    """The output, and the gradients of a random projection of it."""
    y = function(x)
    present = [parameter for parameter in parameters if parameter is not None]
    return [y, *torch.autograd.grad((y * randn(*y.shape, seed=99).to(y.dtype)).sum(), [x, *present])]


def follow(layer, reference, *, steps=25, shapes=((8, 3, 4, 3), (5, 3, 4, 3)), atol=1e-10):
    """Outputs, gradients and state of `layer` are those of `reference` in every step of a trajectory.

    `reference(x, gamma, beta)` is one training step in plain autograd, and `reference.state()` what the buffers must
    hold after it.
    """
    for step in range(steps):
        x = drifting(shapes[step % len(shapes)], step)
        affine = [None if p is None else p.detach().clone().requires_grad_() for p in (layer.weight, layer.bias)]
        ours = gradients(layer, x, [layer.weight, layer.bias])
        theirs = gradients(lambda x: reference(x, *affine), x, affine)  # noqa: B023
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=atol, msg=lambda m: f"step {step}: {m}")  # noqa: B023
        for name, value in reference.state().items():
            torch.testing.assert_close(
                layer.get_buffer(name).double(),
                torch.as_tensor(value, dtype=torch.float64),
                rtol=1e-9,
                atol=atol,
                msg=lambda m: f"step {step}, {name}: {m}",  # noqa: B023
            )


def per_channel(vector, x):
    return vector.reshape(1, -1, *[1] * (x.dim() - 2))


def moments(x):
    """Mean and biased variance per channel, by their definitions, and the number of values."""
    dims = [0, *range(2, x.dim())]
    count = x.numel() // x.shape[1]
    mean = x.sum(dims) / count
    return mean, (x - per_channel(mean, x)).square().sum(dims) / count, count


class Literal:
    """A norm written out in autograd; `__call__` is one training step. Subclasses define it."""

    def __init__(self, momentum, eps=1e-5):
        self.mean, self.var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        self.momentum, self.eps, self.steps = momentum, eps, 0

    def average(self, mean, var):
        """One step of torch's moving averages; a cumulative average without momentum."""
        self.steps += 1
        share = 1 / self.steps if self.momentum is None else self.momentum
        self.mean = (1 - share) * self.mean + share * mean.detach()
        self.var = (1 - share) * self.var + share * var.detach()

    def output(self, x, gamma, beta, mean, var):
        x_hat = (x - per_channel(mean, x)) / per_channel((var + self.eps).sqrt(), x)
        return per_channel(gamma, x) * x_hat + per_channel(beta, x)

    def state(self):
        return {"running_mean": self.mean, "running_var": self.var, "num_batches_tracked": self.steps}
