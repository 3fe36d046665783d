"""Runs of one specification under several seeds, and the numbers read from them.

The number of a run is its last evaluation. A run that diverged or is not finished is named and never averaged in.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import yaml

from memnorm.lab.significance import Sample
from memnorm.lab.spec import RunSpec
from memnorm.lab.store import StoredRun
from memnorm.lab.verdict import Cost

RECALIBRATED = "test_error_recalibrated"  # in the last line of metrics of a run with `recalibrate`


def identity(spec: RunSpec) -> str:
    """A hash that runs share if they differ in the seed only."""
    values = {name: value for name, value in spec.identity.items() if name != "seed"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def measured(values: Any, name: str) -> float | None:
    """A finite number from a line of metrics, or None."""
    value = values.get(name) if isinstance(values, dict) else None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return float(value)


def final(run: StoredRun, metric: str = "test_error") -> float | None:
    """The headline number: the last evaluation of a finished run."""
    return measured(run.result.get("final"), metric) if run.result and run.status == "finished" else None


def best(run: StoredRun) -> tuple[float, int] | None:
    """The lowest test error of all evaluations and its iteration; never the headline number."""
    found = run.result.get("best") if run.result else None
    error, iteration = measured(found, "test_error"), measured(found, "iteration")
    return None if error is None or iteration is None else (error, int(iteration))


def progress(run: StoredRun) -> int:
    """The last iteration on record."""
    reached = measured(run.result, "diverged_at" if run.status == "diverged" else "iteration")
    return int(reached) if reached is not None else run.metrics[-1]["iteration"] if run.metrics else 0


def condition(run: StoredRun) -> str:
    """State of a run for tables."""
    if run.status == "diverged":
        return f"diverged at iteration {progress(run):,}"
    if run.status == "unfinished":
        return f"unfinished, {progress(run):,} of {run.spec.iterations:,} iterations"
    return "finished"


def step_ms(run: StoredRun) -> float | None:
    """Time per step: the median over the evaluations, which ignores a warm-up and a busy minute."""
    return median(measured(line, "step_ms") for line in run.metrics)


def memory_mb(run: StoredRun) -> float | None:
    return max((peak for line in run.metrics if (peak := measured(line, "peak_memory_mb")) is not None), default=None)


def median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


@dataclass(frozen=True)
class Group:
    """Runs of one specification, ordered by seed."""

    runs: tuple[StoredRun, ...]

    @property
    def spec(self) -> RunSpec:
        return self.runs[0].spec

    @cached_property
    def key(self) -> str:
        return identity(self.spec)

    @property
    def anchor(self) -> str:
        return f"run-{self.key}"

    @property
    def title(self) -> str:
        return f"{self.spec.arm} · {self.spec.model} · {self.spec.data} · batch {self.spec.batch}"

    def having(self, status: str) -> list[StoredRun]:
        return [run for run in self.runs if run.status == status]

    def sample(self, metric: str = "test_error") -> Sample | None:
        values = [value for run in self.runs if (value := final(run, metric)) is not None]
        return Sample(values) if values else None

    @property
    def cost(self) -> Cost:
        """Medians over the finished runs."""
        finished = self.having("finished")
        return Cost(median(map(step_ms, finished)), median(map(memory_mb, finished)))

    @property
    def trouble(self) -> str:
        """Why runs of the group are not in its number; empty if all are."""
        others = [run for run in self.runs if run.status != "finished"]
        if len(self.runs) == 1:
            return "; ".join(map(condition, others))
        words = [f"seed {run.spec.seed} {condition(run)}" for run in others]
        words += [f"seed {run.spec.seed} has no number" for run in self.having("finished") if final(run) is None]
        return "; ".join(words)

    @property
    def places(self) -> list[str]:
        """Software and machines of the runs, each once."""
        return unique(place(run.environment) for run in self.runs)

    @property
    def yaml(self) -> str:
        """The specification without the seed."""
        values = self.spec.as_dict()
        del values["seed"]
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def place(environment: dict[str, Any]) -> str:
    """Software and machine of a run in one line."""
    known = {name: str(value) for name, value in environment.items() if value is not None}
    words = [f"{name} {known[name]}" for name in ("memnorm", "commit", "torch", "python") if name in known]
    threads = known.get("threads")
    words += [f"{threads} thread{'' if threads == '1' else 's'}"] if threads else []
    words += [f"on {known['device']}"] if "device" in known else []
    words += ["channels last"] if environment.get("channels_last") is True else []
    words += [f"kernels: {known['kernels']}"] if "kernels" in known else []
    words += [known["machine"]] if "machine" in known else []
    return ", ".join(words) or "not recorded"


def unique(words: Any) -> list[str]:
    return sorted(set(words))
