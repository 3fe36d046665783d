"""The CPU kernels: a layer's forward, with the update of its memory, and its backward in one call each.

The compiled module checks the tensors itself, because that takes longer in Python than a small layer. It returns None
if a tensor is not dense, plain and of a known layout; then the functions here prepare copies and call it again. They
return None if a compiler, functorch, a dispatch mode or forward-mode AD must see the operations.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from memnorm import _torch
from memnorm.errors import InputError, warn
from memnorm.kernels import switched_off

_DTYPES = (torch.float32, torch.float64, torch.bfloat16)  # that the compiled module reads
_STATISTICS = {torch.float32: torch.float32, torch.float64: torch.float64}
_STATISTICS |= {torch.bfloat16: torch.float32, torch.float16: torch.float32}
_OBSERVERS = (_torch.functorch_active, _torch.dispatch_modes, _torch.is_tracing)
_PLAIN = (Tensor, nn.Parameter)
_LACKING = _torch.lacks_for_kernels()
_EXCHANGE = getattr(Tensor, "__dlpack_c_exchange_api__", None)  # newer than torch 2.8


@functools.cache
def module() -> Any:
    """The compiled module; None if it is switched off or was not built, after one warning."""
    if switched_off():
        return None
    if _LACKING:
        warn(
            f"torch {torch.__version__} has no {_LACKING[0]}, which memnorm's CPU kernels need; torch operations "
            "replace them, several times slower. Use another version of torch, or set MEMNORM_KERNELS=off to hide this."
        )
        return None
    try:
        found = importlib.import_module("memnorm.kernels._cpu")
        introduce_torch(found, _EXCHANGE)
        return found
    except ImportError as error:
        warn(
            f"memnorm's CPU kernels are missing ({error}); torch operations replace them, several times slower. "
            "Install memnorm on a machine with a C++ compiler, or set MEMNORM_KERNELS=off to hide this."
        )
        return None


def introduce_torch(compiled: Any, exchange: Any) -> None:
    """Give the compiled module the objects of torch that it uses. Without `exchange` it reads tensors by attributes."""
    functions = (torch.is_grad_enabled, _torch.is_fwd_grad_enabled, _torch.current_graph_task_id)
    hooks = _torch.top_saved_tensors_hooks
    compiled.introduce(
        *(Tensor, nn.Parameter, *_DTYPES, torch.int64, torch.empty_like, _torch.increment_version),
        *(_OBSERVERS, forward_ad, *functions, hooks, torch.is_inference_mode_enabled, torch.get_num_threads, exchange),
    )


def description() -> str:
    """What computes memorized layers on the CPU."""
    if module() is not None:
        return "C++ kernels for the CPU"
    if switched_off():
        return "torch operations: MEMNORM_KERNELS=off"
    return "torch operations: " + (f"torch has no {_LACKING[0]}" if _LACKING else "not built")


def takes(x: Tensor, dtype: torch.dtype) -> bool:
    """Return True if the kernels can normalise `x` by statistics of this dtype."""
    return (
        unobserved()
        and type(x) in _PLAIN
        and _STATISTICS.get(x.dtype) is dtype
        and x.is_cpu
        and x.layout is torch.strided
        and x.numel() > 0
        and not _torch.is_zerotensor(x)
        and module() is not None
    )


def unobserved() -> bool:
    """Return True if no compiler, functorch transform, dispatch mode, tracer or forward-mode AD is active; False if
    torch does not say.
    """
    return not (_LACKING or is_compiling() or any(one() for one in _OBSERVERS) or _torch.forward_level() >= 0)


def is_gradient(grad_y: Tensor) -> bool:
    """Return True for one dense gradient; autograd's vmap (`is_grads_batched`) sends several in one tensor."""
    return (
        type(grad_y) is Tensor
        and not _torch.is_legacy_batchedtensor(grad_y)
        and grad_y.layout is torch.strided
        and not _torch.is_zerotensor(grad_y)
    )


def check(buffers: Any) -> Any:
    """The handle by which the kernels find a layer's buffers; None if they cannot use them."""
    found = None if module() is None else module().check(buffers)
    if found is None:
        require_memory(*buffers.values())
    return found


def train_prepared(
    layer: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, relu: bool
) -> Any:
    """A training forward of `layer`, whose buffers `check` has seen, on copies of the tensors that the kernels read.
    Returns the output and what `backward` and `Saved` read of it. `takes(x)` must be True.
    """
    data, (weight, bias) = _dense(x), _vectors(x, weight, bias)
    if residual is not None:
        if not _is_alike(residual, x):
            return None
        residual = _like(residual, data)
    return _in_dtype(module().train_prepared(layer, layer.ranks, data, weight, bias, residual, relu), x.dtype)


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, mean: Tensor, var: Tensor, memory_weight: float
) -> Any:
    """norm(x) with a memory that is only read, and what `backward` and `Saved` read. `takes(x)` must be True."""
    found = module().forward(x, weight, bias, None, False, eps, mean, var, memory_weight)
    if found is None:
        weight, bias, mean, var = _vectors(x, weight, bias, mean, var)
        found = module().forward(_dense(x), weight, bias, None, False, eps, mean, var, memory_weight)
    return _in_dtype(found, x.dtype)


