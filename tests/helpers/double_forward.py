"""Networks whose memory shows which batches they have recorded, for the tests of Double-Forward."""

from __future__ import annotations

from typing import Any

import torch
from helpers.common import randn
from torch import Tensor, nn

import memnorm
from memnorm.replay import recorders


def batch(seed: int, size: int = 4) -> Tensor:
    """A batch with its own mean."""
    return randn(size, 3, seed=seed, dtype=torch.float32) + seed


def transparent_net(*before: nn.Module, **options: Any) -> nn.Sequential:
    """A net that begins with a memorized layer (after `before`), which remembers the moments of the inputs for any
    weights.
    """
    net = nn.Sequential(*before, nn.BatchNorm1d(3), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    with torch.no_grad():
        for index, parameter in enumerate(net.parameters()):
            parameter.copy_(1 + 0.3 * randn(*parameter.shape, seed=index))
    memnorm.convert(net, **options)
    return net


def assert_remembers(model: nn.Module, *batches: Tensor) -> None:
    """The first memorized layer holds the means of these batches, newest first, and nothing else."""
    layer: Any = next(recorders(model))
    expected = torch.stack([x.mean(0) for x in batches]) if batches else torch.zeros(0, 3)
    torch.testing.assert_close(layer.memory_mean[layer.memory_count > 0], expected, rtol=0, atol=1e-5)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def attached(*before: nn.Module, **options: Any) -> tuple[Any, torch.optim.SGD]:
    """A `transparent_net` and its optimizer, with Double-Forward."""
    model = transparent_net(*before)
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer, **options)
    return model, optimizer


def accumulate(model: nn.Module, x: Tensor) -> None:
    """Forward and backward."""
    model(x).square().mean().backward()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    accumulate(model, x)
    optimizer.step()
