"""Contents of a report before it is HTML, Markdown or CSV: comparisons, and the paper's tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memnorm.lab.comparison import Comparison
from memnorm.lab.group import Group
from memnorm.lab.significance import Sample
from memnorm.lab.spec import RunSpec
from memnorm.lab.tables.parts import Cell, Curve, Figure, Table

NOT_RUN, NOT_APPLICABLE, UNAVAILABLE, APART = "not run", "–", "norm not available", "see below the table"


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
    """The runs of the paper's tables and figures at one scale."""

    scale: str
    rules: str
    tables: tuple[TableView, ...]
    figures: tuple[FigureView, ...]


@dataclass(frozen=True)
class Grid:
    """A table of texts in a section; without a title it has the section's."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Section:
    """Paragraphs and tables that the caller adds at the top. Plain text; it is escaped."""

    title: str
    paragraphs: Sequence[str] = ()
    grids: Sequence[Grid] = ()


@dataclass(frozen=True)
class Page:
    """The contents of a report."""

    title: str
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]
    scales: tuple[ScaleView, ...]
    comparisons: tuple[Comparison, ...]
    groups: tuple[Group, ...]
    problems: tuple[str, ...]
