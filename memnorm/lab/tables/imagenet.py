"""Table of BN against MBN on ImageNet. One run gives its top-1 and its top-5 cell."""

from __future__ import annotations

from memnorm.lab.tables.parts import OURS, Cell, Table
from memnorm.lab.tables.protocol import IMAGENET_MODELS, NORMS, imagenet

COLUMNS = {  # (norm, metric)
    "top-1 BN": ("BN", "test_error"),
    "top-1 MBN": ("MBN", "test_error"),
    "top-5 BN": ("BN", "test_error_top5"),
    "top-5 MBN": ("MBN", "test_error_top5"),
}
PRINTED: dict[str, tuple[float | None, ...]] = {
    "GoogLeNet": (27.31, None, 9.15, None),
    "PReLU-net": (24.27, None, 7.38, None),
    "VGG": (28.07, 27.33, 9.33, 8.91),
    "ResNet-18": (30.43, 29.79, 10.76, 10.23),
    "ResNet-34": (26.73, 25.85, 8.74, 8.37),
    "ResNet-50": (24.01, 23.67, 7.02, 6.74),
}
QUOTED_ROWS = ("GoogLeNet", "PReLU-net")
QUOTED = "the paper quotes this number and trained no such model; a run of ours has another protocol and model details"


def _cell(row: str, column: str, number: float | None) -> Cell:
    norm, metric = COLUMNS[column]
    spec = imagenet(IMAGENET_MODELS[row], NORMS[norm])
    if number is None:
        return Cell(row, column, spec, None, metric, source="not printed", note=OURS)
    if row in QUOTED_ROWS:
        return Cell(row, column, spec, number, metric, note=QUOTED, quoted=True)
    return Cell(row, column, spec, number, metric)


TABLE = Table(
    name="imagenet",
    title="ImageNet: test error (%), single crop",
    caption="VGG is VGG-16 with a norm after each convolution. GoogLeNet and PReLU-net are quoted in the paper.",
    rows=tuple(PRINTED),
    columns=tuple(COLUMNS),
    cells=tuple(
        _cell(row, column, number)
        for row, numbers in PRINTED.items()
        for column, number in zip(COLUMNS, numbers, strict=True)
    ),
)
