"""What a report is made of, before it is HTML, Markdown or CSV: groups of runs, and the tables and figures they fill.

A group is a specification under several seeds. Its number is the last evaluation of each finished run; a run that
diverged or is not finished is named beside it and never averaged in.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import yaml

from memnorm.lab.report.verdict import Cost, Verdict
from memnorm.lab.significance import Sample
from memnorm.lab.spec import RunSpec
from memnorm.lab.store import StoredRun
from memnorm.lab.tables.parts import Cell, Curve, Figure, Table

RECALIBRATED = "test_error_recalibrated"  # in a run's last line of metrics, if it was asked to recalibrate
NOT_RUN, NOT_APPLICABLE, UNAVAILABLE, APART = "not run", "–", "norm not available", "see below the table"


def identity(spec: RunSpec) -> str:
    """The same for runs that differ in the seed only."""
    values = {name: value for name, value in spec.identity.items() if name != "seed"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def measured(values: Any, name: str) -> float | None:
    """A number from a line of metrics, if there is one."""
    value = values.get(name) if isinstance(values, dict) else None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return float(value)


def final(run: StoredRun, metric: str = "test_error") -> float | None:
    """The headline: the last evaluation of a finished run."""
    return measured(run.result.get("final"), metric) if run.result and run.status == "finished" else None


def best(run: StoredRun) -> tuple[float, int] | None:
    """The lowest test error at any evaluation, and when; never the headline."""
    found = run.result.get("best") if run.result else None
    error, iteration = measured(found, "test_error"), measured(found, "iteration")
    return None if error is None or iteration is None else (error, int(iteration))


def progress(run: StoredRun) -> int:
    """The iteration that is known to have been reached."""
    reached = measured(run.result, "diverged_at" if run.status == "diverged" else "iteration")
    return int(reached) if reached is not None else run.metrics[-1]["iteration"] if run.metrics else 0


def condition(run: StoredRun) -> str:
    """How far a run came, in words."""
    if run.status == "diverged":
        return f"diverged at iteration {progress(run):,}"
    if run.status == "unfinished":
        return f"unfinished, {progress(run):,} of {run.spec.iterations:,} iterations"
    return "finished"


def step_ms(run: StoredRun) -> float | None:
    """Time per step: the median over the evaluations, so that neither a warm-up nor a busy minute counts."""
    times = sorted(time for line in run.metrics if (time := measured(line, "step_ms")) is not None)
    return times[len(times) // 2] if times else None


def memory_mb(run: StoredRun) -> float | None:
    return max((peak for line in run.metrics if (peak := measured(line, "peak_memory_mb")) is not None), default=None)


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


@dataclass(frozen=True)
class Group:
    """Runs of one specification, by seed."""

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
        finished = self.having("finished")
        return Cost(mean([step_ms(run) for run in finished]), mean([memory_mb(run) for run in finished]))

    @property
    def trouble(self) -> str:
        """What keeps runs of the group out of its number."""
        others = [run for run in self.runs if run.status != "finished"]
        if len(self.runs) == 1:
            return "; ".join(map(condition, others))
        words = [f"seed {run.spec.seed} {condition(run)}" for run in others]
        words += [f"seed {run.spec.seed} has no number" for run in self.having("finished") if final(run) is None]
        return "; ".join(words)

    @property
    def places(self) -> list[str]:
        """Where the runs were computed, without repetition."""
        return unique(place(run.environment) for run in self.runs)

    @property
    def yaml(self) -> str:
        """The specification without the seed."""
        values = self.spec.as_dict()
        del values["seed"]
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def place(environment: dict[str, Any]) -> str:
    """One line on the software and the machine of a run."""
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


@dataclass(frozen=True)
class CellView:
    """A cell of a table at one scale, with what the store has for it."""

    cell: Cell
    spec: RunSpec | None
    group: Group | None
    missing: str  # what to say where there is no run

    @property
    def ours(self) -> Sample | None:
        return self.group.sample(self.cell.metric) if self.group else None

    @property
    def status(self) -> str:
        """Empty if all is well and there is a number."""
        if self.group is None:
            return self.missing
        return self.group.trouble or ("" if self.ours else f"no {self.cell.metric} was measured")

    @property
    def apart(self) -> bool:
        """A run that must not stand beside the number the paper prints for the cell."""
        return self.group is not None and self.cell.printed is not None and not self.cell.comparable


@dataclass(frozen=True)
class TableView:
    table: Table
    scale: str
    cells: tuple[CellView, ...]

    @property
    def name(self) -> str:
        return self.table.name if self.scale == "paper" else f"{self.table.name}-{self.scale}"

    @property
    def beside_print(self) -> bool:
        return self.scale == "paper"

    def cell(self, row: str, column: str) -> CellView:
        return next(one for one in self.cells if (one.cell.row, one.cell.column) == (row, column))

    @property
    def filled(self) -> int:
        return sum(one.ours is not None for one in self.cells)


@dataclass(frozen=True)
class CurveView:
    curve: Curve
    group: Group | None


@dataclass(frozen=True)
class FigureView:
    figure: Figure
    scale: str
    curves: tuple[CurveView, ...]

    @property
    def name(self) -> str:
        return self.figure.name if self.scale == "paper" else f"{self.figure.name}-{self.scale}"

    def panel(self, name: str) -> list[CurveView]:
        return [one for one in self.curves if one.curve.panel == name and one.group]

    @property
    def absent(self) -> list[str]:
        """The curves without a run."""
        return [f"{one.curve.panel}: {one.curve.label}" for one in self.curves if not one.group]


@dataclass(frozen=True)
class ScaleView:
    """What the store has of the paper at one scale."""

    scale: str
    rules: str
    tables: tuple[TableView, ...]
    figures: tuple[FigureView, ...]


@dataclass(frozen=True)
class Family:
    """Runs outside the paper's tables that differ in nothing but norm, scheme, batch size and seed."""

    name: str
    title: str
    about: str
    groups: tuple[tuple[str, Group], ...]  # with the arm's label
    verdict: Verdict | None
    recalibrated: bool = False  # error against batch size is that with statistics measured afresh, where there are any

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(label for label, _ in self.groups))


@dataclass(frozen=True)
class Grid:
    """A table of texts for a section of the caller's; without a title it goes by the section's."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Section:
    """A part that the caller adds at the top: paragraphs, then tables. Plain text; it is escaped."""

    title: str
    paragraphs: Sequence[str] = ()
    grids: Sequence[Grid] = ()


@dataclass(frozen=True)
class Page:
    """All of a report."""

    title: str
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]
    scales: tuple[ScaleView, ...]
    families: tuple[Family, ...]
    groups: tuple[Group, ...]
    problems: tuple[str, ...]
