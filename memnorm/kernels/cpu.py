"""The kernels for the processor: tensors here, addresses in the compiled module.

`forward` and `backward` are the whole layer in one call each, `record` is the memory's update; all write through
addresses, so they take plain strided tensors only, with nothing looking over autograd's shoulder (`takes`). In the
usual case (`Memory.handle`) the compiled module looks at the tensors itself: here that takes longer than a small layer.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import _C, Tensor, nn
from torch._C._functorch import is_legacy_batchedtensor
from torch._prims_common import suggest_memory_format
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from memnorm.errors import InputError, warn
from memnorm.kernels import switched_off

_KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 0}
_STATISTICS = {dtype: torch.float64 if dtype is torch.float64 else torch.float32 for dtype in _KINDS}
_DTYPES = (torch.float32, torch.float64, torch.bfloat16)  # in the order of their kinds
_OBSERVERS = (_C._are_functorch_transforms_active, _C._len_torch_dispatch_stack, _C._is_tracing)
_PLAIN = (Tensor, nn.Parameter)
_CHANNELS_LAST: dict[int, Any] = {4: torch.channels_last, 5: torch.channels_last_3d}


@functools.cache
def module() -> Any:
    """The compiled module, or None where it is switched off or was not built; in that case said once."""
    if switched_off():
        return None
    try:
        found = importlib.import_module("memnorm.kernels._cpu")
        found.introduce(
            *(Tensor, nn.Parameter, torch.strided, *_DTYPES, torch.empty_like, increment_version),
            *(_OBSERVERS, forward_ad, torch.is_grad_enabled, _C._is_fwd_grad_enabled),
            *(_C._current_graph_task_id, _C._autograd._top_saved_tensors_default_hooks),
        )
        return found
    except ImportError as error:
        warn(
            f"memnorm's kernels for the processor are not there ({error}); torch operations take their place, several "
            "times slower. Install memnorm where a C++ compiler is, or set MEMNORM_KERNELS=off to hide this."
        )
        return None


def description() -> str:
    """What computes memorized layers on the processor."""
    if module() is not None:
        return "C++ kernels for the processor"
    return "torch operations: " + ("MEMNORM_KERNELS=off" if switched_off() else "not built")


def takes(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels can normalise `x` by statistics of this dtype."""
    return (
        unobserved()
        and type(x) in _PLAIN
        and _STATISTICS.get(x.dtype) is dtype
        and x.is_cpu
        and x.layout is torch.strided
        and x.numel() > 0
        and not x.is_neg()
        and not x._is_zerotensor()
        and module() is not None
    )


def unobserved() -> bool:
    """Whether autograd alone is looking: a compiler, a functorch transform, forward-mode AD, a dispatch mode and a
    tracer each need operations that they can see through.
    """
    return not (is_compiling() or any(one() for one in _OBSERVERS) or forward_ad._current_level >= 0)


def are_alike(x: Tensor, other: Tensor) -> bool:
    """Whether `other` may go beside `x`, which the kernels take."""
    return (
        type(other) in _PLAIN
        and other.is_cpu
        and other.dtype is x.dtype
        and other.shape == x.shape
        and other.layout is torch.strided
    )


def backward_at_once(
    grad_y: Tensor,
    y: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    saved: bytearray,
    wanted: tuple[bool, ...],
    memory: Any,
) -> Any:
    """`backward` as autograd wants it, in the usual case; else None. Autograd's vmap (`is_grads_batched`) sends many
    gradients in one, without an address. `memory` is None or a `BackwardMemory`.
    """
    if is_legacy_batchedtensor(grad_y):
        return None
    past = (None, None) if memory is None else memory.on_kernels()
    return module().backward_layer(saved, grad_y, y, x, weight, wanted, torch.get_num_threads(), *past)


def is_gradient(grad_y: Tensor) -> bool:
    """Whether `grad_y` is one dense gradient."""
    return (
        type(grad_y) is Tensor
        and not is_legacy_batchedtensor(grad_y)
        and grad_y.layout is torch.strided
        and not grad_y._is_zerotensor()
    )


