"""Memories of several processes that train one model.

Three ways, by what a step costs besides the gradients:

    nothing at all            each process remembers its own batches; rank 0's memory is the one to save
    `exchange_memory`         each process normalises with its own batch and a memory of everybody's: one flat gather
                              after the step
    `convert(…, sync=True)`   everybody's batch is one batch: a gather per layer in the forward, a reduction per layer
                              in the backward

The second is possible because the memory is made of the past: what the others have recorded may arrive after the step.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from memnorm.collective import Some, companions, gathered
from memnorm.errors import DTypeError, MemnormError, NothingToRecord, OptionError, check_module
from memnorm.functional import Moments, pool
from memnorm.layers import MemorizedBatchNorm
from memnorm.modules import modules_of

IGNORED = "_ddp_params_and_buffers_to_ignore"  # torch's name, on the module that is given to DistributedDataParallel


def keep_local(model: nn.Module) -> None:
    """Let DistributedDataParallel leave the memories in `model` alone, which is about to be wrapped.

    By default it copies rank 0's buffers to everybody before each forward, and what the others have recorded is lost.
    `memnorm.convert` does this to the model it returns; call it where that becomes a part of a larger one. DDP then no
    longer copies these buffers at its start either: load a checkpoint in every process, or call `broadcast_memory`.
    """
    names = [f"{name}.{buffer}".lstrip(".") for name, layer in _layers(model).items() for buffer in layer._buffers]
    if names:
        kept = [
            *getattr(model, IGNORED, []),
            *names,
            *(f"_orig_mod.{name}" for name in names),
        ]  # as compiled modules say
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
    """Give the memories of `model` in every process the contents they have in rank `source` of the group: the running
    statistics, the remembered batches and the strength.
    """
    check_module(model, "broadcast_memory")
    together = _companions(group)
    if together is None:
        return
    buffers = [buffer for layer in _layers(model).values() for buffer in layer._buffers.values() if buffer is not None]
    rank = dist.get_global_rank(together, source)
    for dtype in sorted({buffer.dtype for buffer in buffers}, key=str):
        chosen = [buffer for buffer in buffers if buffer.dtype is dtype]
        flat = torch.cat([buffer.flatten() for buffer in chosen])
        dist.broadcast(flat, rank, group=together)
        for buffer, part in zip(chosen, flat.split([buffer.numel() for buffer in chosen]), strict=True):
            buffer.copy_(part.view_as(buffer))


def exchange_memory(model: nn.Module, optimizer: Optimizer, *, group: Any = None, max_waiting: int = 1024) -> Exchange:
    """Let every process remember what all of them have recorded; the training loop stays as it is.

        model = DistributedDataParallel(memnorm.convert(model))
        memnorm.double_forward(model, optimizer)
        memnorm.distributed.exchange_memory(model, optimizer)

    What the layers record waits until `optimizer` has stepped and the second forward of a Double-Forward is done. Then
    one gather of a flat tensor, 2C + 2 numbers per layer, makes *one entry per step* of it: the moments of all values
    of all processes in that step, with the weight of their average batch. So `decay` counts steps and `strength` means
    what it means in one process, however many processes and accumulated batches there are, and the memory is the same
    everywhere. It begins as rank 0's.

    Two-way layers share the means of backward as well, 2C + 2 numbers more, and give an entry the weight of all its
    values: their memory stands for the large batch that the processes make together. They cannot be compiled with
    `fullgraph=True` then.

    Args:
        model: the module that the loop trains, wrapped or not.
        optimizer: of several, the one that steps last. It must step equally often in every process.
        group: the processes; all of them by default. A process outside the group remembers its own batches.
        max_waiting: batches that a layer records without a step after which something must be wrong.

    Returns:
        A handle with `exchange()`, for loops that record after the step by hand, and `remove()`; also usable in a
        `with` statement. Copies and pickles of the model do not carry it.
    """
    return Exchange(model, optimizer, group, max_waiting)


class Waiting(list[Moments]):
    """What a layer has recorded since the last exchange; the handle that will share it."""

    def __init__(self, handle: Exchange) -> None:
        super().__init__()
        self.handle = handle

    def append(self, batch: Moments) -> None:
        if len(self) >= self.handle.max_waiting:
            self.clear()
            raise MemnormError(
                f"exchange_memory: a layer has recorded {self.handle.max_waiting} batches without a step of the "
                "optimizer, so none of them is remembered. If another optimizer trains the model now, remove() the "
                "handle and attach that one; if so many batches belong to a step, raise max_waiting."
            )
        super().append(batch)


class Exchange:
    """The handle of `exchange_memory`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, group: Any, max_waiting: int) -> None:
        check_module(model, "exchange_memory")
        if not hasattr(optimizer, "_optimizer_step_post_hooks"):
            raise DTypeError(
                f"exchange_memory: expected a torch.optim.Optimizer; got {type(optimizer).__name__}. Of a wrapper, "
                "pass the optimizer inside."
            )
        layers = [layer for layer in _layers(model).values() if layer.running_mean is not None]
        _check_layers(model, layers)
        broadcast_memory(model, group=group)
        self.group, self.max_waiting, self._model = group, max_waiting, weakref.ref(model)
        for layer in layers:
            for name in layer.outgoing:
                vars(layer)[name] = Waiting(self)
        self._after = optimizer.register_step_post_hook(lambda *_: self.exchange())
        self._before = optimizer.register_step_pre_hook(self._go_last)

    def _go_last(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Of the hooks after the step: a Double-Forward that was attached later records before the exchange."""
        optimizer._optimizer_step_post_hooks.move_to_end(self._after.id)

    @torch.no_grad()
    def exchange(self) -> None:
        """Share what was recorded since the last time, and remember it. Every process must call it."""
        layers = self._exchanging()
        if not layers:
            raise NothingToRecord(
                "exchange_memory: the memorized layers of the model are gone. Convert it again, or remove() the handle."
            )
        device = layers[0].running_mean.device
        boxes = [(layer, name) for layer in layers for name in layer.outgoing]
        flat = torch.cat([_packed(layer, name).to(device) for layer, name in boxes])
        group = _companions(self.group)
        everyones_RV = flat[None] if group is None else gathered(flat, group)
        sizes = [2 * layer.num_features + 2 for layer, _ in boxes]
        for (layer, name), part_RV in zip(boxes, everyones_RV.split(sizes, dim=1), strict=True):
            mean_RC, var_RC = part_RV[:, :-2].chunk(2, dim=1)
            count_R, batches_R = part_RV[:, -2:].unbind(1)
            # If nobody has recorded, the union is NaN, and it is not remembered.
            union = _union(mean_RC, var_RC, count_R, layer.outgoing[name])
            total = Moments(*(torch.as_tensor(value).to(layer.running_mean) for value in union))
            layer._remember_shared(name, total, batches_R.sum())

    def _exchanging(self) -> list[MemorizedBatchNorm]:
        model = self._model()
        layers = [] if model is None else [one for one in modules_of(model) if isinstance(one, MemorizedBatchNorm)]
        return [layer for layer in layers if isinstance(layer._outgoing, Waiting) and layer._outgoing.handle is self]

    def remove(self) -> None:
        """Detach: from now on every process remembers its own batches. What waits to be shared is dropped."""
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
            "exchange_memory: the layers were converted with sync, so every process remembers the joint batch already. "
            "Convert with sync=False, or leave out the exchange."
        )
    if any(layer.momentum is None for layer in layers):
        raise OptionError(
            "exchange_memory: layers with momentum=None average all batches since the reset at once, and have nothing "
            "to share after a step. Set momentum to a number, whichever, or leave out the exchange."
        )
    if any(layer._outgoing is not None for layer in layers):
        raise MemnormError("exchange_memory: the model's memory is exchanged already; remove() that handle first")


def _companions(group: Any) -> Any:
    return companions(True if group is None else Some(group))


def _packed(layer: MemorizedBatchNorm, name: str) -> Tensor:
    """The moments of what waits in `layer`, its count and the number of batches, in a row. What is not finite counts
    for nothing: it must not spoil what others have.
    """
    waiting: Any = getattr(layer, name)
    batches, waiting[:] = list(waiting), []
    if not batches:
        return layer.running_mean.new_zeros(2 * layer.num_features + 2)
    mean_KC, var_KC = torch.stack([one.mean for one in batches]), torch.stack([one.var for one in batches])
    finite_K = (mean_KC.isfinite() & var_KC.isfinite()).all(1)
    count_K = finite_K * torch.stack([mean_KC.new_tensor(one.weight) for one in batches])
    mean_KC, var_KC = mean_KC.where(finite_K[:, None], 0), var_KC.where(finite_K[:, None], 0)
    union = _union(mean_KC, var_KC, count_K, layer.outgoing[name])
    return torch.cat([union.mean, union.var, torch.stack([count_K.sum(), finite_K.sum()])]).nan_to_num(0.0)


def _union(mean_KC: Tensor, second_KC: Tensor, weight_K: Tensor, with_variances: bool) -> Moments:
    """The union of K entries, whose second vectors are variances or, for backward, a second mean."""
    union = pool(mean_KC, second_KC, weight_K)
    return union if with_variances else union._replace(var=pool(second_KC, mean_KC, weight_K).mean)


def stop_exchange(model: nn.Module) -> None:
    """Remove every exchange from `model`: its layers are about to be replaced."""
    for layer in _layers(model).values():
        if isinstance(layer._outgoing, Waiting):
            layer._outgoing.handle.remove()


def _layers(model: nn.Module) -> dict[str, MemorizedBatchNorm]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, MemorizedBatchNorm)}
