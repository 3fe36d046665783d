"""Which norm is best here? The runs of a comparison, and what came out of them.

Every arm of a seed gets the same initial weights, data order, augmentation, learning rate and number of images. With
tuning, each arm and batch size gets the learning rate that did best on held-out *training* images, with a seed of its
own; the test images take no part in any choice.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from memnorm.lab.listen import Outcome
from memnorm.lab.report.model import memory_mb, step_ms
from memnorm.lab.report.verdict import Cost, Verdict, verdict
from memnorm.lab.significance import Sample
from memnorm.lab.spec import RunSpec
from memnorm.lab.store import RunFolder, Store, StoredRun

TUNING_SEED = 1000
Runner = Callable[[Sequence[RunSpec]], list[Outcome]]


@dataclass(frozen=True)
class Question:
    """What is compared: arms × batch sizes × seeds, on the model, data and schedule of `base`."""

    base: RunSpec
    arms: tuple[dict[str, Any], ...]
    batch_sizes: tuple[int, ...]
    seeds: int
    images: int  # seen in each training, whatever the batch size
    rates: tuple[float, ...] = ()  # to choose from; empty: the base's for every arm
    holdout: int = 0  # training images to choose on

    def spec(self, arm: dict[str, Any], batch_size: int, **changes: Any) -> RunSpec:
        iterations = math.ceil(self.images / (batch_size * self.base.accumulate))
        warmup = min(self.base.warmup, iterations - 1)
        return self.base.but(batch_size=batch_size, iterations=iterations, warmup=warmup, **arm, **changes)

    def tuning(self) -> list[RunSpec]:
        return [
            self.spec(arm, size, learning_rate=rate, holdout=self.holdout, seed=TUNING_SEED)
            for size in self.batch_sizes
            for arm in self.arms
            for rate in self.rates
        ]

    def runs(self, chosen: dict[tuple[str, int], float]) -> list[RunSpec]:
        """Arms side by side within a seed, so that a busy moment of the machine falls on all of them."""
        return [
            self.spec(arm, size, seed=seed, **rate)
            for seed in range(self.seeds)
            for size in self.batch_sizes
            for arm in self.arms
            for rate in [_rate(chosen, RunSpec(**arm).arm, size)]
        ]


def _rate(chosen: dict[tuple[str, int], float], arm: str, size: int) -> dict[str, float]:
    return {"learning_rate": chosen[arm, size]} if (arm, size) in chosen else {}


@dataclass(frozen=True)
class Answer:
    """What came out: a row per arm and batch size, and what may be concluded."""

    outcomes: list[Outcome]
    rows: list[dict[str, Any]]
    verdict: Verdict


def _row(group: Sequence[Outcome], cost: Cost, tuned: bool) -> dict[str, Any]:
    spec = group[0].spec
    finals = [outcome.result["final"] for outcome in group if outcome.status == "finished" and outcome.result]
    errors = Sample([final["test_error"] for final in finals]) if finals else None
    return {
        "norm": spec.arm,
        "batch_size": spec.batch_size,
        "learning_rate": spec.base_learning_rate,
        "tuned": tuned,
        "n": len(finals),
        "test_error": errors.mean if errors else None,
        "sd": errors.sd if errors else None,
        "diverged": sum(outcome.status == "diverged" for outcome in group),
        "failed": sum(outcome.status == "failed" for outcome in group),
        "step_ms": cost.step_ms,
        "peak_memory_mb": cost.memory_mb,
    }


def _stored(folder: RunFolder, outcome: Outcome) -> StoredRun:
    return StoredRun(folder.path, outcome.spec, folder.metrics(), outcome.result)


def _cost(group: Sequence[Outcome], store: Store) -> Cost:
    """As the report counts it; the median over the seeds."""
    runs = [_stored(store.run(outcome.spec), outcome) for outcome in group if outcome.status == "finished"]

    def median(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    return Cost(median(map(step_ms, runs)), median(map(memory_mb, runs)))


def answer(question: Question, run: Runner, store: Store) -> Answer:
    """Tune if asked to, run, judge."""
    tuned = choose_rates(run(question.tuning())) if question.rates else {}
    outcomes = run(question.runs(tuned))
    groups: dict[tuple[str, int], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.spec.arm, outcome.spec.batch_size), []).append(outcome)
    results: dict[str, dict[int, dict[int, float | None]]] = {}
    costs: dict[str, dict[int, Cost]] = {}
    for (arm, size), group in groups.items():
        results.setdefault(arm, {})[size] = {
            one.spec.seed: one.result["final"]["test_error"] if one.status == "finished" else None
            for one in group
            if one.result is not None
        }
        costs.setdefault(arm, {})[size] = _cost(group, store)
    rows = [_row(group, costs[arm][size], (arm, size) in tuned) for (arm, size), group in groups.items()]
    return Answer(outcomes, rows, verdict(results, costs))


def choose_rates(outcomes: Sequence[Outcome]) -> dict[tuple[str, int], float]:
    """For each arm and batch size the learning rate with the lowest error on the held-out images; the larger of
    equals.
    """
    best: dict[tuple[str, int], tuple[float, float]] = {}
    for outcome in outcomes:
        if outcome.status != "finished" or not outcome.result:
            continue
        key = (outcome.spec.arm, outcome.spec.batch_size)
        found = (outcome.result["final"]["test_error"], -outcome.spec.learning_rate)
        best[key] = min(best.get(key, found), found)
    return {key: -rate for key, (_, rate) in best.items()}
