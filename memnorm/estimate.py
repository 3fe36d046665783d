"""Population statistics of a trained model, with plain or memorized batch norm: compute them (`recalibrate`), or
replace them by those of another domain (`adapt`).

The moments of every batch that reaches a layer are merged by count in float64, including the squared shift between the
means. The result does not depend on how the inputs of a layer are split into batches.
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

from memnorm.errors import InputError, NothingToRecord, OptionError, check_callable, check_module, is_whole, warn
from memnorm.functional import Moments, constant_moments, merge
from memnorm.layers import MemorizedBatchNorm, Recording
from memnorm.norms.base import RunningNorm
from memnorm.replay import buffers_restored, recorded_by, recorders

Forward = Callable[[nn.Module, Any], Any]
Layers = dict[str, Any]  # batch norms by name
CONSTANT = 1e-6  # standard deviations: a smaller change is rounding


@dataclass(frozen=True)
class Recalibration:
    """The result of `recalibrate`."""

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

        memnorm.recalibrate(model, loader)

    `passes=1`: one pass with the norms in training mode and everything else, such as dropout, in eval mode. The
    statistics are exact for the inputs of each layer, but the inputs of deeper layers are normalized by single batches,
    so the result still depends on the batch size. Norms that read their statistics or their memory in training
    normalize by the batch alone here, because the old statistics belong to inputs that will not occur again. (A memory
    is still read for batches of one value per channel, which have no variance.)

    `passes="exact"`: passes in eval mode until nothing changes. At least one more layer is final after each pass, so
    there are at most as many passes as layers, plus one that changes nothing. The statistics are those of the network
    at inference, and do not depend on how the data is split. `batches` must yield the same data in every pass: a list,
    or a DataLoader without random augmentation. If they differ, small changes grow from layer to layer and nothing
    settles; then one pass is made instead, with a warning.

    The memory is emptied and the new statistics replace it. Other training state is kept, including the number of
    batches that a schedule ("brn", "momentum_bn") counts. Frozen layers (in eval mode in a model in training mode) are
    unchanged. If an error occurs, the model is restored.

    Args:
        batches: inputs of the model. The first element of a tuple or list is passed, a mapping as keyword arguments.
        forward: calls the model on a batch, if that is not enough.
        max_passes: stop after this many passes, with a warning.
    """
    if not isinstance(passes, (int, str)) or passes not in (1, "exact"):
        raise OptionError(f'recalibrate: passes must be 1 or "exact"; got {passes!r}')
    check_batches(batches, "recalibrate")
    check_callable(call := call_model if forward is None else forward, "recalibrate", "forward")
    if passes == "exact" and iter(batches) is batches:
        raise OptionError(
            'recalibrate: passes="exact" needs the batches several times, and an iterator yields them only once; '
            "pass a list"
        )
    if max_passes is not None and (not is_whole(max_passes) or max_passes < 1):
        raise OptionError(f"recalibrate: max_passes must be positive; got {max_passes!r}")
    layers = tracking_layers(model, "recalibrate")
    with _restored_on_error(layers.values()), torch.no_grad():
        if passes == 1:
            return _one_pass(model, layers, batches, call, training=True)[0]
        return _until_constant(model, layers, batches, call, max_passes)


def _until_constant(
    model: nn.Module, layers: Layers, batches: Iterable[Any], call: Forward, max_passes: int | None
) -> Recalibration:
    limit, before = max_passes or len(layers) + 1, Statistics(layers.values())
    result, _, repeated = _one_pass(model, layers, batches, call, training=False)
    if repeated and max_passes is None:
        limit = max(100, limit)  # a layer that gets its own output converges only in the limit
    while result.largest_change > CONSTANT and result.passes < limit:
        following, least_change, _ = _one_pass(model, layers, batches, call, training=False)
        result = replace(following, passes=result.passes + 1)
        if least_change > 10 * CONSTANT and not repeated:  # the first layer's inputs depend on no statistics
            warn(
                "recalibrate: the batches differ from pass to pass, so there is no exact result; one pass was made "
                "instead. Turn off random augmentation, and shuffling with drop_last, or pass a list of batches."
            )
            before.restore()
            return _one_pass(model, layers, batches, call, training=True)[0]
    if result.largest_change > CONSTANT:
        warn(
            f"recalibrate: statistics still changed by {result.largest_change:.2g} standard deviations in pass "
            f"{limit}. Pass a larger max_passes, or none."
        )
    return result


