"""Measure per layer whether batch normalization is a problem, and summarize it.

Three separate problems are measured: the statistics of a batch differ from those of the population (noise), the running
statistics describe outdated weights (staleness), and the outputs in training and eval mode differ (disagreement).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from memnorm._torch import tree_leaves
from memnorm.errors import NothingToRecord, OptionError, check_callable, is_whole
from memnorm.estimate import (
    Forward,
    Layers,
    call_model,
    check_batches,
    for_layer,
    norms_in_mode,
    observed,
    rms,
    tracking_layers,
)
from memnorm.functional import Moments, merge
from memnorm.layers import MemorizedBatchNorm
from memnorm.norms.base import RunningNorm
from memnorm.text import table

NOTICEABLE = 0.1  # in standard deviations, or relative to the output; the verdict mentions larger differences
REMEMBERS = "This layer reads older batches as well, which average the noise; larger batches reduce it further."
FORGETS = (
    "Use larger batches. Where these do not fit, two-way memory with centred weights or gradients had less error than "
    'batch norm in our first runs: memnorm.convert(model, "two_way").'
)


@dataclass(frozen=True)
class LayerDiagnosis:
    """The numbers of one layer in standard deviations of its inputs (root mean square over channels and batches).
    `disagreement` is nan if the output in training is not a function of the moments of the batch.
    """

    name: str
    kind: str
    values_per_batch: float
    batch_noise: float
    staleness: float
    disagreement: float


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """The result of `diagnose`; its text is a table and a verdict."""

    layers: tuple[LayerDiagnosis, ...]
    batches: int
    output_disagreement: float
    changed_predictions: float | None
    verdict: str

    def __repr__(self) -> str:
        header = ("layer", "kind", "values/batch", "batch noise", "staleness", "train-eval")
        rows = [
            (
                d.name or "(the model)",
                d.kind,
                f"{d.values_per_batch:.0f}",
                f"{d.batch_noise:.3f}",
                f"{d.staleness:.3f}",
                "unknown" if math.isnan(d.disagreement) else f"{d.disagreement:.3f}",
            )
            for d in self.layers
        ]
        return f"{table([header, *rows])}\n\n{self.verdict}"


def diagnose(
    model: nn.Module, batches: Iterable[Any], *, max_batches: int = 32, forward: Forward | None = None
) -> Diagnosis:
    """Measure the effect of batch statistics in `model` on `batches`, which have the training size. The result prints
    as a table with a verdict.

        print(memnorm.diagnose(model, loader))

    Per layer: the distance between the statistics of a batch and of all batches (`batch_noise`), between the running
    statistics and those of the inputs in eval mode (`staleness`), and between the outputs in training and eval mode
    (`disagreement`). This works for all norms with running statistics; for "cbn", "ghost", "momentum_bn" and "online",
    the disagreement is measured at the output of the model only. The model is not changed, and dropout is off.

    Args:
        batches: an iterable, such as a DataLoader; one batch at a time is in memory.
        max_batches: take at most this many.
        forward: calls the model on a batch, as in `memnorm.recalibrate`.
    """
    check_batches(batches, "diagnose")
    check_callable(call := call_model if forward is None else forward, "diagnose", "forward")
    if not is_whole(max_batches) or max_batches < 1:
        raise OptionError(f"diagnose: max_batches must be a positive number of batches; got {max_batches!r}")
    layers = tracking_layers(model, "diagnose")
    in_training: dict[str, list[Moments]] = {}
    in_eval: dict[str, list[Moments]] = {}
    outputs, count = _OutputDifference(), 0
    with torch.no_grad():
        for batch in islice(batches, int(max_batches)):
            count += 1
            trained = _observed_outputs(model, layers, batch, call, in_training, training=True)
            outputs.add(trained, _observed_outputs(model, layers, batch, call, in_eval, training=False))
        reached = {name: layer for name, layer in layers.items() if name in in_training and name in in_eval}
        if not reached:
            raise NothingToRecord(
                "diagnose: no batch norm was reached: pass batches for the model (and forward=, if it is not called as "
                "model(batch))"
                if count
                else "diagnose: there is no batch; pass a few of the training size"
            )
        found = tuple(_layer_diagnosis(name, one, in_training[name], in_eval[name]) for name, one in reached.items())
    gap, changed = outputs.relative(), outputs.changed()
    remembering = {name for name, layer in reached.items() if _has_memory(layer)}
    return Diagnosis(found, count, gap, changed, _verdict(found, gap, changed, remembering))


def _observed_outputs(
    model: nn.Module, layers: Layers, batch: Any, call: Forward, seen: dict[str, list[Moments]], *, training: bool
) -> list[Tensor]:
    """The outputs for one batch; the moments of the layers' inputs are added to `seen`."""
    with (
        norms_in_mode(model, layers, training=training),
        observed(layers, lambda name, moments: seen.setdefault(name, []).append(moments)),
    ):
        return _tensors(call(model, batch))


def _layer_diagnosis(name: str, layer: Any, per_batch: list[Moments], in_eval: list[Moments]) -> LayerDiagnosis:
    kept, population = for_layer(layer, reduce(merge, per_batch)), reduce(merge, in_eval)
    noise = [distance(for_layer(layer, moments), kept, layer.eps) for moments in per_batch]
    running = Moments(layer.running_mean.to(population.mean), layer.running_var.to(population.var), 0.0)
    stale = distance(running, for_layer(layer, population), layer.eps)
    values = sum(float(moments.weight) for moments in per_batch) / len(per_batch)
    gap = _gap(layer, per_batch, running)
    return LayerDiagnosis(name, type(layer).__name__, values, rms(noise), rms([stale]), gap)


