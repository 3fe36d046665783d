"""The layers compared with their equations: largest difference over whole trainings, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import memnorm
from memnorm import reference

LAYERS = {
    "1d": (memnorm.MemorizedBatchNorm1d, (6, 3)),
    "2d": (memnorm.MemorizedBatchNorm2d, (3, 3, 4, 4)),
    "3d": (memnorm.MemorizedBatchNorm3d, (2, 3, 2, 3, 3)),
}
MEMORY_SIZES = (1, 2, 20, None)
STEPS = 25


@dataclass(frozen=True)
class Check:
    """What was compared, and the largest difference."""

    what: str
    difference: float


def check() -> list[Check]:
    return [_two_way(), *_layers(), *_algorithm_1()]


def _two_way() -> Check:
    """Outputs and gradients of a two-way layer over batches that drift, with an update after every fourth."""
    ours = memnorm.TwoWayBatchNorm2d(3, warmup=0, dtype=torch.float64)
    literal = reference.ReferenceTwoWayBatchNorm(3)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.0)
    largest = 0.0
    for step, (batch, direction) in enumerate(_drifting((3, 3, 4, 4)), 1):
        found = [_output_and_gradient(layer, batch, direction) for layer in (ours, literal)]
        largest = max(largest, _difference(*found))
        if step % 4 == 0:
            optimizer.step()
            literal.update()
    return Check(f"two-way layer, {STEPS} micro-batches, 4 per update", largest)


def _drifting(shape: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches whose mean and spread grow, each with a gradient."""
    random = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        batch = torch.randn(shape, generator=random, dtype=torch.float64) * (1 + step / 10) + step / 5
        yield batch, torch.randn(shape, generator=random, dtype=torch.float64)


def _layers() -> Iterator[Check]:
    """Outputs, gradients and inference of single layers over batches that drift, λ changing on the way."""
    for kind, (make, shape) in LAYERS.items():
        largest = 0.0
        for memory_size in MEMORY_SIZES:
            ours = make(3, memory_size=memory_size, dtype=torch.float64)
            paper = reference.ReferenceBatchNorm(3, memory_size=memory_size)
            for step, (batch, direction) in enumerate(_drifting(shape)):
                paper.strength = (0.1, 0.5, 0.9)[3 * step // STEPS]
                ours.set_strength(paper.strength)
                largest = max(largest, _difference(_answers(ours, batch, direction), _answers(paper, batch, direction)))
        yield Check(f"MBN, {kind} layer, memory of 1, 2, 20 and all batches, {STEPS} steps", largest)


def _answers(layer: nn.Module, batch: Tensor, direction: Tensor) -> list[Tensor]:
    """Output, gradient, and output in eval mode."""
    found = _output_and_gradient(layer.train(), batch, direction)
    with torch.no_grad():
        return [*found, layer.eval()(batch)]


def _output_and_gradient(layer: nn.Module, batch: Tensor, direction: Tensor) -> list[Tensor]:
    x = batch.clone().requires_grad_()
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, x, direction)]


def _difference(ours: list[Any], paper: list[Any]) -> float:
    pairs = zip(map(torch.as_tensor, ours), map(torch.as_tensor, paper), strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


def _network(make: Any) -> nn.Sequential:
    """A network with the same weights for every norm."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Identity(), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).double()
    net[1] = make(4, strength=0.1).double()
    return net


def _algorithm_1() -> Iterator[Check]:
    """Whole trainings of a network: losses and final weights."""
    random = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(4, 1, 6, 6, generator=random, dtype=torch.float64), torch.randint(3, (4,), generator=random))
        for _ in range(STEPS)
    ]
    with torch.random.fork_rng(devices=[]):
        for double in (False, True):
            paper, ours = _network(reference.ReferenceBatchNorm), _network(memnorm.MemorizedBatchNorm2d)
            wanted = reference.algorithm_1(paper, batches, nn.functional.cross_entropy, 0.1, double_forward=double)
            found = _train(ours, batches, double)
            weights = [[one.detach() for one in net.parameters()] for net in (ours, paper)]
            largest = _difference([*found, *weights[0]], [*wanted, *weights[1]])
            scheme = "with Double-Forward" if double else "with a single forward"
            yield Check(f"Algorithm 1 {scheme}, losses and weights of a network, {STEPS} steps", largest)


def _train(net: nn.Module, batches: list[tuple[Tensor, Tensor]], double: bool) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if double:
        memnorm.double_forward(net, optimizer)
    losses = []
    for x, target in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
