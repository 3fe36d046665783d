"""Two-way memorized batch norm: micro-batches that train like the large batch they are parts of.

In backward a large batch subtracts two means, mean(g) and mean(g·x̂), taken over all its samples. The paper's memory is
a constant in backward, so only the current batch's share of these means is subtracted. This layer remembers them, too:

    forward    ρ = n/(n + λW)         μ̂, σ̂² = merge of the batch and (M, V, λW)
    backward   ρ_b = n/(n + λW_b)     ā = A + ρ_b(mean(g) − A)      q̄ = Q + ρ_b(mean(g·x̂) − Q)
               dx = γ/√(σ̂² + ε) · (g − ā − x̂·q̄)

g is the gradient of the output, before γ. A batch is merged into (M, V, W) after its forward and into (A, Q, W_b) in
its backward. With each update of the weights, W and W_b fade by `decay`; within an accumulation window they do not. The
default decay is max(1/2, 1 − 1/4 · √(images per update / 32)).
`docs/equations.md` has the derivation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from memnorm import centering, updates
from memnorm._torch import foreach_copy_, forward_level, functorch_active, is_legacy_batchedtensor
from memnorm.errors import MemnormError, OptionError, is_whole
from memnorm.functional import Moments, as_scalar, snapshot
from memnorm.kernels import cpu
from memnorm.layers import (
    MemorizedBatchNorm,
    MemorizedBatchNorm1d,
    MemorizedBatchNorm2d,
    MemorizedBatchNorm3d,
    Recording,
    check_strength,
)
from memnorm.modules import is_real, version_of
from memnorm.norms import mbn
from memnorm.recompute import inside_backward

BACKWARD = ("backward_mean", "backward_product", "backward_weight")  # A, Q, W_b
PATIENCE = 10  # steps of other optimizers after which a layer no longer waits for the one that it has followed


class TwoWayBatchNorm(MemorizedBatchNorm):
    """The base of `TwoWayBatchNorm1d`, `2d` and `3d`. Use those, or `memnorm.convert(model, "two_way")`.

    Args:
        num_features: channels C of an input (N, C, …).
        decay: factor by which the memory loses weight with each update of the weights, in (0, 1]. None: by the images
            per update, max(1/2, 1 − 1/4 · √(images / 32)), because no single number was best for both small and
            large updates. They are the images that the layer has recorded since the last update, those of all
            processes with `sync`.
        strength: weight λ of the memory against the current batch, in [0, 1]; 0 is plain batch norm in training.
        warmup: number of updates over which λ grows linearly from 0 to `strength`. The first updates change every layer
            at once, so what is remembered then is soon outdated.
        sync: take the batch of all processes together: True, or a process group.

    The other arguments are those of `torch.nn.BatchNorm2d`. Buffers, besides those of `MemorizedBatchNorm`:
    `backward_mean` (A), `backward_product` (Q), `backward_weight` (W_b), `num_images`, recorded since the last update,
    and `num_updates`, counted up to `warmup`. `strength` is the present λ.

    The backward is not the derivative of the forward, so `create_graph=True` is an error.
    """

    norm = "two_way"
    memory_buffers = (*MemorizedBatchNorm.memory_buffers, *BACKWARD, "num_images")
    own_buffers = (*memory_buffers, "strength", "num_updates")
    outgoing: ClassVar[dict[str, bool]] = {"_outgoing": True, "_outgoing_backward": False}
    statistics = (*MemorizedBatchNorm.statistics, *BACKWARD)
    _transient = (
        *Recording._transient,
        *("_has_optimizer", "_leader", "_is_held", "_steps_of_others", "_has_run", "_backwards_alone", "_faded_at"),
        *("_counted", "_outgoing_backward"),
    )

    decay: Any  # a number, or None: by the images per update
    warmup: int
    _centered: bool | None = None  # the layers before the norms of this model are centred; None: not decided yet
    num_updates: Tensor
    num_images: Tensor
    backward_mean: Tensor
    backward_product: Tensor
    backward_weight: Tensor
    _has_optimizer: bool | None = None  # the steps of an optimizer count, not the backwards; None: not known yet
    _leader: ref[Optimizer] | None = None  # whose steps count
    _is_held: bool = False  # `_leader` holds parameters of the layer
    _steps_of_others: int = 0  # after something was recorded, since the last step of `_leader`
    _has_run: bool = False  # in training mode and not compiled, since it was made or copied
    _faded_at: tuple[int, ...] | None = None  # the versions after the last update
    _backwards_alone: int = 0  # recorded backwards that no optimizer was found for
    _counted: tuple[int, int, int] = (0, 0, 0)  # id, version and value of `num_updates`, to spare the device a read
    _outgoing_backward: list[Moments] | None = None  # as `_outgoing`, for the means of backward

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        decay: float | None = None,
        strength: float = 1.0,
        warmup: int = 100,
        sync: Any = False,
    ) -> None:
        _BatchNorm.__init__(self, num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if not bias:
            self.register_parameter("bias", None)
        self._install_memory(decay=decay, strength=strength, warmup=warmup, sync=sync)

    def _install_memory(  # type: ignore[override]
        self, *, decay: float | None, strength: float, warmup: int, sync: Any
    ) -> None:
        if not is_whole(warmup) or warmup < 0:
            raise OptionError(f"warmup must be a whole number of updates, or 0; got {warmup!r}")
        forward: dict[str, Any] = {"memory_size": None, "prior_weight": 1.0, "prior_from_init": False}
        super()._install_memory(decay=1.0 if decay is None else decay, strength=strength, sync=sync, **forward)
        if decay is None:
            self.decay = None
        self.warmup = int(warmup)
        if self.running_mean is None:
            for name in (*BACKWARD, "num_updates", "num_images"):
                self.register_buffer(name, None)
            return
        self.register_buffer("backward_mean", torch.zeros_like(self.running_mean))
        self.register_buffer("backward_product", torch.zeros_like(self.running_mean))
        self.register_buffer("backward_weight", torch.zeros_like(self.running_weight))
        for name in ("num_updates", "num_images"):
            self.register_buffer(name, torch.zeros((), dtype=torch.long, device=self.running_mean.device))
        self._follow(0)
        self.__dict__["_faded_at"] = self._versions()
        updates.watch(self)

    @property
    def _decay_per_batch(self) -> float:
        return 1.0

    def _read(self, count: Tensor | float, at_once: bool = False) -> Moments:
        """As for `MemorizedBatchNorm`. A batch of one value per channel has no variance of its own: it takes the memory
        at full weight, and with nothing remembered the initial statistics, as heavy as itself.
        """
        if isinstance(count, Tensor) or count > 1 or self.momentum is None:
            return super()._read(count, at_once)
        weight = self._weight_of_one()
        return Moments(snapshot(self.running_mean), snapshot(self.running_var), snapshot(weight))

    def _weight_of_one(self) -> Tensor:
        """W as a batch of one value per channel meets it."""
        return torch.where(self.running_weight == 0, 1, self.running_weight)

    @torch.no_grad()
    def _remember(self, batch: Moments) -> None:
        if not isinstance(batch.weight, Tensor) and batch.weight == 1 and self.momentum is not None:
            # What a finite value was merged with is remembered as well. Not copy_: see `_merge_backward`.
            weight = torch.where(batch.mean.isfinite().all(), self._weight_of_one(), self.running_weight)
            foreach_copy_([self.running_weight], [weight])
        super()._remember(batch)

    def _record(self, batch: Moments, x: Tensor) -> None:
        super()._record(batch, x)
        images: Any = x.shape[0]
        if isinstance(batch.weight, Tensor):  # the joint batch; this process may have no image of it
            images = (batch.weight / max(1, math.prod(x.shape[2:]))).round()
        finite = (batch.mean.isfinite() & batch.var.isfinite()).all()  # else it is not remembered
        self.num_images.add_((images * finite).to(torch.long))

    def _require_values(self, x: Tensor, count: int) -> None:
        if count != 1 or self.momentum is None:
            super()._require_values(x, count)

    def _forward_in_torch(self, input: Tensor) -> Tensor:
        observed = functorch_active() or forward_level() >= 0
        if observed and self.running_mean is not None:
            raise MemnormError(
                f"{self._name}: two-way memory records in backward, which torch.func and forward-mode AD cannot "
                'follow. Use memnorm.convert(model, "mbn"), or eval mode.'
            )
        return super()._forward_in_torch(input)

    def _forward(self, input: Tensor, activation: str | None, residual: Tensor | None) -> Tensor:
        if self.training:
            updates.scaled_backward.leave_if_over()
            if not (self._has_run or torch.compiler.is_compiling()):
                self.__dict__["_has_run"] = True
        return super()._forward(input, activation, residual)

    def _backward_memory(self, handle: Any = None, reading: bool | None = None, recorded: bool = False) -> _Backward:
        """The backward memory of a forward that runs now, or of one whose `handle` the kernels have kept."""
        if handle is None:
            reading = self.momentum is not None
            handle = cpu.check(self._buffers) if cpu.unobserved() else None
        buffers: Any = self._buffers
        memory, strength = [buffers[name] for name in BACKWARD], buffers["strength"]
        if handle is not None:
            memory, strength = cpu.backward_buffers(handle)
        return _Backward(self, handle, memory, strength if reading else None, recorded)

    def _count_backward(self) -> None:
        """The backward memory has changed, and no optimizer is known to train the layer."""
        updates.count_backward(self)

    def _fade_outgoing(self) -> None:
        """The weights have changed while means of backward wait for an exchange."""
        waiting: Any = self._outgoing_backward
        images = self.num_images.to(self.running_weight.dtype)
        decay = updates.decay_by_images(images) if self.decay is None else self.decay
        waiting[:] = [Moments(mean, product, decay * weight) for mean, product, weight in waiting]

    def _remember_shared(self, name: str, union: Moments, _batches: Tensor) -> None:
        if name == "_outgoing":
            self._remember(union)
        else:
            _merge_backward([self.backward_mean, self.backward_product, self.backward_weight], *union)

    def set_strength(self, value: float) -> None:
        """Set λ, in [0, 1]; during the warm-up, what it grows to."""
        self._initial_strength = check_strength(value)
        if self.strength is not None and not self.strength.is_meta:
            self._follow(min(self._updates_counted(), self.warmup))

    def _warm_up(self) -> None:
        """Count one update of the warm-up, if it is not over."""
        count = self._updates_counted()
        if count < self.warmup:
            self._follow(count + 1)

    def _updates_counted(self) -> int:
        """The value of `num_updates`. Reads the device only if somebody else has written the buffer."""
        buffer: Any = self._buffers["num_updates"]
        known, version, count = self._counted
        if known != id(buffer) or version != version_of(buffer):
            count = int(buffer)
            self.__dict__["_counted"] = id(buffer), version_of(buffer), count
        return count

    @torch.no_grad()
    def _follow(self, count: int) -> None:
        """Set the present λ after `count` updates."""
        self.num_updates.fill_(count)
        self.strength.fill_(self._initial_strength * (count / self.warmup if self.warmup else 1.0))
        self._counted = (id(self.num_updates), version_of(self.num_updates), count)

    def _is_trained(self) -> bool:
        """Return True if the running statistics differ from (0, 1), or cannot be read because they are on meta."""
        return not is_real(self.running_mean) or bool(self._has_prior())

    def _own_parameters(self) -> list[nn.Parameter]:
        """The trainable ones."""
        return [one for one in self._parameters.values() if one is not None and one.requires_grad]

    def _is_due(self, optimizer: Optimizer, held: set[int]) -> bool:
        """Return True if something was recorded since the last update, and `optimizer`, which holds the parameters with
        these ids, makes the layer's updates: the one that holds the layer's parameters. A frozen layer that none holds
        follows the first optimizer that steps after a training forward of the layer, and another one if that has not
        stepped for long. So does, after some steps, a trainable layer that only runs forward, such as a teacher.
        """
        if not self._has_recorded():
            return False
        leader = self._leader and self._leader()
        if leader is optimizer:
            self.__dict__["_steps_of_others"] = 0
            return True
        own = [one for one in self._parameters.values() if one is not None]
        trainable = any(one.requires_grad for one in own)
        if any(id(one) in held for one in own):
            self._follow_steps(optimizer, is_held=True, instead_of_backwards=True)
            return True
        if trainable:  # its holder, or its own backwards, make its updates; a teacher has neither
            if (leader and self._is_held) or self._has_recorded_backward() or not self._has_run or inside_backward():
                return False
        elif leader is None and not self._has_run and int(self.num_images) == 0:
            return False
        if (leader is not None or trainable) and self._steps_of_others < PATIENCE:
            self.__dict__["_steps_of_others"] = self._steps_of_others + 1
            return False
        self._follow_steps(optimizer, is_held=False, instead_of_backwards=not trainable)
        return True

    def _follow_steps(self, optimizer: Optimizer, is_held: bool, instead_of_backwards: bool) -> None:
        """Let the steps of `optimizer` be the layer's updates, and perhaps its backwards no longer."""
        leader = ref(optimizer, functools.partial(_forget_leader, ref(self)))
        self.__dict__.update(_leader=leader, _is_held=is_held, _steps_of_others=0)
        if instead_of_backwards:
            self.__dict__["_has_optimizer"] = True

    def _has_recorded(self) -> bool:
        """Return True if something was recorded since the last update. After loading, copying or moving the buffers,
        this reads the device once.
        """
        now, known = self._versions(), self._faded_at
        if known is not None and (known[0], known[2]) == (now[0], now[2]):
            return now != known
        recorded = is_real(self.num_images) and int(self.num_images) > 0
        # -1 is no version: a forward has been recorded. What backward had recorded is not known.
        self.__dict__["_faded_at"] = (now[0], -1, *now[2:4], -1) if recorded else now
        return recorded

    def _has_recorded_backward(self) -> bool:
        """Return True if a backward was recorded since the last update."""
        return self._faded_at is None or self._versions()[2:4] != self._faded_at[2:4]

    def _versions(self) -> tuple[int, ...]:
        """Change whenever something is recorded. Under a dispatch mode torch does not count what `_foreach_copy_`
        writes; the number of batches is written by `add_`.
        """
        buffers: Any = self._buffers
        one, other = buffers["running_weight"], buffers["backward_weight"]
        batches = buffers["num_batches_tracked"]
        try:
            return id(one), one._version, id(other), other._version, batches._version
        except RuntimeError:  # inference tensors have no version
            return id(one), version_of(one), id(other), version_of(other), version_of(batches)

    def _after_update(self) -> None:
        """The memory has faded."""
        self.__dict__["_faded_at"] = self._versions()
        self._warm_up()

    def reset_parameters(self) -> None:
        if self._buffers.get("num_updates") is not None:
            self.num_updates.zero_()
        super().reset_parameters()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """A checkpoint of plain or memorized batch norm has no backward memory and has seen no update. An older one of
        this layer has counted no images.
        """
        begins = self.running_mean is not None and prefix + "num_updates" not in state_dict
        saved = state_dict.get(prefix + "running_mean")
        if self.running_mean is not None and isinstance(saved, Tensor):
            device = saved.device
            for name in (*BACKWARD, "num_updates", "strength") if begins else ():
                state_dict[prefix + name] = torch.zeros_like(self.get_buffer(name), device=device)
            state_dict.setdefault(prefix + "num_images", torch.zeros_like(self.num_images, device=device))
        updates.scaled_backward.leave()
        self.__dict__["_faded_at"] = None
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if begins and not self.strength.is_meta:
            self._follow(0)

    def _drop_nonfinite(self) -> bool:
        dropped, buffers = super()._drop_nonfinite(), [self.get_buffer(name) for name in BACKWARD]
        if all(bool(one.isfinite().all()) for one in buffers):
            return dropped
        self._buffers.update({name: torch.zeros_like(one) for name, one in zip(BACKWARD, buffers, strict=True)})
        return True

    def __getstate__(self) -> dict[str, Any]:
        updates.scaled_backward.leave_if_over()
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.running_mean is not None:
            updates.watch(self)

    def _save_to_state_dict(self, *args: Any) -> None:
        updates.scaled_backward.leave_if_over()
        super()._save_to_state_dict(*args)

    def _note(self) -> str:
        weight = float(self.running_weight)
        decay = "by the images per update" if self.decay is None else self.decay
        return f"two-way memory of {weight:,.0f} values, decay {decay}, strength {float(self.strength):g}"

    def _memory_repr(self) -> str:
        return f"decay={self.decay}, strength={self._initial_strength:g}, warmup={self.warmup}"


