"""The cost of a training step on this machine, relative to the same step with batch norm.

Arms take turns within each round, so that a busy moment of the machine affects all of them. A second batch norm shows
the noise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from memnorm.lab.bench.clock import Ratio, ratios, take_turns
from memnorm.lab.spec import RunSpec
from memnorm.lab.training import Training

ARMS = {
    "BN": {"norm": "bn"},
    "BN again": {"norm": "bn"},
    "two-way": {"norm": "two_way"},
    "MBN-2": {"norm": "mbn", "scheme": "double"},
}


def measure(
    arms: Mapping[str, Mapping[str, Any]] = ARMS,
    *,
    model: str = "resnet20",
    batch_size: int = 8,
    rounds: int = 12,
    evaluation: bool = False,
) -> list[Ratio]:
    """Whole training steps, or forwards in eval mode, on noise images of CIFAR's size. The first arm is the measure."""
    random = torch.Generator().manual_seed(0)
    images = torch.randn(batch_size, 3, 32, 32, generator=random)
    labels = torch.randint(10, (batch_size,), generator=random)

    def stepper(arm: Mapping[str, Any]) -> Callable[[], object]:
        training = Training(RunSpec(model=model, batch_size=batch_size, **arm), 10, (3, 32, 32), "cpu")
        iterations = itertools.count()
        if evaluation:
            training.step(next(iterations), images, labels)
            training.model.eval()
            return lambda: training.model(images)
        return lambda: training.step(next(iterations), images, labels)

    steps = {name: stepper(arm) for name, arm in arms.items()}
    with torch.set_grad_enabled(not evaluation):
        return ratios(take_turns(steps, rounds=rounds))
