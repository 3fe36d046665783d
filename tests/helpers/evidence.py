"""Records of our studies, made up: errors by arm, with as little as a test wants to say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.reports import fabricate

from memnorm.lab.evidence import STUDIES, Study
from memnorm.lab.evidence.findings import Findings
from memnorm.lab.store import Store

FIRST, LONG, TINY = "small-batch-resnet20", "ablation-resnet8", "tiny-batch-resnet8"
HEADLINE, CHEAPER = "headline-resnet56", "cheaper-second-forward"
BETTER = {"BN": [34.0, 34.4, 33.8, 34.1, 34.2], "MBN-2": [31.0, 31.5, 30.7, 31.3, 31.1]}
WORSE = {"BN": BETTER["MBN-2"], "MBN-2": BETTER["BN"]}
EQUAL = {"BN": [34.0, 33.0, 34.5, 33.5, 34.0], "MBN-2": [33.6, 33.5, 34.0, 34.0, 33.8]}
BENCH = {
    "where": {"machine": "Some machine", "threads": 2},
    "layer": {"shapes": [{"eval": {"ratio": 1.0}}]},
    "step": {
        "networks": [
            {
                "model": "resnet20",
                "batch_size": 128,
                "arms": [
                    {
                        "name": name,
                        "ratio": ratio,
                        "low": ratio - 0.05,
                        "high": ratio + 0.05,
                        "milliseconds of": {"forward": 100.0, "backward": 210.0, "update": 1.0},
                    }
                    for name, ratio in (("BN", 1.0), ("MBN-1", 0.9), ("MBN-2", 1.3))
                ],
            }
        ]
    },
}


def study(name: str) -> Study:
    return next(one for one in STUDIES if one.name == name)


def record(root: Path, name: str, errors: dict[str, list[float | None]], size: int | None = None, **last: Any) -> None:
    """Runs of a study: for each arm's label the error of each seed from 0 on, None for one that diverged. Of an arm
    whose learning rate is to be chosen, trials that choose 0.1.
    """
    chosen = study(name)
    for arm in chosen.arms:
        if arm.label not in errors or size not in (None, arm.spec.batch_size):
            continue
        for index, trial in enumerate(arm.trials(chosen.holdout)):
            write(root, trial, 40.0 + index)
        for seed, error in enumerate(errors[arm.label]):
            more = last if arm.spec.recalibrate else {}
            write(root, arm.run(seed, arm.rates[0] if arm.rates else None), error, **more)


def write(root: Path, spec: Any, error: float | None, **last: Any) -> None:
    if (root / spec.name).exists():
        return
    if error is None:
        fabricate(root, spec, status="diverged", stop_at=0.3)
    else:
        fabricate(root, spec, error=error, **last)


def found(root: Path) -> Findings:
    return Findings(STUDIES, Store(root).runs())


def cells_of(text: str, label: str) -> list[str]:
    """The cells of the only row that begins so."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {label} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]
