"""Recalibrate trained MBN networks with their memory taking part, as until 2026-11-17, and without it, as since; write
the test errors to results/recalibration.json.

    memnorm train --model resnet8 --norm mbn --batch-size 8 --keep-weights
    python benchmarks/recalibration_both_ways.py runs path/to/data

Takes every finished run of MBN below the first folder that kept its weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from memnorm import MemorizedBatchNorm2d
from memnorm.lab import environment
from memnorm.lab.store import Store, StoredRun
from memnorm.lab.training import Training, load_data, recalibration_source, sources

OUT = Path(__file__).resolve().parent.parent / "results/recalibration.json"


def both_ways(run: StoredRun, data_root: Path) -> dict[str, Any]:
    data = load_data(run.spec, data_root)
    measured, (_, test) = recalibration_source(run.spec, data), sources(run.spec, data)
    assert measured is not None
    training = Training(run.spec, data.classes, data.shape, "cpu", bool(run.environment.get("channels_last")))
    training.model.load_state_dict(torch.load(run.path / "weights.pt", weights_only=True))
    without = training.evaluate_recalibrated(measured, test, 0)
    with patch.object(MemorizedBatchNorm2d, "set_strength", lambda *_: None):  # which would set the memory aside
        taking_part = training.evaluate_recalibrated(measured, test, 0)
    return {
        "run": run.spec.name,
        "as_it_is": training.evaluate(test, 0)["test_error"],
        "with_memory": taking_part["test_error_recalibrated"],
        "without": without["test_error_recalibrated"],
    }


def main(runs: str, data_root: str) -> None:
    torch.set_num_threads(1)
    kept = [run for run in Store(Path(runs)).runs() if run.spec.norm == "mbn" and (run.path / "weights.pt").exists()]
    found = [both_ways(run, Path(data_root)) for run in kept if run.result is not None]
    if not found:
        raise SystemExit(f"no finished run of MBN below {runs} has kept its weights; see --keep-weights")
    OUT.write_text(json.dumps({"where": environment.session("cpu", 1, 0), "runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