def _forget_leader(layer: ref[TwoWayBatchNorm], leader: ref[Optimizer]) -> None:
    """The optimizer is gone: the backwards count until another one makes a step."""
    own = layer()
    if own is not None and own._leader is leader:
        own.__dict__["_has_optimizer"] = None


class _Backward:
    """The backward memory as the backward of one forward uses it: read each time, recorded the first time. It reads and
    writes the buffers that the forward used, also under `functional_call`.
    """

    def __init__(
        self, layer: TwoWayBatchNorm, handle: Any, buffers: Sequence[Tensor], strength: Tensor | None, recorded: bool
    ) -> None:
        self.layer, self.handle, self.buffers, self.recorded = layer, handle, buffers, recorded
        self.strength = strength  # None: the memory is not read

    @property
    def for_kernels(self) -> tuple[Any, Any, bool] | None:
        return None if self.handle is None else (self.layer, self.handle, self.strength is not None)

    def means(self, sum_g: Tensor, sum_gx: Tensor, count: Tensor | float) -> tuple[Tensor, Tensor]:
        layer, compiling = self.layer, torch.compiler.is_compiling()
        if compiling and not layer.recording:
            raise MemnormError(
                f"{layer._name} records in backward, which a graph compiled with recording off never does. Compile "
                "without fullgraph, which leaves this layer uncompiled, or train without Double-Forward."
            )
        if torch.is_grad_enabled() and not compiling:
            raise MemnormError(
                f"{layer._name}: the backward of two-way memory is not the derivative of its forward, so it cannot be "
                'differentiated again (create_graph=True). Use memnorm.convert(model, "mbn"), which can.'
            )
        mean, product = sum_g / count, sum_gx / count
        share = as_scalar(count / (count + self._weight(count)), mean.dtype, mean.device)
        past_mean, past_product = (one.to(mean.dtype) for one in self.buffers[:2])
        subtracted = torch.lerp(past_mean, mean, share), torch.lerp(past_product, product, share)
        if layer.recording and (compiling or not (self.recorded or is_legacy_batchedtensor(sum_g))):
            self._record(mean, product, count)
        return subtracted

    def _weight(self, count: Tensor | float) -> Tensor:
        """λW_b; for one value per channel as in `TwoWayBatchNorm._read`."""
        weight: Tensor = self.buffers[2]
        if self.strength is None:
            return torch.zeros_like(weight)
        if isinstance(count, Tensor) or count > 1:
            return self.strength * weight
        return torch.where(weight == 0, count, weight)

    def _record(self, mean: Tensor, product: Tensor, count: Tensor | float) -> None:
        layer = self.layer
        if layer._outgoing_backward is not None:
            scale = updates.scaled_backward.scale
            means = (mean, product) if scale is None else (mean / scale, product / scale)
            layer._outgoing_backward.append(Moments(*means, count))
            self.recorded = True
        elif torch.compiler.is_compiling():
            _merge_backward(self.buffers, mean, product, count)
        else:
            counts = not layer._has_optimizer and is_real(self.buffers[2])
            before = float(self.buffers[2]) if counts else 0.0
            _merge_backward(self.buffers, mean, product, count)
            self.recorded = True
            changed = counts and float(self.buffers[2]) != before
            if changed and layer._buffers["backward_weight"] is self.buffers[2]:
                layer._count_backward()