def _one_pass(
    model: nn.Module, layers: Layers, batches: Iterable[Any], call: Forward, *, training: bool
) -> tuple[Recalibration, float, bool]:
    """Write the statistics of one pass. Also return the smallest change of a layer, and True if a layer was called more
    than once per batch.
    """
    seen = population(model, layers, batches, call, training=training)
    changes = [_change(layers[name], moments) for name, moments in seen.moments.items()]
    for name, moments in seen.moments.items():
        _write(layers[name], moments, seen.batches)
    unreached = tuple(name for name in layers if name not in seen.moments)
    result = Recalibration(len(seen.moments), seen.batches, 1, max(changes), unreached)
    return result, min(changes), seen.calls > seen.batches


class Population(NamedTuple):
    """Moments of the inputs of each layer, the number of batches, and the largest number of calls of a layer."""

    moments: dict[str, Moments]
    batches: int
    calls: int


def population(
    model: nn.Module, layers: Layers, batches: Iterable[Any], call: Forward, *, training: bool
) -> Population:
    """Run the batches with the norms in training or eval mode; the model is restored afterwards. In training mode,
    norms that would read their running statistics or their memory normalize by the current batch.
    """
    moments: dict[str, Moments] = {}
    calls, skipped = Counter[str](), Counter[str]()

    def collect(name: str, seen: Moments) -> None:
        calls[name] += 1
        if name in readers:
            readers[name](seen)
        if not (seen.mean.isfinite().all() and seen.var.isfinite().all()):
            skipped[name] += 1
        else:
            moments[name] = merge(moments[name], seen) if name in moments else seen

    count, reading = 0, _normalizing_by_batch(layers if training else {})
    with norms_in_mode(model, layers, training=training), reading as readers, observed(layers, collect):
        for batch in batches:
            call(model, batch)
            count += 1
    if moments:
        for name, times in skipped.most_common(1):
            subject = "1 batch is" if times == 1 else f"{times} batches are"
            warn(f"{subject} not finite in {repr(name) if name else 'the layer'}: skipped")
        return Population(moments, count, max(calls.values()))
    if skipped:
        raise NothingToRecord("no input of a batch norm is finite: check the data and the weights")
    problem = "no batch norm was reached" if count else "there is no batch"
    raise NothingToRecord(
        f"{problem}: pass an iterable of batches for the model (and forward=, if it is not called as model(batch))"
    )


