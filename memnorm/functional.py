"""The arithmetic of memorized batch normalization: moments, their union, and the normalisation with its gradient.

Everything rests on one operation, the union of two weighted sets of values known only by their moments:

    ρ = n/(n + w)      μ̂ = M + ρ(μ − M)      σ̂² = V + ρ(σ² − V) + ρ(1 − ρ)(μ − M)²

With (μ, σ², n) the current batch and (M, V, w) the memory, this is the paper's Eq. 6. The same `merge` is the recursion
of an unlimited memory, the update of a cumulative average, and the sum over batches of a recalibration. `var` is always
the biased variance.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction
from torch.nn import functional as F

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

    def on_kernels(self, fresh: bool = False) -> tuple[cpu.Past | None, bool]:
        """Return the memory for the kernels (None if they cannot use it), and True if they should record; then call
        `written`. `fresh` checks the tensors anew.
        """

    def written(self) -> None: ...


def batch_moments(x: Tensor) -> Moments:
    """Moments over every dimension but the second, in float32 or wider.

    `var_mean` is accurate for data far from zero in every memory layout; a sum of squares is not.
    """
    dims = [0, *range(2, x.dim())]
    var, mean = torch.var_mean(x.to(statistics_dtype(x.dtype)), dims, correction=0)
    return Moments(mean, var, count_per_channel(x))


def constant_moments(x: Tensor) -> Moments:
    """`batch_moments` without a gradient, sooner: on the CPU `var_mean` takes a value at a time, and two passes of
    vector operations are several times as fast. What rounding left in the mean is among the deviations, and taken out.
    """
    x = x.detach()
    if x.device.type != "cpu":
        return batch_moments(x)
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
    """Where statistics of such data are kept: float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_scalar(value: Tensor | float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number on the device. Not `as_tensor`, which copies it there and waits."""
    return value.to(device, dtype) if isinstance(value, Tensor) else torch.full((), value, dtype=dtype, device=device)


def snapshot(tensor: Tensor) -> Tensor:
    """A copy that holds although `tensor` is overwritten before backward.

    In a compiled graph `clone` does not: AOTAutograd may save the buffer instead and clone it in backward, when it has
    changed already. It never recomputes a cumulative sum; that over one row is a copy.
    """
    return tensor.unsqueeze(0).cumsum(0).squeeze(0) if torch.compiler.is_compiling() else tensor.clone()


def merge(memory: Moments, batch: Moments, *, shift: bool = True) -> Moments:
    """Moments of the union of two weighted sets: the module's equation.

    `shift=False` leaves out ρ(1 − ρ)(μ − M)², the squared shift between the means: the paper's Eq. 4, which it argues
    against.
    """
    total = batch.weight + memory.weight
    # Not other = 1 − share, which has few digits where the memory is light.
    share, other = (
        as_scalar(weight / total, batch.mean.dtype, batch.mean.device) for weight in (batch.weight, memory.weight)
    )
    mean = torch.lerp(memory.mean, batch.mean, share)
    var = torch.lerp(memory.var, batch.var, share)
    if shift:
        var = var + share * other * (batch.mean - memory.mean).square()
    return Moments(mean, var, total)


def pool(mean_KC: Tensor, var_KC: Tensor, weight_K: Tensor, *, shift: bool = True) -> Moments:
    """Moments of the union of K weighted batches.

        W = Σ w        M = Σ w μ / W        V = Σ w (σ² + (μ − M)²) / W

    The squared shift between means is the paper's correction term: averaging the variances alone would lose it.
    """
    total = weight_K.sum()
    share_K1 = (weight_K / total).unsqueeze(1)
    mean_C = (share_K1 * mean_KC).sum(0)
    spread_KC = var_KC + (mean_KC - mean_C).square() if shift else var_KC
    return Moments(mean_C, (share_K1 * spread_KC).sum(0), total)


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
    *,
    shift: bool = True,
    backward: BackwardMemory | None = None,
) -> tuple[Tensor, Moments]:
    """`memorized_batch_norm`, and the batch's own moments (constants). The caller gives up `memory`'s tensors: they
    must not change before backward, unless `reads_at_once`.
    """
    if shift and reads_at_once(x, memory.mean) and (backward is None or count_per_channel(x) > 1):
        return _on_kernels(x, weight, bias, memory, eps, backward)
    dtype = statistics_dtype(x.dtype)
    memory_weight = as_scalar(memory.weight, dtype, x.device).detach()
    memory = Moments(memory.mean.to(dtype), memory.var.to(dtype), memory_weight)
    if backward is not None:
        batch = constant_moments(x)
        hat = merge(memory, batch)
        return _TwoWay.apply(x, weight, bias, hat.mean, hat.var, (eps, backward)), batch
    if shift and is_plain(x):
        y, mean, var = _MemorizedBatchNorm.apply(x, weight, bias, memory, eps)  # type: ignore[attr-defined]
        return y, Moments(mean, var, count_per_channel(x))
    batch = batch_moments(x)
    y = _affine(x, weight, bias, merge(memory, batch, shift=shift), eps)
    return y, Moments(batch.mean.detach(), batch.var.detach(), batch.weight)


def reads_at_once(x: Tensor, memory_mean: Tensor) -> bool:
    """Whether the kernels normalise `x`: they copy what they read of the memory, which may then change."""
    return (
        cpu.takes(x, memory_mean.dtype)
        and cpu.readable(memory_mean, memory_mean.dtype)
        and memory_mean.shape == x.shape[1:2]
    )


def _on_kernels(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    memory: Moments,
    eps: float,
    backward: BackwardMemory | None,
) -> tuple[Tensor, Moments]:
    reading = cpu.Reading(memory.mean, memory.var, float(memory.weight))
    y, saved = cpu.forward(x, weight, bias, None, False, eps, reading, False)
    found = cpu.Saved.of(saved, x)
    y = with_gradient(y, saved, x, weight, bias, None, False, eps, backward)
    return y, Moments(found.batch_mean, found.batch_var, count_per_channel(x))


def with_gradient(
    y: Tensor,
    saved: bytearray,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    rectify: bool,
    eps: float,
    backward: BackwardMemory | None = None,
) -> Tensor:
    """What the kernels made of `x` (`cpu.forward`), as a function of their input if anybody may ask for a gradient."""
    if torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
    ):
        y = _Kernels.apply(x, weight, bias, residual, (y, saved, rectify, eps, backward))  # type: ignore[attr-defined]
    return y


class _Kernels(_SingleLevelFunction):
    """The whole layer as one node that saves its input and six vectors of C numbers.

    Not an `autograd.Function`, whose `apply` prepares for functorch: that costs as much as a small layer, and `takes`
    has made sure that no transform is active. Gradients may leave in the statistics' dtype: autograd casts them.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, residual, call):
        y, ctx.saved, rectify, ctx.eps, ctx.memory = call
        ctx.save_for_backward(x, weight, y if rectify else None)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        x, weight, y = ctx.saved_tensors
        memory = ctx.memory
        found = cpu.backward_at_once(grad_y, y, x, weight, ctx.saved, ctx.needs_input_grad, memory)
        if found is not None:
            if memory is not None:
                memory.written()
            return found
        wants_x, wants_weight, wants_bias, wants_residual, _ = ctx.needs_input_grad
        if not torch.is_grad_enabled() and cpu.unobserved() and cpu.is_gradient(grad_y):
            found = cpu.backward(grad_y, y, x, weight, ctx.saved, wants_x, wants_residual, memory)
        if found is not None:
            grad_x, grad_weight, grad_bias, grad_residual = found
            if memory is not None:
                memory.written()
        else:
            # Under create_graph the moments must be functions of x: the saved ones would lose the second derivative.
            read = cpu.Saved.of(ctx.saved, x)
            hat = merge(Moments(read.memory_mean, read.memory_var, read.memory_weight), batch_moments(x))
            grad_residual = grad_y = grad_y if y is None else torch.where(y.detach() <= 0, 0, grad_y)
            grad_x, grad_weight, grad_bias = _backward_formula(grad_y, x, weight, hat, ctx.eps, None, memory)
        return (
            grad_x,
            grad_weight if wants_weight else None,
            grad_bias if wants_bias else None,
            grad_residual if wants_residual else None,
            None,
        )


_Kernels._backward_cls.apply = _Kernels.backward  # type: ignore[attr-defined]  # torch's own looks for it each time


def is_plain(x: Tensor) -> bool:
    """Whether autograd alone is looking, at a tensor of torch's own class."""
    return type(x) in (Tensor, torch.nn.Parameter) and cpu.unobserved()


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, hat: Moments, eps: float) -> Tensor:
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


