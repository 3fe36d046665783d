"""What the tests of norms that remember iterations share."""

from __future__ import annotations

from typing import Any

import torch
from helpers.common import images, labels
from torch import Tensor, nn

import memnorm


def converted(model: nn.Module, entry: dict[str, Any], **options: Any) -> Any:
    return memnorm.convert(model, entry["name"], **options)


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_states_equal(mine: dict[str, Tensor], theirs: dict[str, Tensor], *, atol: float = 0.0) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


def changed(module: nn.Module, before: dict[str, Tensor]) -> set[str]:
    """The names of the tensors that are not what they were."""
    return {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}


def losses(net: nn.Module, size: int) -> tuple[float, float]:
    """The mean loss of the first and of the last 5 of 40 steps on one batch of `common.small_net`'s data."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x, target = images(size, seed=0), labels(size, seed=1)
    history = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), target)
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    return sum(history[:5]) / 5, sum(history[-5:]) / 5