@torch.no_grad()
def _merge_backward(buffers: Sequence[Tensor], mean: Tensor, product: Tensor, weight: Tensor | float) -> None:
    """Merge the means of a backward into (A, Q, W_b), in place. Means that are not finite change nothing."""
    total = buffers[2] + weight
    share = as_scalar(weight / total, buffers[0].dtype, buffers[0].device)
    new = [torch.lerp(old, one.to(old.dtype), share) for old, one in zip(buffers[:2], (mean, product), strict=True)]
    finite = (new[0].isfinite() & new[1].isfinite()).all()
    # Not buffer.copy_: a compiled graph loses that for a float64 scalar on the CPU.
    foreach_copy_(
        list(buffers), [torch.where(finite, one, old) for old, one in zip(buffers, [*new, total], strict=True)]
    )


class TwoWayBatchNorm1d(TwoWayBatchNorm, MemorizedBatchNorm1d):
    """Two-way memorized batch norm over (N, C) or (N, C, L).

    layer = memnorm.TwoWayBatchNorm1d(64)  # in place of nn.BatchNorm1d(64)
    """


class TwoWayBatchNorm2d(TwoWayBatchNorm, MemorizedBatchNorm2d):
    """Two-way memorized batch norm over (N, C, H, W).

    layer = memnorm.TwoWayBatchNorm2d(64)  # in place of nn.BatchNorm2d(64)
    """


