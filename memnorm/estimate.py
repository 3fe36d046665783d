"""Population statistics for a trained model, of plain batch norm as well as memorized: compute them, move them to
another domain, judge them.

All rest on the same exact accumulation: the moments of every batch that reaches a layer, merged by count in float64,
the squared shift between the means included. The result does not depend on how the same layer inputs are split into
batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from memnorm.errors import NothingToRecord, OptionError, check_module, is_whole, warn
from memnorm.functional import Moments, constant_moments, merge
from memnorm.layers import MemorizedBatchNorm, Recording
from memnorm.norms.base import RunningNorm
from memnorm.replay import buffers_restored

Forward = Callable[[nn.Module, Any], Any]
Layers = dict[str, Any]  # batch norms by name


@dataclass(frozen=True)
class Recalibration:
    """What `recalibrate` did."""

    layers: int
    batches: int
    passes: int
    largest_change: float
    unreached: tuple[str, ...]

    def __str__(self) -> str:
        text = f"{self.layers} layers recalibrated on {self.batches} batches in {self.passes} passes; "
        text += f"largest change in the last pass {self.largest_change:.3g}"
        return text + (f"; not reached: {', '.join(self.unreached)}" if self.unreached else "")


def recalibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    passes: Literal[1, "exact"] = 1,
    forward: Forward | None = None,
    max_passes: int | None = None,
) -> Recalibration:
    """Replace the running statistics of every batch norm, plain or memorized, by those of `batches`.

    `passes=1`: one pass with the norms in training mode (and nothing else: dropout stays off). Exact for the inputs
    each layer gets, but the inputs of deeper layers are normalised by single batches, so the result still depends on
    the batch size. Norms that read their statistics or their memory in training normalise by the batch alone here: by
    the old ones, each layer would get those of inputs that it will never see again. (A memory is read for batches of
    one value per channel, which have no variance of their own.)

    `passes="exact"`: passes in eval mode until nothing changes. Each pass settles at least one more layer, so there are
    at most as many as layers, plus one to see it. The result is what the network computes at inference, and does not
    depend on how the data is split. `batches` is gone through repeatedly: a list or a DataLoader that yields the same
    data each time.

    A memory is emptied, and the new statistics stand in for it. What other norms keep for training is left alone, with
    the number of batches from which a schedule ("brn", "momentum_bn") knows how far it is. Layers frozen by the user
    (in eval mode while the model is in training mode) are left alone. If anything raises, the model is as before.

    Args:
        batches: what the model takes; of a tuple or list the first element, a mapping as keyword arguments.
        forward: how to call the model on a batch, if otherwise.
        max_passes: give up earlier, with a warning.
    """
    if passes not in (1, "exact"):
        raise OptionError(f'recalibrate: passes must be 1 or "exact"; got {passes!r}')
    if passes == "exact" and iter(batches) is batches:
        raise OptionError(
            'recalibrate: passes="exact" goes through the batches repeatedly, and an iterator is used up at once; '
            "pass a list"
        )
    if max_passes is not None and (not is_whole(max_passes) or max_passes < 1):
        raise OptionError(f"recalibrate: max_passes must be positive; got {max_passes!r}")
    layers = _tracking_layers(model, "recalibrate")
    call = forward or _call
    with _undone_on_error(layers.values()), torch.no_grad():
        if passes == 1:
            return _one_pass(model, layers, batches, call, training=True)[0]
        return _until_settled(model, layers, batches, call, max_passes)


def _until_settled(
    model: nn.Module, layers: Layers, batches: Iterable[Any], call: Forward, max_passes: int | None
) -> Recalibration:
    limit = max_passes or len(layers) + 1
    result, repeated = _one_pass(model, layers, batches, call, training=False)
    if repeated and max_passes is None:
        limit = max(100, limit)  # a layer that sees its own output settles in the limit only
    while result.largest_change > 1e-6 and result.passes < limit:
        following, _ = _one_pass(model, layers, batches, call, training=False)
        result = replace(following, passes=result.passes + 1)
    if result.largest_change <= 1e-6:
        return result
    warn(
        f"recalibrate: statistics still changed by {result.largest_change:.2g} standard deviations in pass {limit}. "
        "Random augmentation, or shuffling that drops other images each time, makes passes differ: turn it off for an "
        "exact result."
    )
    return result


def _one_pass(
    model: nn.Module, layers: Layers, batches: Iterable[Any], call: Forward, *, training: bool
) -> tuple[Recalibration, bool]:
    """Write the statistics of one pass; and tell whether a layer was called more than once per batch."""
    seen = population(model, layers, batches, call, training=training)
    change = max(_change(layers[name], moments) for name, moments in seen.moments.items())
    for name, moments in seen.moments.items():
        _write(layers[name], moments, seen.batches)
    unreached = tuple(name for name in layers if name not in seen.moments)
    return Recalibration(len(seen.moments), seen.batches, 1, change, unreached), seen.calls > seen.batches


class Population(NamedTuple):
    """Moments of the inputs of each layer over some batches, and the calls of the layer that was called most."""

    moments: dict[str, Moments]
    batches: int
    calls: int


def population(
    model: nn.Module, layers: Layers, batches: Iterable[Any], call: Forward, *, training: bool
) -> Population:
    """Run the batches with the norms in training or eval mode, and leave the model as it was. In training mode, norms
    that would read their running statistics or their memory normalise by the batch at hand.
    """
    moments: dict[str, Moments] = {}
    calls, left_out = Counter[str](), Counter[str]()

    def collect(name: str, seen: Moments) -> None:
        calls[name] += 1
        if name in readers:
            readers[name](seen)
        if not (seen.mean.isfinite().all() and seen.var.isfinite().all()):
            left_out[name] += 1
        else:
            moments[name] = merge(moments[name], seen) if name in moments else seen

    if isinstance(batches, Tensor) or not isinstance(batches, Iterable):
        raise OptionError(
            f"expected an iterable of batches, got {type(batches).__name__}: put a single batch in a list"
        )
    count, reading = 0, _by_the_batch(layers if training else {})
    with _norms_in(model, layers, training=training), reading as readers, _watched(layers, collect):
        for batch in batches:
            call(model, batch)
            count += 1
    if moments:
        for name, times in left_out.most_common(1):
            subject = "1 batch is" if times == 1 else f"{times} batches are"
            warn(f"{subject} not finite in {repr(name) if name else 'the layer'}: left out")
        return Population(moments, count, max(calls.values()))
    if left_out:
        raise NothingToRecord("no batch is finite where it reaches a batch norm: look at the data, and at the weights")
    problem = "no batch norm was reached" if count else "there is no batch"
    raise NothingToRecord(
        f"{problem}: pass an iterable of batches for the model (and forward=, if it is not called as model(batch))"
    )


@contextmanager
def _watched(layers: Layers, collect: Callable[[str, Moments], None]) -> Iterator[None]:
    """Hand the moments of every input of every layer to `collect`, in float64 where the device has it."""

    def hook(name: str) -> Callable[..., None]:
        def watch(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            wide = torch.float32 if x.device.type == "mps" else torch.float64
            mean, var, weight = constant_moments(x)
            collect(name, Moments(mean.to(wide), var.to(wide), weight))

        return watch

    handles = [layer.register_forward_pre_hook(hook(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _by_the_batch(layers: Layers) -> Iterator[dict[str, Callable[[Moments], None]]]:
    """Those that would read older statistics, by name, each with what has it normalise by the moments at hand instead;
    then their buffers as before.
    """
    running = {n: one for n, one in layers.items() if isinstance(one, RunningNorm) and one.READS_STATISTICS}
    memorized = {n: one for n, one in layers.items() if isinstance(one, MemorizedBatchNorm)}
    before = Statistics([*running.values(), *memorized.values()])
    try:
        for layer in running.values():
            layer.training = False
        yield {
            **{name: partial(_put, layer) for name, layer in running.items()},
            **{name: partial(_without_memory, layer, float(layer.strength)) for name, layer in memorized.items()},
        }
    finally:
        before.restore()


def _without_memory(layer: MemorizedBatchNorm, strength: float, seen: Moments) -> None:
    """One value has no variance: it needs the memory."""
    layer.strength.fill_(0.0 if seen.weight > 1 else strength)


@contextmanager
def _norms_in(model: nn.Module, layers: Layers, *, training: bool) -> Iterator[None]:
    """The model in eval mode, its norms in training mode if asked, recording nothing; then everything as before."""
    modes = [(module, module.training) for module in model.modules()]
    muted = [module for module in model.modules() if isinstance(module, Recording) and module.recording]
    try:
        model.eval()
        for layer in layers.values():
            layer.training = training
        for recorder in muted:
            recorder.recording = False
        with buffers_restored(module for module in model.modules() if not isinstance(module, Recording)):
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for recorder in muted:
            recorder.recording = True


def _tracking_layers(model: nn.Module, caller: str) -> Layers:
    """Batch norms with running statistics, except those the user froze."""
    check_module(model, caller)
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None and not is_lazy(layer.running_mean)
    }
    if model.training:
        layers = {name: layer for name, layer in layers.items() if layer.training}
    if not layers:
        raise NothingToRecord(
            f"{caller}: {type(model).__name__} has no batch norm whose running statistics could be used"
        )
    return layers


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, (tuple, list)) else batch)


def _change(layer: Any, new: Moments) -> float:
    """How far writing `new` moves the running statistics: the mean in standard deviations, the variance relatively."""
    new = for_layer(layer, new)
    mean, var = new.mean.to(layer.running_mean.dtype), new.var.to(layer.running_var.dtype)
    scale = new.var + layer.eps
    shift = (layer.running_mean - mean).abs() / scale.sqrt()
    growth = (layer.running_var - var).abs() / scale
    return float(torch.maximum(shift, growth).max())


def for_layer(layer: Any, moments: Moments) -> Moments:
    """What the layer keeps of a population; not every norm keeps mean and variance."""
    return layer.running_from(moments) if isinstance(layer, RunningNorm) else moments


def _write(layer: Any, moments: Moments, batches: int) -> None:
    if isinstance(layer, MemorizedBatchNorm):
        layer.reset_memory()
    _put(layer, moments)
    if not (isinstance(layer, RunningNorm) and layer.COUNTS_STEPS):
        layer.num_batches_tracked.fill_(batches)


def _put(layer: Any, moments: Moments) -> None:
    """Make these the running statistics."""
    moments = for_layer(layer, moments)
    layer.running_mean.copy_(moments.mean)
    layer.running_var.copy_(moments.var)


@contextmanager
def _undone_on_error(layers: Iterable[_BatchNorm]) -> Iterator[None]:
    snapshot = Statistics(layers)
    try:
        yield
    except BaseException:
        snapshot.restore()
        raise


class Statistics:
    """A copy of the buffers of some layers, and the way back to it."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._kept = [
            (layer, name, buffer.clone())
            for layer in layers
            for name, buffer in layer._buffers.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        for layer, name, value in self._kept:
            layer.get_buffer(name).copy_(value)
            if isinstance(layer, MemorizedBatchNorm):
                layer._seasoned = None


class Adaptation:
    """The handle of `adapt`: `revert()` brings the statistics of before back, memory included. In a `with` statement,
    so does leaving it.
    """

    def __init__(self, statistics: Statistics, result: Recalibration) -> None:
        self._statistics: Statistics | None = statistics
        self.result = result

    def revert(self) -> None:
        if self._statistics is not None:
            self._statistics.restore()
            self._statistics = None

    def __enter__(self) -> Adaptation:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.revert()


def adapt(
    model: nn.Module, target_batches: Iterable[Any], *, passes: Literal[1, "exact"] = 1, forward: Forward | None = None
) -> Adaptation:
    """Give every batch norm the statistics of a target domain (AdaBN), reversibly. No labels, no gradient; arguments as
    in `recalibrate`.

    with memnorm.adapt(model, target_batches):
        predictions = model(target)
    """
    statistics = Statistics(_tracking_layers(model, "adapt").values())
    return Adaptation(statistics, recalibrate(model, target_batches, passes=passes, forward=forward))


def rms(values: Iterable[Tensor]) -> float:
    squares = torch.cat([value.double().square().flatten() for value in values])
    return float(squares.mean().sqrt()) if squares.numel() else 0.0
