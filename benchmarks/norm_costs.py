"""Measure what each norm costs on this machine, in training and in eval, and write results/norm-costs.json.

Run it with nothing else running. ResNet-20 at batch size 8; NormProp, which residual networks do not take, on NIN. The
norms take turns, and the second BN is the noise floor.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from memnorm import norms
from memnorm.lab import environment
from memnorm.lab.cost import measure

OUT = Path(__file__).resolve().parent.parent / "results/norm-costs.json"
ROUNDS = 25


def main() -> None:
    others = [name for name in norms.available() if name not in ("bn", "normprop")]
    pair = {"bn": {"norm": "bn"}, "bn again": {"norm": "bn"}}
    record: dict[str, dict] = {}
    for model, names in (("resnet20", others), ("nin", ["normprop"])):
        arms = {**pair, **{name: {"norm": name} for name in names}}
        for what in ("train", "eval"):
            for cost in measure(arms, model=model, rounds=ROUNDS, evaluation=what == "eval"):
                entry = record.setdefault(f"{model}/{cost.name}", {})
                entry[what] = {key: round(value, 4) for key, value in vars(cost).items() if key != "name"}
    where = environment.session("cpu", torch.get_num_threads(), 0)
    OUT.write_text(json.dumps({"batch_size": 8, "rounds": ROUNDS, "where": where, "costs": record}, indent=1) + "\n")


if __name__ == "__main__":
    main()
