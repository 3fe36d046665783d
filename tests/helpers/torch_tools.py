"""Networks for the tests with torch's own tools, and the choice between kernels and torch on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.common import images, labels, randn
from torch import Tensor, nn
from torch.nn import functional as F

import memnorm
from memnorm.kernels import cpu
from memnorm.lab.models import build
from memnorm.lab.models.parts import Residual

Layer = memnorm.MemorizedBatchNorm2d


double = torch.float64


def residual_net(dtype: torch.dtype = double, **options: Any) -> nn.Module:
    """A converted network with a norm of the usual kind and one that adds a shortcut and applies ReLU, for images
    (N, 3, 8, 8) and 5 classes.
    """
    block = Residual([(6, 6, 3, 1)], nn.BatchNorm2d)
    ends = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5))
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), block, *ends)
    return memnorm.convert(_drawn(net), **{"memory_size": 3, **options}).to(dtype)


def resnet(dtype: torch.dtype = double, **options: Any) -> nn.Module:
    """The lab's ResNet-8, narrow and converted: seven norms, six with ReLU and three with a shortcut."""
    net = build("resnet8", classes=5, image_shape=(3, 8, 8), width=4)
    return memnorm.convert(_drawn(net), **{"memory_size": 3, **options}).to(dtype)


def _drawn(net: nn.Module) -> nn.Module:
    with torch.no_grad():
        for index, parameter in enumerate(net.parameters()):
            noise = randn(*parameter.shape, seed=index, dtype=torch.float32)
            parameter.copy_(0.3 * noise if parameter.dim() > 1 else 1 + 0.1 * noise)
    return net


def trained(net: nn.Module, steps: int = 5, **options: Any) -> nn.Module:
    """The network after a few steps; `options` are those of `step`."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for seed in range(steps):
        step(net, optimizer, seed, **options)
    return net


def step(call: Any, optimizer: torch.optim.Optimizer, seed: int, amp: torch.dtype | None = None) -> Tensor:
    """One step on a batch of its own, under autocast to `amp` if that is given; returns the output."""
    optimizer.zero_grad()
    x = images(4, seed=seed, dtype=optimizer.param_groups[0]["params"][0].dtype)
    with torch.autocast("cpu", dtype=amp, enabled=amp is not None):
        y = call(x)
        loss = F.cross_entropy(y, labels(4, seed=seed))
    loss.backward()
    optimizer.step()
    return y.detach()


def compute_on(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make layers compute with the CPU "kernels" or with "torch" operations."""
    if which == "torch":
        monkeypatch.setattr(cpu, "module", lambda: None)
    elif cpu.module() is None:
        pytest.skip("the CPU kernels are not built")