def _in_dtype(made: Any, dtype: torch.dtype) -> Any:
    return made if made is None or made[0].dtype is dtype else (made[0].to(dtype), made[1])


class Saved(NamedTuple):
    """What a forward saves in addition to its input: vectors of C, the memory's weight, and 1 once its backward has
    been recorded. The tensors share the memory of `saved`.
    """

    memory_mean: Tensor
    memory_var: Tensor
    hat_mean: Tensor
    hat_inv: Tensor
    batch_mean: Tensor
    batch_var: Tensor
    memory_weight: Tensor
    recorded: Tensor

    @classmethod
    def of(cls, saved: bytearray, x: Tensor) -> Saved:
        numbers = torch.frombuffer(saved, dtype=_STATISTICS[x.dtype])
        return cls(*numbers[:-2].view(6, -1).unbind(), *numbers[-2:].unbind())


def backward_prepared(
    call: Any, wanted: tuple[bool, ...], grad_y: Tensor, y: Tensor | None, x: Tensor, weight: Tensor | None
) -> Any:
    """The wanted gradients of x, weight, bias and residual, those of vectors in the statistics' dtype, and a None; or
    None if the formula in torch operations must run. Works on copies that the kernels can read.

    `call` is what the forward returned besides its output, `y` the output if a ReLU made it, else None.
    """
    if torch.is_grad_enabled() or not (unobserved() and is_gradient(grad_y) and any(wanted[:3])):
        return None
    data = _dense(x)
    y, grad_y = None if y is None else _like(y, data), _like(grad_y, data)
    (gain,) = _vectors(x, weight)
    needs = wanted[:4]
    if gain is None and wanted[2]:  # the gradients of vectors are made like the weight
        gain, needs = data.new_ones(x.shape[1], dtype=_STATISTICS[x.dtype]), (wanted[0], False, *wanted[2:4])
    found = module().backward(call, needs, grad_y, y, data, gain)
    if found is None:
        return None
    grad_x, grad_weight, grad_bias, grad_residual, _ = found
    narrow = [None if one is None else one.to(x.dtype) for one in (grad_x, grad_residual)]
    return narrow[0], grad_weight, grad_bias, narrow[1], None


def backward_buffers(handle: Any) -> Any:
    """The backward memory (mean, product, weight) that a handle holds, and the strength."""
    return handle[8:11], handle[0]


def fade(layers: list[tuple[Any, Any, float | None]]) -> bool:
    """Count an update for the handle and buffers of each layer: multiply the weights of both memories by the factor,
    None for that of `decay_by_images`, and set the count of images to 0. False if the kernels cannot do it for all.
    """
    return module() is not None and bool(module().fade(layers))


def _is_alike(residual: Tensor, x: Tensor) -> bool:
    return (
        type(residual) in _PLAIN
        and residual.is_cpu
        and residual.dtype is x.dtype
        and residual.shape == x.shape
        and residual.layout is torch.strided
    )


def require_memory(*tensors: Tensor | None) -> None:
    """Raise if a tensor has values and no memory: reading it would crash the process."""
    if not unobserved():
        return
    for one in tensors:
        if (
            one is not None
            and type(one) in _PLAIN
            and one.is_cpu
            and one.layout is torch.strided
            and one.nbytes
            and not _torch.is_zerotensor(one)
            and not _torch.is_legacy_batchedtensor(one)
            and not one.data_ptr()
        ):
            raise InputError(f"a tensor of shape {tuple(one.shape)} has no memory: its storage was freed")


def _dense(x: Tensor) -> Tensor:
    """`x` in a kind and layout that the kernels read."""
    require_memory(x)
    dtype = torch.float32 if x.dtype is torch.float16 else x.dtype
    if x.dtype is dtype and not x.is_neg() and x.is_contiguous():
        return x
    dense = torch.empty(x.shape, dtype=dtype, device="meta", memory_format=_torch.suggest_memory_format(x))
    if x.dtype is dtype and not x.is_neg() and x.stride() == dense.stride():
        return x
    return torch.empty_like(dense, device="cpu").copy_(x.detach().resolve_neg())


def _like(tensor: Tensor, data: Tensor) -> Tensor:
    """`tensor` in the dtype and layout of `data`."""
    require_memory(tensor)
    if tensor.dtype is data.dtype and tensor.stride() == data.stride() and not tensor.is_neg():
        return tensor
    return torch.empty_like(data).copy_(tensor.detach().resolve_neg())


def _vectors(x: Tensor, *vectors: Tensor | None) -> list[Any]:
    """Parameters and statistics in the dtype and layout that the kernels need for `x`."""
    require_memory(*vectors)
    dtype, channels = _STATISTICS[x.dtype], x.shape[1]
    for one in vectors:
        if one is not None and one.numel() != channels:
            raise InputError(f"a parameter or statistic has {one.numel()} values, the input {channels} channels")
    return [None if one is None else one.detach().to(dtype).resolve_neg().contiguous() for one in vectors]
