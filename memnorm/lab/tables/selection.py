"""Which cells and curves a command means, and the runs behind them.

Cells of several tables can be the same run (ResNet-56 with MBN stands in four tables): it has one specification, one
digest, and is trained once.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from memnorm.lab.errors import UsageError
from memnorm.lab.spec import RunSpec
from memnorm.lab.tables.parts import Cell, Curve, Figure, Table
from memnorm.lab.tables.protocol import at_scale
from memnorm.text import suggestion


class Item(NamedTuple):
    """A cell or a curve, and the name of the table or figure it is part of."""

    name: str
    part: Cell | Curve


class Catalogue:
    """Tables and figures by name. A table and a figure may share a name, which then means both."""

    def __init__(self, tables: Mapping[str, Table], figures: Mapping[str, Figure]):
        self.tables, self.figures = tables, figures
        self.names = tuple(dict.fromkeys([*tables, *figures]))

    def select(self, names: Sequence[str], only: Sequence[str] = ()) -> list[Item]:
        """Cells and curves of the named tables and figures, in the paper's order of presentation.

        `only` keeps those that match one of its patterns: ROW/COLUMN for a table, PANEL/LABEL for a figure, in any
        case, with `*` for anything.
        """
        chosen = self._named(names)
        items = [item for name in self.names if name in chosen for item in self._items(name)]
        if not only:
            return items
        for pattern in only:
            if not any(_matches(item.part, pattern) for item in items):
                raise UsageError(self._no_match(pattern, chosen))
        return [item for item in items if any(_matches(item.part, pattern) for pattern in only)]

    def _named(self, names: Sequence[str]) -> set[str]:
        if not names:
            raise UsageError(f"name what to reproduce: all, or some of {', '.join(self.names)}")
        chosen: set[str] = set()
        for name in names:
            wanted = name.strip().lower().replace("_", "-")
            if wanted != "all" and wanted not in self.names:
                near = difflib.get_close_matches(wanted, [*self.names, "all"], n=3, cutoff=0.5)
                raise UsageError(
                    f"no table or figure {name!r}.{suggestion(near)} There are {', '.join(self.names)}, and all."
                )
            chosen.update(self.names if wanted == "all" else [wanted])
        return chosen

    def _items(self, name: str) -> list[Item]:
        parts: list[Cell | Curve] = []
        if name in self.tables:
            parts += self.tables[name].cells
        if name in self.figures:
            parts += self.figures[name].curves
        return [Item(name, part) for part in parts]

    def _no_match(self, pattern: str, chosen: set[str]) -> str:
        lines = [
            f"only {pattern!r} matches nothing: patterns are ROW/COLUMN (PANEL/LABEL in a figure), * for anything."
        ]
        for name in (one for one in self.names if one in chosen):
            if name in self.tables:
                table = self.tables[name]
                lines.append(f"  table {name}: rows {_list(table.rows)}; columns {_list(table.columns)}")
            if name in self.figures:
                figure = self.figures[name]
                labels = dict.fromkeys(curve.label for curve in figure.curves)
                lines.append(f"  figure {name}: panels {_list(figure.panels)}; labels {_list(labels)}")
        return "\n".join(lines)

    def places(self, scale: str = "paper") -> dict[str, list[Item]]:
        """Every cell and curve by the digest of its run with seed 0 at a scale: where a stored run belongs."""
        found: dict[str, list[Item]] = {}
        for item in self.select(["all"]):
            if item.part.spec is not None:
                found.setdefault(at_scale(item.part.spec, scale).digest, []).append(item)
        return found


def _matches(part: Cell | Curve, pattern: str) -> bool:
    return fnmatch.fnmatchcase(part.key.lower(), pattern.strip().lower())


def _list(labels: Iterable[str]) -> str:
    return ", ".join(labels)


def unique_specs(items: Iterable[Item], scale: str = "paper", seeds: Iterable[int] = (0,)) -> list[RunSpec]:
    """The runs behind the items, each once, in order of first appearance; with all seeds of a run side by side."""
    seeds = tuple(seeds)
    specs = (at_scale(item.part.spec, scale) for item in items if item.part.spec is not None)
    runs = (spec.but(seed=seed) for spec in specs for seed in seeds)
    return list({run.digest: run for run in runs}.values())


def unsupported(spec: RunSpec, registered: Mapping[str, bool]) -> str | None:
    """The reason that a run cannot be made with these norms; None if it can.

    `registered` maps the name of each norm to True if its layers record, which Double-Forward needs. Plain batch norm
    is always available and can always be recalibrated; it records only if `registered` says so.
    """
    if spec.norm != "bn" and spec.norm not in registered:
        return f"the norm {spec.norm!r} is not registered in this version of memnorm"
    if spec.scheme == "double" and not registered.get(spec.norm, False):
        return f"Double-Forward needs a norm that records its statistics, and {spec.norm!r} does not"
    if spec.recalibrate and spec.norm != "bn" and not registered[spec.norm]:
        return f"recalibrate needs running statistics, and {spec.norm!r} has none"
    return None
