"""The contents of a report, collected from stored runs, before they are HTML, Markdown or CSV.

Every run is looked up in the paper's tables by its specification. At paper scale it is shown next to the printed
number, at other scales in tables of their own. Runs of no table are grouped into comparisons.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from memnorm.lab import tables
from memnorm.lab.comparison import Comparison, Group, comparisons, final, groups_of, identity
from memnorm.lab.errors import UsageError
from memnorm.lab.paper import FIGURES, TABLES, Cell, Curve, Figure, Table
from memnorm.lab.significance import Sample
from memnorm.lab.spec import RunSpec, unsupported
from memnorm.lab.store import Store, StoredRun
from memnorm.text import visible

TITLE = "Memorized Batch Normalization: report of runs"
NOT_RUN, NOT_APPLICABLE, UNAVAILABLE = "not run", "–", "norm not available"
SCALE_TITLES = {
    "paper": "The paper's tables and figures",
    "reduced": "The paper's experiments, reduced",
    "smoke": "Smoke check of the paper's experiments",
}


@dataclass(frozen=True)
class CellView:
    """A cell of a table at one scale, with its runs."""

    cell: Cell
    spec: RunSpec | None
    group: Group | None
    missing: str  # text where there is no run

    @property
    def ours(self) -> Sample | None:
        return self.group.sample(self.cell.metric) if self.group else None

    @property
    def status(self) -> str:
        """What is wrong with the cell's runs; empty if nothing is."""
        if self.group is None:
            return self.missing
        return self.group.trouble or ("" if self.ours else f"no {self.cell.metric} was measured")

    @property
    def apart(self) -> bool:
        """True if the run must not be shown next to the printed number, which had another protocol."""
        return self.group is not None and self.cell.printed is not None and not self.cell.comparable


@dataclass(frozen=True)
class TableView:
    """A table of the paper at one scale, with the runs of its cells."""

    table: Table
    scale: str
    cells: tuple[CellView, ...]

    @property
    def name(self) -> str:
        return _scaled(self.table.name, self.scale)

    @property
    def beside_print(self) -> bool:
        """True if each column is two: paper, ours."""
        return self.scale == "paper"

    @property
    def groups(self) -> list[Group]:
        return [one.group for one in self.cells if one.group]


@dataclass(frozen=True)
class FigureView:
    """A figure of the paper at one scale, with the runs of its curves."""

    figure: Figure
    scale: str
    curves: tuple[tuple[Curve, Group | None], ...]

    @property
    def name(self) -> str:
        return _scaled(self.figure.name, self.scale)

    @property
    def groups(self) -> list[Group]:
        return [group for _, group in self.curves if group]

    @property
    def absent(self) -> str:
        """The curves without a run."""
        names = [f"{curve.panel}: {curve.label}" for curve, group in self.curves if not group]
        if len(names) > 6:
            return f"Not run: {len(names)} of {len(self.curves)} curves."
        return f"Not run: {', '.join(names)}." if names else ""


def _scaled(name: str, scale: str) -> str:
    return name if scale == "paper" else f"{name}-{scale}"


@dataclass(frozen=True)
class Chapter:
    """The paper at one scale, or the comparisons of other runs."""

    anchor: str
    title: str
    rules: str = ""
    tables: tuple[TableView, ...] = ()
    figures: tuple[FigureView, ...] = ()
    comparisons: tuple[Comparison, ...] = ()

    @property
    def groups(self) -> list[Group]:
        views: tuple[TableView | FigureView, ...] = (*self.tables, *self.figures)
        return [group for view in views for group in view.groups]

    @property
    def empty(self) -> bool:
        return not self.groups and not self.comparisons


@dataclass(frozen=True)
class Section:
    """A figure, paragraphs and a table that the caller adds at the top. Plain text; it is escaped."""

    title: str
    paragraphs: Sequence[str] = ()
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    figure: str = ""  # the name of a comparison, whose figure is then shown here only


@dataclass(frozen=True)
class Page:
    title: str
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]
    chapters: tuple[Chapter, ...]
    groups: tuple[Group, ...]
    problems: tuple[str, ...]

    @property
    def tables(self) -> list[TableView]:
        return [view for chapter in self.chapters for view in chapter.tables]

    @property
    def figures(self) -> list[FigureView]:
        return [view for chapter in self.chapters for view in chapter.figures]

    @property
    def comparisons(self) -> list[Comparison]:
        return [one for chapter in self.chapters for one in chapter.comparisons]

    @property
    def shown_above(self) -> set[str]:
        """The comparisons whose figures stand in a section."""
        return {section.figure for section in self.sections}


