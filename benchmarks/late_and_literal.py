"""Continue the training of MBN networks on the last batches of their run, in the lab and with everything written out.
The distance between the two is written to results/late_and_literal.json.

    memnorm train --model resnet8 --norm mbn --batch-size 8 --keep-weights
    python benchmarks/late_and_literal.py runs path/to/data

This takes every finished run of MBN below the first folder that kept its weights, and names the others with the reason.
Both begin with the trained weights, empty memories and no momentum, in float64, and see the same images.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from literal import LiteralTraining

from memnorm.lab import environment
from memnorm.lab.errors import UsageError
from memnorm.lab.store import Store, StoredRun
from memnorm.lab.training import Training, drawn, load_data, sources
from memnorm.schedule import in_steps

OUT = Path(__file__).resolve().parent.parent / "results/late_and_literal.json"
STEPS = 60  # three times the memory
TEST_IMAGES = 1000


def compared(run: StoredRun, data_root: Path | None, steps: int, test_images: int) -> dict[str, Any]:
    """How far the lab and what is written out are apart after these steps.

    Raises:
        UsageError: the run is not of the kind that can be compared.
    """
    spec = run.spec.but(precision="float64", test_images=test_images)
    start = spec.iterations - steps
    last = in_steps(spec.milestones[-1], spec.iterations) if spec.milestones else 0
    if spec.schedule != "step" or spec.warmup or start < last:
        raise UsageError(f"the last {steps} steps of {run.spec.name} are not all behind the last milestone")
    data = load_data(spec, data_root)
    train, test = sources(spec, data)
    literal = LiteralTraining(spec, data.classes, data.shape)
    lab = Training(spec, data.classes, data.shape, "cpu", bool(run.environment.get("channels_last")))
    weights = torch.load(run.path / "weights.pt", weights_only=True)
    for network in (lab.model, literal.network):
        for name, parameter in network.named_parameters():
            parameter.data.copy_(weights[name])
    assert lab.strength is not None
    lab.strength.load_state_dict(lab.strength.state_dict() | {"last_step": start})
    rate = spec.base_learning_rate / 10 ** len(spec.milestones)
    for iteration, (images, labels) in enumerate(train.batches(drawn(spec, train.labels, start)), start):
        if not lab.step(iteration, images, labels):
            raise UsageError(f"{run.spec.name} diverges when training continues")
        literal.step(images, labels, learning_rate=rate, strength=spec.strength[-1])
    theirs = literal.training_error()
    images, labels = (torch.cat(part) for part in zip(*lab.swept(test, 0), strict=True))
    theirs |= literal.test_error(images, labels)
    ours, moved = lab.tally.summary("train") | lab.evaluate(test, 0), dict(lab.model.named_parameters())
    apart = [
        (moved[name] - wanted).norm() / (wanted - weights[name]).norm()
        for name, wanted in literal.network.named_parameters()
    ]
    return {
        "run": run.spec.name,
        "network": spec.model.replace("resnet", "ResNet-"),
        "strength": spec.strength[-1],
        "channels_last": bool(run.environment.get("channels_last")),
        "apart": torch.stack(apart).max().item(),  # in parts of how far these steps have moved the weights
        "lab": {name: ours[name] for name in theirs},
        "literal": theirs,
    }


def main(runs: str, data_root: str) -> None:
    torch.set_num_threads(1)
    found = []
    for run in Store(Path(runs)).runs():
        if run.spec.norm == "mbn" and run.result is not None and (run.path / "weights.pt").exists():
            try:
                found.append(compared(run, Path(data_root), STEPS, TEST_IMAGES))
            except UsageError as error:
                print(error)
    if not found:
        raise SystemExit(f"no finished run of MBN below {runs} that kept its weights can be compared; --keep-weights")
    where = environment.session("cpu", 1, 0)
    record = {"where": where, "steps": STEPS, "test_images": TEST_IMAGES, "runs": found}
    OUT.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
