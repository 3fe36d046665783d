"""What the norms share: replacing a batch norm, and a base class for variants of batch norm in training.

`RunningNorm` has the parameters, buffers, checkpoints and eval mode of torch's batch norm. A subclass defines how a
training forward uses the batch and the running statistics (`_normalize`), and what is recorded (`_record`). If it
remembers more than running statistics, `MEMORY` names its buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from memnorm.errors import DTypeError, InputError, MemnormError, OptionError, is_number, is_whole
from memnorm.functional import Moments, constant_moments, count_per_channel, snapshot, statistics_dtype
from memnorm.kernels import cpu
from memnorm.layers import Recording, check_eps, warn_of_dropped
from memnorm.modules import is_real
from memnorm.recompute import Readings, inside_backward

# What the registry says of a norm with torch's running statistics that needs the variance of the batch.
ENTRY_OF_RUNNING_NORM: dict[str, Any] = {
    "records": True,
    "state": "moving averages of mean and variance",
    "batch_one": False,
    "keeps_weights": True,
    "folds": True,
    "double_forward": "fresher statistics",
}


class RunningNorm(Recording, _BatchNorm):
    """Base class of norms over (N, C, …) that are torch's batch norm on the running statistics in eval mode.

    `OPTIONS` are the options of the norm with their defaults; they become attributes of the layer. `momentum` has
    torch's meaning: the weight of the new batch, or None for an average over all batches. Its default is `MOMENTUM`, or
    the momentum of the replaced layer if that is `...`. The buffers in `MEMORY` are zero in a new layer, after
    `reset_running_stats` and after loading a checkpoint of plain batch norm.
    """

    OPTIONS: ClassVar[dict[str, Any]] = {}
    MOMENTUM: ClassVar[Any] = ...
    MEMORY: ClassVar[tuple[str, ...]] = ()
    MIN_VALUES: ClassVar[int] = 1  # per channel in training; 2 where the batch's own variance is used
    READS_STATISTICS: ClassVar[bool] = True  # the output depends on them, so a recomputed forward needs the same ones
    COUNTS_STEPS: ClassVar[bool] = False  # `num_batches_tracked` is the position in a schedule, too
    DEBIASED: ClassVar[bool] = False  # the initial statistics have no weight in the moving averages

    running_mean: Any  # Tensor, or None without track_running_stats
    running_var: Any
    num_batches_tracked: Any
    drop: nn.Module
    act: nn.Module
    _source_class: type[_BatchNorm] | None = None
    _source_momentum: Any = ...
    _added: frozenset[str] = frozenset()  # attributes and buffers that batch norm does not have
    _activated: bool = False  # `drop` and `act` follow, as in timm's BatchNormAct2d
    _rank: int | None = None  # number of dimensions of the input, if the layer did not replace another

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: Any = ...,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        **options: Any,
    ) -> None:
        default = 0.1 if self.MOMENTUM is ... else self.MOMENTUM
        momentum = default if momentum is ... else momentum
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if not bias:
            self.register_parameter("bias", None)
        self._set_up(momentum, options)

    @classmethod
    def replacing(cls, layer: _BatchNorm, /, momentum: Any = ..., **options: Any) -> nn.Module:
        """The replacement of a batch norm, with its parameters, statistics, mode and hooks."""
        if isinstance(layer, RunningNorm):
            layer = restored(layer)
        new = takes_over(layer, cls)
        new._source_class, new._source_momentum = type(layer), layer.momentum
        new._activated = has_activation(layer)
        default = layer.momentum if cls.MOMENTUM is ... else cls.MOMENTUM
        new._set_up(default if momentum is ... else momentum, options)
        if new._drop_nonfinite():
            warn_of_dropped(type(layer).__name__)
        return new

    def _set_up(self, momentum: Any, options: dict[str, Any]) -> None:
        """Install the norm and remember the names of what it adds."""
        if momentum is not None and not (is_number(momentum) and 0 <= momentum <= 1):
            raise OptionError(
                f"{type(self).__name__}: momentum must be a number from 0 to 1, the weight of the new batch, or None "
                f"for an average over all batches; got {momentum!r}"
            )
        if self.DEBIASED and momentum == 0:
            raise OptionError(
                f"{type(self).__name__}: momentum, the weight of the new batch, must be positive, or None; got 0"
            )
        self.momentum = momentum
        before = self._names()
        self._install(**check_options(type(self).__name__, self.OPTIONS, options))
        self._added = frozenset(self._names() - before)

    def _names(self) -> set[str]:
        return {name for registry in _registries(self) for name in registry}

    def _install(self, **options: Any) -> None:
        """Set the options on an initialized batch norm. Subclasses check them and add their buffers."""
        for name, value in options.items():
            setattr(self, name, value)

    def _remember(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> None:
        """Register the buffer `name` of zeros, or None if the layer has no running statistics."""
        if self.running_mean is None:
            self.register_buffer(name, None)
            return
        dtype = dtype or statistics_dtype(self.running_mean.dtype)
        self.register_buffer(name, torch.zeros(shape, device=self.running_mean.device, dtype=dtype))

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy):
            return as_leaf(self, input)
        output = self._forward(input)
        return self.act(self.drop(output)) if self._activated else output

    def _forward(self, input: Tensor) -> Tensor:
        self._check(input)
        plain = not (self.training and self.track_running_stats) or self.running_mean is None
        if plain or count_per_channel(input) == 0:
            return self._plain_forward(input)
        compiling = torch.compiler.is_compiling()
        replaying = not compiling and inside_backward()
        remembered = self.READS_STATISTICS and not compiling
        state = self._kept_readings.recall(self._batch(input)) if replaying and remembered else None
        if state is None:
            state = self._read()
        output, batch = self._normalize(input, state)
        if not replaying:
            if remembered:
                self._kept_readings.keep(batch, state)
            if self.recording:
                with torch.no_grad():
                    self._record(batch, state)
        return output

    def _plain_forward(self, x: Tensor) -> Tensor:
        """Torch's batch norm: on the running statistics in eval mode, on the batch if there are none."""
        use_batch = self.training or self.running_mean is None
        mean, var = (None, None) if use_batch else (self.running_mean, self.running_var)
        return F.batch_norm(x, mean, var, self.weight, self.bias, use_batch, 0.0, self.eps)

    def _read(self) -> Moments:
        """A copy of the running statistics and of the number of batches, for this forward."""
        return Moments(snapshot(self.running_mean), snapshot(self.running_var), snapshot(self.num_batches_tracked))

    _batch = staticmethod(constant_moments)  # by which a recomputed forward is recognized

    def _normalize(self, x: Tensor, state: Moments) -> tuple[Tensor, Moments]:
        """The output, and the batch's own moments (biased variance; constants)."""
        raise NotImplementedError

    def _record(self, batch: Moments, state: Moments) -> None:
        """Torch's update in place: a moving average with the unbiased variance. Skips a batch that is not finite."""
        self._write(batch.mean, unbiased(batch))

    def _write(self, mean: Tensor, var: Tensor, share: Tensor | float | None = None) -> None:
        """Move the running statistics towards these values."""
        share = self._share(self.num_batches_tracked) if share is None else share
        self._store(blend(self.running_mean, mean, share), blend(self.running_var, var, share))

    def _share(self, batches: Any) -> Tensor | float:
        """The weight of the next batch in the running statistics of `batches` batches."""
        if self.momentum is not None and not self.DEBIASED:
            return float(self.momentum)
        count = read(self._as_float(batches)) + 1
        return 1 / count if self.momentum is None else self.momentum / (1 - (1 - self.momentum) ** count)

    def _as_float(self, batches: Any) -> Tensor:
        return batches.to(statistics_dtype(self.running_mean.dtype))

    def _store(self, mean: Tensor, var: Tensor, batches: int = 1) -> None:
        """Set the running statistics and count `batches`, unless they are not finite."""
        finite = store_finite((self.running_mean, self.running_var), (mean, var))
        self.num_batches_tracked.add_(finite * batches)

    def reset_running_stats(self) -> None:
        super().reset_running_stats()
        for name in self.MEMORY:
            if self._buffers.get(name) is not None:
                self.get_buffer(name).zero_()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Map every tensor through `fn`, but keep the memory in float32 or wider."""
        before = {name: self._buffers.get(name) for name in self.MEMORY}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers.get(name)
            if old is not None and new is not None and new.is_floating_point():
                wide = statistics_dtype(new.dtype)
                self._buffers[name] = new if new.dtype == wide else old.to(device=new.device, dtype=wide)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if prefix + "running_mean" in state_dict and not any(prefix + name in state_dict for name in self.MEMORY):
            self._complete_plain_state(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self._drop_nonfinite():
            warn_of_dropped(prefix.rstrip(".") or type(self).__name__)

    def _complete_plain_state(self, state_dict: Any, prefix: str) -> None:
        """Add the entries that a checkpoint of plain batch norm does not have."""
        for name in self.MEMORY:
            if self._buffers.get(name) is not None:
                state_dict[prefix + name] = torch.zeros_like(self.get_buffer(name))

    def _drop_nonfinite(self) -> bool:
        """Reset the statistics if some are not finite: nothing could be recorded any more."""
        buffers: Any = self._buffers
        floating = [one for one in buffers.values() if is_real(one) and one.is_floating_point()]
        if all(bool(one.isfinite().all()) for one in floating):
            return False
        # Not in place: they may belong to a checkpoint or to the replaced layer.
        buffers.update({name: one if one is None else one.clone() for name, one in buffers.items()})
        self.reset_running_stats()
        return True

    @property
    def _kept_readings(self) -> Readings:
        if "_readings" not in self.__dict__:
            self._readings = Readings()
        return self._readings

    @property
    def plain_class(self) -> type[_BatchNorm]:
        """The class of the replaced layer; if there was none, the class for the input of this one."""
        by_rank = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 5: nn.BatchNorm3d}
        return self._source_class or by_rank.get(self._rank or 0, nn.BatchNorm2d)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise InputError(
                f"{type(self).__name__}: expected at least 2-D input (N, C, …), got shape {tuple(input.shape)}"
            )
        if self._source_class is None and self._rank != input.dim():
            self._rank = input.dim()

    def _check(self, x: Tensor) -> None:
        self._check_input_dim(x)
        name = type(self).__name__
        if not torch.jit.is_tracing() and x.shape[1] != self.num_features:
            raise InputError(
                f"{name}: the layer has {self.num_features} channels, the input has shape {tuple(x.shape)}"
            )
        if not x.is_floating_point():
            raise DTypeError(f"{name}: expected floating-point input, got {x.dtype}")
        count = count_per_channel(x)
        if self.training:
            check_eps(name, self.eps)
            cpu.require_memory(x, self.weight, self.bias, *self._buffers.values())
        if self.training and 0 < count < self.MIN_VALUES:
            raise InputError(
                f"{name}: Expected more than 1 value per channel when training, got input size {tuple(x.shape)}: one "
                "value has no variance. Use a larger batch, or a norm that trains on one value (mbn, group, layer)."
            )

    @property
    def evaluates_as_batchnorm(self) -> bool:
        """True if the layer is torch's batch norm in eval mode, so that `to_batchnorm` can replace it."""
        return True

    def running_from(self, moments: Moments) -> Moments:
        """The running statistics for a population of these moments."""
        return moments

    def training_moments(self, batch: Moments) -> Moments | None:
        """Mean and variance that a training forward would use for a batch with these moments; None if they depend on
        more than the moments, or if training does not normalize by two numbers per channel.
        """
        return None

    def note(self) -> str:
        """The note about the layer in `memnorm.summary`."""
        if self.running_mean is None:
            return "batch statistics only: track_running_stats=False"
        if self.running_mean.is_meta:
            return "on meta"
        count = int(self.num_batches_tracked)
        recorded = f"{count} {'batch' if count == 1 else 'batches'} recorded"
        own = "".join(f", {name} {getattr(self, name)}" for name in self.OPTIONS)
        return f"{recorded}, momentum {self.momentum}{own}{'' if self.recording else ', recording off'}"

    def extra_repr(self) -> str:
        own = "".join(f", {name}={getattr(self, name)}" for name in self.OPTIONS)
        return f"{super().extra_repr()}{own}"