def collect(
    store_roots: Sequence[Path | str] = (),
    *,
    title: str = TITLE,
    sections: Sequence[Section] = (),
    made: Sequence[Comparison] = (),
) -> Page:
    """The page on all runs in these folders.

    Args:
        sections: come first in the report.
        made: comparisons that the caller has made already; shown before those found among the stored runs.
    """
    runs, problems = _read(store_roots)
    given = [group for comparison in made for _, group in comparison.groups]
    if not runs and not given:
        raise UsageError(_no_runs(store_roots, problems))
    groups = {group.key: group for group in groups_of(runs)}
    paper, reduced, smoke = (_chapter(scale, groups) for scale in reversed(tables.SCALES))
    claimed = {group.key: group for scale in (paper, reduced, smoke) for group in scale.groups}
    shown = (*made, *comparisons([group for key, group in groups.items() if key not in claimed]))
    results = [scale for scale in (paper, reduced) if not scale.empty]
    others = Chapter("others", "Other runs" if results or smoke.groups else "Runs", comparisons=shown)
    chapters = [*results, *(one for one in (others, smoke) if not one.empty)]
    chapters += [paper] if paper.empty and store_roots else []  # the printed numbers
    return Page(
        title=title,
        facts=tuple(_facts([*runs, *(run for group in given for run in group.runs)])),
        sections=tuple(sections),
        chapters=tuple(chapters),
        groups=tuple((claimed | {group.key: group for one in shown for _, group in one.groups}).values()),
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
            copies = [one for one in (found.get(name), run) if one and one.result]
            if len({(one.status, final(one)) for one in copies}) > 1:
                problems.append(f"{name}: two stores hold it with different results; the first by path is used")
            if name not in found or _reach(run) > _reach(found[name]):
                found[name] = run
        problems += [visible(problem.replace(f"{root}/", "")) for problem in store.problems]
    return [found[name] for name in sorted(found)], sorted(problems)


def _reach(run: StoredRun) -> tuple[bool, int]:
    return run.result is not None, len(run.metrics)


def _no_runs(roots: Sequence[Path | str], problems: Sequence[str]) -> str:
    where = " and ".join(str(root) for root in roots) or "an empty list of folders"
    unreadable = f" What is there cannot be read: {'; '.join(problems)}." if problems else ""
    return (
        f"no runs in {where}: there is nothing to report.{unreadable} Make some with memnorm train, memnorm compare or "
        "memnorm reproduce (memnorm reproduce all --scale smoke is the quickest), or name the folder they are in."
    )


def _chapter(scale: str, groups: Mapping[str, Group]) -> Chapter:
    """The tables and figures that have a run; at paper scale every table."""
    found = [_table(table, scale, groups) for table in TABLES.values()]
    figures = [_figure(figure, scale, groups) for figure in FIGURES.values()]
    return Chapter(
        scale,
        SCALE_TITLES[scale],
        tables.RULES[scale],
        tuple(view for view in found if view.groups or scale == "paper"),
        tuple(view for view in figures if view.groups),
    )


@functools.cache
def _at_scale(scale: str) -> dict[str, RunSpec]:
    """The run at a scale for each run of the paper, by digest; cells and curves share runs."""
    return {spec.digest: tables.at_scale(spec, scale) for spec in tables.unique_specs(tables.select(["all"]))}


def _table(table: Table, scale: str, groups: Mapping[str, Group]) -> TableView:
    views = []
    for cell in table.cells:
        if cell.spec is None:
            views.append(CellView(cell, None, None, NOT_APPLICABLE))
            continue
        spec = _at_scale(scale)[cell.spec.digest]
        missing = UNAVAILABLE if unsupported(spec) else NOT_RUN
        views.append(CellView(cell, spec, groups.get(identity(spec)), missing))
    return TableView(table, scale, tuple(views))


def _figure(figure: Figure, scale: str, groups: Mapping[str, Group]) -> FigureView:
    curves = ((one, groups.get(identity(_at_scale(scale)[one.spec.digest]))) for one in figure.curves)
    return FigureView(figure, scale, tuple(curves))


def _facts(runs: Sequence[StoredRun]) -> Iterable[tuple[str, str]]:
    counts = {status: sum(run.status == status for run in runs) for status in ("finished", "diverged", "unfinished")}
    yield "Runs", ", ".join(f"{count:,} {status}" for status, count in counts.items() if count)
    days = sorted({str(run.environment["started"])[:10] for run in runs if run.environment.get("started")})
    if days:
        yield "Started", days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    facts = {"Software": ("memnorm", "torch", "python"), "Commit": ("commit",), "Machine": ("machine",)}
    for label, names in facts.items():
        known = [[(name, run.environment[name]) for name in names if run.environment.get(name)] for run in runs]
        found = sorted({", ".join(f"{n} {v}" if len(names) > 1 else str(v) for n, v in one) for one in known if one})
        if found:
            yield label, "; ".join(found)
