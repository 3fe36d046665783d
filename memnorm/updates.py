"""How a layer learns that the weights have changed, and by how much the loss is scaled.

A memory goes stale when the weights change, so its age is counted in updates. Torch calls a hook after every step of
every optimizer; a layer counts the steps of the optimizer that holds its own weight or bias. A step that `GradScaler`
skips is no update, and steps with nothing recorded in between (of two optimizers, or of one inside another) are one. A
layer that no optimizer trains counts each forward that has a backward.

`GradScaler` multiplies the loss, and with it every gradient, by a factor that changes during training. Torch has no
hook for that, so `GradScaler.scale` is wrapped: within a scaled backward, what the layers remember of backward is
multiplied by the factor, and divided by it afterwards. At rest it belongs to the unscaled loss. Other loss scalers
(FSDP's `ShardedGradScaler`, DeepSpeed's) are not supported. Run scaled backwards in one thread at a time.
"""

from __future__ import annotations

import functools
import gc
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from memnorm._torch import current_graph_task_id, disable_dynamo, foreach_mul_, loss_scale, queue_callback, tree_leaves
from memnorm.kernels import cpu
from memnorm.modules import has_skipped
from memnorm.recompute import inside_backward

if TYPE_CHECKING:
    from memnorm.norms.two_way import TwoWayBatchNorm

_layers: WeakSet[TwoWayBatchNorm] = WeakSet()
_counted_early: WeakSet[Optimizer] = WeakSet()  # their running step has been counted before torch's hook


def watch(layer: TwoWayBatchNorm) -> None:
    """Let `layer` learn of updates from now on."""
    _install_hooks()
    scaled_backward.leave_if_over()  # which has not scaled this layer
    _layers.add(layer)


@functools.cache
def _install_hooks() -> None:
    register_optimizer_step_post_hook(_after_step)
    GradScaler.scale = _noticed(GradScaler.scale)  # type: ignore[method-assign]


@disable_dynamo  # a compiled step would lose what is written here
def _after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if optimizer in _counted_early:
        _counted_early.discard(optimizer)
    else:
        _count_step(optimizer)


def count_step_early(optimizer: Optimizer) -> None:
    """Count the running step of `optimizer` now: what is recorded from here on saw the new weights."""
    _count_step(optimizer)
    _counted_early.add(optimizer)


def _count_step(optimizer: Optimizer) -> None:
    if not _layers or has_skipped(optimizer):
        return
    held = _held_by(optimizer)
    count_update([layer for layer in list(_layers) if layer.training and layer._is_due(optimizer, held)])


def _held_by(optimizer: Any) -> set[int]:
    return {id(parameter) for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]}


@torch.no_grad()
def count_update(layers: list[TwoWayBatchNorm]) -> None:
    """Fade the memories of these layers, because the weights have changed. One call for all, because it runs at every
    step.
    """
    for layer in layers:
        if layer._outgoing_backward:
            layer._fade_outgoing()  # while the images are counted
    if layers and not cpu.fade([(layer._handle, layer._buffers, layer.decay) for layer in layers]):
        _fade_in_torch(layers)
    for layer in layers:
        layer._after_update()


def decay_by_images(images: Any) -> Any:
    """The default decay of an update on so many images: max(1/2, 1 − 1/4 · √(images / 32)). For numbers or tensors."""
    decay = 1 - (images / 32) ** 0.5 / 4
    return decay.clamp(min=0.5) if isinstance(decay, Tensor) else max(0.5, decay)


def _fade_in_torch(layers: list[TwoWayBatchNorm]) -> None:
    """As `cpu.fade`, without reading the device. Layers of one device, dtype and decay share the operations."""
    alike: dict[Any, list[Any]] = {}
    for layer in layers:
        buffers: Any = layer._buffers
        weight = buffers["running_weight"]
        alike.setdefault((weight.device, weight.dtype, layer.decay), []).append(buffers)
    for (_, dtype, decay), group in alike.items():
        images = [buffers["num_images"] for buffers in group]
        weights = [buffers[name] for name in ("running_weight", "backward_weight") for buffers in group]
        decays = decay_by_images(torch.stack(images).to(dtype)).unbind() if decay is None else [decay] * len(group)
        foreach_mul_(weights, [*decays, *decays])
        foreach_mul_(images, [0] * len(group))


def count_backward(layer: TwoWayBatchNorm) -> None:
    """Count a forward and its backward as an update if no optimizer trains the layer. An optimizer may be made at any
    time, so the search is repeated after 1, 2, 4, 8 … such backwards.
    """
    number = layer._backwards_alone + 1
    if number & (number - 1) == 0:
        task = current_graph_task_id()
        if task == -1:  # torch does not say which backward this is
            _held_by_optimizers.cache_clear()
        held, own = _held_by_optimizers(task), layer._own_parameters()
        if any(id(one) in held for one in own) if own else held:
            layer.__dict__["_has_optimizer"] = True
            return
    layer.__dict__["_backwards_alone"] = number
    count_update([layer])


@functools.lru_cache(maxsize=1)
def _held_by_optimizers(_backward: int) -> set[int]:
    """The ids of all parameters that an optimizer holds. Torch keeps no list of optimizers, so this searches all
    objects, once for the layers that ask within the same backward.
    """
    held: set[int] = set()
    for one in gc.get_objects():
        if issubclass(type(one), Optimizer):
            held |= _held_by(one)
    return held


def _noticed(scale: Any) -> Any:
    @functools.wraps(scale)
    def noticed(self: GradScaler, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        if self.is_enabled():
            for leaf in tree_leaves(scaled):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda _gradient: scaled_backward.enter(self))
        return scaled

    return noticed


def _suspend_kernels(on: bool) -> None:
    """While the memory belongs to a scaled loss, let forwards come through Python, which ends that first."""
    if cpu.module() is not None:
        cpu.module().suspend(on)


class _ScaledBackward:
    """The backward of a scaled loss, while it runs."""

    def __init__(self) -> None:
        self.scale: Tensor | None = None
        self._task = -1

    def enter(self, scaler: GradScaler) -> None:
        task = current_graph_task_id()
        if self.scale is not None and self._task == task:  # another output of the same backward
            return
        self.leave()
        scale = loss_scale(scaler)
        self.scale, self._task = torch.where(scale > 0, scale, 1.0), task  # 0: the scaler has given up
        self._multiply(self.scale)
        _suspend_kernels(True)
        if queue_callback is not None:
            queue_callback(self.leave)

    def leave_if_over(self) -> None:
        """Call this before a layer's memory is used, copied or saved: a backward that raises has no end."""
        if self.scale is not None and not inside_backward():
            self.leave()

    def leave(self) -> None:
        if self.scale is not None:
            self._multiply(1 / self.scale)
            self.scale = None
            _suspend_kernels(False)

    def _multiply(self, factor: Tensor) -> None:
        """Through .data: autograd must not count this as a change."""
        vectors: dict[Any, list[Tensor]] = {}
        for layer in _layers:
            for name in ("backward_mean", "backward_product"):
                vector: Any = layer._buffers[name]
                vectors.setdefault((vector.device, vector.dtype), []).append(vector.data)
        for (device, dtype), group in vectors.items():
            foreach_mul_(group, factor.to(device, dtype))


scaled_backward = _ScaledBackward()
