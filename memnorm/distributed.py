"""The memory in distributed training.

Three ways, ordered by their communication per step besides the gradients:

    default                   each rank remembers its own batches; save the memory of rank 0. No communication
    `exchange_memory`         each rank normalizes with its own batch and a memory of all batches. One gather after the
                              step
    `convert(…, sync=True)`   all ranks normalize by the joint batch. One gather per layer in the forward, one reduction
                              per layer in the backward

The memory consists of earlier batches, so `exchange_memory` can communicate after the step.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from memnorm.collective import KeptGroup, gathered, group_of_ranks
from memnorm.errors import MemnormError, NothingToRecord, OptionError, check_module
from memnorm.functional import Moments, as_scalar, pool
from memnorm.layers import MemorizedBatchNorm
from memnorm.modules import check_optimizer, layers_of, modules_of

IGNORED = "_ddp_params_and_buffers_to_ignore"  # torch's name; an attribute of the module that DDP wraps


def keep_local(model: nn.Module) -> None:
    """Exclude the memories in `model` from the buffer broadcasts of DistributedDataParallel. Call this before wrapping.

    By default DDP copies the buffers of rank 0 to all ranks before each forward, which overwrites what the others have
    recorded. `memnorm.convert` calls this for the model that it returns; call it for a larger model that contains a
    converted one. DDP then does not copy these buffers at the start either: load checkpoints on every rank, or call
    `broadcast_memory`.
    """
    names = [f"{name}.{buffer}".lstrip(".") for name, layer in _layers(model).items() for buffer in layer._buffers]
    if names:
        compiled = [f"_orig_mod.{name}" for name in names]
        kept = [*getattr(model, IGNORED, []), *names, *compiled]
        setattr(model, IGNORED, list(dict.fromkeys(kept)))


def unkeep_local(model: nn.Module) -> None:
    """Undo `keep_local` in the whole model."""
    for module in model.modules():
        if IGNORED in vars(module):
            own = {
                f"{name}.{buffer}".lstrip(".") for name, layer in _layers(module).items() for buffer in layer._buffers
            }
            left = [name for name in getattr(module, IGNORED) if name.removeprefix("_orig_mod.") not in own]
            vars(module).pop(IGNORED)
            if left:
                setattr(module, IGNORED, left)


@torch.no_grad()
def broadcast_memory(model: nn.Module, source: int = 0, *, group: Any = None) -> None:
    """Copy the memories of `model` from rank `source` of the group to all its ranks: running statistics, remembered
    batches and strength.
    """
    check_module(model, "broadcast_memory")
    ranks = _group_of_ranks(group)
    if ranks is None:
        return
    buffers = [buffer for layer in _layers(model).values() for buffer in layer._buffers.values() if buffer is not None]
    rank = dist.get_global_rank(ranks, source)
    for dtype in sorted({buffer.dtype for buffer in buffers}, key=str):
        chosen = [buffer for buffer in buffers if buffer.dtype is dtype]
        flat = torch.cat([buffer.flatten() for buffer in chosen])
        dist.broadcast(flat, rank, group=ranks)
        for buffer, part in zip(chosen, flat.split([buffer.numel() for buffer in chosen]), strict=True):
            buffer.copy_(part.view_as(buffer))


def exchange_memory(model: nn.Module, optimizer: Optimizer, *, group: Any = None, max_waiting: int = 1024) -> Exchange:
    """Let every rank remember the batches of all ranks. The training loop does not change.

        model = DistributedDataParallel(memnorm.convert(model))
        memnorm.double_forward(model, optimizer)
        memnorm.distributed.exchange_memory(model, optimizer)

    Layers keep what they record until `optimizer` has stepped and the second forward, if any, is done. Then one gather
    of a flat tensor with 2C + 2 numbers per layer turns it into *one entry per step*: the moments of all values of all
    ranks in that step, with the weight of their average batch. So `decay` counts steps and `strength` has the same
    meaning as in one process, regardless of the number of ranks and micro-batches. The memory is the same on all ranks
    and begins with that of rank 0.

    Two-way layers also share the means of backward, with 2C + 2 more numbers, and the weight of an entry is the number
    of all its values: the memory describes the large batch of all ranks. With `decay=None` a rank counts its own images
    per update, so batches must be equally large on all ranks for equal memories. These layers cannot be compiled with
    `fullgraph=True` during an exchange.

    Args:
        model: the trained module, wrapped or not.
        optimizer: the optimizer; if there are several, the one that steps last. It must step equally often on all
            ranks.
        group: the process group; all ranks by default. A rank outside the group remembers its own batches.
        max_waiting: raise an error if a layer records this many batches without a step.

    Returns:
        A handle with `remove()`, and with `exchange()` for loops that call `rerecord` after the step. It is also a
        context manager. Copies and pickles of the model have no exchange.
    """
    return Exchange(model, optimizer, group, max_waiting)


class Waiting(list[Moments]):
    """The batches that a layer has recorded since the last exchange, and the handle that will share them."""

    def __init__(self, handle: Exchange) -> None:
        super().__init__()
        self.handle = handle

    def append(self, batch: Moments) -> None:
        if len(self) >= self.handle.max_waiting:
            self.clear()
            raise MemnormError(
                f"exchange_memory: a layer has recorded {self.handle.max_waiting} batches without a step of the "
                "optimizer, so none of them is remembered. If another optimizer trains the model now, call remove() on "
                "the handle and attach that one; if a step has that many batches, raise max_waiting."
            )
        super().append(batch)


class Exchange:
    """The handle of `exchange_memory`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, group: Any, max_waiting: int) -> None:
        check_module(model, "exchange_memory")
        check_optimizer(optimizer, "exchange_memory: expected a torch.optim.Optimizer")
        layers = [layer for layer in _layers(model).values() if layer.running_mean is not None]
        _check_layers(model, layers)
        broadcast_memory(model, group=group)
        self.group, self.max_waiting, self._model = group, max_waiting, weakref.ref(model)
        for layer in layers:
            for name in layer.outgoing:
                vars(layer)[name] = Waiting(self)
        self._after = optimizer.register_step_post_hook(lambda *_: self.exchange())
        self._before = optimizer.register_step_pre_hook(self._move_hook_to_end)

    def _move_hook_to_end(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Exchange after all other hooks, because a Double-Forward that was attached later must record first."""
        optimizer._optimizer_step_post_hooks.move_to_end(self._after.id)

    @torch.no_grad()
    def exchange(self) -> None:
        """Share and remember what was recorded since the last exchange. Every rank must call it."""
        layers = self._exchanging()
        if not layers:
            raise NothingToRecord(
                "exchange_memory: the model has no memorized layers any more. Convert it again, or call remove() on "
                "the handle."
            )
        device = layers[0].running_mean.device
        boxes = [(layer, name) for layer in layers for name in layer.outgoing]
        flat = torch.cat([_packed(layer, name).to(device) for layer, name in boxes])
        group = _group_of_ranks(self.group)
        parts_RV = flat[None] if group is None else gathered(flat, group)
        sizes = [2 * layer.num_features + 2 for layer, _ in boxes]
        for (layer, name), part_RV in zip(boxes, parts_RV.split(sizes, dim=1), strict=True):
            mean_RC, var_RC = part_RV[:, :-2].chunk(2, dim=1)
            count_R, batches_R = part_RV[:, -2:].unbind(1)
            # If no rank has recorded anything, the union is NaN and is not remembered.
            union = _union(mean_RC, var_RC, count_R, layer.outgoing[name])
            total = Moments(*(torch.as_tensor(value).to(layer.running_mean) for value in union))
            layer._remember_shared(name, total, batches_R.sum())

    def _exchanging(self) -> list[MemorizedBatchNorm]:
        model = self._model()
        layers = [] if model is None else [one for one in modules_of(model) if isinstance(one, MemorizedBatchNorm)]
        return [layer for layer in layers if isinstance(layer._outgoing, Waiting) and layer._outgoing.handle is self]

    def remove(self) -> None:
        """Stop the exchange. From now on every rank remembers its own batches. Batches not yet shared are discarded."""
        self._after.remove()
        self._before.remove()
        for layer in self._exchanging():
            for name in layer.outgoing:
                vars(layer).pop(name)

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


def _check_layers(model: nn.Module, layers: list[MemorizedBatchNorm]) -> None:
    if not layers:
        raise NothingToRecord(
            f"exchange_memory: {type(model).__name__} has no memorized layer. Call memnorm.convert(model) first."
        )
    if any(layer.sync is not False for layer in layers):
        raise OptionError(
            "exchange_memory: the layers were converted with sync, so every rank remembers the joint batch already. "
            "Convert with sync=False, or do not exchange."
        )
    if any(layer.momentum is None for layer in layers):
        raise OptionError(
            "exchange_memory: layers with momentum=None average all batches since the last reset and have nothing to "
            "share after a step. Set momentum to any number, or do not exchange."
        )
    if any(layer._outgoing is not None for layer in layers):
        raise MemnormError(
            "exchange_memory: the memory of the model is exchanged already; call remove() on that handle first"
        )


def _group_of_ranks(group: Any) -> Any:
    return group_of_ranks(True if group is None else KeptGroup(group))


def _packed(layer: MemorizedBatchNorm, name: str) -> Tensor:
    """One row with the moments of the unshared batches of `layer`, their count of values and their number. Batches that
    are not finite count as empty, because they would make the union useless for all ranks.
    """
    waiting: Any = getattr(layer, name)
    batches, waiting[:] = list(waiting), []
    if not batches:
        return layer.running_mean.new_zeros(2 * layer.num_features + 2)
    mean_KC, var_KC = torch.stack([one.mean for one in batches]), torch.stack([one.var for one in batches])
    finite_K = (mean_KC.isfinite() & var_KC.isfinite()).all(1)
    count_K = finite_K * torch.stack([as_scalar(one.weight, mean_KC.dtype, mean_KC.device) for one in batches])
    mean_KC, var_KC = mean_KC.where(finite_K[:, None], 0), var_KC.where(finite_K[:, None], 0)
    union = _union(mean_KC, var_KC, count_K, layer.outgoing[name])
    return torch.cat([union.mean, union.var, torch.stack([count_K.sum(), finite_K.sum()])]).nan_to_num(0.0)


def _union(mean_KC: Tensor, second_KC: Tensor, weight_K: Tensor, with_variances: bool) -> Moments:
    """The union of K entries, whose second vectors are variances or, for backward, a second mean."""
    union = pool(mean_KC, second_KC, weight_K)
    return union if with_variances else union._replace(var=pool(second_KC, mean_KC, weight_K).mean)


def stop_exchange(model: nn.Module) -> None:
    """Remove every exchange from `model`, whose layers are about to be replaced."""
    for layer in _layers(model).values():
        if isinstance(layer._outgoing, Waiting):
            layer._outgoing.handle.remove()


def _layers(model: nn.Module) -> dict[str, MemorizedBatchNorm]:
    return layers_of(model, MemorizedBatchNorm)
