"""The arithmetic of memorized batch normalization: moments, their union, and the normalisation with its gradient.

Everything rests on one operation, the union of two weighted sets of values known only by their moments:

    ρ = n/(n + w)      μ̂ = M + ρ(μ − M)      σ̂² = V + ρ(σ² − V) + ρ(1 − ρ)(μ − M)²

With (μ, σ², n) the current batch and (M, V, w) the memory, this is the paper's Eq. 6. The same `merge` is the recursion
of an unlimited memory, the update of a cumulative average, and the sum over batches of a recalibration. `var` is always
the biased variance.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from memnorm._torch import SingleLevelFunction
from memnorm.errors import InputError, OptionError, is_number
from memnorm.kernels import cpu, cuda


class Moments(NamedTuple):
    """Mean and biased variance per channel, and the weight they stand for: a number of values per channel."""

    mean: Tensor
    var: Tensor
    weight: Tensor | float


class BackwardMemory(Protocol):
    """What the backward of one forward reads and records, for layers that remember backward's two means."""

    def means(self, sum_g: Tensor, sum_gx: Tensor, count: Tensor | float) -> tuple[Tensor, Tensor]:
        """What to subtract: ā and q̄, from the sums of g and of g·x̂ over a batch of `count` values per channel."""

    @property
    def for_kernels(self) -> tuple[Any, Any, bool] | None:
        """The layer, the handle of its buffers, True to read them; None if the kernels cannot use the buffers."""


def batch_moments(x: Tensor) -> Moments:
    """Moments over every dimension but the second, in float32 or wider.

    `var_mean` is accurate for data far from zero in every memory layout; a sum of squares is not.
    """
    dims = [0, *range(2, x.dim())]
    var, mean = torch.var_mean(x.to(statistics_dtype(x.dtype)), dims, correction=0)
    return Moments(mean, var, count_per_channel(x))


def constant_moments(x: Tensor) -> Moments:
    """`batch_moments` without a gradient. On the CPU, two passes of vector operations are several times as fast as
    `var_mean`. The second pass also corrects the rounding of the mean.
    """
    x = x.detach()
    if x.device.type != "cpu":
        return batch_moments(x)
    cpu.require_memory(x)
    x, dims = x.to(statistics_dtype(x.dtype)), [0, *range(2, x.dim())]
    first = x.mean(dims, keepdim=True)
    away = x - first
    rest = away.mean(dims)
    var = (away.square_().mean(dims) - rest.square()).clamp(min=0)
    return Moments(first.flatten() + rest, var, count_per_channel(x))