class _MemorizedBatchNorm(_SingleLevelFunction):
    """The whole layer as one node that saves its input and vectors of C numbers, from the pieces of torch's own batch
    norms. For plain tensors only, as `_Kernels` is.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, memory, eps):
        on_cuda = cuda.takes(x)
        batch = Moments(*cuda.moments(x), count_per_channel(x)) if on_cuda else batch_moments(x)
        hat = merge(memory, batch)
        if on_cuda:
            y = cuda.transform(x, weight, bias, hat.mean, torch.rsqrt(hat.var + eps))
        else:
            dtype = hat.mean.dtype
            y = F.batch_norm(x, hat.mean, hat.var, _to(weight, dtype), _to(bias, dtype), False, 0.0, eps)
        ctx.mark_non_differentiable(batch.mean, batch.var)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, *memory, *hat)
        ctx.eps = eps
        return y, batch.mean, batch.var

    @staticmethod
    def backward(ctx, grad_y, _grad_mean, _grad_var):
        if grad_y is None:
            return (None,) * 5
        x, weight, *vectors = ctx.saved_tensors
        memory, hat = Moments(*vectors[:3]), Moments(*vectors[3:])
        wants = ctx.needs_input_grad
        if torch.is_grad_enabled():
            # Under create_graph the moments must be functions of x: the saved ones would lose the second derivative.
            hat = merge(memory, batch_moments(x))
        gradients = _backward(grad_y, x, weight, hat, ctx.eps, wants, None)
        return *[gradient if wanted else None for gradient, wanted in zip(gradients, wants, strict=False)], None, None


class _TwoWay(torch.autograd.Function):
    """Normalise by given moments; the backward subtracts what a `BackwardMemory` says. Compilers can trace it."""

    @staticmethod
    def forward(ctx, x, weight, bias, mean, var, rest):
        ctx.eps, ctx.memory = rest
        ctx.save_for_backward(x, weight, mean, var)
        ctx.bias_dtype = None if bias is None else bias.dtype
        if is_plain(x) and cuda.takes(x):
            return cuda.transform(x, weight, bias, mean, torch.rsqrt(var + ctx.eps))
        return F.batch_norm(x, mean, var, _to(weight, mean.dtype), _to(bias, mean.dtype), False, 0.0, ctx.eps)

    @staticmethod
    def backward(ctx, grad_y):
        x, weight, mean, var = ctx.saved_tensors
        hat = Moments(mean, var, count_per_channel(x))
        grad_x, grad_weight, grad_bias = _backward(grad_y, x, weight, hat, ctx.eps, ctx.needs_input_grad, ctx.memory)
        grad_weight = None if weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if ctx.bias_dtype is None else grad_bias.to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None


def _backward(grad_y, x, weight, hat, eps, needs, memory):
    """Gradients with respect to x, weight and bias: dx = γ/√(σ̂² + ε) · (g − ā − x̂·q̄).

    `memory` gives ā and q̄; without one they are the sums over the batch, divided by the weight of batch and memory.
    """
    if torch.is_grad_enabled() or not is_plain(grad_y) or not cpu.is_gradient(grad_y):
        backward = _backward_formula
    elif cuda.takes(x):
        backward = _backward_on_cuda
    else:
        backward = _backward_fast if x.dtype == hat.mean.dtype else _backward_formula
    return backward(grad_y, x, weight, hat, eps, needs, memory)


def _subtracted(sum_g, sum_gx, x, hat, memory):
    if memory is None:
        return sum_g / hat.weight, sum_gx / hat.weight
    return memory.means(sum_g, sum_gx, count_per_channel(x))


def _backward_on_cuda(grad_y, x, weight, hat, eps, needs, memory):
    inv, grad_y = torch.rsqrt(hat.var + eps), cuda.arranged(grad_y, x)
    sum_g, sum_gx = cuda.reduce(grad_y, x, hat.mean, inv)
    grad_weight = sum_gx * inv
    mean, product = _subtracted(sum_g, grad_weight, x, hat, memory)
    grad_x = None
    if needs[0]:
        grad_x = cuda.elementwise(grad_y, x, hat.mean, inv, weight, mean, product / inv)
    return grad_x, grad_weight, sum_g


def _backward_fast(grad_y, x, weight, hat, eps, needs, memory):
    """Torch's eval-mode backward gives γg/σ̂ and the two sums; what is subtracted is linear in x."""
    weight = _to(weight, hat.mean.dtype)
    mask = [needs[0], True, True]
    grad_x, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
        grad_y, x, weight, hat.mean, hat.var, None, None, False, eps, mask
    )
    mean, product = _subtracted(grad_bias, grad_weight, x, hat, memory)
    if needs[0]:
        inv = torch.rsqrt(hat.var + eps)
        scale = -inv if weight is None else -inv * weight
        centred = x - _per_channel(hat.mean, x)
        correction = centred.mul_(_per_channel(scale * inv * product, x)).add_(_per_channel(scale * mean, x))
        grad_x = grad_x.add_(correction)
    return grad_x, grad_weight, grad_bias


def _backward_formula(grad_y, x, weight, hat, eps, _needs, memory):
    """The formula itself: differentiable again, and rounded to a narrow dtype only once."""
    inv = torch.rsqrt(hat.var + eps)
    x_hat = (x - _per_channel(hat.mean, x)) * _per_channel(inv, x)
    dims = [0, *range(2, x.dim())]
    grad = grad_y.to(inv.dtype)
    grad_bias, grad_weight = grad.sum(dims), (grad * x_hat).sum(dims)
    scale = inv if weight is None else inv * weight
    mean, product = _subtracted(grad_bias, grad_weight, x, hat, memory)
    subtracted = _per_channel(mean, x) + x_hat * _per_channel(product, x)
    return ((grad - subtracted) * _per_channel(scale, x)).to(x.dtype), grad_weight, grad_bias


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return tensor if tensor is None or tensor.dtype is dtype else tensor.to(dtype)
