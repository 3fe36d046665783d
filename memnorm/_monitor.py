"""Watch a training: how noisy the batches are, how fast the statistics drift, how old and heavy the memory is.

Age and weight are read off the buffers. The drift is the change of the remembered statistics between two readings. The
noise needs one batch, so after each reading the next training forward of each layer is observed, once; other steps cost
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memnorm._diagnose import distance
from memnorm.errors import NothingToRecord, OptionError, check_module, is_whole
from memnorm.functional import Moments, constant_moments
from memnorm.layers import MemorizedBatchNorm
from memnorm.modules import layers_of
from memnorm.norms.two_way import TwoWayBatchNorm
from memnorm.recompute import inside_backward
from memnorm.updates import decay_by_images

Layers = Mapping[str, MemorizedBatchNorm]


def monitor(model: nn.Module) -> Monitor:
    """Numbers about the memorized layers of a training, for TensorBoard, W&B or a print.

        monitor = memnorm.monitor(model)
        for step, (images, labels) in enumerate(loader, 1):
            ...
            optimizer.step()
            if step % 50 == 0:
                run.log(monitor.read(step))

    The training does not change, bit for bit. `Monitor.read` explains the numbers.
    """
    check_module(model, "monitor")
    return Monitor(model)


def check_interval(every: int) -> int:
    if not is_whole(every) or every < 1:
        raise OptionError(f"monitor: every must be a positive number of steps; got {every!r}")
    return int(every)


class Monitor:
    """The handle that `monitor` returns. `remove()`, or the end of a `with` statement, ends the observation."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._observers: dict[str, _Observer] = {}
        self._sizes: dict[str, tuple[float, int]] = {}  # values per channel and images of the last observed batch
        self._last: dict[str, tuple[Moments, float]] = {}  # statistics and number of batches at the last reading
        self._last_step = 0
        self._observe(self._layers())

    @torch.no_grad()
    def read(self, step: int) -> dict[str, float]:
        """The numbers since the last reading, after `step` updates of the weights. Call it after an update.

            {"memnorm/noise": 0.31, "memnorm/drift": 0.004, …, "memnorm/noise/layer1.0.bn1": 0.27, …}

        Per layer, and over all layers (root mean square of noise and drift, mean of age and weight):

        `noise`: distance between the statistics of a batch and those in memory, in standard deviations, as in
        `memnorm.diagnose`. The batch is the first one after the last reading.

        `drift`: how far the remembered statistics have moved per update since the last reading, in standard deviations,
        without the part that the noise explains. It is the net way, so longer intervals may show less.

        `age`: mean age of the remembered values, in updates for two-way memory and in batches otherwise. Without slots
        it is derived from the weight, as if all batches since the last reading were of one size.

        `weight`: share of the memory in the statistics of the next training forward, from 0 to 1.

        What is not known is left out, such as the drift at the first reading. Batches inside a compiled graph cannot be
        observed, so noise, drift and weight are not known there.
        """
        if not is_whole(step) or step < 0:
            raise OptionError(f"monitor: step must be the number of updates so far; got {step!r}")
        layers, updates = self._layers(), int(step) - self._last_step
        found: dict[str, dict[str, float]] = {"noise": {}, "drift": {}, "age": {}, "weight": {}}
        measured = _as_floats({name: self._measure(name, layer) for name, layer in layers.items()})
        for name, layer in layers.items():
            noise, change, count, weight, strength, *slots = measured[name]
            before = self._last[name][1] if name in self._last else math.nan
            values, images = self._sizes.get(name, (math.nan, math.nan))
            reading = _Reading(noise, change, count - before, values, images, updates, weight, strength, slots)
            for key, value in _values(layer, reading).items():
                if math.isfinite(value):
                    found[key][name or "model"] = value
            self._last[name] = _copied_statistics(layer), count
        self._last_step = int(step)
        self._observe(layers)
        return _flat(found)

    def _measure(self, name: str, layer: MemorizedBatchNorm) -> list[Tensor]:
        """The squared noise and the squared change since the last reading, nan if unknown; then number of batches, W, λ
        and the counts of the slots.
        """
        noise = change = layer.running_mean.new_full((), math.nan)
        seen = self._observers[name].batch if name in self._observers else None
        if seen is not None:
            batch, memory, images = seen
            self._sizes[name] = float(batch.weight), images
            initial = (memory.mean == 0) & (memory.var == 1)  # there is no memory to compare with
            noise = torch.where(initial, math.nan, distance(batch, memory, layer.eps).square()).mean()
        if name in self._last:
            now = Moments(layer.running_mean, layer.running_var, 0.0)
            change = distance(self._last[name][0], now, layer.eps).square().mean()
        return [noise, change, layer.num_batches_tracked, layer.running_weight, layer.strength, layer.memory_count]

    def remove(self) -> None:
        """Remove the hooks that wait for a forward."""
        for observer in self._observers.values():
            observer.remove()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    def _layers(self) -> Layers:
        memorized = layers_of(self._model, MemorizedBatchNorm)
        layers = {name: layer for name, layer in memorized.items() if layer.running_mean is not None}
        if not layers:
            raise NothingToRecord(
                f"monitor: {type(self._model).__name__} has no memorized layer. Call memnorm.convert(model) first."
            )
        return layers

    def _observe(self, layers: Layers) -> None:
        self.remove()
        self._observers = {name: _Observer(layer) for name, layer in layers.items()}


