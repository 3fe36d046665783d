"""What the tests share: data from local generators, small networks, and comparisons that say what differs."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import memnorm

LAYERS = {
    2: (memnorm.MemorizedBatchNorm1d, nn.BatchNorm1d),
    3: (memnorm.MemorizedBatchNorm1d, nn.BatchNorm1d),
    4: (memnorm.MemorizedBatchNorm2d, nn.BatchNorm2d),
    5: (memnorm.MemorizedBatchNorm3d, nn.BatchNorm3d),
}
SHAPES = [(8, 3), (8, 3, 5), (8, 3, 5, 4), (2, 3, 4, 3, 3)]


def cpu_seconds() -> float:
    """The CPU time of the finished child processes, which does not depend on other load of the machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def leaf(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Data with a mean and a deviation of its own in every channel, requiring grad."""
    channels = (1, -1) + (1,) * (len(shape) - 2)
    scale = 1 + torch.arange(shape[1], dtype=torch.float64).view(channels)
    return (randn(*shape, seed=seed) * scale + scale / 2).to(dtype).requires_grad_()


def twins(shape: Sequence[int], *, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Any, Any]:
    """A memorized layer and torch's batch norm for inputs of this shape, with the same random affine parameters."""
    memorized, plain = LAYERS[len(shape)]
    ours, torchs = memorized(shape[1], dtype=dtype, **options), plain(shape[1], dtype=dtype)
    randomize(ours, seed=100)
    torchs.load_state_dict({name: value for name, value in ours.state_dict().items() if name in torchs.state_dict()})
    return ours, torchs


def randomize(module: nn.Module, seed: int) -> None:
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(1 + 0.3 * randn(*parameter.shape, seed=seed + index))


def small_net(
    norm: Callable[[int], nn.Module] = nn.BatchNorm2d, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> nn.Sequential:
    """Two convolutions with norms and a classifier of 5 classes, for images (N, 3, 8, 8)."""
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3),
        norm(6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3),
        norm(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 5),
    )
    with torch.no_grad():
        for index, parameter in enumerate(net.parameters()):
            noise = randn(*parameter.shape, seed=1000 * seed + index)
            parameter.copy_(0.3 * noise if parameter.dim() > 1 else 1 + 0.1 * noise)
    return net.to(dtype)


def images(count: int, *, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return randn(count, 3, 8, 8, seed=seed, dtype=torch.float64).to(dtype)


def labels(count: int, *, seed: int) -> Tensor:
    return torch.randint(0, 5, (count,), generator=torch.Generator().manual_seed(seed))


def assert_same_state(ours: nn.Module, other: nn.Module, *, atol: float = 0.0, rtol: float = 0.0) -> None:
    """Equal parameters and buffers, by name."""
    assert list(ours.state_dict()) == list(other.state_dict())
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(
            value, other.state_dict()[name], rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}"
        )


def assert_same_output_and_gradients(ours: nn.Module, other: nn.Module, x: Tensor, *, atol: float) -> None:
    """Equal outputs on `x`, and equal gradients of a random projection of them in x and every parameter."""
    results = []
    for module in (ours, other):
        point = x.detach().clone().requires_grad_()
        y = module(point)
        probe = randn(*y.shape, seed=99).to(y.dtype)
        grads = torch.autograd.grad((y * probe).sum(), [point, *module.parameters()])
        results.append([y, *grads])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=atol)