def _gap(layer: Any, per_batch: list[Moments], running: Moments) -> float:
    """The distance between the normalized values in training and eval mode; nan if it is unknown."""
    used = [(_training_moments(layer, batch), batch) for batch in per_batch]
    gaps = [_output_gap(train, running, batch, layer.eps) for train, batch in used if train is not None]
    return rms(gaps) if gaps else math.nan


def _training_moments(layer: Any, batch: Moments) -> Moments | None:
    """The moments that the layer uses in training mode to normalize `batch`."""
    if isinstance(layer, RunningNorm):
        return layer.training_moments(batch)
    if not isinstance(layer, MemorizedBatchNorm):
        return batch
    memory = layer._read(batch.weight)
    return merge(Moments(memory.mean.to(batch.mean), memory.var.to(batch.var), memory.weight), batch)


def distance(a: Moments, b: Moments, eps: float | Tensor) -> Tensor:
    """Per channel, √(shift² + ratio²), with the shift between the means in standard deviations and the logarithm of the
    ratio of the standard deviations.
    """
    deviation = (b.var + eps).sqrt()
    shift = (a.mean - b.mean) / deviation
    ratio = ((a.var + eps) / (b.var + eps)).log() / 2
    return (shift.square() + ratio.square()).sqrt()


def _output_gap(train: Moments, eval_: Moments, batch: Moments, eps: float) -> Tensor:
    """Root mean square of the difference between normalized values in training and eval mode, over a batch with the
    given moments.
    """
    a, b = torch.rsqrt(train.var + eps), torch.rsqrt(eval_.var + eps)
    slope, offset = a - b, b * eval_.mean - a * train.mean
    return (slope.square() * batch.var + (slope * batch.mean + offset).square()).sqrt()


def _tensors(output: Any) -> list[Tensor]:
    return [
        leaf.detach().clone() for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


class _OutputDifference:
    """Sums over the outputs of the model in training and eval mode, one batch at a time."""

    def __init__(self) -> None:
        self._difference = self._size = 0.0
        self._changed = self._predictions = 0

    def add(self, trained: list[Tensor], evaluated: list[Tensor]) -> None:
        if len(trained) != len(evaluated):
            return
        for a, b in zip(trained, evaluated, strict=True):
            if a.shape != b.shape:
                continue
            self._difference += float((a.double() - b.double()).square().sum())
            self._size += float(b.double().square().sum())
            if a.dim() == 2 and a.shape[1] > 1:
                self._changed += int((a.argmax(1) != b.argmax(1)).sum())
                self._predictions += a.shape[0]

    def relative(self) -> float:
        """The root mean square of the difference, relative to the outputs in eval mode."""
        return math.sqrt(self._difference) / max(math.sqrt(self._size), 1e-12)

    def changed(self) -> float | None:
        """The share of predictions that differ if outputs are scores (N, classes)."""
        return self._changed / self._predictions if self._predictions else None


def _has_memory(layer: nn.Module) -> bool:
    """Return True if the layer normalizes by more than the current batch in training."""
    return isinstance(layer, MemorizedBatchNorm) or (isinstance(layer, RunningNorm) and layer.READS_STATISTICS)


def _verdict(
    layers: tuple[LayerDiagnosis, ...], gap: float, changed: float | None, remembering: Collection[str]
) -> str:
    noisy, stale = _worst(layers, "batch_noise"), _worst(layers, "staleness")
    if not all(math.isfinite(value) for value in (gap, noisy.batch_noise, stale.staleness)):
        return "Some values are not finite: check the batches and the weights for inf and nan."
    sentences = []
    if noisy.batch_noise > NOTICEABLE:
        sentences.append(
            f"Batch statistics are noisy: in {noisy.name or 'the layer'} those of a batch "
            f"({noisy.values_per_batch:.0f} values per channel) differ from those of all batches by "
            f"{noisy.batch_noise:.2f} standard deviations. {REMEMBERS if noisy.name in remembering else FORGETS}"
        )
    if stale.staleness > NOTICEABLE:
        sentences.append(
            f"Running statistics are stale: in {stale.name or 'the layer'} they differ by {stale.staleness:.2f} "
            "standard deviations from the inputs in eval mode. memnorm.recalibrate(model, batches) updates them."
        )
    if gap > NOTICEABLE:
        share = "" if changed is None else f" and {changed:.1%} of the predictions change"
        sentences.append(f"Training and eval mode disagree: their outputs differ by {gap:.0%}{share}.")
    return " ".join(sentences) or (
        f"Nothing unusual: batch noise at most {noisy.batch_noise:.2f} and staleness at most {stale.staleness:.2f} "
        f"standard deviations; the outputs in training and eval mode differ by {gap:.0%}."
    )


def _worst(layers: tuple[LayerDiagnosis, ...], key: str) -> LayerDiagnosis:
    """The layer with the largest value; nan counts as the largest."""
    return max(layers, key=lambda layer: (math.isnan(getattr(layer, key)), getattr(layer, key)))
