"""For the tests of norms without batch statistics: training compared with a reference, and models of any wiring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from helpers.common import leaf, randn
from torch import Tensor, nn

SHAPES = [(4, 6, 5), (3, 6, 4, 3), (2, 6, 2, 3, 2)]


def random_batch_norm(shape: Any, *, seed: int = 7, **options: Any) -> Any:
    """A batch norm in float64 for inputs of this shape, with random γ and β."""
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    layer = kind(shape[1], dtype=torch.float64, **options)
    with torch.no_grad():
        for index, parameter in enumerate(layer.parameters()):
            parameter.copy_(1 - index + 0.3 * randn(shape[1], seed=seed + index))
    return layer


def assert_trains_like(
    layer: nn.Module,
    reference: Callable[..., Tensor],
    shape: Any,
    *,
    steps: int = 20,
    atol: float = 1e-10,
) -> None:
    """`layer` and `reference(x, **parameters)` trained side by side by gradient descent: equal outputs, gradients of
    inputs and parameters, and parameters, at every step.
    """
    own = dict(layer.named_parameters())
    twin = {name: value.detach().clone().requires_grad_() for name, value in own.items()}
    for step in range(steps):
        x, x_twin = leaf(shape, seed=step), leaf(shape, seed=step)
        y, y_twin = layer(x), reference(x_twin, **twin)
        torch.testing.assert_close(y, y_twin, rtol=0, atol=atol)
        probe = randn(*y.shape, seed=1000 + step)
        grads = torch.autograd.grad((y * probe).sum(), [x, *own.values()])
        grads_twin = torch.autograd.grad((y_twin * probe).sum(), [x_twin, *twin.values()])
        for mine, theirs in zip(grads, grads_twin, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=atol * max(1.0, float(theirs.abs().max())))
        with torch.no_grad():
            for parameters, gradients in ((own, grads), (twin, grads_twin)):
                for parameter, gradient in zip(parameters.values(), gradients[1:], strict=True):
                    parameter -= 0.01 * gradient


def per_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.reshape([1, -1] + [1] * (x.dim() - 2))


class Wired(nn.Module):
    """Modules that `forward(self, x)`, a function, connects."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **modules: nn.Module) -> None:
        super().__init__()
        self.connect = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Any:
        return self.connect(self, x)
