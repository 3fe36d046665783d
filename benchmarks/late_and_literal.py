"""Let trained MBN networks go on, in the lab and with everything written out, on the last batches of their run; write
how far the two come apart to results/late_and_literal.json.

    memnorm evidence ablation-resnet8 --keep-weights …
    python benchmarks/late_and_literal.py runs path/to/data

Takes every finished run of MBN below the first folder that kept its weights, and whose options the reference has. Both
begin with the trained weights, empty memories and no momentum, in float64.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memnorm.lab import environment
from memnorm.lab.data.plans import order
from memnorm.lab.evidence.findings import model_name
from memnorm.lab.literal import Literal
from memnorm.lab.store import Store, StoredRun
from memnorm.lab.training import Training, load_data, sources

OUT = Path(__file__).resolve().parent.parent / "results/late_and_literal.json"
STEPS = 60  # three times the memory; both milestones are behind
TEST_IMAGES = 1000


def compared(run: StoredRun, data_root: Path) -> dict[str, Any]:
    spec = run.spec.but(precision="float64", test_images=TEST_IMAGES)
    data = load_data(spec, data_root)
    train, test = sources(spec, data)
    lab, literal = Training(spec, data.classes, data.shape, "cpu"), Literal(spec, data.classes, data.shape)
    weights = torch.load(run.path / "weights.pt", weights_only=True)
    for network in (lab.model, literal.network):
        for name, parameter in network.named_parameters():
            parameter.data.copy_(weights[name])
    start = spec.iterations - STEPS
    assert lab.strength is not None
    lab.strength.load_state_dict(lab.strength.state_dict() | {"last_step": start})
    plan = order(
        train.labels,
        sampler=spec.sampler,
        batch_size=spec.batch_size,
        iterations=spec.iterations,
        seed=spec.seed,
        start=start,
        augment=spec.augment,
    )
    for iteration, (images, labels) in enumerate(train.batches(plan), start):
        lab.step(iteration, images, labels)
        literal.step(images, labels, learning_rate=0.01 * spec.base_learning_rate, strength=spec.strength[-1])
    ours, theirs = lab.tally.summary("train") | lab.evaluate(test, 0), literal.training_error()
    unseen: list[tuple[Tensor, Tensor]] = list(lab.swept(test, 0))
    images, labels = (torch.cat(part) for part in zip(*unseen, strict=True))
    theirs |= literal.test_error(images, labels)
    moved = dict(lab.model.named_parameters())
    apart = [
        (moved[name] - wanted).norm() / (wanted - weights[name]).norm()
        for name, wanted in literal.network.named_parameters()
    ]
    return {
        "strength": spec.strength[-1],
        "steps": STEPS,
        "test_images": TEST_IMAGES,
        "apart": max(apart).item(),  # in parts of how far these steps have moved the weights
        "lab": {name: ours[name] for name in theirs},
        "literal": theirs,
    }


def main(runs: str, data_root: str) -> None:
    torch.set_num_threads(1)
    known = [run for run in Store(Path(runs)).runs() if run.spec.norm == "mbn" and not run.spec.norm_options]
    kept = [run for run in known if run.result is not None and (run.path / "weights.pt").exists()]
    if not kept:
        raise SystemExit(f"no finished run of MBN below {runs} has kept its weights; see --keep-weights")
    found = [{"run": run.spec.name, "network": model_name(run.spec), **compared(run, Path(data_root))} for run in kept]
    OUT.write_text(json.dumps({"where": environment.session("cpu", 1, 0), "runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