class TwoWayBatchNorm3d(TwoWayBatchNorm, MemorizedBatchNorm3d):
    """Two-way memorized batch norm over (N, C, D, H, W).

    layer = memnorm.TwoWayBatchNorm3d(64)  # in place of nn.BatchNorm3d(64)
    """


class TwoWayBatchNormNd(TwoWayBatchNorm, mbn.MemorizedBatchNormNd):
    """In place of a layer that takes data of any rank, such as SyncBatchNorm."""


class TwoWayBatchNormAct2d(TwoWayBatchNorm, mbn.MemorizedBatchNormAct2d):
    """In place of a batch norm with a `drop` and an `act` layer of its own behind it."""


FAMILY = mbn.Family(
    "two_way",
    {nn.BatchNorm1d: TwoWayBatchNorm1d, nn.BatchNorm2d: TwoWayBatchNorm2d, nn.BatchNorm3d: TwoWayBatchNorm3d},
    TwoWayBatchNormNd,
    TwoWayBatchNormAct2d,
    {"decay": None, "strength": 1.0, "warmup": 100, "sync": False},
    ("center",),
)


def replace(layer: _BatchNorm, /, *, center: Any = "auto", **options: Any) -> MemorizedBatchNorm:
    """Replace a batch norm by a two-way layer. `_center` handles `center`."""
    centering.check_mode(center)
    new = cast(TwoWayBatchNorm, FAMILY.replace(layer, **options))
    if "warmup" in options and isinstance(layer, TwoWayBatchNorm) and is_real(layer.running_mean):
        count, over = int(layer.num_updates), int(layer.num_updates) >= layer.warmup
        new._follow(new.warmup if over else min(count, new.warmup))  # over stays over
    return new


def _center(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Centre the layers before the norms: their weights if the norms are untrained, else their gradients. A model that
    is converted again keeps what it had, unless `center` is given.
    """
    norms = [layer for layer in model.modules() if isinstance(layer, TwoWayBatchNorm)]
    before = [layer._centered for layer in norms if layer._centered is not None]
    kept = ("gradients" if before[0] else None) if before else "auto"
    mode: Any = options.get("center", kept)
    if mode == "auto":
        mode = "gradients" if any(layer._is_trained() for layer in norms) else "weights"
    if mode is not None:
        centering.center_before(model, mode, TwoWayBatchNorm)
    for layer in norms:
        layer._centered = mode is not None


ENTRY: dict[str, Any] = {
    "name": "two_way",
    "title": "Two-way memorized batch norm",
    "paper": "memnorm, 2026; built on MBN (Guo et al., AAAI 2018) and on the insight of MABN (Yan et al., ICLR 2020) "
    "that backward's statistics matter",
    "replace": replace,
    "records": True,
    "state": "pooled moments of recent batches, and the two means of their backwards",
    "keeps_weights": True,
    "folds": True,
    "double_forward": "fresher statistics",
    "surgery": _center,
    "settle": centering.settle,
}
