"""The layer's pieces on a CUDA device, from the kernels that torch ships for `SyncBatchNorm`.

    moments        μ, σ²                                             batch_norm_update_stats
    transform      y = γ(x − μ̂)/s + β,   s = √(σ̂² + ε)               batch_norm_elemt
    reduce         Σg, Σg(x − μ̂)                                     batch_norm_backward_reduce
    elementwise    dx = γ/s · (g − Σg/w − (x − μ̂)/s² · Σg(x − μ̂)/w)   batch_norm_backward_elemt

With w = n these are batch norm's; with w = n + λW, the weight of batch and memory, they are the memorized layer's.

Never run on a GPU: written from torch's sources, and tested with stand-ins for the four kernels on the CPU.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from memnorm.kernels import switched_off

DEVICE = "cuda"
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def takes(x: Tensor) -> bool:
    """Return True if the kernels can normalise `x`, for which `functional.is_plain` is True."""
    return (
        x.device.type == DEVICE
        and x.dtype in _DTYPES
        and x.layout is torch.strided
        and x.numel() > 0
        and _memory_format(x) is not None
        and _wanted()
    )


@functools.cache
def _wanted() -> bool:
    return not switched_off()


def _memory_format(x: Tensor) -> Any:
    """The dense layout of `x`, of those that the kernels know; else None."""
    if x.is_contiguous():
        return torch.contiguous_format
    return torch.channels_last if x.is_contiguous(memory_format=torch.channels_last) else None


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance, float32 for narrower data."""
    mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)
    return mean, var


def transform(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inv: Tensor) -> Tensor:
    """y, with inv = 1/s."""
    ignored_eps = 0.0
    return torch.batch_norm_elemt(x, _like(weight, mean), _like(bias, mean), mean, inv, ignored_eps)


def arranged(grad_y: Tensor, x: Tensor) -> Tensor:
    """`grad_y` in the layout of `x`, for the two functions below: a kernel may look at one of them only and trust the
    other.
    """
    return grad_y.contiguous(memory_format=_memory_format(x))


def reduce(grad_y: Tensor, x: Tensor, mean: Tensor, inv: Tensor) -> tuple[Tensor, Tensor]:
    """Σg and Σg(x − μ̂), in the dtype of the statistics.

    The caller makes the gradients of weight and bias from these two: the kernel would give them in weight's dtype,
    and none for a bias without weight.
    """
    sum_g, sum_gx, _, _ = torch.batch_norm_backward_reduce(grad_y, x, mean, inv, None, True, False, False)
    return sum_g, sum_gx


def elementwise(
    grad_y: Tensor, x: Tensor, mean: Tensor, inv: Tensor, weight: Tensor | None, own_g: Tensor, own_gx: Tensor
) -> Tensor:
    """dx, with own_g = Σg/w and own_gx = Σg(x − μ̂)/w.

    The kernel divides by a count, which is an integer; w is not. So they come divided, and count as one.
    """
    one = torch.ones(1, dtype=torch.int32, device=x.device)
    return torch.batch_norm_backward_elemt(grad_y, x, mean, inv, _like(weight, mean), own_g, own_gx, one)


def _like(vector: Tensor | None, mean: Tensor) -> Tensor | None:
    """`vector` as the kernels read it: they take weight and bias in the statistics' dtype, through their address."""
    return None if vector is None else vector.to(mean.dtype).contiguous()
