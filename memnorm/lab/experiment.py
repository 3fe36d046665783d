"""The runs of a comparison: arms × batch sizes × seeds.

Every arm of a seed gets the same initial weights, data order, augmentation, learning rate and number of images. With
tuning, each arm and batch size gets the learning rate with the lowest error on held-out *training* images, under a seed
of its own. Test images take no part in any choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from memnorm.lab.comparison import Comparison, arm_key, compare, groups_of
from memnorm.lab.errors import LabError
from memnorm.lab.listen import Outcome
from memnorm.lab.spec import RunSpec
from memnorm.lab.store import Store, StoredRun

TUNING_SEED = 1000
RunAll = Callable[[Sequence[RunSpec]], list[Outcome]]


@dataclass(frozen=True)
class Experiment:
    """Arms × batch sizes × seeds on the model, data and schedule of `base`."""

    base: RunSpec
    arms: tuple[dict[str, Any], ...]
    batch_sizes: tuple[int, ...]
    seeds: int
    images: int  # seen by each run, at every batch size
    rates: tuple[float, ...] = ()  # learning rates to choose from; empty: the base's for every arm
    holdout: int = 0  # training images to choose on

    def spec(self, arm: dict[str, Any], batch_size: int, **changes: Any) -> RunSpec:
        iterations = math.ceil(self.images / (batch_size * self.base.accumulate))
        warmup = min(self.base.warmup, iterations - 1)
        return self.base.but(batch_size=batch_size, iterations=iterations, warmup=warmup, **arm, **changes)

    def trials(self) -> list[RunSpec]:
        """The runs that choose the learning rates."""
        return [
            self.spec({**arm, "recalibrate": 0}, size, learning_rate=rate, holdout=self.holdout, seed=TUNING_SEED)
            for size in self.batch_sizes
            for arm in self.arms
            for rate in self.rates
        ]

    def runs(self, rates: dict[tuple[str, int], float]) -> list[RunSpec]:
        """All runs, with the arms of a seed next to each other: a busy minute of the machine affects all arms."""
        specs = [
            self.spec(arm, size, seed=seed)
            for seed in range(self.seeds)
            for size in self.batch_sizes
            for arm in self.arms
        ]
        return [spec.but(learning_rate=rates.get(place(spec), spec.learning_rate)) for spec in specs]


def place(spec: RunSpec) -> tuple[str, int]:
    """The arm, as a key, and the batch size of a run."""
    return arm_key(spec), spec.batch_size


def run_experiment(
    experiment: Experiment, run_all: RunAll, store: Store
) -> tuple[Comparison, dict[tuple[str, int], float]]:
    """Tune if asked to, run, compare. Also returns the tuned learning rates by arm and batch size."""
    rates = choose_rates(run_all(experiment.trials())) if experiment.rates else {}
    outcomes = run_all(experiment.runs(rates))
    failures = [(one.spec.name, one.message) for one in outcomes if one.status == "failed"]
    runs = []
    for outcome in outcomes:
        folder, result = store.run(outcome.spec), outcome.result
        try:
            lines = folder.metrics()
        except LabError as error:
            failures.append((outcome.spec.name, str(error)))
            lines, result = [], None
        runs.append(StoredRun(folder.path, outcome.spec, lines, result, folder.sessions()))
    return compare(groups_of(runs), failures), rates


def choose_rates(outcomes: Sequence[Outcome]) -> dict[tuple[str, int], float]:
    """For each arm and batch size the learning rate with the lowest error; the larger of equals."""
    best: dict[tuple[str, int], tuple[float, float]] = {}
    for outcome in outcomes:
        if outcome.status != "finished" or not outcome.result:
            continue
        key = place(outcome.spec)
        found = (outcome.result["final"]["test_error"], -outcome.spec.learning_rate)
        best[key] = min(best.get(key, found), found)
    return {key: -rate for key, (_, rate) in best.items()}
