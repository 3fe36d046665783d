"""Batch normalization with a memory, as drop-in subclasses of torch's layers.

A layer remembers the moments of the last `memory_size` batches. Their union, weighted by `decay**age` and by each
batch's count, is kept pooled in `running_mean`, `running_var` and `running_weight` (M, V, W of the docs). A training
forward normalises with the union of the current batch and that memory, the memory's weight multiplied by `strength`; an
eval forward is torch's own batch norm on `running_mean` and `running_var`.

Buffers, with k = `memory_size` (0 rows for None) and C channels:

    running_mean (C), running_var (C), running_weight ()          the pooled memory M, V, W
    memory_mean (k, C), memory_var (k, C), memory_count (k)       the batches, newest first; count 0 is an empty slot
    strength ()                                                   λ, float64
"""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from memnorm._torch import foreach_copy_
from memnorm.collective import KeptGroup, check_sync, group_of_ranks, joint_moments, normalize_jointly
from memnorm.errors import DTypeError, InputError, OptionError, is_number, is_whole, warn
from memnorm.functional import (
    BackwardMemory,
    Moments,
    as_scalar,
    constant_moments,
    count_per_channel,
    merge,
    normalize_with_memory,
    pool,
    reads_at_once,
    snapshot,
    statistics_dtype,
    with_gradient,
)
from memnorm.kernels import cpu
from memnorm.modules import is_real
from memnorm.recompute import Readings, inside_backward

# Layers before their first step: True if their statistics were trained, and their number of batches at the start.
unchecked: WeakKeyDictionary[MemorizedBatchNorm, tuple[bool, int]] = WeakKeyDictionary()

POOLED = ("running_mean", "running_var", "running_weight")
SLOTS = ("memory_mean", "memory_var", "memory_count")


class Recording:
    """A layer that writes statistics in its training forwards, unless `recording` is off.

    The switch belongs to the running program: copies and pickles of a layer start with it on.
    """

    training: bool
    recording: bool = True
    _watched_by: Any = None  # the Double-Forward handle in charge, if any
    _transient: tuple[str, ...] = ("recording", "_readings", "_watched_by", "_handle", "_outgoing")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self._transient}


