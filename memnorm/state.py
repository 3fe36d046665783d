"""The buffers of a memorized layer when tools move them: dtype and device conversion, and checkpoints of plain batch
norm or another memory size.

Buffers, with k = `memory_size` (0 rows for None) and C channels:

    running_mean (C), running_var (C), running_weight ()     the pooled memory M, V, W: what eval and the next forward
    read memory_mean (k, C), memory_var (k, C), memory_count (k)  the remembered batches, newest first; count 0 is an
    empty slot strength ()                                              λ
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memnorm.functional import pool, statistics_dtype

if TYPE_CHECKING:
    from memnorm.layers import MemorizedBatchNorm

BACKWARD = ("backward_mean", "backward_product", "backward_weight")  # A, Q, W_b of `memnorm.norms.two_way`
POOLED = ("running_mean", "running_var", "running_weight")
SLOTS = ("memory_mean", "memory_var", "memory_count")


def scalar(value: float, device: torch.device) -> Tensor:
    """Float64 wherever it exists: 0.1 must stay 0.1 when the layer is used in float64."""
    return torch.full((), value, device=device, dtype=torch.float32 if device.type == "mps" else torch.float64)


def apply_keeping_width(layer: MemorizedBatchNorm, fn: Callable[[Tensor], Tensor], apply: Callable[[], object]) -> None:
    """Run `apply` (which maps every tensor of the layer through `fn`), then undo what it narrowed: statistics stay
    float32 or wider.
    """
    buffers: dict[str, Any] = layer._buffers
    before = {name: buffers[name] for name in layer.statistics}
    strength = layer.strength
    narrow = buffers["strength"] = strength.float()  # not every device has float64
    try:
        apply()
    except BaseException:
        buffers["strength"] = strength
        raise
    layer._plain_dtype = fn(torch.empty(0, dtype=layer._plain_dtype, device=strength.device)).dtype
    for name, old in before.items():
        new = buffers[name]
        if new.dtype != statistics_dtype(new.dtype):
            buffers[name] = old.to(device=new.device, dtype=statistics_dtype(new.dtype))
    buffers["strength"] = _moved_strength(layer, strength, narrow, fn)


def _moved_strength(
    layer: MemorizedBatchNorm, strength: Tensor, narrow: Tensor, fn: Callable[[Tensor], Tensor]
) -> Tensor:
    after: Any = layer._buffers["strength"]
    if after is narrow:  # shared in place, or nothing to do
        moved = fn(strength)
        return moved if moved.dtype == strength.dtype else strength
    if after.device.type == "mps":
        return after.float()
    if strength.is_meta and not after.is_meta:
        # to_empty leaves garbage, and a plain checkpoint brings no strength to replace it
        return scalar(layer._initial_strength, after.device)
    return strength.to(after.device)


def channel_mismatch(layer: MemorizedBatchNorm, state: MutableMapping[str, Any], prefix: str) -> str | None:
    """What is wrong with a checkpoint of another number of channels, in words; None if nothing is."""
    for name in ("running_mean", "running_var", "weight", "bias"):
        tensor = state.get(prefix + name)
        if isinstance(tensor, Tensor) and tuple(tensor.shape) != (layer.num_features,):
            return (
                f"{prefix + name}: the checkpoint has shape {tuple(tensor.shape)}, the layer {layer.num_features} "
                "channels. Load a checkpoint of the same architecture, or leave this layer's entries out and pass "
                "strict=False."
            )
    return None


def complete_checkpoint(layer: MemorizedBatchNorm, state: MutableMapping[str, Any], prefix: str) -> None:
    """Make entries of `state` under `prefix` fit the layer: those of a plain batch norm, or of another memory size."""
    mean = state.get(prefix + "running_mean")
    if mean is None:
        return
    if prefix + "running_weight" not in state:
        for name in layer.memory_buffers:
            state[prefix + name] = torch.zeros_like(layer.get_buffer(name), device=mean.device)
        state.setdefault(
            prefix + "strength",
            scalar(layer._initial_strength, mean.device) if layer.strength.is_meta else layer.strength,
        )
        return
    if _is_memory_of_other_size(layer, state, prefix):
        _resize_memory(layer, state, prefix)


def _is_memory_of_other_size(layer: MemorizedBatchNorm, state: MutableMapping[str, Any], prefix: str) -> bool:
    slots: list[Any] = [state.get(prefix + name) for name in SLOTS]
    if not all(isinstance(slot, Tensor) for slot in slots):
        return False
    mean, var, count = slots
    size = count.shape[0] if count.dim() == 1 else -1
    return tuple(mean.shape) == tuple(var.shape) == (size, layer.num_features) and size != (layer.memory_size or 0)


def _resize_memory(layer: MemorizedBatchNorm, state: MutableMapping[str, Any], prefix: str) -> None:
    """Keep the newest entries that fit. An unlimited memory has none, so its pooled moments become one entry."""
    size = layer.memory_size or 0
    slots = [state[prefix + name] for name in SLOTS]
    if slots[2].shape[0] == 0:
        slots = [state[prefix + name][None] for name in POOLED]
    for name, slot in zip(SLOTS, slots, strict=True):
        fitted = torch.zeros_like(layer.get_buffer(name), device=slot.device)
        rows = min(size, slot.shape[0])
        fitted[:rows] = slot[:rows]
        state[prefix + name] = fitted
    truncated = 0 < size < slots[2].shape[0] and layer.momentum is not None
    if truncated and not slots[2].is_meta and bool(slots[2][:size].sum() > 0):
        mean, var, count = (state[prefix + name] for name in SLOTS)
        age = torch.arange(size, device=count.device, dtype=count.dtype)
        pooled = pool(mean, var, count * layer.decay**age, shift=layer.shift)
        state.update(zip((prefix + name for name in POOLED), pooled, strict=True))


def widen(layer: MemorizedBatchNorm) -> None:
    """After `load_state_dict(assign=True)`: whatever the checkpoint brought, statistics are wide and of one dtype."""
    if layer.running_mean is not None:
        dtype = statistics_dtype(layer.running_mean.dtype)
        layer._buffers.update({name: layer.get_buffer(name).to(dtype) for name in layer.statistics})
    if layer.strength is not None and layer.strength.device.type != "mps":
        layer.strength = layer.strength.double()
