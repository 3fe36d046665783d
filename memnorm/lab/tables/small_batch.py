"""Table of batch sizes: ResNet-56 on CIFAR-10 with as many iterations as at batch 128, so batch 8 sees 12.5 epochs."""

from __future__ import annotations

from memnorm.lab.tables.parts import Cell, Table
from memnorm.lab.tables.protocol import NORMS, cifar

COLUMNS = ("BN", "MBN")
PRINTED = {
    8: (19.64, 15.37),
    16: (13.26, 11.87),
    32: (10.45, 9.37),
    64: (8.60, 7.79),
    128: (6.97, 6.23),
}

TABLE = Table(
    name="small-batch",
    title="Small batches: test error (%) of ResNet-56 on CIFAR-10",
    caption="Rows are batch sizes. The same number of iterations and the same learning rate 0.1 at every batch size.",
    rows=tuple(str(size) for size in PRINTED),
    columns=COLUMNS,
    cells=tuple(
        Cell(str(size), column, cifar("resnet56", NORMS[column], batch_size=size), number)
        for size, numbers in PRINTED.items()
        for column, number in zip(COLUMNS, numbers, strict=True)
    ),
)
