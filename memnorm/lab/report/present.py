"""Contents as texts for HTML and Markdown: cells with footnotes, rows of runs, times and sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from memnorm.lab.comparison import Comparison
from memnorm.lab.group import RECALIBRATED, Group, best, condition, measured, memory_mb, progress, step_ms
from memnorm.lab.paper import Cell
from memnorm.lab.report.collect import (
    APART,
    NOT_APPLICABLE,
    CellView,
    FigureView,
    Page,
    ScaleView,
    TableView,
)
from memnorm.lab.significance import Sample, number
from memnorm.lab.store import StoredRun

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SMOKE_CAPTION = "A check that the cells run: the numbers mean nothing."
FROM_TEXT = "from the paper's text"


@dataclass(frozen=True)
class Shown:
    """The texts of a table cell: number, spread, trouble, footnote mark, link to its runs."""

    text: str
    kind: str = "number"  # or missing, none, trouble
    spread: str = ""
    trouble: str = ""
    mark: str = ""
    anchor: str = ""

    @property
    def plain(self) -> str:
        trouble = f" ({self.trouble})" if self.trouble else ""
        return f"{self.text}{f' {self.spread}' if self.spread else ''}{trouble}"


@dataclass(frozen=True)
class ShownTable:
    name: str
    title: str
    caption: str
    columns: tuple[str, ...]
    beside_print: bool  # each column is two: paper, ours
    rows: tuple[tuple[str, tuple[Shown, ...]], ...]
    notes: tuple[tuple[str, str], ...]
    apart: tuple[str, ...]


def sampled(sample: Sample | None, group: Group | None, trouble: str, missing: str) -> Shown:
    anchor = group.anchor if group else ""
    if sample is None:
        kind = "trouble" if group else "none" if missing == NOT_APPLICABLE else "missing"
        return Shown(trouble or missing, kind, anchor=anchor)
    spread = "" if sample.sd is None else f"± {number(sample.sd)} "
    return Shown(number(sample.mean), spread=f"{spread}(n = {sample.n})", trouble=trouble, anchor=anchor)


def show_table(view: TableView) -> ShownTable:
    notes: dict[str, str] = {}
    rows = []
    for row in view.table.rows:
        shown: list[Shown] = []
        for column in view.table.columns:
            one = view.cell(row, column)
            mark = _mark(_note(one, view), notes)
            if view.beside_print:
                shown += _beside_print(one, mark)
            else:
                shown.append(replace(_ours(one), mark=mark))
        rows.append((row, tuple(shown)))
    return ShownTable(
        name=view.name,
        title=view.table.title + ("" if view.beside_print else f" ({view.scale} scale)"),
        caption=view.table.caption if view.scale != "smoke" else SMOKE_CAPTION,
        columns=view.table.columns,
        beside_print=view.beside_print,
        rows=tuple(rows),
        notes=tuple((letter, text) for text, letter in notes.items()),
        apart=tuple(_apart(one) for one in view.cells if view.beside_print and one.apart),
    )


def _ours(one: CellView) -> Shown:
    return sampled(one.ours, one.group, one.status, one.missing)


def _beside_print(one: CellView, mark: str) -> list[Shown]:
    """The printed number and ours, the footnote at the one it describes."""
    printed = Shown("–", "none") if one.cell.printed is None else Shown(number(one.cell.printed))
    ours = Shown(APART, "missing", anchor=one.group.anchor) if one.apart and one.group else _ours(one)
    if one.cell.printed is None:
        return [printed, replace(ours, mark=mark)]
    return [replace(printed, mark=mark), ours]


def _note(one: CellView, view: TableView) -> str:
    cell: Cell = one.cell
    if cell.spec is None:
        return cell.note
    if not view.beside_print or (cell.source == "not printed" and one.group is None):
        return ""
    words = [FROM_TEXT] if cell.source == "text" and cell.printed is not None else []
    words += ["derived"] if cell.source == "derived" else []
    return ": ".join([*words, cell.note] if cell.note else words)


def _mark(note: str, notes: dict[str, str]) -> str:
    if not note:
        return ""
    return notes.setdefault(note, LETTERS[len(notes) % len(LETTERS)])


def _apart(one: CellView) -> str:
    ours = f"{one.cell.row}, {one.cell.column}, ours: {_ours(one).plain}"
    return f"{ours}. Not comparable with the printed number: {one.cell.note}."


RUN_HEADER = ("seed", "state", "last error", "best error", "iterations", "time", "ms/step", "peak memory", "started")


def run_row(run: StoredRun) -> tuple[str, ...]:
    """A row under RUN_HEADER."""
    line = run.result.get("final") if run.result else run.metrics[-1] if run.metrics else None
    last, lowest = measured(line, "test_error"), best(run)
    seconds = measured(run.result, "seconds") or measured(line, "seconds")
    started = str(run.environment.get("started") or "")[:16].replace("T", " ")
    return (
        str(run.spec.seed),
        condition(run),
        "–" if last is None else number(last),
        "–" if lowest is None else f"{number(lowest[0])} at {lowest[1]:,}",
        f"{progress(run):,}",
        duration(seconds),
        milliseconds(step_ms(run)),
        megabytes(memory_mb(run)),
        started or "–",
    )


def run_rows(group: Group) -> list[tuple[str, ...]]:
    return [run_row(run) for run in group.runs]


TESTS_CAPTION = (
    "Significance tests against the norm with the lowest error. Differences are in points of error; p-values are "
    "Holm-corrected, intervals are not."
)
COMPARISON_HEADER = ("norm", "batch", "learning rate", "iterations", "error (%)", "best (%)", "ms/step", "peak memory")


def comparison_header(comparison: Comparison) -> tuple[str, ...]:
    return (*COMPARISON_HEADER, *(["recalibrated (%)"] if comparison.is_recalibrated else []))


def comparison_rows(comparison: Comparison) -> list[tuple[str | Shown, ...]]:
    """A row per arm and batch size; the best is the mean of each seed's lowest error."""
    rows: list[tuple[str | Shown, ...]] = []
    for label, group in comparison.groups:
        lowest = [found[0] for run in group.having("finished") if (found := best(run))]
        cost = group.cost
        rows.append(
            (
                label,
                group.spec.batch,
                f"{group.spec.base_learning_rate:.4g}",
                f"{group.spec.iterations:,}",
                sampled(group.sample(), group, group.trouble, "no number"),
                "–" if not lowest else number(Sample(lowest).mean),
                milliseconds(cost.step_ms),
                megabytes(cost.memory_mb),
                *([sampled(group.sample(RECALIBRATED), group, "", "–")] if comparison.is_recalibrated else []),
            )
        )
    return rows