def as_leaf(layer: nn.Module, input: Any) -> Any:
    """Add the call of `layer` as a single node to the graph that torch.fx is tracing."""
    return input.tracer.create_proxy("call_module", input.tracer.path_of_module(layer), (input,), {})


def blend(old: Tensor, new: Tensor, share: Tensor | float) -> Tensor:
    """old + share·(new − old), in the statistics' dtype."""
    dtype = statistics_dtype(old.dtype)
    weight = share.to(dtype) if isinstance(share, Tensor) else share
    return torch.lerp(old.to(dtype), new.to(dtype), weight)


def store_finite(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> Any:
    """Write the values in place if all are finite in the dtypes of the buffers, which may be narrower. Return True if
    they are.
    """
    narrow = [value.to(buffer.dtype) for buffer, value in zip(buffers, values, strict=True)]
    zeros = [value.mul(0).sum() for value in narrow if value.is_floating_point()]  # NaN if a value is not finite
    finite = read(sum(zeros[1:], zeros[0]) == 0)
    for buffer, value in zip(buffers, narrow, strict=True):
        buffer.copy_(choose(finite, value, buffer))
    return finite


def read(scalar: Tensor) -> Any:
    """The number in a scalar on the CPU, where reading it does not wait. Elsewhere, and in graphs, the scalar."""
    return scalar.item() if scalar.is_cpu and type(scalar) is Tensor and cpu.unobserved() else scalar


def choose(condition: Any, yes: Tensor, no: Tensor) -> Tensor:
    """`torch.where`, without an operation if the condition was read."""
    return torch.where(condition, yes, no) if isinstance(condition, Tensor) else (yes if condition else no)


def restored(layer: RunningNorm) -> _BatchNorm:
    """The batch norm that computes the same as `layer` in eval mode, with its parameters and statistics."""
    new = takes_over(layer, layer.plain_class)
    own = {"_source_class", "_source_momentum", "_added", "_activated", "_rank", *layer._transient, *layer._added}
    for name in own:
        for registry in _registries(new):
            registry.pop(name, None)
        new._non_persistent_buffers_set.discard(name)
    if layer._source_momentum is not ...:
        new.momentum = layer._source_momentum
    return new


def _registries(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """The dictionaries of a module's attributes, parameters, buffers and submodules."""
    return module.__dict__, module._parameters, module._buffers, module._modules


def require_recording(layer: RunningNorm) -> None:
    """Refuse to compile a norm that records in backward with recording off, as in Double-Forward: the compiled backward
    would never record.
    """
    if torch.compiler.is_compiling() and torch.is_grad_enabled() and not layer.recording:
        raise MemnormError(
            f"{type(layer).__name__} records in backward, which a graph compiled with recording off never does: "
            "compile without fullgraph, and it runs uncompiled, or train without Double-Forward"
        )


def count_up(counter: Tensor, valid: Any, limit: int) -> None:
    """Add 1 to the counter in place if `valid`, until it reaches `limit`."""
    counter.add_(valid).clamp_(max=limit)


def check_whole(name: str, value: Any, least: int) -> int:
    if not is_whole(value) or value < least:
        raise OptionError(f"{name} must be a whole number, at least {least}; got {value!r}")
    return int(value)


def check_total_steps(norm: str, total_steps: Any) -> None:
    if total_steps is not None and (not is_whole(total_steps) or total_steps < 1):
        raise OptionError(
            f"{norm}: total_steps must be the number of steps of the training, or None; got {total_steps!r}"
        )


def unbiased(batch: Moments) -> Tensor:
    """The variance with Bessel's factor n/(n − 1), n = N·H·W… values per channel."""
    return batch.var * (batch.weight / max(batch.weight - 1, 1))


def check_options(name: str, known: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The known options with the given values. An unknown option is an error."""
    unknown = given.keys() - known.keys()
    if unknown:
        has = f"its options are {', '.join(known)}" if known else "it has no options"
        raise OptionError(f"{name}: unknown option {', '.join(sorted(unknown))}; {has}")
    return {**known, **given}


def takes_over(layer: nn.Module, cls: type) -> Any:
    """An instance of `cls` with the contents of `layer`. The hook dictionaries are shared, so that existing handles
    still work.
    """
    new: Any = object.__new__(cls)
    new.__dict__.update(layer.__dict__)
    for registry in ("_parameters", "_buffers", "_modules"):
        new.__dict__[registry] = dict(layer.__dict__[registry])
    new.__dict__["_non_persistent_buffers_set"] = set(layer._non_persistent_buffers_set)
    return new


def has_activation(layer: nn.Module) -> bool:
    """Return True for a norm followed by `drop` and `act` as in timm. The class name is checked, because other classes
    may use these attributes differently.
    """
    known = ("BatchNormAct2d", "SyncBatchNormAct", "MemorizedBatchNormAct2d", "TwoWayBatchNormAct2d")
    parts = (getattr(layer, name, None) for name in ("drop", "act"))
    return type(layer).__name__ in known and all(isinstance(part, nn.Module) for part in parts)


def with_affine(layer: _BatchNorm, new: nn.Module) -> nn.Module:
    """`new`, a norm without batch statistics, in place of `layer`, with its weight and bias."""
    replacement = in_place_of(layer, new)
    for name in new._parameters.keys() & {"weight", "bias"}:
        new._parameters[name] = layer._parameters[name]
    return replacement


def in_place_of(layer: _BatchNorm, new: nn.Module) -> nn.Module:
    """`new` with the device, dtype and mode of `layer`, followed by `drop` and `act` if `layer` has them as in timm."""
    reference = layer.weight if layer.weight is not None else layer.running_mean
    if reference is not None:
        new.to(device=reference.device, dtype=reference.dtype)
    new.train(layer.training)
    if not has_activation(layer):
        return new
    for name in ("drop", "act"):
        new._modules.pop(name, None)
    parts: Any = (new, layer.drop, layer.act)
    return nn.Sequential(*parts)
