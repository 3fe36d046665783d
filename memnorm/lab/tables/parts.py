"""Cells of tables and curves of figures, each with its run.

A cell holds its `RunSpec` at paper scale with seed 0, and the number the paper prints. A curve holds its run alone: the
paper prints no data for its figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memnorm.lab.spec import RunSpec

OURS = "ours: not in the paper"


@dataclass(frozen=True)
class Cell:
    """One number of a table. `spec` None: the cell does not apply, and `note` says why."""

    row: str
    column: str
    spec: RunSpec | None
    printed: float | None  # percent
    metric: str = "test_error"  # or test_error_top5: which field of the last evaluation the number is
    source: Literal["table", "text", "derived", "not printed"] = "table"
    note: str = ""
    quoted: bool = False  # the paper took the number from elsewhere and trained nothing for it

    @property
    def key(self) -> str:
        return f"{self.row}/{self.column}"

    @property
    def comparable(self) -> bool:
        """True if a run of `spec` can be compared with the printed number: the protocols are the same."""
        return self.spec is not None and self.printed is not None and not self.quoted


@dataclass(frozen=True)
class Table:
    """Rows × columns, every pair exactly one cell, in reading order."""

    name: str
    title: str
    caption: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[Cell, ...]

    def cell(self, row: str, column: str) -> Cell:
        return next(cell for cell in self.cells if (cell.row, cell.column) == (row, column))


@dataclass(frozen=True)
class Curve:
    """One run in one panel, drawn once for each of its metrics."""

    label: str
    panel: str
    spec: RunSpec
    style: str  # curves of one style have one colour: `spec.arm` where norms are compared, else the model's title
    metrics: tuple[str, ...] = ("train_error", "test_error")
    dashed: bool = False

    @property
    def key(self) -> str:
        return f"{self.panel}/{self.label}"


@dataclass(frozen=True)
class Figure:
    """Panels side by side. `kind` train-and-test: train thin and test bold in one panel; one-metric: a panel each."""

    name: str
    title: str
    caption: str
    panels: tuple[str, ...]
    curves: tuple[Curve, ...]
    kind: Literal["train-and-test", "one-metric"]