def group_number(group: Group) -> str:
    return sampled(group.sample(), group, group.trouble, "no number").plain


def seeds(group: Group) -> str:
    return ", ".join(str(run.spec.seed) for run in group.runs)


def settings(group: Group) -> str:
    """Settings that differ from the defaults, in one line."""
    return (
        ", ".join(f"{name} {value}" for name, value in group.spec.identity.items() if name != "seed") or "all defaults"
    )


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def milliseconds(time: float | None) -> str:
    return "–" if time is None else f"{time:.2f}" if time < 10 else f"{time:.1f}" if time < 100 else f"{time:,.0f}"


def megabytes(size: float | None) -> str:
    return "–" if size is None else f"{size:,.0f} MiB"


SCALE_TITLES = {
    "paper": "The paper's tables and figures",
    "reduced": "The paper's experiments, reduced",
    "smoke": "Smoke check of the paper's experiments",
}
NOTHING_AT_PAPER_SCALE = "No run at paper scale is in the store. These are the printed numbers, and what is missing."
ACCOUNT = (
    "Every number is the error on the test images at the last evaluation of a run, never the best of several "
    "evaluations; the best is given as well, with its iteration. Seeds are averaged: mean ± standard deviation "
    "(n − 1) over n runs. Runs that diverged or are not finished are named, not averaged. Times leave out evaluation."
)


@dataclass(frozen=True)
class Chapter:
    """The paper at one scale, or the comparisons."""

    anchor: str
    title: str
    scale: ScaleView | None = None
    comparisons: tuple[Comparison, ...] = ()

    @property
    def empty(self) -> bool:
        """True if there are printed numbers only."""
        return self.scale is not None and not self.scale.groups


def chapters(page: Page) -> list[Chapter]:
    """Chapters with results first, then the smoke check, then tables without any run."""
    scales = {scale.scale: Chapter(scale.scale, SCALE_TITLES[scale.scale], scale) for scale in page.scales}
    found = [scales[name] for name in ("paper", "reduced") if name in scales and not scales[name].empty]
    if page.comparisons:
        found.append(
            Chapter("others", "Other runs" if found or "smoke" in scales else "Runs", comparisons=page.comparisons)
        )
    found += [scales["smoke"]] if "smoke" in scales else []
    return found + ([scales["paper"]] if "paper" in scales and scales["paper"].empty else [])


def absent(view: FigureView) -> str:
    """The curves of a figure without a run."""
    names = [f"{one.curve.panel}: {one.curve.label}" for one in view.curves if not one.group]
    if len(names) > 6:
        return f"Not run: {len(names)} of {len(view.curves)} curves."
    return f"Not run: {', '.join(names)}." if names else ""
