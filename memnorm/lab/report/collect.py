"""From stores to the contents of a report. Reads, sorts and counts; trains nothing and draws nothing.

Every run is found in the paper's tables by its specification: at paper scale it may stand beside the printed number, at
another scale it stands in tables of its own, and what belongs to no table is told as other runs.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from memnorm.lab import tables
from memnorm.lab.errors import UsageError
from memnorm.lab.report.families import families
from memnorm.lab.report.model import (
    NOT_APPLICABLE,
    NOT_RUN,
    UNAVAILABLE,
    CellView,
    CurveView,
    FigureView,
    Group,
    Page,
    ScaleView,
    Section,
    TableView,
    final,
    identity,
    unique,
)
from memnorm.lab.spec import RunSpec
from memnorm.lab.store import Store, StoredRun

SCALES = ("paper", "reduced", "smoke")


def collect(
    store_roots: Sequence[Path | str],
    *,
    title: str,
    sections: Sequence[Section] = (),
    registered: Mapping[str, bool] | None = None,
    only: Collection[RunSpec] | None = None,
) -> Page:
    """Everything in the stores, or `only` the runs of these specifications.

    `registered` norms, as in `tables.why_not`, tell the cells that could not be run from those that were not.
    """
    runs, problems = _read(store_roots)
    if only is not None:
        wanted = {spec.name for spec in only}
        runs, problems = [run for run in runs if run.spec.name in wanted], _about(problems, wanted)
    if not runs:
        raise UsageError(_nothing(store_roots, problems))
    groups = {group.key: group for group in _groups(runs)}
    scales = tuple(_scale(scale, groups, registered) for scale in SCALES)
    claimed = {one.group.key for scale in scales for table in scale.tables for one in table.cells if one.group}
    claimed |= {one.group.key for scale in scales for figure in scale.figures for one in figure.curves if one.group}
    others = families([group for key, group in groups.items() if key not in claimed])
    if only is not None:
        scales = tuple(_without_empty_tables(scale) for scale in scales)
    shown = tuple(scale for scale in scales if scale.tables or scale.figures)
    return Page(
        title=title,
        facts=tuple(_facts(runs)),
        sections=tuple(sections),
        scales=shown,
        families=tuple(others),
        groups=tuple(_in_order(groups, scales, [group for family in others for _, group in family.groups])),
        problems=tuple(problems),
    )


def _read(roots: Sequence[Path | str]) -> tuple[list[StoredRun], list[str]]:
    """The runs of all stores, each once: of two copies the one that is further."""
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


def _nothing(roots: Sequence[Path | str], problems: Sequence[str]) -> str:
    where = " and ".join(str(root) for root in roots) or "an empty list of folders"
    unreadable = f" What is there cannot be read: {'; '.join(problems)}." if problems else ""
    return (
        f"no runs in {where}: there is nothing to report.{unreadable} Make some with memnorm train, memnorm compare or "
        "memnorm reproduce (memnorm reproduce all --scale smoke is the quickest), or name the folder they are in."
    )


def _groups(runs: Iterable[StoredRun]) -> list[Group]:
    by_key: dict[str, list[StoredRun]] = {}
    for run in runs:
        by_key.setdefault(identity(run.spec), []).append(run)
    return [Group(tuple(sorted(by_key[key], key=lambda run: run.spec.seed))) for key in sorted(by_key)]


def _scale(scale: str, groups: Mapping[str, Group], registered: Mapping[str, bool] | None) -> ScaleView:
    """At paper scale every table is shown; at the others those that have a run."""
    found = [_table(table, scale, groups, registered) for table in tables.TABLES.values()]
    if scale != "paper":
        found = [table for table in found if any(one.group for one in table.cells)]
    figures = [_figure(figure, scale, groups) for figure in tables.FIGURES.values()]
    figures = [figure for figure in figures if any(one.group for one in figure.curves)]
    return ScaleView(scale, tables.RULES[scale], tuple(found), tuple(figures))


@functools.cache
def _at_scale(scale: str) -> dict[str, RunSpec]:
    """The run at a scale for each run of the paper, by its digest; many cells and curves share one."""
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
        unavailable = registered is not None and tables.why_not(spec, registered) is not None
        views.append(CellView(cell, spec, groups.get(identity(spec)), UNAVAILABLE if unavailable else NOT_RUN))
    return TableView(table, scale, tuple(views))


def _figure(figure: tables.Figure, scale: str, groups: Mapping[str, Group]) -> FigureView:
    curves = (CurveView(one, groups.get(identity(_at_scale(scale)[one.spec.digest]))) for one in figure.curves)
    return FigureView(figure, scale, tuple(curves))


def _in_order(groups: Mapping[str, Group], scales: Sequence[ScaleView], others: Sequence[Group]) -> list[Group]:
    """As the reader meets them: the paper's tables, other scales, other runs, and the smoke check last."""
    met: dict[str, Group] = {}

    def meet(found: Iterable[Group | None]) -> None:
        met.update({group.key: group for group in found if group and group.key not in met})

    for scale in scales:
        if scale.scale == "smoke":
            meet(others)
        meet(one.group for table in scale.tables for one in table.cells)
        meet(one.group for figure in scale.figures for one in figure.curves)
    assert met.keys() == groups.keys()
    return list(met.values())


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