class MemorizedBatchNorm(Recording, _BatchNorm):
    """The base of the layers for 1-d, 2-d and 3-d data.

    Args:
        num_features: channels C of an input (N, C, …).
        memory_size: number of batches to remember; None remembers all of them, in constant space. With the default
            decay the 20th batch has 12 % of its weight left, so more of them would change little.
        decay: factor by which a remembered batch loses weight with each batch that follows, in (0, 1]; 0.9 is the
            paper's.
        strength: weight of the whole memory against the current batch, in [0, 1]; 0 is plain batch norm in training.
            A buffer: change it with `set_strength` or a `memnorm.StrengthSchedule`, as the paper does. Without a
            schedule it is constant.
        prior_weight: trained running statistics of a plain batch norm replace the memory until something is recorded;
            this is their weight, in units of the current batch. By default they weigh as much as the batch.
        prior_from_init: use the initial statistics (0, 1) in the same way, so that a first batch of one value per
            channel can be trained on.
        sync: take the batch of all processes together: True, or a process group. Every process must then call the
            layer equally often, if necessary with an empty batch.

    `eps`, `momentum`, `affine`, `track_running_stats`, `device`, `dtype` and `bias` are those of
    `torch.nn.BatchNorm2d`. `momentum=None` accumulates cumulative statistics as torch does (see `docs/design.md`); a
    number has no effect here and is kept for `memnorm.to_batchnorm`.
    """

    norm = "mbn"  # its name in the registry
    plain_class: type[_BatchNorm]
    ranks: tuple[int, ...]
    memory_buffers: tuple[str, ...] = ("running_weight", *SLOTS)  # all zero: nothing is remembered
    own_buffers: tuple[str, ...] = (*memory_buffers, "strength")  # those that a plain batch norm does not have
    statistics: tuple[str, ...] = (*POOLED, *SLOTS)  # float32 or wider in a model of any dtype
    outgoing: ClassVar[dict[str, bool]] = {"_outgoing": True}  # entries that wait for an exchange; True: with variances

    weight: nn.Parameter | None  # type: ignore[assignment]
    bias: nn.Parameter | None  # type: ignore[assignment]
    running_mean: Any  # Tensor, or None without track_running_stats; so are the buffers below
    running_var: Any
    num_batches_tracked: Any
    running_weight: Tensor
    memory_mean: Tensor
    memory_var: Tensor
    memory_count: Tensor
    strength: Tensor
    sync: bool | KeptGroup = False
    _plain_dtype: torch.dtype  # of the statistics of a plain batch norm in place of this layer
    _checked_strength: int | None = None  # version of the strength with which there was something to merge a batch with
    _handle: Any = None  # of the buffers as the kernels last used them
    _outgoing: list[Moments] | None = None  # batches recorded for `memnorm.distributed.exchange_memory` to share

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
        memory_size: int | None = 20,
        decay: float = 0.9,
        strength: float = 0.5,
        prior_weight: float = 1.0,
        prior_from_init: bool = False,
        sync: Any = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if not bias:
            self.register_parameter("bias", None)
        self._install_memory(
            memory_size=memory_size,
            decay=decay,
            strength=strength,
            prior_weight=prior_weight,
            prior_from_init=prior_from_init,
            sync=sync,
        )

    def _install_memory(
        self,
        *,
        memory_size: int | None,
        decay: float,
        strength: float,
        prior_weight: float,
        prior_from_init: bool,
        sync: Any,
    ) -> None:
        """Add the memory to a layer that is a batch norm already."""
        if memory_size is not None and (not is_whole(memory_size) or memory_size < 1):
            raise OptionError(
                "memory_size must be a positive number of batches, or None for all of them; "
                f"got {memory_size!r} (the limit is 2**63 - 1)"
            )
        if not is_number(decay) or not 0 < decay <= 1:
            raise OptionError(f"decay must lie in (0, 1]; got {decay!r}")
        if not is_number(prior_weight) or not 0 <= prior_weight < math.inf:
            raise OptionError(
                "prior_weight must be zero or a positive number of batches; "
                f"got {prior_weight!r} (the limit is 1.8e308)"
            )
        if not isinstance(prior_from_init, bool):
            raise OptionError(f"prior_from_init must be True or False; got {prior_from_init!r}")
        self.memory_size = None if memory_size is None else int(memory_size)
        self.decay, self.prior_weight = float(decay), float(prior_weight)
        self._initial_strength = check_strength(strength)
        self.prior_from_init = prior_from_init
        self.sync = check_sync(sync)
        if self.running_mean is None or self.running_var is None:
            for name in MemorizedBatchNorm.own_buffers:
                self.register_buffer(name, None)
            return
        self._plain_dtype = self.running_mean.dtype
        device, dtype = self.running_mean.device, statistics_dtype(self.running_mean.dtype)
        self.running_mean, self.running_var = self.running_mean.to(dtype), self.running_var.to(dtype)
        slots = memory_size or 0
        self.register_buffer("running_weight", torch.zeros((), device=device, dtype=dtype))
        self.register_buffer("memory_mean", torch.zeros(slots, self.num_features, device=device, dtype=dtype))
        self.register_buffer("memory_var", torch.zeros(slots, self.num_features, device=device, dtype=dtype))
        self.register_buffer("memory_count", torch.zeros(slots, device=device, dtype=dtype))
        self.register_buffer("strength", _scalar(self._initial_strength, device))
        self._notice_strength()

    def _notice_strength(self) -> None:
        """Let the first optimizer step check the strength (`memnorm.schedule`). Only the paper's layers need that."""
        if self.norm == MemorizedBatchNorm.norm and self not in unchecked and is_real(self.running_mean):
            unchecked[self] = bool(self.running_mean.any()), int(self.num_batches_tracked)

    # Forward

    def forward(
        self, input: Tensor, *, activation: Literal["relu"] | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """Normalise the input. With `activation="relu"`, return relu(norm(input) + residual), on the CPU in the same
        pass over the data.
        """
        if self.training and not is_dynamo_compiling():
            kernels = cpu.module()
            if kernels is not None:
                output = kernels.train(with_gradient, self, self.ranks, input, activation, residual)
                if output is not None:
                    return output
        return self._forward(input, activation, residual)

    def _forward(self, input: Tensor, activation: str | None, residual: Tensor | None) -> Tensor:
        """A forward that one call of the kernels cannot compute."""
        if isinstance(input, fx.Proxy):  # a leaf for torch.fx, called as torch's own layers are
            output = input.tracer.create_proxy("call_module", input.tracer.path_of_module(self), (input,), {})
            return _completed(output, activation, residual)
        if self.training:
            output = self._train_on_kernels(input, activation, residual)
            if output is not None:
                return output
        self._check_input(input)
        self._check_completion(input, activation, residual)
        output = self._forward_in_torch(input) if self.training else self._plain_forward(input)
        return _completed(output, activation, residual)

    def _train_on_kernels(self, x: Tensor, activation: str | None, residual: Tensor | None) -> Tensor | None:
        """A training forward on buffers that the kernels have not checked yet, or on copies of tensors that they cannot
        read; None if they cannot do all of it.
        """
        mean: Any = self._buffers["running_mean"]
        if (
            is_dynamo_compiling()
            or mean is None
            or not _is_activation(activation)
            or not cpu.takes(x, mean.dtype)
            or x.dim() not in self.ranks
            or not x.shape[1] == self.num_features < x.numel()
        ):
            return None
        self.__dict__["_handle"] = cpu.check(self._buffers)
        if self._handle is None:
            return None
        weight, bias = self._affine()
        made = cpu.train_prepared(self, x, weight, bias, residual, activation == "relu")
        output: Tensor | None = None if made is None else with_gradient(x, weight, bias, residual, made)
        return output

    def _forward_in_torch(self, input: Tensor) -> Tensor:
        group = group_of_ranks(self.sync)
        if group is not None:
            return self._forward_jointly(input, group)
        if not self.track_running_stats or self.running_mean is None:
            return self._plain_forward(input)
        count = count_per_channel(input)
        if count == 0:
            return self._plain_forward(input)
        if count == 1:
            self._require_values(input, count)
        compiling = torch.compiler.is_compiling()
        replaying = not compiling and inside_backward()
        memory = self._kept_readings.recall(constant_moments(input)) if replaying else None
        backward = self._backward_memory()
        if memory is None:
            on_kernels = backward is None or backward.for_kernels is not None  # not with unusual buffers
            memory = self._read(count, on_kernels and reads_at_once(input, self.running_mean))
        output, batch = normalize_with_memory(input, self.weight, self.bias, memory, self.eps, backward)
        self._after_forward(input, batch, memory, compiling, replaying)
        return output

    def _forward_jointly(self, x: Tensor, group: Any) -> Tensor:
        """A training forward whose batch is that of all processes of `group`, which all remember it."""
        batch = joint_moments(x.detach(), group)
        if count_per_channel(x) < 2:  # true in every process if all together have fewer than two
            count = int(batch.weight)
            if count == 0:
                return self._plain_forward(x)
            self._require_values(x, count)
        if not self.track_running_stats or self.running_mean is None:
            nothing = Moments(torch.zeros_like(batch.mean), torch.ones_like(batch.var), 0.0)
            return normalize_jointly(x, self.weight, self.bias, batch, nothing, self.eps, group)
        compiling = torch.compiler.is_compiling()
        replaying = not compiling and inside_backward()
        memory = self._kept_readings.recall(batch) if replaying else None
        if memory is None:
            memory = self._read(batch.weight)
        backward = self._backward_memory()
        output = normalize_jointly(x, self.weight, self.bias, batch, memory, self.eps, group, backward)
        self._after_forward(x, batch, memory, compiling, replaying)
        return output

    def _after_forward(self, x: Tensor, batch: Moments, memory: Moments, compiling: bool, replaying: bool) -> None:
        if replaying:
            return
        if not compiling:
            self._kept_readings.keep(batch, memory)
        if self.recording:
            self._record(batch, x)

    def _backward_memory(self) -> BackwardMemory | None:
        """What the backward of this forward remembers of earlier ones; the paper's layer remembers nothing."""
        return None

    def _plain_forward(self, x: Tensor) -> Tensor:
        """Torch's own operation: on the running statistics in eval, on the batch where no statistics are kept."""
        mean: Any
        var: Any
        mean, var = self._buffers["running_mean"], self._buffers["running_var"]
        weight, bias = self._affine()
        if self.training or mean is None:
            return F.batch_norm(x, None, None, weight, bias, True, 0.0, self.eps)
        dtype = statistics_dtype(x.dtype)
        weight, bias, mean, var = [
            one if one is None or one.dtype is dtype else one.to(dtype) for one in (weight, bias, mean, var)
        ]
        return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, self.eps, torch.backends.cudnn.enabled)

    def _affine(self) -> tuple[Any, Any]:
        """Weight and bias, past the lookup of `nn.Module`; one that is computed from others is no parameter."""
        own = self._parameters
        if "weight" in own and "bias" in own:
            return own["weight"], own["bias"]
        return self.weight, self.bias

    @property
    def _kept_readings(self) -> Readings:
        if "_readings" not in self.__dict__:
            self._readings = Readings()
        return self._readings

    # The memory: what a forward reads of it, and how a batch enters it. The kernels do the same in `record.h`.

    @property
    def _decay_per_batch(self) -> float:
        """The factor by which remembered batches fade when a batch is recorded."""
        return self.decay

    def _read(self, count: Tensor | float, at_once: bool = False) -> Moments:
        """The memory as this forward uses it, its weight multiplied by the strength; a copy, unless read `at_once`.

        With `momentum=None` torch's tools accumulate statistics over batches that are each normalised on their own, and
        so do we.
        """
        weight = self.strength * (0 if self.momentum is None else self._weight_now(count))
        if at_once:
            return Moments(self.running_mean, self.running_var, weight.item())
        return Moments(snapshot(self.running_mean), snapshot(self.running_var), snapshot(weight))

    def _weight_now(self, count: Tensor | float) -> Tensor:
        """W; if nothing is recorded yet, the weight of trained statistics. No branch, no host sync."""
        prior = self._has_prior().to(self.running_weight.dtype) * (self.prior_weight * count)
        return torch.where(self.running_weight == 0, prior, self.running_weight)

    def _has_prior(self) -> Tensor:
        """Return True if the running statistics replace a memory that is empty."""
        trained: Tensor = (self.running_mean != 0).any() | (self.running_var != 1).any()
        return torch.ones_like(trained) if self.prior_from_init and self.momentum is not None else trained

    def _rules(self) -> tuple[float, float, bool, bool]:
        """How a batch enters the memory, as the kernels take it."""
        evenly = self.momentum is None
        return self._decay_per_batch, self.prior_weight, self.prior_from_init and not evenly, evenly

    def _record(self, batch: Moments, _x: Tensor) -> None:
        """Remember the batch of the input `x`, at the next exchange if the memory is exchanged between processes."""
        if self._outgoing is not None and self.momentum is not None:
            self._outgoing.append(batch)
        else:
            self._remember(batch)

    def _remember_shared(self, _name: str, union: Moments, batches: Tensor) -> None:
        """Remember what all processes have recorded in a step, as one entry of the weight of their average batch."""
        self._remember(Moments(union.mean, union.var, union.weight / batches))

    @torch.no_grad()
    def _remember(self, batch: Moments) -> None:
        """Make `batch` the newest remembered one and pool the memory again. Every buffer changes in place; a batch that
        is not finite changes none.
        """
        if cpu.unobserved() and not isinstance(batch.weight, Tensor):
            buffers = self._buffers
            buffers.update(
                {name: one.resolve_neg() for name, one in buffers.items() if one is not None and one.is_neg()}
            )
            handle = cpu.check(buffers)
            if handle is not None and cpu.module().record(handle, *batch, *self._rules()):
                return
        batch = Moments(batch.mean.to(self.running_mean.dtype), batch.var.to(self.running_mean.dtype), batch.weight)
        weight = self._weight_now(batch.weight)
        slots = self._slots_after(batch, weight)
        if self.momentum is None or self.memory_size is None:
            fade = 1.0 if self.momentum is None else self._decay_per_batch
            pooled = merge(Moments(self.running_mean, self.running_var, weight * fade), batch)
        else:
            age = torch.arange(self.memory_size, device=weight.device, dtype=self.memory_count.dtype)
            pooled = pool(slots[0], slots[1], slots[2] * self.decay**age)
        finite = (pooled.mean.isfinite() & pooled.var.isfinite()).all()
        old: list[Any] = [self._buffers[name] for name in (POOLED + SLOTS if slots else POOLED)]
        new = [torch.where(finite, value, buffer) for value, buffer in zip((*pooled, *slots), old, strict=True)]
        # Not buffer.copy_: a compiled graph loses that for a float64 scalar on the CPU, which running_weight may be.
        foreach_copy_(old, new)
        self.num_batches_tracked.add_(finite)

    def _slots_after(self, batch: Moments, weight: Tensor) -> tuple[Tensor, ...]:
        """The slots with `batch` as the newest entry. Statistics that replaced an empty memory become the second."""
        if not self.memory_size:
            return ()
        stood_in = (self.running_weight == 0) & (weight > 0)
        newest = (batch.mean, batch.var, as_scalar(batch.weight, weight.dtype, weight.device))
        prior = (self.running_mean, self.running_var, weight)
        slots = (self.memory_mean, self.memory_var, self.memory_count)
        second = (torch.where(stood_in, value, slot[0]) for value, slot in zip(prior, slots, strict=True))
        rows = zip(newest, second, slots, strict=True)
        return tuple(torch.cat([a[None], b[None], slot[1:]])[: self.memory_size] for a, b, slot in rows)

    @torch.no_grad()
    def reset_memory(self) -> None:
        """Forget the remembered batches. Eval does not change: the running statistics stay, and replace the memory as
        trained ones do.
        """
        self._checked_strength = None
        for name in self.memory_buffers:
            if self._buffers.get(name) is not None:
                self.get_buffer(name).zero_()

    def reset_running_stats(self) -> None:
        """Forget everything: running statistics (0, 1), empty memory."""
        super().reset_running_stats()
        self.reset_memory()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self._buffers.get("strength") is not None:
            self.set_strength(self._initial_strength)

    def set_strength(self, value: float) -> None:
        """Set the weight of the memory, in [0, 1]. In place: nothing recompiles and the device is not synchronised."""
        value = check_strength(value)
        if self.strength is not None:
            self.strength.fill_(value)

    # Checks and words

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() not in self.ranks:
            wanted = " or ".join(f"{rank}-D" for rank in self.ranks)
            raise InputError(
                f"{self._name}: expected {wanted} input (N, C, …), "
                f"got {input.dim()}-D input of shape {tuple(input.shape)}"
            )

    def _check_input(self, x: Tensor) -> None:
        self._check_input_dim(x)
        if not torch.jit.is_tracing() and x.shape[1] != self.num_features:
            raise InputError(
                f"{self._name}: the layer has {self.num_features} channels, the input has {x.shape[1]} (shape "
                f"{tuple(x.shape)}; channels are dimension 1)"
            )
        if not x.is_floating_point():
            advice = "" if x.is_complex() else ": convert it with .float()"
            raise DTypeError(f"{self._name}: expected real floating-point input, got {x.dtype}{advice}")
        if self.training:
            check_eps(self._name, self.eps)
            cpu.require_memory(x, self.weight, self.bias, *self._buffers.values())

    def _check_completion(self, x: Tensor, activation: str | None, residual: Any) -> None:
        """Check what follows the norm before anything is recorded."""
        if not _is_activation(activation):
            raise OptionError(f"{self._name}: activation must be 'relu' or None; got {activation!r}")
        if residual is None:
            return
        if not isinstance(residual, Tensor):
            raise InputError(f"{self._name}: residual must be a tensor of the input's shape; got {residual!r}")
        cpu.require_memory(residual)
        if torch.jit.is_tracing():  # its sizes are tensors
            return
        if residual.is_complex() or (residual.dim() and residual.device != x.device):
            raise InputError(
                f"{self._name}: residual must be real and on the input's device {x.device}; got {residual.dtype} on "
                f"{residual.device}"
            )
        sizes = zip(reversed(residual.shape), reversed(x.shape), strict=False)
        if residual.dim() > x.dim() or any(one not in (1, size) for one, size in sizes):
            raise InputError(
                f"{self._name}: residual must have the input's shape {tuple(x.shape)}; got {tuple(residual.shape)}"
            )

    def _require_values(self, x: Tensor, count: int) -> None:
        """Raise for one value per channel with nothing to merge it with.

        This reads the device, in this rare case only, and not again once the answer was yes.
        """
        if count > 1 or torch.compiler.is_compiling():
            return
        if self.momentum is not None and self.running_mean is not None:
            if self._checked_strength == self.strength._version:
                return
            if bool(self.strength * self._weight_now(1) > 0):
                self._checked_strength = self.strength._version
                return
        raise InputError(
            f"{self._name}: Expected more than 1 value per channel when training, got input size {tuple(x.shape)}, "
            "and the memory is empty. Begin with a larger batch, load trained statistics, or pass "
            "prior_from_init=True to start from mean 0 and variance 1."
        )

    def note(self) -> str:
        """What `memnorm.summary` says of the layer."""
        if self.running_mean is None:
            return "no memory: track_running_stats=False"
        return "on meta" if self.running_mean.is_meta else self._note()

    def _note(self) -> str:
        if self.memory_size is None:
            memory = "remembers all batches" if self.running_weight > 0 else "remembers no batch yet, then all"
        else:
            memory = f"remembers {int((self.memory_count > 0).sum())} of {self.memory_size} batches"
        return f"{memory}, decay {self.decay}, strength {float(self.strength):g}"

    def extra_repr(self) -> str:
        plain = f"eps={self.eps}, momentum={self.momentum}, affine={self.affine}"
        bias = "" if self.bias is not None or not self.affine else ", bias=False"
        sync = f", sync={self.sync}" if self.sync is not False else ""
        tracking = f"track_running_stats={self.track_running_stats}"
        return f"{self.num_features}, {self._memory_repr()}, {plain}{bias}, {tracking}{sync}"

    def _memory_repr(self) -> str:
        strength = self._initial_strength if self.strength is None or self.strength.is_meta else float(self.strength)
        return f"memory_size={self.memory_size}, decay={self.decay}, strength={strength:g}"

    # Moves between dtypes and devices, and checkpoints of plain batch norm or of another memory size

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Map every tensor through `fn`, then undo what it narrowed: statistics stay float32 or wider."""
        if self.running_mean is None:
            return super()._apply(fn, recurse)
        buffers: Any = self._buffers
        before = {name: buffers[name] for name in self.statistics}
        strength = self.strength
        narrow = buffers["strength"] = strength.float()  # not every device has float64
        try:
            super()._apply(fn, recurse)
        except BaseException:
            buffers["strength"] = strength
            raise
        self._plain_dtype = fn(torch.empty(0, dtype=self._plain_dtype, device=strength.device)).dtype
        for name, old in before.items():
            new = buffers[name]
            if new.dtype != statistics_dtype(new.dtype):
                buffers[name] = old.to(device=new.device, dtype=statistics_dtype(new.dtype))
        buffers["strength"] = self._moved_strength(strength, narrow, fn)
        return self

    def _moved_strength(self, strength: Tensor, narrow: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
        after: Any = self._buffers["strength"]
        if after is narrow:  # shared in place, or nothing to do
            moved = fn(strength)
            return moved if moved.dtype == strength.dtype else strength
        if after.device.type == "mps":
            return after.float()
        if strength.is_meta and not after.is_meta:
            # to_empty leaves garbage, and a plain checkpoint brings no strength to replace it
            return _scalar(self._initial_strength, after.device)
        return strength.to(after.device)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        self._checked_strength = None
        for name in ("running_mean", "running_var", "weight", "bias"):
            tensor = state_dict.get(prefix + name)
            if isinstance(tensor, Tensor) and tuple(tensor.shape) != (self.num_features,):
                error_msgs.append(
                    f"{prefix + name}: the checkpoint has shape {tuple(tensor.shape)}, the layer {self.num_features} "
                    "channels. Load a checkpoint of the same architecture, or leave this layer's entries out and pass "
                    "strict=False."
                )
                return
        if self.running_mean is not None:
            self._complete_checkpoint(state_dict, prefix)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        # With assign=True the layer has the checkpoint's tensors, of any dtype.
        if self.running_mean is not None:
            dtype = statistics_dtype(self.running_mean.dtype)
            self._buffers.update({name: self.get_buffer(name).to(dtype) for name in self.statistics})
        if self.strength is not None and self.strength.device.type != "mps":
            self.strength = self.strength.double()
        if is_real(self.strength) and not 0 <= float(self.strength) <= 1:
            warn(
                f"{prefix}strength: the checkpoint has {float(self.strength):g}, which does not lie in [0, 1]; the "
                f"layer uses {self._initial_strength:g}"
            )
            self.strength = self.strength.clone()  # it may belong to the checkpoint
            self.set_strength(self._initial_strength)
        if is_real(self.running_mean) and self._drop_nonfinite():
            warn_of_dropped(prefix.rstrip(".") or self._name)
        if unchecked.pop(self, None):
            self._notice_strength()  # the checkpoint may be trained

    def _drop_nonfinite(self) -> bool:
        """Drop remembered entries that are not finite: with one of them, nothing could be recorded any more."""
        buffers: Any = self._buffers
        pooled, slots = [buffers[name] for name in POOLED], [buffers[name] for name in SLOTS]
        bad_K = ~(slots[0].isfinite().all(1) & slots[1].isfinite().all(1) & slots[2].isfinite())
        spoiled = not all(bool(one.isfinite().all()) for one in pooled)
        if not spoiled and not bool(bad_K.any()):
            return False
        keep_K = ~bad_K
        slots = [torch.where(keep_K.view(-1, *[1] * (one.dim() - 1)), one, 0) for one in slots]
        buffers.update(zip(SLOTS, slots, strict=True))
        if bool((slots[2] > 0).any()):
            age_K = torch.arange(len(slots[2]), device=slots[2].device, dtype=slots[2].dtype)
            pooled = [*pool(slots[0], slots[1], slots[2] * self.decay**age_K)]
        elif spoiled:
            pooled = [torch.zeros_like(pooled[0]), torch.ones_like(pooled[1]), torch.zeros_like(pooled[2])]
        buffers.update(zip(POOLED, pooled, strict=True))
        return True

    def _complete_checkpoint(self, state: MutableMapping[str, Any], prefix: str) -> None:
        """Make the entries of a plain batch norm, or of another memory size, fit the layer."""
        mean = state.get(prefix + "running_mean")
        if not isinstance(mean, Tensor):
            return
        if prefix + "running_weight" not in state:
            for name in self.memory_buffers:
                state[prefix + name] = torch.zeros_like(self.get_buffer(name), device=mean.device)
            strength = _scalar(self._initial_strength, mean.device) if self.strength.is_meta else self.strength
            state.setdefault(prefix + "strength", strength)
            return
        slots: list[Any] = [state.get(prefix + name) for name in SLOTS]
        if not all(isinstance(slot, Tensor) for slot in slots) or slots[2].dim() != 1:
            return
        size = slots[2].shape[0]
        if slots[0].shape == slots[1].shape == (size, self.num_features) and size != (self.memory_size or 0):
            self._resize_memory(state, prefix, slots)

    def _resize_memory(self, state: MutableMapping[str, Any], prefix: str, slots: list[Tensor]) -> None:
        """Keep the newest entries that fit. An unlimited memory has none, so its pooled moments become one entry."""
        size = self.memory_size or 0
        if slots[2].shape[0] == 0:
            slots = [state[prefix + name][None] for name in POOLED]
        for name, slot in zip(SLOTS, slots, strict=True):
            fitted = torch.zeros_like(self.get_buffer(name), device=slot.device)
            rows = min(size, slot.shape[0])
            fitted[:rows] = slot[:rows]
            state[prefix + name] = fitted
        truncated = 0 < size < slots[2].shape[0] and self.momentum is not None
        if truncated and not slots[2].is_meta and bool(slots[2][:size].sum() > 0):
            mean, var, count = (state[prefix + name] for name in SLOTS)
            age = torch.arange(size, device=count.device, dtype=count.dtype)
            pooled = pool(mean, var, count * self.decay**age)
            state.update(zip((prefix + name for name in POOLED), pooled, strict=True))


def check_eps(name: str, eps: float) -> None:
    """Raise torch's error if `eps` is not positive."""
    if not eps > 0:
        raise ValueError(f"{name}: batch_norm eps must be positive during training, but got {eps}")