def _copied_statistics(layer: MemorizedBatchNorm) -> Moments:
    return Moments(layer.running_mean.clone(), layer.running_var.clone(), 0.0)


def _as_floats(tensors: Mapping[str, Sequence[Tensor]]) -> dict[str, list[float]]:
    """The values of all tensors by name. One transfer for all, because each one waits for the device."""
    flat = {name: torch.cat([one.reshape(-1) for one in some]) for name, some in tensors.items()}
    device = next(iter(flat.values())).device
    parts = torch.cat([one.to(device) for one in flat.values()]).cpu().split([len(one) for one in flat.values()])
    return {name: part.tolist() for name, part in zip(flat, parts, strict=True)}


class _Reading(NamedTuple):
    """The state of a layer: squared noise, squared change and recorded batches since the last reading; values per
    channel and images of a batch; updates since the last reading; W, λ and the counts of the slots.
    """

    noise: float
    change: float
    batches: float
    values: float
    images: float
    updates: int
    weight: float
    strength: float
    slots: list[float]


def _values(layer: MemorizedBatchNorm, r: _Reading) -> dict[str, float]:
    """The numbers of a layer; nan for those that are not known."""
    two_way = isinstance(layer, TwoWayBatchNorm)
    per_update = r.batches / r.updates if r.updates > 0 else math.nan
    # Entries are what `decay` counts: updates for two-way memory, batches otherwise.
    entries, of_an_entry = (r.updates, per_update) if two_way else (r.batches, 1.0)
    decay = decay_by_images(r.images * per_update) if layer.decay is None else layer.decay
    drift = math.nan
    if per_update > 0:
        explained = _noise_of_change(decay, entries) * r.noise / of_an_entry
        drift = math.nan if math.isnan(explained) else math.sqrt(max(0.0, r.change - explained)) / r.updates
    if r.slots:
        weights = [count * decay**age for age, count in enumerate(r.slots)]
        age = sum(age * weight for age, weight in enumerate(weights)) / (sum(weights) or math.nan)
    else:
        fresh = of_an_entry * r.values
        age = _age(decay, r.weight / fresh, newest=1 if two_way else 0) if fresh > 0 else math.nan
    memory = r.strength * r.weight
    return {"noise": math.sqrt(r.noise), "drift": drift, "age": age, "weight": memory / (r.values + memory)}


def _noise_of_change(decay: float, entries: float) -> float:
    """The expected squared change of an average with this decay over so many entries of noise with variance 1.

    Its variance is (1 − d)/(1 + d), and the correlation of two averages that are e entries apart is d^e.
    """
    return 2 * (1 - decay**entries) * (1 - decay) / (1 + decay)


def _age(decay: float, weight: float, newest: int) -> float:
    """The mean age of entries that fade by `decay` and are each as heavy as 1 when new, if they weigh this much now.

    They are u entries of ages a = newest, newest + 1, …:   weight = Σ d^a      age = Σ a·d^a / weight
    """
    if math.isnan(weight) or weight <= 0:
        return math.nan
    sum_of_powers = weight / decay**newest  # (1 − d^u)/(1 − d)
    if decay == 1:
        return newest + max(0.0, sum_of_powers - 1) / 2
    faded = 1 - sum_of_powers * (1 - decay)  # d^u
    oldest = faded * math.log(faded) / math.log(decay) / (1 - faded) if faded > 0 else 0.0  # u·d^u/(1 − d^u)
    return newest + max(0.0, decay / (1 - decay) - oldest)


def _flat(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    flat = {}
    for key, by_layer in found.items():
        values = by_layer.values()
        if values:
            power = 2 if key in ("noise", "drift") else 1
            flat[f"memnorm/{key}"] = (sum(value**power for value in values) / len(values)) ** (1 / power)
        flat.update({f"memnorm/{key}/{name}": value for name, value in by_layer.items()})
    return flat


class _Observer:
    """A hook that sees one training forward of a layer. Copies and pickles of it see nothing."""

    def __init__(self, layer: nn.Module | None = None) -> None:
        self.batch: tuple[Moments, Moments, int] | None = None  # the memory that it met, and its images
        self._handle = None if layer is None else layer.register_forward_pre_hook(self, with_kwargs=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Observer, ()

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self._handle is None or not layer.training or inside_backward():
            return
        if not isinstance(layer, MemorizedBatchNorm):  # `to_batchnorm` has kept the hook
            self.remove()
            return
        x = next(iter((*args, *kwargs.values())), None)
        if not isinstance(x, Tensor) or x.dim() < 2 or x.numel() == 0:
            return  # the layer raises an error, or has nothing to see
        self.remove()
        with torch.no_grad():
            self.batch = constant_moments(x), _copied_statistics(layer), x.shape[0]