def readable(vector: Tensor, dtype: torch.dtype) -> bool:
    """Whether statistics can be read through their address."""
    return (
        type(vector) in _PLAIN
        and vector.is_cpu
        and vector.dtype is dtype
        and vector.is_contiguous()
        and not vector.is_neg()
    )


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    rectify: bool,
    eps: float,
    memory: Memory | Reading,
    recording: bool,
) -> tuple[Tensor, bytearray]:
    """y = norm(x), or relu(norm(x) + residual) if `rectify`; and what `Saved` and `backward` read.

    Of a layer's `Memory`, the batch then becomes a part if `recording`; a `Reading` is only read.
    """
    data, memory_format, sizes = _arranged(x)
    dtype, c = memory.dtype, sizes[4]
    if memory.channels != c:
        raise InputError(f"the statistics are of {memory.channels} channels, the input has {c}")
    if weight is not None:
        weight = _vector(weight, c, dtype)
    if bias is not None:
        bias = _vector(bias, c, dtype)
    if residual is not None:
        residual = _like(residual, data, memory_format)
    y, saved = torch.empty_like(data), bytearray((6 * c + 1) * dtype.itemsize)
    memory.function(
        *sizes,
        _address(data),
        _address(weight),
        _address(bias),
        _address(residual),
        rectify,
        _address(y),
        eps,
        saved,
        *memory.arguments(recording),
    )
    if recording:
        increment_version(memory.buffers)
    return y if data is x else y.to(x.dtype), saved


class Saved(NamedTuple):
    """What `forward` leaves behind the output: vectors of C, and the memory's weight."""

    memory_mean: Tensor
    memory_var: Tensor
    hat_mean: Tensor
    hat_inv: Tensor
    batch_mean: Tensor
    batch_var: Tensor
    memory_weight: Tensor

    @classmethod
    def of(cls, saved: bytearray, x: Tensor) -> Saved:
        numbers = torch.frombuffer(saved, dtype=_STATISTICS[x.dtype])
        return cls(*numbers[:-1].view(6, -1).unbind(), numbers[-1])  # type: ignore[call-arg]


def backward(
    grad_y: Tensor,
    y: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    saved: bytearray,
    wants_x: bool,
    wants_residual: bool,
    memory: Any = None,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor | None] | None:
    """Gradients with respect to x, weight, bias and residual; weight's and bias's in the statistics' dtype.

    `y` is the output if it was rectified, else None. With a `BackwardMemory` that the kernels cannot write, None.
    """
    past, recording = Past(), False
    if memory is not None:
        known, recording = memory.on_kernels(fresh=True)
        if known is None or known.wide != (x.dtype is torch.float64):
            return None
        past = known
    data, memory_format, sizes = _arranged(x)
    y = None if y is None else _like(y, data, memory_format)
    grad_y = _like(grad_y, data, memory_format)
    grad_x = torch.empty_like(data) if wants_x else None
    grad_residual = torch.empty_like(data) if wants_residual else None
    c, dtype = sizes[4], _STATISTICS[x.dtype]
    grad_weight, grad_bias = data.new_empty(c, dtype=dtype), data.new_empty(c, dtype=dtype)
    if weight is not None:
        weight = _vector(weight, c, dtype)
    module().backward(
        *sizes,
        _address(data),
        _address(weight),
        _address(grad_y),
        _address(y),
        _address(grad_x),
        _address(grad_residual),
        saved,
        _address(grad_weight),
        _address(grad_bias),
        *past[4:8],
        recording,
    )
    if recording:
        increment_version(memory.buffers)
    if data is not x:
        grad_x = None if grad_x is None else grad_x.to(x.dtype)
        grad_residual = None if grad_residual is None else grad_residual.to(x.dtype)
    return grad_x, grad_weight, grad_bias, grad_residual


