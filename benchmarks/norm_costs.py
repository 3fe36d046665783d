"""Measure what each norm costs on this machine, in training and in eval, and write results/norm-costs.json.

Run it with nothing else running. ResNet-20 at batch size 8; NormProp, which residual networks do not take, on NIN. The
norms take turns, and the second BN is the noise floor.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import torch

from memnorm import norms
from memnorm.lab import environment
from memnorm.lab.bench.clock import Ratio, ratios, take_turns
from memnorm.lab.spec import RunSpec
from memnorm.lab.training import Training

OUT = Path(__file__).resolve().parent.parent / "results/norm-costs.json"
ROUNDS, BATCH_SIZE = 25, 8


def measure(names: dict[str, str], model: str, *, evaluation: bool) -> list[Ratio]:
    """Whole training steps, or forwards in eval mode, on noise images of CIFAR's size; ratios to the first norm."""
    random = torch.Generator().manual_seed(0)
    images = torch.randn(BATCH_SIZE, 3, 32, 32, generator=random)
    labels = torch.randint(10, (BATCH_SIZE,), generator=random)

    def call(norm: str) -> Callable[[], object]:
        spec = RunSpec(model=model, batch_size=BATCH_SIZE, norm=norm)
        training, iterations = Training(spec, 10, (3, 32, 32), "cpu"), itertools.count()
        if evaluation:
            training.step(next(iterations), images, labels)
            training.model.eval()
            return lambda: training.model(images)
        return lambda: training.step(next(iterations), images, labels)

    calls = {name: call(norm) for name, norm in names.items()}
    with torch.set_grad_enabled(not evaluation):
        return ratios(take_turns(calls, rounds=ROUNDS))


def main() -> None:
    others = [name for name in norms.available() if name not in ("bn", "normprop")]
    costs: dict[str, dict] = {}
    for model, names in (("resnet20", others), ("nin", ["normprop"])):
        measured = {"bn": "bn", "bn again": "bn", **{name: name for name in names}}
        for what in ("train", "eval"):
            for cost in measure(measured, model, evaluation=what == "eval"):
                entry = costs.setdefault(f"{model}/{cost.name}", {})
                entry[what] = {key: round(value, 4) for key, value in vars(cost).items() if key != "name"}
    where = environment.session("cpu", torch.get_num_threads(), 0)
    record = {"batch_size": BATCH_SIZE, "rounds": ROUNDS, "where": where, "costs": costs}
    OUT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
