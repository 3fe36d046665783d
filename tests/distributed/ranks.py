"""The programs of test_processes.py; each function runs on all ranks."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from helpers.common import leaf, randn, small_net
from helpers.ranks import (
    collectives_of,
    even_part,
    loss,
    main,
    net,
    own_part,
    sgd,
    state_of,
    trajectory,
    two_way_net,
    wrapped,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import memnorm
from memnorm import norms
from memnorm.distributed import broadcast_memory, exchange_memory


def train(part: Any, *, make: Any = net, twice: bool = False, share: bool = False, **options: Any) -> list[Any]:
    """A training under DDP. The exchange is attached first, and still has to wait for the second forward."""
    model = wrapped(make(**options))
    optimizer = sgd(model)
    if share:
        exchange_memory(model, optimizer)
    if twice:
        memnorm.double_forward(model, optimizer)
    return trajectory(model, optimizer, part)


TRAININGS = {
    "plain": partial(train, even_part),  # one batch size for all ranks, so that no batch is empty
    "joint_single": partial(train, own_part, sync=True),
    "joint_double": partial(train, own_part, sync=True, twice=True),
    "exchanged_single": partial(train, even_part, share=True),
    "exchanged_double": partial(train, even_part, share=True, twice=True),
    "plain_two_way": partial(train, even_part, make=two_way_net),
    "joint_two_way": partial(train, own_part, make=two_way_net, sync=True, decay=None),
    "exchanged_two_way": partial(train, even_part, make=two_way_net, share=True),
}


def collectives() -> dict[str, dict[str, int]]:
    """The collectives of one step and of one forward, by mode."""
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
        found[f"forward of {mode}"] = collectives_of(lambda m=model: m(even_part(0)[0]))
    return found


def accumulated(model: Any, optimizer: Any, part: Any) -> list[dict[str, Tensor]]:
    """The state after every step of two batches. DDP averages the gradients with the second batch."""
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        for micro in (2 * step, 2 * step + 1):
            x, y, share = part(micro)
            if micro % 2 == 0:
                with model.no_sync():
                    loss(model(x), y, share=share / 2).backward()
            else:
                loss(model(x), y, share=share / 2).backward()
        optimizer.step()
        seen.append(state_of(model))
    return seen


def accumulated_joint() -> list[Any]:
    model = wrapped(net(sync=True))
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    return accumulated(model, optimizer, own_part)


def accumulated_exchange() -> list[Any]:
    model = wrapped(net())
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    exchange_memory(model, optimizer)
    return accumulated(model, optimizer, even_part)


def odd_part(rank: int) -> Tensor:
    return leaf((3 + 2 * rank, 3, 2, 2), seed=rank).detach()


def second_derivative() -> dict[str, Tensor]:
    """The gradient of the square of a gradient of a joint layer."""
    layer = memnorm.MemorizedBatchNorm2d(3, dtype=torch.float64, sync=True)
    layer(randn(4, 3, 2, 2, seed=50 + dist.get_rank()) + 1)
    x = odd_part(dist.get_rank()).requires_grad_()
    y = layer(x)
    probe = randn(*x.shape, seed=70 + dist.get_rank())
    (first,) = torch.autograd.grad((y.square() * probe).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    return {"first": first.detach(), "second": second}


def checkpointed() -> dict[str, Any]:
    """Activation checkpointing runs the layers and their collectives again inside backward."""
    found = {}
    for name in ("plain", "checkpointed"):
        model = net(sync=True)
        for step in range(3):
            x, _, _ = own_part(step)
            y = checkpoint(model, x, use_reentrant=False) if name == "checkpointed" else model(x)
            y.square().sum().backward()
        found[name] = [[parameter.grad for parameter in model.parameters()], state_of(model)]
    return found


def group_of_two() -> dict[str, Any]:
    """`sync=group`: the members share their batch, other ranks do not. A copy is in the group, too."""
    group = dist.new_group([0, 1])
    layer = memnorm.convert(torch.nn.BatchNorm2d(3).double(), sync=group)
    layer = copy.deepcopy(layer)
    layer(odd_part(dist.get_rank()))
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return {"state": state_of(layer), "pickled": torch.load(file, weights_only=False).sync}


def exchanged_in_groups() -> dict[str, Any]:
    """Ranks outside the group, and a rank that is alone in it, remember their own batches."""
    found = {}
    for members in ([0, 1], [0]):
        layer = memnorm.MemorizedBatchNorm2d(3, dtype=torch.float64)
        optimizer = sgd(layer)
        exchange_memory(layer, optimizer, group=dist.new_group(members))
        layer(odd_part(dist.get_rank()))
        optimizer.step()
        found[str(members)] = state_of(layer)
    return found


def narrow() -> dict[str, Any]:
    """Joint layers on bfloat16 and float16 data."""
    found = {}
    for dtype in (torch.bfloat16, torch.float16):
        layer = memnorm.MemorizedBatchNorm2d(3, sync=True)
        x = odd_part(dist.get_rank()).to(dtype).requires_grad_()
        with torch.autocast("cpu", dtype=dtype):
            y = layer(x)
        y.float().square().sum().backward()
        found[str(dtype)] = {"output": y.detach(), "gradient": x.grad, "state": state_of(layer)}
    return found


def scant() -> list[str]:
    """The error of every rank for an empty joint batch, and for a single value."""
    layer = memnorm.MemorizedBatchNorm1d(3, sync=True)

    def heard(size: int) -> str:
        try:
            layer(torch.zeros(size, 3))
        except ValueError as error:
            return str(error)
        return "nothing"

    return [heard(0), heard(1 if dist.get_rank() == 0 else 0)]


def without_statistics() -> Tensor:
    layer = memnorm.MemorizedBatchNorm2d(3, dtype=torch.float64, sync=True, track_running_stats=False)
    return layer(odd_part(dist.get_rank())).detach()


def handed_out() -> dict[str, Tensor]:
    """Different memories, overwritten by that of rank 0."""
    model = net()
    model(even_part(0)[0])
    broadcast_memory(model)
    return state_of(model)


def others() -> dict[str, dict[str, Tensor]]:
    """The final weights with each norm that records, under DDP's defaults."""
    found = {}
    for name in norms.available():
        if norms.get(name).records:
            model = wrapped(memnorm.convert(small_net(), name))
            optimizer = sgd(model)
            memnorm.double_forward(model, optimizer)
            for step in range(3):
                x, y, share = even_part(step)
                optimizer.zero_grad()
                loss(model(x.float()), y, share=share).backward()
                optimizer.step()
            found[name] = {key: value.detach() for key, value in model.module.named_parameters()}
    return found


def spoilt() -> dict[str, Tensor]:
    """The batch of rank 0 is not finite. In the second step no rank has recorded anything."""
    layer = memnorm.MemorizedBatchNorm2d(3, dtype=torch.float64)
    optimizer = sgd(layer)
    exchange_memory(layer, optimizer)
    x = odd_part(dist.get_rank())
    layer(x / 0 if dist.get_rank() == 0 else x)
    optimizer.step()
    optimizer.step()
    return state_of(layer)


PROGRAMS = (
    *(collectives, accumulated_joint, accumulated_exchange, second_derivative, checkpointed, group_of_two, scant),
    *(without_statistics, handed_out, spoilt, exchanged_in_groups, narrow, others),
)

if __name__ == "__main__":
    main({**TRAININGS, **{program.__name__: program for program in PROGRAMS}})
