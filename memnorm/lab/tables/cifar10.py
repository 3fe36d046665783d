"""Table of the normalization methods on CIFAR-10; the one on CIFAR-100 has the same shape and protocol."""

from __future__ import annotations

from collections.abc import Mapping

from memnorm.lab.tables.parts import OURS, Cell, Table
from memnorm.lab.tables.protocol import CIFAR_MODELS, NORMS, cifar

PRINTED: dict[str, tuple[float | None, ...]] = {  # NIN, ResNet-20, ResNet-56, VGG
    "NormProp": (7.25, None, None, 11.18),
    "BN": (7.54, 8.41, 6.97, 6.75),
    "BRN": (None, 8.18, 6.46, 6.64),
    "MBN": (None, 7.93, 6.23, 6.43),
}
NOTES = {
    "MBN/ResNet-20": (
        "the paper does not state the memory size of its main tables; with 20, its memory-size table prints 7.80"
    )
}


def grid(data: str, printed: Mapping[str, tuple[float | None, ...]], notes: Mapping[str, str]) -> tuple[Cell, ...]:
    """Methods × models on one of the CIFAR sets."""
    return tuple(
        _cell(row, column, data, number, notes.get(f"{row}/{column}", ""))
        for row, numbers in printed.items()
        for column, number in zip(CIFAR_MODELS, numbers, strict=True)
    )


def _cell(row: str, column: str, data: str, number: float | None, note: str) -> Cell:
    if row == "NormProp" and column.startswith("ResNet"):
        why = "does not apply: NormProp cannot be put into residual blocks as they are"
        return Cell(row, column, None, None, source="not printed", note=why)
    spec = cifar(CIFAR_MODELS[column], NORMS[row], data=data)
    if number is None:
        return Cell(row, column, spec, None, source="not printed", note=OURS)
    return Cell(row, column, spec, number, note=note)


TABLE = Table(
    name="cifar10",
    title="CIFAR-10: test error (%) by normalization method",
    caption="MBN and BRN with Double-Forward, BN and NormProp with a single forward.",
    rows=tuple(PRINTED),
    columns=tuple(CIFAR_MODELS),
    cells=grid("cifar10", PRINTED, NOTES),
)
