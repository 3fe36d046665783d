"""What the processes of the tests beside do; each function runs in all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from rankkit import collectives_of, main, net, own_part, sgd, trajectory, wrapped
from support import images, small_net
from torch import Tensor

import memnorm
from memnorm.distributed import exchange_memory


def plain() -> list[Any]:
    """DDP as it is: no option of ours, none of its own. One batch size for all, so that nobody's is empty."""
    model = wrapped(net())
    return trajectory(model, sgd(model), even_part)


def even_part(step: int) -> tuple[Tensor, Tensor, float]:
    rank = dist.get_rank()
    x = images(4, seed=100 * rank + step, dtype=torch.float64) + rank
    return x, torch.arange(4) % 5, 1 / 4


def joint_single() -> list[Any]:
    model = wrapped(net(sync=True))
    return trajectory(model, sgd(model), own_part)


def joint_double() -> list[Any]:
    model = wrapped(net(sync=True))
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    return trajectory(model, optimizer, own_part)


def exchanged_single() -> list[Any]:
    model = wrapped(net())
    optimizer = sgd(model)
    exchange_memory(model, optimizer)
    return trajectory(model, optimizer, even_part)


def exchanged_double() -> list[Any]:
    """The exchange is attached first and has to wait for the second forward all the same."""
    model = wrapped(net())
    optimizer = sgd(model)
    exchange_memory(model, optimizer)
    memnorm.double_forward(model, optimizer)
    return trajectory(model, optimizer, even_part)


def collectives() -> dict[str, dict[str, int]]:
    """Of one step, by mode."""
    found = {}
    for mode in ("bn", "plain", "sync", "exchange"):
        model: Any = small_net(dtype=torch.float64) if mode == "bn" else net(sync=mode == "sync")
        model = wrapped(model)
        optimizer = sgd(model)
        if mode == "exchange":
            memnorm.double_forward(model, optimizer)
            exchange_memory(model, optimizer)
        trajectory(model, optimizer, even_part, steps=2)  # DDP settles its buckets
        found[mode] = collectives_of(lambda m=model, o=optimizer: trajectory(m, o, even_part, steps=1))
    return found


PROGRAMS = {
    function.__name__: function
    for function in (plain, joint_single, joint_double, exchanged_single, exchanged_double, collectives)
}

if __name__ == "__main__":
    main(PROGRAMS)