def count_per_channel(x: Tensor) -> int:
    count = x.shape[0]
    for size in x.shape[2:]:
        count *= size
    return count


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the statistics of such data: float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_scalar(value: Tensor | float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number on the device. Not `as_tensor`, which copies it there and waits."""
    return value.to(device, dtype) if isinstance(value, Tensor) else torch.full((), value, dtype=dtype, device=device)


def snapshot(tensor: Tensor) -> Tensor:
    """Return a copy that stays valid if `tensor` is overwritten before backward.

    In a compiled graph `clone` does not: AOTAutograd may save the buffer instead and clone it in backward, when it has
    changed already. It never recomputes a cumulative sum; that over one row is a copy.
    """
    return tensor.unsqueeze(0).cumsum(0).squeeze(0) if torch.compiler.is_compiling() else tensor.clone()


def merge(memory: Moments, batch: Moments) -> Moments:
    """Return the moments of the union of two weighted sets: the module's equation."""
    total = batch.weight + memory.weight
    # Not other = 1 − share, which has few digits where the memory is light.
    share, other = (
        as_scalar(weight / total, batch.mean.dtype, batch.mean.device) for weight in (batch.weight, memory.weight)
    )
    mean = torch.lerp(memory.mean, batch.mean, share)
    var = torch.lerp(memory.var, batch.var, share) + share * other * (batch.mean - memory.mean).square()
    return Moments(mean, var, total)


def pool(mean_KC: Tensor, var_KC: Tensor, weight_K: Tensor) -> Moments:
    """Return the moments of the union of K weighted batches.

        W = Σ w        M = Σ w μ / W        V = Σ w (σ² + (μ − M)²) / W

    The squared shift between means is the paper's correction term: averaging the variances alone would lose it.
    """
    total = weight_K.sum()
    share_K1 = (weight_K / total).unsqueeze(1)
    mean_C = (share_K1 * mean_KC).sum(0)
    var_C = (share_K1 * (var_KC + (mean_KC - mean_C).square())).sum(0)
    return Moments(mean_C, var_C, total)


def memorized_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    memory_mean: Tensor,
    memory_var: Tensor,
    memory_weight: Tensor | float,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise `x` (N, C, …) by the moments of the union of its own values and a memory.

        y = γ x̂ + β,   x̂ = (x − μ̂)/√(σ̂² + ε)
        dx = γ/√(σ̂² + ε) · (g − ρ·mean(g) − ρ·x̂·mean(g·x̂))

    `memory_weight` is the memory's weight in values per channel, strength included (λW in the docs). The memory is a
    constant: no gradient flows into it, and it may be overwritten after the call.
    """
    vectors = {"x": x, "weight": weight, "bias": bias, "memory_mean": memory_mean, "memory_var": memory_var}
    for name, one in vectors.items():
        if not isinstance(one, Tensor) and not (one is None and name in ("weight", "bias")):
            raise InputError(f"memorized_batch_norm: {name} must be a tensor; got {one!r}")
    if x.dim() < 2:
        raise InputError(f"memorized_batch_norm: expected input (N, C, …), got shape {tuple(x.shape)}")
    if not isinstance(memory_weight, Tensor) and not is_number(memory_weight):
        raise OptionError(f"memorized_batch_norm: memory_weight must be a number or a tensor; got {memory_weight!r}")
    if not is_number(eps) or not eps > 0:
        raise OptionError(f"memorized_batch_norm: eps must be a positive number; got {eps!r}")
    memory = Moments(memory_mean, memory_var, memory_weight)
    if not reads_at_once(x, memory_mean):
        memory = Moments(snapshot(memory_mean), snapshot(memory_var), memory_weight)
    return normalize_with_memory(x, weight, bias, memory, eps)[0]


def normalize_with_memory(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    memory: Moments,
    eps: float,
    backward: BackwardMemory | None = None,
) -> tuple[Tensor, Moments]:
    """`memorized_batch_norm`, and the batch's own moments (constants). `memory`'s tensors must not change before
    backward, unless `reads_at_once`.
    """
    layer = None if backward is None else backward.for_kernels
    if reads_at_once(x, memory.mean) and (backward is None or (layer is not None and count_per_channel(x) > 1)):
        var = memory.var.to(memory.mean).expand_as(memory.mean)
        y, call = cpu.forward(x, weight, bias, eps, memory.mean, var, float(memory.weight))
        read = cpu.Saved.of(call[0], x)
        batch = Moments(read.batch_mean, read.batch_var, count_per_channel(x))
        return with_gradient(x, weight, bias, None, (y, call if layer is None else (*call[:3], *layer))), batch
    dtype = statistics_dtype(x.dtype)
    memory = Moments(memory.mean.to(dtype), memory.var.to(dtype), as_scalar(memory.weight, dtype, x.device).detach())
    if backward is not None or is_plain(x):
        batch = Moments(*cuda.moments(x), count_per_channel(x)) if _on_cuda(x) else constant_moments(x)
        return _Normalize.apply(x, weight, bias, *merge(memory, batch), (memory, eps, backward)), batch
    batch = batch_moments(x)
    y = normalize(x, weight, bias, merge(memory, batch), eps)
    return y, Moments(batch.mean.detach(), batch.var.detach(), batch.weight)


def reads_at_once(x: Tensor, memory_mean: Tensor) -> bool:
    """Return True if the kernels normalise `x`: they copy what they read of the memory, so it may change afterwards."""
    return memory_mean.is_cpu and cpu.takes(x, memory_mean.dtype) and memory_mean.shape == x.shape[1:2]


class _Kernels(SingleLevelFunction):
    """The layer on the CPU kernels: one node that saves its input and six vectors of C numbers. Its last argument is
    (y, call): the output that the kernels have made, and what they need in backward.

    Not an `autograd.Function`, whose `apply` prepares for functorch: that takes as long as a small layer, and the
    kernels have made sure that no transform is active. Gradients may leave in the statistics' dtype: autograd casts
    them.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, residual, made):
        y, ctx.call = made
        ctx.save_for_backward(x, weight, y if ctx.call[1] else None)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        x, weight, y = ctx.saved_tensors
        call, wanted = ctx.call, ctx.needs_input_grad
        found = cpu.module().backward(call, wanted, grad_y, y, x, weight)
        if found is None:
            found = cpu.backward_prepared(call, wanted, grad_y, y, x, weight)
        return _backward_in_torch(call, wanted, grad_y, y, x, weight) if found is None else found


if hasattr(_Kernels, "_backward_cls"):  # torch's own looks for it each time
    _Kernels._backward_cls.apply = _Kernels.backward
with_gradient = _Kernels.apply