def center(gradient: Tensor, rows: int) -> bool:
    """Take the mean of each of the `rows` of a gradient, in place. False if the kernels cannot do it."""
    kernels, kind = module(), _KINDS.get(gradient.dtype, 2)
    if (
        kernels is None
        or kind > 1
        or type(gradient) is not Tensor
        or not gradient.is_cpu
        or not (gradient.is_contiguous() or gradient.is_contiguous(memory_format=torch.channels_last))
        or gradient.dtype is torch.float16
    ):
        return False
    kernels.center(kind, rows, gradient.numel() // rows, _address(gradient))
    increment_version(gradient)
    return True


class Past(NamedTuple):
    """A backward memory (A, Q, W_b) as the kernels take it: the tensors, and the addresses at which they were checked.
    Without `strength` it is written and not read.
    """

    mean: Tensor | None = None
    product: Tensor | None = None
    weight: Tensor | None = None
    strength: Tensor | None = None
    mean_address: int = 0
    product_address: int = 0
    weight_address: int = 0
    strength_address: int = 0
    wide: bool = False
    channels: int = 0
    kept: Any = None  # the storages, so that nothing else gets these addresses


def past_of(vectors: Sequence[Tensor], strength: Tensor | None) -> Past | None:
    """The `Past` of these tensors; None if the kernels cannot write them."""
    c, dtype = vectors[0].numel(), vectors[0].dtype
    if (
        dtype not in (torch.float32, torch.float64)
        or [one.numel() for one in vectors] != [c, c, 1]
        or not all(readable(one, dtype) and not one.is_inference() for one in vectors)
        or not (strength is None or readable(strength, torch.float64))
    ):
        return None
    tensors: tuple[Any, ...] = (*vectors, strength)
    kept = [one.detach() for one in tensors if one is not None]
    return Past._make((*tensors, *map(_address, tensors), dtype is torch.float64, c, kept))


def fade(weights: list[Tensor], factors: list[float]) -> bool:
    """Multiply scalars by factors, in place, in one call; False if the kernels cannot."""
    dtype = weights[0].dtype
    if module() is None or dtype not in (torch.float32, torch.float64):
        return False
    for one in weights:
        if not (type(one) is Tensor and one.is_cpu and one.dtype is dtype and not one.is_inference()):
            return False
    module().fade(_KINDS[dtype], [_address(one) for one in weights], factors)
    increment_version(weights)
    return True


def _address(tensor: Tensor | None) -> int:
    """Of the first value; 0 without a tensor. One that has values but no address would crash the process."""
    if tensor is None:
        return 0
    address = tensor.data_ptr()
    if not address:
        raise InputError(f"a tensor of shape {tuple(tensor.shape)} has no memory: its storage was freed")
    return address


def _like(tensor: Tensor, data: Tensor, memory_format: Any) -> Tensor:
    """`tensor` in the kind and layout of `data`, which has this layout."""
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor.dtype is data.dtype and tensor.is_contiguous(memory_format=memory_format):
        return tensor
    return tensor.to(data.dtype).contiguous(memory_format=memory_format)


def _vector(parameter: Tensor, c: int, dtype: torch.dtype) -> Tensor:
    """A parameter in the kind and layout that the kernels read."""
    if parameter.numel() != c:
        raise InputError(f"a parameter has {parameter.numel()} values, the input {c} channels")
    if parameter.dtype is dtype and parameter.is_contiguous():
        return parameter
    return parameter.to(dtype).contiguous()


def _arranged(x: Tensor) -> tuple[Tensor, Any, tuple[int, ...]]:
    """`x` in a kind and layout that the kernels read; that layout; and its kind, whether it is planes (see `layer.h`),
    the threads to use, and N, C, L.
    """
    shape = x.shape
    n, c = shape[0], shape[1]
    length = x.numel() // (n * c)
    if x.dtype is torch.float16:
        x = x.float()
    kind, threads = _KINDS[x.dtype], torch.get_num_threads()
    if x.is_contiguous():
        return x, torch.contiguous_format, (kind, c > 1 and length > 1, threads, n, c, length)
    memory_format = _CHANNELS_LAST.get(len(shape), torch.contiguous_format)
    if memory_format is not torch.contiguous_format and x.is_contiguous(memory_format=memory_format):
        return x, memory_format, (kind, False, threads, n, c, length)
    return _arranged(x.contiguous(memory_format=suggest_memory_format(x)))


class Reading:
    """A memory that is read and not written."""

    buffers = ()

    def __init__(self, mean: Tensor, var: Tensor, weight: float) -> None:
        self.function, self.dtype, self.channels = module().forward, mean.dtype, mean.numel()
        self._kept = mean, var.to(mean).expand_as(mean).contiguous()
        self._arguments = (*map(_address, self._kept), weight)

    def arguments(self, recording: bool) -> tuple[Any, ...]:
        return self._arguments


class Rules(NamedTuple):
    """How a memory changes."""

    decay: float
    prior_weight: float
    prior_always: bool  # the initial statistics count as trained ones
    evenly: bool  # pool a batch with everything since the reset
    shift: bool  # count the squared shift between means


class Memory:
    """A layer's memory as the kernels write it: where its buffers are, and the rules by which they change."""

    NAMES = (
        "running_mean",
        "running_var",
        "running_weight",
        "num_batches_tracked",
        "memory_mean",
        "memory_var",
        "memory_count",
    )
    NAMES_OF_ALL = ("strength", *NAMES)

    def __init__(self, buffers: Mapping[str, Any], rules: Rules) -> None:
        self.rules = rules
        self.buffers = [buffers[name] for name in self.NAMES]
        self.strength = buffers["strength"]
        self.addresses = [buffers[name].data_ptr() for name in self.NAMES_OF_ALL]
        # With their storages alive, these addresses are nobody else's, whatever becomes of the tensors.
        self._held = [buffers[name].detach() for name in self.NAMES_OF_ALL]
        self.dtype, self.channels = self.buffers[0].dtype, self.buffers[0].numel()
        self.slots = buffers["memory_mean"].shape
        self.function: Any = getattr(module(), "train", None)
        self.handle: Any = None  # with which `train_layer` looks at a layer by itself
        self._held_of_handle: list[Tensor] = []
        self._arguments = (*self.addresses, self.slots[0], *rules)

    def arguments(self, recording: bool) -> tuple[Any, ...]:
        """What `train` takes of it."""
        return (*self._arguments, recording)

    def arguments_of_record(self) -> tuple[Any, ...]:
        return self._arguments[1:]

    def still(self, buffers: Mapping[str, Any], rules: Rules) -> bool:
        """Whether it still is where it was, under the same rules."""
        return (
            all(buffers[name] is one for name, one in zip(self.NAMES, self.buffers, strict=True))
            and [buffers[name].data_ptr() for name in self.NAMES_OF_ALL] == self.addresses
            and buffers["memory_mean"].shape == self.slots
            and rules == self.rules
        )

    def grasp(self, buffers: Any, parameters: Mapping[str, Any]) -> None:
        """Let the compiled module look for itself from now on, if the parameters are such that it can."""
        self.handle, self._held_of_handle = None, []
        vectors = [parameters.get(name, False) for name in ("weight", "bias")]
        fits = all(one is None or self._is_parameter(one) for one in vectors)
        if fits and (vectors[0] is not None or vectors[1] is None) and isinstance(parameters, dict):
            written, wide = tuple(self.buffers), self.dtype is torch.float64
            self._held_of_handle = [one.detach() for one in vectors if one is not None]
            self.handle = module().know(buffers, parameters, wide, self.channels, self.slots[0], written)

    def _is_parameter(self, vector: Any) -> bool:
        """Not a tensor that someone has computed, whose graph must not be held."""
        return type(vector) is nn.Parameter and readable(vector, self.dtype) and vector.numel() == self.channels

    def writable(self) -> bool:
        """Whether every buffer can be written through its address."""
        dtypes = {"num_batches_tracked": torch.int64, "strength": torch.float64}
        named = zip(self.NAMES_OF_ALL, (self.strength, *self.buffers), strict=True)
        k, c = self.slots[0], self.channels
        return (
            self.function is not None
            and [one.numel() for one in self.buffers] == [c, c, 1, 1, k * c, k * c, k]
            and all(self.addresses[: 8 if k else 5])
            and all(readable(one, dtypes.get(name, self.dtype)) and not one.is_inference() for name, one in named)
        )


def record(memory: Memory, mean: Tensor, var: Tensor, count: float) -> None:
    """Make a batch the newest remembered one, in place; see `record.h`."""
    module().record(
        _KINDS[mean.dtype], mean.numel(), *memory.arguments_of_record(), mean.data_ptr(), var.data_ptr(), count
    )
    increment_version(memory.buffers)
