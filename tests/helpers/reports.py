"""Stores made up for the tests of reports: runs as the trainer would leave them, without training."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from memnorm.lab import tables
from memnorm.lab.spec import RunSpec

ENVIRONMENT = {
    "started": "2031-05-17T10:20:30Z",
    "iteration": 0,
    "threads": 1,
    "device": "cpu",
    "memnorm": "0.1.0",
    "commit": "0123456789ab",
    "torch": "2.9.0",
    "python": "3.11.9",
    "machine": "Linux x86_64, 2 cores, Some Processor",
    "kernels": "torch ops",
}
IMAGES = {"imagenet": 1_281_167, "synthetic": 12, "digits": 1_437}
NORM_EFFECT = {"bn": 1.0, "brn": 0.96, "mbn": 0.92, "normprop": 1.2}
NORM_TIME = {"bn": 1.0, "mbn": 1.1}


def fabricate(
    root: Path,
    spec: RunSpec,
    *,
    error: float | None = None,
    status: str = "finished",
    stop_at: float = 1.0,
    environment: dict[str, Any] | None = None,
    **last: Any,
) -> Path:
    """Write a run that ends with `error` (made up if None) after the fraction `stop_at` of its iterations.

    `last` overrides fields of the last line of metrics.
    """
    draw = random.Random(spec.digest)
    target = _plausible(spec, draw) if error is None else error
    path = root / spec.name
    path.mkdir(parents=True)
    (path / "spec.yaml").write_text(spec.as_yaml(), encoding="utf-8")
    (path / "env.json").write_text(json.dumps({"sessions": [{**ENVIRONMENT, **(environment or {})}]}))
    reached = max(1, int(spec.iterations * stop_at))
    lines = [line for line in _lines(spec, target, draw) if line["iteration"] <= reached]
    if lines and status == "finished":
        lines[-1]["test_error"] = target
        lines[-1].update(last)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if status != "unfinished":
        (path / "result.json").write_text(json.dumps(_result(spec, status, reached, lines), indent=1))
    return path


def _result(spec: RunSpec, status: str, reached: int, lines: list[dict[str, Any]]) -> dict[str, Any]:
    known = [line for line in lines if line["test_error"] is not None]
    best = min(known, key=lambda line: line["test_error"], default=None)
    return {
        "status": status,
        "name": spec.name,
        "iteration": reached - (status == "diverged"),
        "final": lines[-1] if lines else None,
        "best": {"test_error": best["test_error"], "iteration": best["iteration"]} if best else None,
        "parameters": 269_722,
        "seconds": reached * 0.05,
        "digest_of_weights": "00ff",
        "environment": ENVIRONMENT,
        **({"diverged_at": reached} if status == "diverged" else {}),
    }


def _plausible(spec: RunSpec, draw: random.Random) -> float:
    base = {"imagenet": 27.0, "cifar100": 30.0}.get(spec.data, 7.5) * (128 / max(spec.batch_size, 1)) ** 0.3
    return round(
        base * NORM_EFFECT.get(spec.norm, 1.0) * (0.96 if spec.scheme == "double" else 1) + draw.gauss(0, 0.2), 2
    )


def _lines(spec: RunSpec, target: float, draw: random.Random) -> list[dict[str, Any]]:
    found = []
    count = min(spec.evaluations, spec.iterations)
    for index in range(1, count + 1):
        iteration = round(spec.iterations * index / count)
        share = index / count
        stage = sum(share > one for one in spec.milestones)
        above = (2.2, 0.5, 0.06)[min(stage, 2)] * math.exp(-2 * share) * (index < count) + 6 * math.exp(-18 * share)
        test = min(90.0, target * (1 + above * (1 + 0.15 * draw.gauss(0, 1))))
        train = min(92.0, max(0.05, target * (0.1 + above + 0.4 * (1 - share)) * (1 + 0.05 * draw.gauss(0, 1))))
        found.append(
            {
                "iteration": iteration,
                "epoch": round(iteration * spec.batch_size / IMAGES.get(spec.data, 50_000), 4),
                "train_loss": train / 30,
                "train_error": train,
                "train_error_top5": train / 4,
                "test_loss": test / 30,
                "test_error": test,
                "test_error_top5": test / 3,
                "learning_rate": 0.1,
                "strength": spec.strength[min(stage, len(spec.strength) - 1)] if spec.norm == "mbn" else None,
                "seconds": iteration * 0.05,
                "images_per_second": 1000.0,
                "step_ms": 50.0 * NORM_TIME.get(spec.norm, 1.3) * (1.3 if spec.scheme == "double" else 1.0),
                "peak_memory_mb": 400.0 + spec.batch_size,
            }
        )
    return found


def every_run(scale: str, seeds: range = range(1)) -> list[RunSpec]:
    """The runs behind all cells and curves of the paper."""
    return tables.unique_specs(tables.select(["all"]), scale, seeds)


def comparison(**changes: Any) -> list[RunSpec]:
    """What `memnorm compare` runs: three arms, three batch sizes, three seeds."""
    base = RunSpec(model="small", data="digits", iterations=200, evaluations=5, **changes)
    arms = ({"norm": "bn"}, {"norm": "mbn", "scheme": "double"}, {"norm": "group"})
    return [base.but(batch_size=size, seed=seed, **arm) for size in (2, 4, 8) for arm in arms for seed in range(3)]
