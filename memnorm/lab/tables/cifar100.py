"""Table of the normalization methods on CIFAR-100."""

from __future__ import annotations

from memnorm.lab.tables.cifar10 import grid
from memnorm.lab.tables.parts import Table
from memnorm.lab.tables.protocol import CIFAR_MODELS

PRINTED: dict[str, tuple[float | None, ...]] = {  # NIN, ResNet-20, ResNet-56, VGG
    "NormProp": (29.24, None, None, 39.55),
    "BN": (30.26, 32.28, 29.27, 27.80),
    "BRN": (None, 32.04, 29.17, 27.44),
    "MBN": (None, 31.75, 28.97, 26.79),
}

TABLE = Table(
    name="cifar100",
    title="CIFAR-100: test error (%) by normalization method",
    caption="MBN and BRN with Double-Forward, BN and NormProp with a single forward.",
    rows=tuple(PRINTED),
    columns=tuple(CIFAR_MODELS),
    cells=grid("cifar100", PRINTED, {}),
)