def _backward_in_torch(call, wanted, grad_y, y, x, weight):
    """The backward of `_Kernels` where the kernels cannot run, as under create_graph."""
    cpu.require_memory(grad_y, y)
    grad_residual = grad_y = grad_y if y is None else torch.where(y.detach() <= 0, 0, grad_y)
    if not any(wanted[:3]):  # the residual's gradient does not pass the norm
        return None, None, None, grad_residual, None
    saved, _, eps, layer, handle, reading = call
    read = cpu.Saved.of(saved, x)
    memory = None if layer is None else layer._backward_memory(handle, reading, bool(read.recorded))
    before = Moments(read.memory_mean, read.memory_var, read.memory_weight)
    hat = merge(before, batch_moments(x))  # under create_graph a function of x, for the second derivative
    results = (*_backward(grad_y, x, weight, hat, eps, wanted[0], memory), grad_residual)
    if memory is not None:
        read.recorded.fill_(memory.recorded)
    return *[one if needed else None for one, needed in zip(results, wanted, strict=False)], None


def is_plain(x: Tensor) -> bool:
    """Return True for a tensor of torch's own class while no compiler, functorch, dispatch or forward-AD mode is
    active.
    """
    return type(x) in (Tensor, torch.nn.Parameter) and cpu.unobserved()


def _on_cuda(x: Tensor) -> bool:
    return is_plain(x) and cuda.takes(x)


def normalize(x: Tensor, weight: Tensor | None, bias: Tensor | None, hat: Moments, eps: float) -> Tensor:
    """y = γ(x − μ̂)/√(σ̂² + ε) + β in differentiable operations, in the statistics' dtype and then the input's."""
    scale = torch.rsqrt(hat.var + eps)
    if weight is not None:
        scale = scale * weight
    y = (x - _per_channel(hat.mean, x)) * _per_channel(scale, x)
    if bias is not None:
        y = y + _per_channel(bias, x)
    return y.to(x.dtype)


def _per_channel(vector_C: Tensor, x: Tensor) -> Tensor:
    return vector_C.view(1, -1, *[1] * (x.dim() - 2))


class _Normalize(torch.autograd.Function):
    """The layer in torch operations: one node that saves its input and vectors of C numbers. Compilers can trace it."""

    @staticmethod
    def forward(ctx, x, weight, bias, mean, var, total, rest):
        memory, ctx.eps, ctx.memory = rest
        ctx.save_for_backward(x, weight, mean, var, total, *memory)
        ctx.bias_dtype = None if bias is None else bias.dtype
        if _on_cuda(x):
            return cuda.transform(x, weight, bias, mean, torch.rsqrt(var + ctx.eps))
        return F.batch_norm(x, mean, var, _to(weight, mean.dtype), _to(bias, mean.dtype), False, 0.0, ctx.eps)

    @staticmethod
    def backward(ctx, grad_y):
        x, weight, mean, var, total, *memory = ctx.saved_tensors
        hat = Moments(mean, var, total)
        if ctx.memory is None and torch.is_grad_enabled():
            # Under create_graph the moments must be functions of x: the saved ones would lose the second derivative.
            hat = merge(Moments(*memory), batch_moments(x))
        grad_x, grad_weight, grad_bias = _backward(grad_y, x, weight, hat, ctx.eps, ctx.needs_input_grad[0], ctx.memory)
        grad_weight = None if weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if ctx.bias_dtype is None else grad_bias.to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None, None


def _backward(grad_y, x, weight, hat, eps, wants_x, memory):
    """Gradients with respect to x, weight and bias: dx = γ/√(σ̂² + ε) · (g − ā − x̂·q̄).

    `memory` gives ā and q̄; without one they are the sums over the batch, divided by the weight of batch and memory.
    """
    cpu.require_memory(grad_y, x, weight)
    on_cuda = not torch.is_grad_enabled() and is_plain(grad_y) and cpu.is_gradient(grad_y) and cuda.takes(x)
    inv = torch.rsqrt(hat.var + eps)
    if on_cuda:
        grad_y = cuda.arranged(grad_y, x)
        grad_bias, sum_gx = cuda.reduce(grad_y, x, hat.mean, inv)
        grad_weight = sum_gx * inv
    else:
        x_hat = (x - _per_channel(hat.mean, x)) * _per_channel(inv, x)
        dims = [0, *range(2, x.dim())]
        grad = grad_y.to(inv.dtype)
        grad_bias, grad_weight = grad.sum(dims), (grad * x_hat).sum(dims)
    if memory is None:
        mean, product = grad_bias / hat.weight, grad_weight / hat.weight
    else:
        mean, product = memory.means(grad_bias, grad_weight, count_per_channel(x))
    if not wants_x:
        return None, grad_weight, grad_bias
    if on_cuda:
        return cuda.elementwise(grad_y, x, hat.mean, inv, weight, mean, product / inv), grad_weight, grad_bias
    scale = inv if weight is None else inv * weight
    subtracted = _per_channel(mean, x) + x_hat * _per_channel(product, x)
    return ((grad - subtracted) * _per_channel(scale, x)).to(x.dtype), grad_weight, grad_bias


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return tensor if tensor is None or tensor.dtype is dtype else tensor.to(dtype)
