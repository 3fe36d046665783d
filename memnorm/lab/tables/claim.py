"""What a claim of the paper is, and where its words and its tables meet.

A `Gap` is a difference between two printed cells that the text states or implies. `fits` does the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from memnorm.lab.tables import cifar10, cifar100, double_forward, imagenet, memory_size, small_batch, strength
from memnorm.lab.tables.parts import Table

_TABLES: dict[str, Table] = {
    module.TABLE.name: module.TABLE
    for module in (cifar10, cifar100, double_forward, imagenet, memory_size, small_batch, strength)
}


@dataclass(frozen=True)
class Gap:
    """`worse` minus `better`, two cells of a table; `stated` as the text rounds it, None where it only says lower."""

    table: str
    worse: tuple[str, str]
    better: tuple[str, str]
    stated: str | None = None

    @property
    def printed(self) -> Decimal:
        """The difference of the printed numbers."""
        return self._number(self.worse) - self._number(self.better)

    @property
    def fits(self) -> bool:
        if self.stated is None:
            return self.printed > 0
        return self.printed.quantize(Decimal(self.stated)) == Decimal(self.stated)

    def _number(self, cell: tuple[str, str]) -> Decimal:
        return Decimal(str(_TABLES[self.table].cell(*cell).printed))


@dataclass(frozen=True)
class Claim:
    """One testable statement. `remark` says where the print is loose or does not agree with itself."""

    name: str
    statement: str
    where: str  # section of the paper
    how: str  # what would test it
    lines: tuple[int, ...] = ()  # of the paper's LaTeX source
    gaps: tuple[Gap, ...] = ()
    remark: str = ""