@contextmanager
def observed(layers: Layers, collect: Callable[[str, Moments], None]) -> Iterator[None]:
    """Context manager that passes the moments of every layer input to `collect`, in float64 if the device has it."""

    def hook(name: str) -> Callable[..., None]:
        def observe(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = next(iter((*args, *kwargs.values())), None)
            if not isinstance(x, Tensor) or x.dim() < 2:
                return  # the layer raises an error
            wide = torch.float32 if x.device.type == "mps" else torch.float64
            mean, var, weight = constant_moments(x)
            collect(name, Moments(mean.to(wide), var.to(wide), weight))

        return observe

    handles = [layer.register_forward_pre_hook(hook(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _normalizing_by_batch(layers: Layers) -> Iterator[dict[str, Callable[[Moments], None]]]:
    """Context manager for layers that would read older statistics. It yields, by layer name, a function that lets the
    layer normalize by given moments instead, and restores the buffers afterwards.
    """
    running = {n: one for n, one in layers.items() if isinstance(one, RunningNorm) and one.READS_STATISTICS}
    memorized = {n: one for n, one in layers.items() if isinstance(one, MemorizedBatchNorm)}
    before = Statistics([*running.values(), *memorized.values()])
    try:
        for layer in running.values():
            layer.training = False
        yield {
            **{name: partial(_set_statistics, layer) for name, layer in running.items()},
            **{name: partial(_without_memory, layer, float(layer.strength)) for name, layer in memorized.items()},
        }
    finally:
        before.restore()


def _without_memory(layer: MemorizedBatchNorm, strength: float, seen: Moments) -> None:
    """Turn the memory off, except for a single value, which has no variance."""
    layer.strength.fill_(0.0 if seen.weight > 1 else strength)


@contextmanager
def norms_in_mode(model: nn.Module, layers: Layers, *, training: bool) -> Iterator[None]:
    """Context manager: the model in eval mode, its norms in training mode if asked. Nothing is recorded or changed."""
    modes = [(module, module.training) for module in model.modules()]
    others = [module for module in model.modules() if not isinstance(module, Recording)]
    try:
        model.eval()
        for layer in layers.values():
            layer.training = training
        with recorded_by(list(recorders(model)), []), buffers_restored(others):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def tracking_layers(model: nn.Module, caller: str) -> Layers:
    """Batch norms with running statistics, without those that the user froze."""
    check_module(model, caller)
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None and not is_lazy(layer.running_mean)
    }
    if model.training:
        layers = {name: layer for name, layer in layers.items() if layer.training}
    if not layers:
        raise NothingToRecord(f"{caller}: {type(model).__name__} has no batch norm with running statistics")
    return layers


def check_batches(batches: object, caller: str) -> None:
    if hasattr(batches, "__array__") or not isinstance(batches, Iterable):  # a tensor, or an array of numpy
        raise OptionError(
            f"{caller}: expected an iterable of batches, got {type(batches).__name__}: put a single batch in a list"
        )


def call_model(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, (tuple, list, Mapping)) and not batch:
        raise InputError(
            f"the batch {batch!r} has no input: a batch is the input, a tuple or list that starts with it, or a "
            "mapping of keyword arguments; pass forward= for anything else"
        )
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, (tuple, list)) else batch)


def _change(layer: Any, new: Moments) -> float:
    """The largest change of the running statistics: of the mean in standard deviations, of the variance relatively."""
    new = for_layer(layer, new)
    mean, var = new.mean.to(layer.running_mean.dtype), new.var.to(layer.running_var.dtype)
    scale = new.var + layer.eps
    shift = (layer.running_mean - mean).abs() / scale.sqrt()
    growth = (layer.running_var - var).abs() / scale
    return float(torch.maximum(shift, growth).max())


def for_layer(layer: Any, moments: Moments) -> Moments:
    """The running statistics for these moments. Not every norm keeps mean and variance."""
    return layer.running_from(moments) if isinstance(layer, RunningNorm) else moments


def _write(layer: Any, moments: Moments, batches: int) -> None:
    if isinstance(layer, MemorizedBatchNorm):
        layer.reset_memory()
    _set_statistics(layer, moments)
    if not (isinstance(layer, RunningNorm) and layer.COUNTS_STEPS):
        layer.num_batches_tracked.fill_(batches)


def _set_statistics(layer: Any, moments: Moments) -> None:
    """Make these the running statistics."""
    moments = for_layer(layer, moments)
    layer.running_mean.copy_(moments.mean)
    layer.running_var.copy_(moments.var)


@contextmanager
def _restored_on_error(layers: Iterable[_BatchNorm]) -> Iterator[None]:
    snapshot = Statistics(layers)
    try:
        yield
    except BaseException:
        snapshot.restore()
        raise


class Statistics:
    """A copy of the buffers of some layers, which `restore` writes back."""

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


class Adaptation:
    """The handle of `adapt`. `revert()`, or the end of a `with` statement, restores the statistics and the memory."""

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
    """Give every batch norm the statistics of a target domain (AdaBN), reversibly. It needs no labels and no gradients.
    For the arguments, see `recalibrate`.

    with memnorm.adapt(model, target_batches):
        predictions = model(target)
    """
    statistics = Statistics(tracking_layers(model, "adapt").values())
    return Adaptation(statistics, recalibrate(model, target_batches, passes=passes, forward=forward))


def rms(values: Iterable[Tensor]) -> float:
    squares = torch.cat([value.double().square().flatten() for value in values])
    return float(squares.mean().sqrt()) if squares.numel() else 0.0
