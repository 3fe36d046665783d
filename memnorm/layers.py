"""Batch normalization with a memory, as drop-in subclasses of torch's layers.

A layer remembers the moments of the last `memory_size` batches. Their union, weighted by `decay**age` and by each
batch's count, is kept pooled in `running_mean`, `running_var` and `running_weight` (M, V, W of the docs). A training
forward normalises with the union of the current batch and that memory, the memory's weight multiplied by `strength`; an
eval forward is torch's own batch norm on `running_mean` and `running_var`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from memnorm.collective import Some, check_sync, companions, joint_moments, normalize_jointly
from memnorm.dispatch import OnKernels
from memnorm.errors import DTypeError, InputError, OptionError
from memnorm.functional import (
    Moments,
    constant_moments,
    count_per_channel,
    normalize_with_memory,
    reads_at_once,
    statistics_dtype,
)
from memnorm.options import check_options, check_shift, check_strength
from memnorm.recompute import Readings, inside_backward
from memnorm.state import (
    POOLED,
    SLOTS,
    apply_keeping_width,
    channel_mismatch,
    complete_checkpoint,
    scalar,
    widen,
)


class Recording:
    """A layer that writes statistics in its training forwards, unless `recording` is off.

    The switch belongs to the running program: copies and pickles of a layer start with it on.
    """

    training: bool
    recording: bool = True
    _watched_by: Any = None  # the Double-Forward handle in charge, if any
    _transient: tuple[str, ...] = ("recording", "_readings", "_watched_by", "_known_memory", "_outgoing")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self._transient}


class MemorizedBatchNorm(Recording, OnKernels, _BatchNorm):
    """What the layers for 1-d, 2-d and 3-d data share. Use those.

    Args:
        num_features: channels C of an input (N, C, …).
        memory_size: batches remembered; None remembers all of them, in constant space.
        decay: factor by which a remembered batch loses weight with each batch that follows, in (0, 1].
        strength: weight of the whole memory against the current batch, in [0, 1]; 0 is plain batch norm in training.
            A buffer: change it with `set_strength` or a `memnorm.StrengthSchedule`.
        prior_weight: trained running statistics of a plain batch norm stand in for the memory until something is
            recorded; this is their weight, in units of the current batch.
        prior_from_init: let the initial statistics (0, 1) stand in as well, so that a first batch of one value per
            channel can be trained on.
        shift: count the squared shift between the means of batches in the variance of their union, as the paper's Eq. 6
            does. False averages the variances alone (its Eq. 4), for the ablation; not with `sync`, and slower.
        sync: take the batch of all processes together: True, or a process group. Every process must then call the
            layer equally often, be it with an empty batch.

    `eps`, `momentum`, `affine`, `track_running_stats`, `device`, `dtype` and `bias` are those of
    `torch.nn.BatchNorm2d`. `momentum=None` accumulates cumulative statistics as torch does (see `docs/design.md`); a
    number has no effect here and is kept for `memnorm.to_batchnorm`.
    """

    norm = "mbn"  # its name in the registry
    plain_class: type[_BatchNorm]
    ranks: tuple[int, ...]
    sync: bool | Some = False
    memory_buffers: tuple[str, ...] = ("running_weight", *SLOTS)  # all zero: nothing is remembered
    own_buffers: tuple[str, ...] = (*memory_buffers, "strength")  # those that a plain batch norm does not have
    outgoing: ClassVar[dict[str, bool]] = {"_outgoing": True}  # entries that wait for an exchange; True: with variances
    statistics: tuple[str, ...] = (*POOLED, *SLOTS)  # float32 or wider in a model of any dtype

    weight: nn.Parameter | None  # type: ignore[assignment]
    bias: nn.Parameter | None  # type: ignore[assignment]
    _plain_dtype: torch.dtype  # of a plain batch norm's statistics in place of this layer
    _seasoned: int | None = None  # version of the strength with which there was something to merge a batch with

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
        shift: bool = True,
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
            shift=shift,
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
        shift: bool,
        sync: Any,
    ) -> None:
        """Add the memory to a layer that is a batch norm already."""
        self.sync = check_sync(sync)
        check_options(memory_size, decay, strength, prior_weight)
        self.shift = check_shift(shift, self.sync)
        self.memory_size = None if memory_size is None else int(memory_size)
        self.decay, self._initial_strength, self.prior_weight = float(decay), float(strength), float(prior_weight)
        self.prior_from_init = bool(prior_from_init)
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
        self.register_buffer("strength", scalar(strength, device))

    def forward(
        self, input: Tensor, *, activation: Literal["relu"] | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """The normalised input; with `activation="relu"`, relu(norm(input) + residual), which on the processor costs no
        further pass over the data.
        """
        if isinstance(input, fx.Proxy):  # a leaf for torch.fx, called as torch's own layers are: one can take its place
            output = input.tracer.create_proxy("call_module", input.tracer.path_of_module(self), (input,), {})
            return _completed(output, activation, residual)
        return self._forward(input, activation, residual)

    def _forward(self, input: Tensor, activation: str | None = None, residual: Tensor | None = None) -> Tensor:
        if activation not in (None, "relu"):
            raise OptionError(f"{self._name}: activation must be 'relu' or None; got {activation!r}")
        if self.training:
            output = self._forward_on_kernels(input, activation is not None, residual)
            if output is not None:
                return output
        self._check_input(input)
        output = self._forward_in_torch(input) if self.training else self._plain_forward(input)
        return _completed(output, activation, residual)

    def _forward_in_torch(self, input: Tensor) -> Tensor:
        group = companions(self.sync)
        if group is not None:
            return self._forward_jointly(input, group)
        if not self.track_running_stats or self.running_mean is None:
            return self._plain_forward(input)
        count = count_per_channel(input)
        if count < 2:
            self._require_values(input, count)
        compiling = torch.compiler.is_compiling()
        replaying = not compiling and inside_backward()
        memory = self._recall(input) if replaying else None
        if memory is None:
            at_once = self.shift and reads_at_once(input, self.running_mean)
            memory = self._read(count, at_once)
        output, batch = normalize_with_memory(
            input, self.weight, self.bias, memory, self.eps, shift=self.shift, backward=self._backward_memory()
        )
        if not replaying:
            if not compiling:
                self._kept_readings.keep(batch, memory)
            if self.recording:
                self._record(batch)
        return output

    def _forward_jointly(self, x: Tensor, group: Any) -> Tensor:
        """A training forward whose batch is that of all processes of `group`, which all remember it."""
        batch = joint_moments(x.detach(), group)
        if count_per_channel(x) < 2:  # so it is in every process if they have less than two together
            self._require_values(x, int(batch.weight))
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
        if not replaying:
            if not compiling:
                self._kept_readings.keep(batch, memory)
            if self.recording:
                self._record(batch)
        return output

    def _plain_forward(self, x: Tensor) -> Tensor:
        """Torch's own operation: on the running statistics in eval, on the batch where no statistics are kept."""
        buffers, parameters = self._buffers, self._parameters
        mean, var = buffers["running_mean"], buffers["running_var"]
        weight: Any
        bias: Any
        weight, bias = parameters["weight"], parameters["bias"]
        if self.training or mean is None:
            return F.batch_norm(x, None, None, weight, bias, True, 0.0, self.eps)
        dtype = statistics_dtype(x.dtype)
        weight, bias, mean, var = [
            one if one is None or one.dtype is dtype else one.to(dtype) for one in (weight, bias, mean, var)
        ]
        return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, self.eps, torch.backends.cudnn.enabled)

    def _recall(self, x: Tensor) -> Moments | None:
        return self._kept_readings.recall(constant_moments(x))

    @property
    def _kept_readings(self) -> Readings:
        if "_readings" not in self.__dict__:
            self._readings = Readings()
        return self._readings

    @torch.no_grad()
    def reset_memory(self) -> None:
        """Forget the remembered batches. Eval does not change: the running statistics stay, and stand in for the memory
        as trained ones do.
        """
        self._seasoned = None
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
        check_strength(value)
        if self.strength is not None:
            self.strength.fill_(value)

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

    def _require_values(self, x: Tensor, count: int) -> None:
        """A batch of `count` values per channel must not be empty, nor have one alone with nothing to merge it with.

        Reads the device, in this rare case only, and not again once the answer was yes.
        """
        if count == 0:
            raise InputError(
                f"{self._name}: the batch is empty (shape {tuple(x.shape)}): skip it, or evaluate it after .eval()"
            )
        if count > 1 or torch.compiler.is_compiling():
            return
        if self.momentum is not None and self.running_mean is not None:
            if self._seasoned == self.strength._version:
                return
            if bool(self.strength * self._weight_now(1) > 0):
                self._seasoned = self.strength._version
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
        rare = ("" if self.shift else ", shift=False") + (f", sync={self.sync}" if self.sync is not False else "")
        tracking = f"track_running_stats={self.track_running_stats}"
        return f"{self.num_features}, {self._memory_repr()}, {plain}{bias}, {tracking}{rare}"

    def _memory_repr(self) -> str:
        strength = self._initial_strength if self.strength is None or self.strength.is_meta else float(self.strength)
        return f"memory_size={self.memory_size}, decay={self.decay}, strength={strength:g}"

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if self.running_mean is None:
            return super()._apply(fn, recurse)
        apply_keeping_width(self, fn, lambda: super(MemorizedBatchNorm, self)._apply(fn, recurse))
        return self

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
        self._seasoned = None
        mismatch = channel_mismatch(self, state_dict, prefix)
        if mismatch is not None:
            error_msgs.append(mismatch)
            return
        if self.running_mean is not None:
            complete_checkpoint(self, state_dict, prefix)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        widen(self)


def _completed(output: Tensor, activation: str | None, residual: Tensor | None) -> Tensor:
    if residual is not None:
        output = output + residual
    return output if activation is None else F.relu(output, inplace=True)


class MemorizedBatchNorm1d(MemorizedBatchNorm, nn.BatchNorm1d):
    """Memorized batch norm over (N, C) or (N, C, L)."""

    plain_class = nn.BatchNorm1d
    ranks: tuple[int, ...] = (2, 3)


class MemorizedBatchNorm2d(MemorizedBatchNorm, nn.BatchNorm2d):
    """Memorized batch norm over (N, C, H, W)."""

    plain_class = nn.BatchNorm2d
    ranks: tuple[int, ...] = (4,)


class MemorizedBatchNorm3d(MemorizedBatchNorm, nn.BatchNorm3d):
    """Memorized batch norm over (N, C, D, H, W)."""

    plain_class = nn.BatchNorm3d
    ranks: tuple[int, ...] = (5,)
