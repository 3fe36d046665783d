"""Double-Forward on and off under BN, BRN and MBN: the paper's figure, and as a table the numbers its text gives.

BN-1 and BN-2 are BN with one and with two forwards. In the second forward BN and BRN update their moving averages.
"""

from __future__ import annotations

from typing import Literal

from memnorm.lab.spec import RunSpec
from memnorm.lab.tables.parts import OURS, Cell, Curve, Figure, Table
from memnorm.lab.tables.protocol import CIFAR_MODELS, NORMS, cifar

MODELS = ("ResNet-56", "ResNet-20")
ARMS = {
    f"{norm}-{forwards}": (norm, scheme)
    for norm in ("BN", "BRN", "MBN")
    for forwards, scheme in ((1, "single"), (2, "double"))
}
METRICS = {"test": "test_error", "train": "train_error"}

_IN_CIFAR10 = "printed in the CIFAR-10 table"
Source = Literal["table", "text", "derived"]
PRINTED: dict[str, tuple[float, Source, str]] = {
    "BN-1/ResNet-56": (6.97, "text", "also printed in the CIFAR-10 table"),
    "BN-2/ResNet-56": (6.81, "text", ""),
    "BRN-1/ResNet-56": (
        6.93,
        "derived",
        "6.46 of BRN-2 in the CIFAR-10 table, plus the 0.47 the text puts between them",
    ),
    "BRN-2/ResNet-56": (6.46, "table", _IN_CIFAR10),
    "MBN-1/ResNet-56": (6.53, "text", ""),
    "MBN-2/ResNet-56": (6.23, "table", f"{_IN_CIFAR10}; the text puts it 0.30 below MBN-1"),
    "BN-1/ResNet-20": (8.41, "table", _IN_CIFAR10),
    "BRN-2/ResNet-20": (8.18, "table", _IN_CIFAR10),
    "MBN-2/ResNet-20": (7.93, "table", _IN_CIFAR10),
}
_SIMILAR = "no number in the paper, whose text calls ResNet-20 similar"


def spec(arm: str, model: str) -> RunSpec:
    norm, scheme = ARMS[arm]
    return cifar(CIFAR_MODELS[model], NORMS[norm], scheme=scheme)


def _cell(arm: str, model: str) -> Cell:
    if f"{arm}/{model}" not in PRINTED:
        return Cell(arm, model, spec(arm, model), None, source="not printed", note=f"{OURS}; {_SIMILAR}")
    number, source, note = PRINTED[f"{arm}/{model}"]
    return Cell(arm, model, spec(arm, model), number, source=source, note=note)


TABLE = Table(
    name="double-forward",
    title="Double-Forward: test error (%) on CIFAR-10 with one forward and with two",
    caption="The paper shows ResNet-56 as a figure and gives most of these numbers in its text.",
    rows=tuple(ARMS),
    columns=MODELS,
    cells=tuple(_cell(arm, model) for arm in ARMS for model in MODELS),
)

FIGURE = Figure(
    name="double-forward",
    title="Double-Forward: BN, BRN and MBN on CIFAR-10 with one forward and with two",
    caption="The paper shows ResNet-56. Its text says that ResNet-20 behaves alike, without showing it.",
    panels=tuple(f"{model} {phase}" for model in MODELS for phase in METRICS),
    curves=tuple(
        Curve(arm, f"{model} {phase}", spec(arm, model), spec(arm, model).arm, (metric,))
        for model in MODELS
        for phase, metric in METRICS.items()
        for arm in ARMS
    ),
    kind="one-metric",
)
