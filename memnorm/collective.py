"""Normalization by the joint batch of all ranks.

Each rank computes the moments of its own part. One gather of 2C + 1 numbers (mean, variance, count) gives the moments
of the joint batch; an empty part has count 0. With the joint count n, the gradient is that of one process with the
joint batch:

    dx = γ/√(σ̂² + ε) · (g − (Σg + x̂·Σg·x̂)/(n + λW))        Σ over all ranks: one reduction of 2C numbers

The gradients of weight and bias are those of the own part, because DDP averages gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from memnorm.errors import OptionError
from memnorm.functional import (
    BackwardMemory,
    Moments,
    batch_moments,
    count_per_channel,
    merge,
    pool,
    statistics_dtype,
)


class KeptGroup:
    """The process group of a layer with `sync=group`. Copies of the layer have the same group. A pickle has
    `sync=True`, because another program does not have the group.
    """

    def __init__(self, group: Any) -> None:
        self.group = group

    def __deepcopy__(self, _memo: dict[int, Any]) -> KeptGroup:
        return self

    def __reduce__(self) -> Any:
        return bool, (True,)

    def __repr__(self) -> str:
        return "<process group>"


def check_sync(sync: Any) -> bool | KeptGroup:
    """Check the option `sync` of a layer, and wrap a process group."""
    if isinstance(sync, (bool, KeptGroup)):
        return sync
    if dist.is_available() and (isinstance(sync, dist.ProcessGroup) or sync is dist.GroupMember.NON_GROUP_MEMBER):
        return KeptGroup(sync)
    raise OptionError(f"sync must be False, True for all processes, or a process group; got {sync!r}")


def group_of_ranks(sync: bool | KeptGroup) -> Any:
    """The process group to communicate with; None if this rank is alone in it or not a member."""
    if sync is False or not (dist.is_available() and dist.is_initialized()):
        return None
    group = sync.group if isinstance(sync, KeptGroup) else dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None


def gathered(vector: Tensor, group: Any) -> Tensor:
    """The `vector` of each rank in a row. Not differentiable."""
    rows = [torch.empty_like(vector) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, vector.contiguous(), group=group)
    return torch.stack(rows)


class _Gather(torch.autograd.Function):
    """`gathered`, differentiable any number of times."""

    @staticmethod
    def forward(ctx, vector, group):
        ctx.group = group
        return gathered(vector, group)

    @staticmethod
    def backward(ctx, grad_RV):
        return _Sum.apply(grad_RV, ctx.group)[dist.get_rank(ctx.group)], None


class _Sum(torch.autograd.Function):
    """The sum of the tensors of all ranks, differentiable any number of times."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return _Sum.apply(grad, ctx.group), None


def joint_moments(x: Tensor, group: Any) -> Moments:
    """Moments of the `x` of all ranks together, differentiable. The weight is a tensor, and 0 if all are empty."""
    count = count_per_channel(x)
    if count:
        own = batch_moments(x)
        flat = torch.cat([own.mean, own.var, own.mean.new_full((1,), count)])
    else:
        flat = x.new_zeros(2 * x.shape[1] + 1, dtype=statistics_dtype(x.dtype)) + x.sum()  # x keeps its gradient
    parts_RV = _Gather.apply(flat, group)
    mean_RC, var_RC, count_R1 = parts_RV.split([x.shape[1], x.shape[1], 1], dim=1)
    return pool(mean_RC, var_RC, count_R1.squeeze(1))


def normalize_jointly(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    batch: Moments,
    memory: Moments,
    eps: float,
    group: Any,
    backward: BackwardMemory | None = None,
) -> Tensor:
    """Normalize `x` by the union of the joint batch (its moments, as constants) and a memory. Do not change the memory
    afterwards.
    """
    dtype = statistics_dtype(x.dtype)
    memory = Moments(*(torch.as_tensor(part, device=x.device).to(dtype).detach() for part in memory))
    y: Tensor = _Joint.apply(x, weight, bias, *batch, *memory, (eps, group, backward))
    return y


class _Joint(torch.autograd.Function):
    """A single autograd node that saves its input and vectors of C numbers."""

    @staticmethod
    def forward(ctx, x, weight, bias, *rest):
        batch, memory, (eps, group, ctx.memory) = Moments(*rest[:3]), Moments(*rest[3:6]), rest[6]
        ctx.save_for_backward(x, weight, bias, *batch, *memory)
        ctx.eps, ctx.group = eps, group
        hat = merge(memory, batch)
        if not x.numel():
            return torch.empty_like(x)
        gain, offset = (None if one is None else one.to(hat.mean.dtype) for one in (weight, bias))
        return F.batch_norm(x, hat.mean, hat.var, gain, offset, False, 0.0, eps)

    @staticmethod
    def backward(ctx, grad_y):
        x, weight, bias, *rest = ctx.saved_tensors
        # With create_graph the moments must depend on x: with saved numbers, second derivatives would be wrong.
        batch = joint_moments(x, ctx.group) if torch.is_grad_enabled() else Moments(*rest[:3])
        hat = merge(Moments(*rest[3:]), batch)
        inv = torch.rsqrt(hat.var + ctx.eps)
        channels, dims = (1, -1, *[1] * (x.dim() - 2)), [0, *range(2, x.dim())]
        x_hat = (x - hat.mean.view(channels)) * inv.view(channels)
        grad = grad_y.to(inv.dtype)
        own = torch.stack([grad.sum(dims), (grad * x_hat).sum(dims)])
        grad_x = None
        if ctx.needs_input_grad[0] or ctx.memory is not None:
            sums = _Sum.apply(own, ctx.group)
            means = sums / hat.weight if ctx.memory is None else torch.stack(ctx.memory.means(*sums, batch.weight))
        if ctx.needs_input_grad[0]:
            mean, product = means.view(2, *channels).unbind()
            scale = inv if weight is None else inv * weight
            grad_x = ((grad - mean - x_hat * product) * scale.view(channels)).to(x.dtype)
        grad_weight = own[1].to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = own[0].to(bias.dtype) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, *[None] * 7
