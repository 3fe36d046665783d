"""The paper's tables and figures: for each cell and curve, its run and the printed number. No torch in here.

    parts ← protocol ← a module per table and figure ← selection

`TABLES` and `FIGURES` are what there is, `select` picks from them, and `at_scale` turns a paper-scale run into a
shorter one by the rule in `RULES`.
"""

from __future__ import annotations

from collections.abc import Sequence

from memnorm.lab.tables import (
    cifar10,
    cifar100,
    convergence,
    double_forward,
    imagenet,
    imagenet_curves,
    memory_size,
    small_batch,
    strength,
)
from memnorm.lab.tables.parts import Cell, Curve, Figure, Table
from memnorm.lab.tables.protocol import RULES, SCALES, Scale, at_scale
from memnorm.lab.tables.selection import Catalogue, Item, unique_specs, unsupported

__all__ = [
    "FIGURES",
    "RULES",
    "SCALES",
    "TABLES",
    "Cell",
    "Curve",
    "Figure",
    "Item",
    "Scale",
    "Table",
    "at_scale",
    "places",
    "select",
    "unique_specs",
    "unsupported",
]

TABLES: dict[str, Table] = {
    module.TABLE.name: module.TABLE
    for module in (cifar10, cifar100, imagenet, small_batch, strength, memory_size, double_forward)
}
FIGURES: dict[str, Figure] = {
    module.FIGURE.name: module.FIGURE for module in (double_forward, convergence, imagenet_curves)
}
_CATALOGUE = Catalogue(TABLES, FIGURES)


def select(names: Sequence[str], only: Sequence[str] = ()) -> list[Item]:
    """Cells and curves by table and figure names (or all), thinned out by ROW/COLUMN or PANEL/LABEL patterns."""
    return _CATALOGUE.select(names, only)


def places(scale: str = "paper") -> dict[str, list[Item]]:
    """Every cell and curve by the digest of its run with seed 0 at a scale: where a stored run belongs."""
    return _CATALOGUE.places(scale)
