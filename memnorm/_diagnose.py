"""Measure per layer whether batch normalization is a problem, and summarize it.

Three separate problems are measured: the statistics of a batch differ from those of the population (noise), the running
statistics describe outdated weights (staleness), and the outputs in training and eval mode differ (disagreement).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from memnorm.errors import NothingToRecord, OptionError
from memnorm.estimate import (
    Forward,
    Layers,
    call_model,
    for_layer,
    norms_in_mode,
    observed,
    population,
    rms,
    tracking_layers,
)
from memnorm.functional import Moments, merge
from memnorm.layers import MemorizedBatchNorm
from memnorm.norms.base import RunningNorm
from memnorm.text import table

NOTICEABLE = 0.1  # in standard deviations, or relative to the output; the verdict mentions larger differences


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


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`; `str()` is a table and a verdict."""

    layers: tuple[LayerDiagnosis, ...]
    batches: int
    output_disagreement: float
    changed_predictions: float | None
    verdict: str

    def __str__(self) -> str:
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
    model: nn.Module, batches: Iterable[Any], *, forward: Forward | None = None, show: bool = True
) -> Diagnosis:
    """Measure the effect of batch statistics in `model` on `batches`, a list of batches of the training size. Print the
    result and return it.

    Per layer: the distance between the statistics of a batch and of all batches (`batch_noise`), between the running
    statistics and those of the inputs in eval mode (`staleness`), and between the outputs in training and eval mode
    (`disagreement`). This works for all norms with running statistics; for "cbn", "ghost", "momentum_bn" and "online",
    the disagreement is measured at the output of the model only. The model is not changed, and dropout is off.
    """
    if isinstance(batches, Tensor) or not isinstance(batches, Iterable):
        raise OptionError(f"diagnose: expected an iterable of batches, got {type(batches).__name__}: put it in a list")
    call = forward or call_model
    batches = list(batches)
    if not batches:
        raise NothingToRecord("diagnose: there is no batch; pass a few of the training size")
    layers = tracking_layers(model, "diagnose")
    with torch.no_grad():
        per_batch, outputs_train = _training_pass(model, layers, batches, call)
        in_eval = population(model, layers, batches, call, training=False).moments
        with norms_in_mode(model, layers, training=False):
            outputs_eval = [_tensors(call(model, batch)) for batch in batches]
        found = tuple(
            _layer_diagnosis(name, layers[name], per_batch[name], in_eval[name])
            for name in layers
            if name in per_batch and name in in_eval
        )
        gap, changed = _disagreement(outputs_train, outputs_eval)
    result = Diagnosis(found, len(batches), gap, changed, _verdict(found, gap, changed))
    if show:
        print(result)
    return result


def _training_pass(
    model: nn.Module, layers: Layers, batches: list[Any], call: Forward
) -> tuple[dict[str, list[Moments]], list[list[Tensor]]]:
    per_batch: dict[str, list[Moments]] = {}
    with (
        norms_in_mode(model, layers, training=True),
        observed(layers, lambda name, moments: per_batch.setdefault(name, []).append(moments)),
    ):
        outputs = [_tensors(call(model, batch)) for batch in batches]
    return per_batch, outputs


def _layer_diagnosis(name: str, layer: Any, per_batch: list[Moments], in_eval: Moments) -> LayerDiagnosis:
    population = per_batch[0]
    for moments in per_batch[1:]:
        population = merge(population, moments)
    kept = for_layer(layer, population)
    noise = [_distance(for_layer(layer, moments), kept, layer.eps) for moments in per_batch]
    running = Moments(layer.running_mean.to(in_eval.mean), layer.running_var.to(in_eval.var), 0.0)
    stale = _distance(running, for_layer(layer, in_eval), layer.eps)
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


def _distance(a: Moments, b: Moments, eps: float) -> Tensor:
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


def _disagreement(train: list[list[Tensor]], evaluated: list[list[Tensor]]) -> tuple[float, float | None]:
    """The relative difference of the outputs, and the share of predictions that differ if the outputs are scores
    (N, classes).
    """
    same = [(one, other) for one, other in zip(train, evaluated, strict=True) if len(one) == len(other)]
    pairs = [(a, b) for one, other in same for a, b in zip(one, other, strict=True) if a.shape == b.shape]
    if not pairs:
        return 0.0, None
    gap = rms(a - b for a, b in pairs) / max(rms(b for _, b in pairs), 1e-12)
    scores = [(a, b) for a, b in pairs if a.dim() == 2 and a.shape[1] > 1]
    if not scores:
        return gap, None
    return gap, float(torch.cat([a.argmax(1) != b.argmax(1) for a, b in scores]).double().mean())


def _verdict(layers: tuple[LayerDiagnosis, ...], gap: float, changed: float | None) -> str:
    noisy, stale = _worst(layers, "batch_noise"), _worst(layers, "staleness")
    if not all(math.isfinite(value) for value in (gap, noisy.batch_noise, stale.staleness)):
        return "Some values are not finite: check the batches and the weights for inf and nan."
    sentences = []
    if noisy.batch_noise > NOTICEABLE:
        sentences.append(
            f"Batch statistics are noisy: in {noisy.name or 'the layer'} those of a batch "
            f"({noisy.values_per_batch:.0f} values per channel) differ from those of all batches by "
            f"{noisy.batch_noise:.2f} standard deviations. Larger batches or a memory (memnorm.convert) help."
        )
    if stale.staleness > NOTICEABLE:
        sentences.append(
            f"Running statistics are stale: in {stale.name or 'the layer'} they differ by {stale.staleness:.2f} "
            "standard deviations from the inputs in eval mode. memnorm.recalibrate(model, batches) updates them; with "
            "a memory, memnorm.double_forward keeps them up to date."
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