def warn_of_dropped(layer: str) -> None:
    warn(f"{layer}: statistics that are not finite were dropped; recording starts again without them")


def check_strength(strength: float) -> float:
    if not is_number(strength) or not 0 <= strength <= 1:
        raise OptionError(f"strength must lie in [0, 1]; got {strength!r}")
    return float(strength)


def _scalar(value: float, device: torch.device) -> Tensor:
    """Float64 wherever it exists: 0.1 must stay 0.1 when the layer is used in float64."""
    return torch.full((), value, device=device, dtype=torch.float32 if device.type == "mps" else torch.float64)


def _is_activation(activation: Any) -> bool:
    return activation is None or (isinstance(activation, str) and activation == "relu")


def _completed(output: Tensor, activation: str | None, residual: Tensor | None) -> Tensor:
    if residual is not None:
        output = output + residual
    return output if activation is None else F.relu(output, inplace=True)


class MemorizedBatchNorm1d(MemorizedBatchNorm, nn.BatchNorm1d):
    """Memorized batch norm over (N, C) or (N, C, L).

    layer = memnorm.MemorizedBatchNorm1d(64)  # in place of nn.BatchNorm1d(64)
    """

    plain_class = nn.BatchNorm1d
    ranks: tuple[int, ...] = (2, 3)


class MemorizedBatchNorm2d(MemorizedBatchNorm, nn.BatchNorm2d):
    """Memorized batch norm over (N, C, H, W).

    layer = memnorm.MemorizedBatchNorm2d(64)  # in place of nn.BatchNorm2d(64)
    """

    plain_class = nn.BatchNorm2d
    ranks: tuple[int, ...] = (4,)


class MemorizedBatchNorm3d(MemorizedBatchNorm, nn.BatchNorm3d):
    """Memorized batch norm over (N, C, D, H, W).

    layer = memnorm.MemorizedBatchNorm3d(64)  # in place of nn.BatchNorm3d(64)
    """

    plain_class = nn.BatchNorm3d
    ranks: tuple[int, ...] = (5,)
