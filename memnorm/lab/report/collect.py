"""Collect the contents of a report from stored runs.

Every run is looked up in the paper's tables by its specification. At paper scale it is shown next to the printed
number, at other scales in tables of their own. Runs of no table are grouped into comparisons.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from memnorm.lab import tables
from memnorm.lab.comparison import Comparison, comparisons, groups_of
from memnorm.lab.errors import UsageError
from memnorm.lab.group import Group, final, identity, unique
from memnorm.lab.report.model import (
    NOT_APPLICABLE,
    NOT_RUN,
    UNAVAILABLE,
    CellView,
    CurveView,
    FigureView,
    Page,
    ScaleView,
    Section,
    TableView,
)
from memnorm.lab.spec import RunSpec
from memnorm.lab.store import Store, StoredRun

TITLE = "Memorized Batch Normalization: report of runs"
SCALES = ("paper", "reduced", "smoke")


def collect(
    store_roots: Sequence[Path | str] = (),
    *,
    title: str = TITLE,
    sections: Sequence[Section] = (),
    made: Sequence[Comparison] = (),
    registered: Mapping[str, bool] | None = None,
    only: Collection[RunSpec] | None = None,
) -> Page:
    """The page on all runs in these folders, or `only` on the runs of these specifications.

    Args:
        sections: come first in the report.
        made: comparisons that the caller has made already; shown before those found among the stored runs.
        registered: norms of this version (see `tables.unsupported`), to distinguish cells that cannot be run from cells
            that were not run.
    """
    runs, problems = _read(store_roots)
    if only is not None:
        wanted = {spec.name for spec in only}
        runs, problems = [run for run in runs if run.spec.name in wanted], _about(problems, wanted)
    given = [group for comparison in made for _, group in comparison.groups]
    if not runs and not given:
        raise UsageError(_no_runs(store_roots, problems))
    groups = {group.key: group for group in groups_of(runs)}
    scales = tuple(_scale(scale, groups, registered) for scale in SCALES)
    claimed = {one.group.key for scale in scales for table in scale.tables for one in table.cells if one.group}
    claimed |= {one.group.key for scale in scales for figure in scale.figures for one in figure.curves if one.group}
    shown = (*made, *comparisons([group for key, group in groups.items() if key not in claimed]))
    if only is not None or not store_roots:
        scales = tuple(_without_empty_tables(scale) for scale in scales)
    return Page(
        title=title,
        facts=tuple(_facts([*runs, *(run for group in given for run in group.runs)])),
        sections=tuple(sections),
        scales=tuple(scale for scale in scales if scale.tables or scale.figures),
        comparisons=shown,
        groups=tuple(_in_order(scales, [group for comparison in shown for _, group in comparison.groups])),
        problems=tuple(problems),
    )


def _read(roots: Sequence[Path | str]) -> tuple[list[StoredRun], list[str]]:
    """The runs of all stores, each once; of two copies the more advanced one."""
    found: dict[str, StoredRun] = {}
    problems: list[str] = []
    for root in sorted({str(Path(root).resolve()) for root in roots}):
        store = Store(root)
        for run in store.runs():
            name = run.spec.name
            if name in found and _disagree(found[name], run):
                problems.append(f"{name}: two stores hold it with different results; the first by path is used")
            if name not in found or _reach(run) > _reach(found[name]):
                found[name] = run
        problems += [problem.replace(f"{root}/", "") for problem in store.problems]
    return [found[name] for name in sorted(found)], sorted(problems)


def _about(problems: Sequence[str], names: Collection[str]) -> list[str]:
    return [problem for problem in problems if problem.partition(":")[0] in names]


def _reach(run: StoredRun) -> tuple[bool, int]:
    return run.result is not None, len(run.metrics)


def _disagree(one: StoredRun, other: StoredRun) -> bool:
    return bool(one.result and other.result) and (one.status, final(one)) != (other.status, final(other))


def _no_runs(roots: Sequence[Path | str], problems: Sequence[str]) -> str:
    where = " and ".join(str(root) for root in roots) or "an empty list of folders"
    unreadable = f" What is there cannot be read: {'; '.join(problems)}." if problems else ""
    return (
        f"no runs in {where}: there is nothing to report.{unreadable} Make some with memnorm train, memnorm compare or "
        "memnorm reproduce (memnorm reproduce all --scale smoke is the quickest), or name the folder they are in."
    )


def _scale(scale: str, groups: Mapping[str, Group], registered: Mapping[str, bool] | None) -> ScaleView:
    """At paper scale every table is shown, at other scales those that have a run."""
    found = [_table(table, scale, groups, registered) for table in tables.TABLES.values()]
    if scale != "paper":
        found = [table for table in found if any(one.group for one in table.cells)]
    figures = [_figure(figure, scale, groups) for figure in tables.FIGURES.values()]
    figures = [figure for figure in figures if any(one.group for one in figure.curves)]
    return ScaleView(scale, tables.RULES[scale], tuple(found), tuple(figures))


@functools.cache
def _at_scale(scale: str) -> dict[str, RunSpec]:
    """The run at a scale for each run of the paper, by digest; cells and curves share runs."""
    return {spec.digest: tables.at_scale(spec, scale) for spec in tables.unique_specs(tables.select(["all"]))}


def _without_empty_tables(scale: ScaleView) -> ScaleView:
    return replace(scale, tables=tuple(table for table in scale.tables if any(one.group for one in table.cells)))


def _table(
    table: tables.Table, scale: str, groups: Mapping[str, Group], registered: Mapping[str, bool] | None
) -> TableView:
    views = []
    for cell in table.cells:
        if cell.spec is None:
            views.append(CellView(cell, None, None, NOT_APPLICABLE))
            continue
        spec = _at_scale(scale)[cell.spec.digest]
        unavailable = registered is not None and tables.unsupported(spec, registered) is not None
        views.append(CellView(cell, spec, groups.get(identity(spec)), UNAVAILABLE if unavailable else NOT_RUN))
    return TableView(table, scale, tuple(views))


def _figure(figure: tables.Figure, scale: str, groups: Mapping[str, Group]) -> FigureView:
    curves = (CurveView(one, groups.get(identity(_at_scale(scale)[one.spec.digest]))) for one in figure.curves)
    return FigureView(figure, scale, tuple(curves))


def _in_order(scales: Sequence[ScaleView], others: Sequence[Group]) -> list[Group]:
    """All groups in the order of the report: paper, reduced, comparisons, smoke."""
    ordered: dict[str, Group] = {}

    def add(found: Iterable[Group | None]) -> None:
        ordered.update({group.key: group for group in found if group and group.key not in ordered})

    for scale in scales:
        if scale.scale == "smoke":
            add(others)
        add(one.group for table in scale.tables for one in table.cells)
        add(one.group for figure in scale.figures for one in figure.curves)
    return list(ordered.values())


def _facts(runs: Sequence[StoredRun]) -> Iterable[tuple[str, str]]:
    counts = {status: sum(run.status == status for run in runs) for status in ("finished", "diverged", "unfinished")}
    yield "Runs", ", ".join(f"{count:,} {status}" for status, count in counts.items() if count)
    days = unique(str(run.environment["started"])[:10] for run in runs if run.environment.get("started"))
    if days:
        yield "Started", days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    for label, names in (("Software", ("memnorm", "torch", "python")), ("Commit", ("commit",))):
        found = unique(_named(run, names) for run in runs if any(run.environment.get(name) for name in names))
        if found:
            yield label, "; ".join(found)
    machines = unique(str(run.environment["machine"]) for run in runs if run.environment.get("machine"))
    if machines:
        yield "Machine", "; ".join(machines)


def _named(run: StoredRun, names: Sequence[str]) -> str:
    known = [(name, run.environment[name]) for name in names if run.environment.get(name)]
    return ", ".join(f"{name} {value}" if len(names) > 1 else str(value) for name, value in known)
