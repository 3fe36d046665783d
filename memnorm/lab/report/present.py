"""The tables of a report as texts, the same for HTML and Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memnorm.lab.comparison import (
    RECALIBRATED,
    Comparison,
    Group,
    best,
    condition,
    measured,
    memory_mb,
    progress,
    step_ms,
)
from memnorm.lab.report.collect import NOT_APPLICABLE, CellView, Section, TableView
from memnorm.lab.significance import Sample, number
from memnorm.lab.store import StoredRun
from memnorm.lab.verdict import TEST_HEADER

APART = "see below the table"
NOTHING_AT_PAPER_SCALE = "No run at paper scale is in the store. These are the printed numbers, and what is missing."
SMOKE_CAPTION = "A check that the cells run: the numbers mean nothing."
FROM_TEXT = "from the paper's text"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ERRORS_CAPTION = "Error at the last evaluation, mean ± standard deviation; best: mean of each seed's lowest."
TESTS_CAPTION = (
    "Significance tests against the norm with the lowest error. Differences are in points of error; p-values are "
    "Holm-corrected, intervals are not."
)
ACCOUNT = (
    "Every number is the error on the test images at the last evaluation of a run, never the best of several "
    "evaluations; the best is given as well, with its iteration. Seeds are averaged: mean ± standard deviation "
    "(n − 1) over n runs. Runs that diverged or are not finished are named, not averaged. Times leave out evaluation."
)


@dataclass(frozen=True)
class Shown:
    """The texts of a table cell: number, spread, trouble, footnote mark, link to its runs."""

    text: str
    kind: str = "value"  # or missing, none, trouble: the style in HTML
    spread: str = ""
    trouble: str = ""
    mark: str = ""
    anchor: str = ""
    printed: bool = False  # a number of the paper

    @property
    def plain(self) -> str:
        trouble = f" ({self.trouble})" if self.trouble else ""
        mark = f" [{self.mark}]" if self.mark else ""
        return f"{self.text}{f' {self.spread}' if self.spread else ''}{trouble}{mark}"


@dataclass(frozen=True)
class Grid:
    """A table as HTML and Markdown show it."""

    title: str
    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str | Shown]]
    words: tuple[int, ...] = ()  # columns that hold words, which are aligned to the left
    notes: tuple[tuple[str, str], ...] = ()  # letter and text
    remarks: tuple[str, ...] = ()


def sampled(sample: Sample | None, group: Group | None, trouble: str, missing: str) -> Shown:
    anchor = group.anchor if group else ""
    if sample is None:
        kind = "trouble" if group else "none" if missing == NOT_APPLICABLE else "missing"
        return Shown(trouble or missing, kind, anchor=anchor)
    spread = "" if sample.sd is None else f"± {number(sample.sd)} "
    return Shown(number(sample.mean), spread=f"{spread}(n = {sample.n})", trouble=trouble, anchor=anchor)


def section_grid(section: Section) -> Grid:
    return Grid(section.title, "", section.header, section.rows)


def paper_grid(view: TableView) -> Grid:
    """A table of the paper: at paper scale printed numbers and ours, else ours only."""
    notes: dict[str, str] = {}
    rows: dict[str, list[str | Shown]] = {row: [row] for row in view.table.rows}
    for one in view.cells:
        note = _note(one, view)
        mark = notes.setdefault(note, LETTERS[len(notes) % len(LETTERS)]) if note else ""
        rows[one.cell.row] += _beside_print(one, mark) if view.beside_print else [replace(_ours(one), mark=mark)]
    columns = view.table.columns
    pairs = [f"{column}: {whose}" for column in columns for whose in ("paper", "ours")]
    return Grid(
        title=view.table.title + ("" if view.beside_print else f" ({view.scale} scale)"),
        caption=view.table.caption if view.scale != "smoke" else SMOKE_CAPTION,
        header=("", *(pairs if view.beside_print else columns)),
        rows=tuple(rows.values()),
        notes=tuple((letter, text) for text, letter in notes.items()),
        remarks=tuple(_apart(one) for one in view.cells if view.beside_print and one.apart),
    )


def _ours(one: CellView) -> Shown:
    return sampled(one.ours, one.group, one.status, one.missing)


def _beside_print(one: CellView, mark: str) -> list[Shown]:
    """The printed number and ours, the footnote at the one it describes."""
    ours = Shown(APART, "missing", anchor=one.group.anchor) if one.apart and one.group else _ours(one)
    if one.cell.printed is None:
        return [Shown("–", "none", printed=True), replace(ours, mark=mark)]
    return [Shown(number(one.cell.printed), mark=mark, printed=True), ours]


def _note(one: CellView, view: TableView) -> str:
    cell = one.cell
    if cell.spec is None:
        return cell.note
    if not view.beside_print or (cell.source == "not printed" and one.group is None):
        return ""
    words = [FROM_TEXT] if cell.source == "text" and cell.printed is not None else []
    words += ["derived"] if cell.source == "derived" else []
    return ": ".join([*words, cell.note] if cell.note else words)


def _apart(one: CellView) -> str:
    ours = f"{one.cell.row}, {one.cell.column}, ours: {_ours(one).plain}"
    return f"{ours}. Not comparable with the printed number: {one.cell.note}."


def comparison_grid(comparison: Comparison) -> Grid:
    """A row per arm and batch size; the best is the mean of each seed's lowest error."""
    header = ["norm", "batch", "learning rate", "iterations", "error (%)", "best (%)", "ms/step", "peak memory"]
    header += ["recalibrated (%)"] if comparison.is_recalibrated else []
    rows: list[list[str | Shown]] = []
    for label, group in comparison.groups:
        lowest = [found[0] for run in group.having("finished") if (found := best(run))]
        row: list[str | Shown] = [label, group.spec.batch, f"{group.spec.base_learning_rate:.4g}"]
        row += [f"{group.spec.iterations:,}", sampled(group.sample(), group, group.trouble, "no number")]
        row += ["–" if not lowest else number(Sample(lowest).mean)]
        row += [milliseconds(group.cost.step_ms), megabytes(group.cost.memory_mb)]
        row += [sampled(group.sample(RECALIBRATED), group, "", "–")] if comparison.is_recalibrated else []
        rows.append(row)
    return Grid(comparison.title, ERRORS_CAPTION, header, rows, words=(4,))


def tests_grid(comparison: Comparison) -> Grid:
    shown = comparison.verdict.shown if comparison.verdict else ()
    title = f"Significance tests: {comparison.title}"
    return Grid(title, TESTS_CAPTION, TEST_HEADER, [one.cells for one in shown], words=(1, 2))


def runs_grid(group: Group) -> Grid:
    header = ("seed", "state", "last error", "best error", "iterations", "time", "ms/step", "peak memory", "started")
    seeds = ", ".join(str(run.spec.seed) for run in group.runs)
    return Grid(f"Runs of {group.title}", f"Seeds {seeds}", header, [_run(run) for run in group.runs], words=(1,))


def _run(run: StoredRun) -> tuple[str, ...]:
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


def group_number(group: Group) -> str:
    return sampled(group.sample(), group, group.trouble, "no number").plain


def settings(group: Group) -> str:
    """Settings that differ from the defaults, in one line."""
    changed = [f"{name} {value}" for name, value in group.spec.identity.items() if name != "seed"]
    return ", ".join(changed) or "all defaults"


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
