"""What a training step costs on this machine, as ratios to the same step with batch norm.

Arms take turns within each round, so that a busy moment of the machine falls on all of them; a second batch norm among
them shows how far two equal things differ here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memnorm.lab.spec import RunSpec
from memnorm.lab.training import Training

ARMS = {
    "BN": {"norm": "bn"},
    "BN again": {"norm": "bn"},
    "MBN-1": {"norm": "mbn", "scheme": "single"},
    "MBN-2": {"norm": "mbn", "scheme": "double"},
}


@dataclass(frozen=True)
class StepCost:
    """Median time of a step, and its ratio to batch norm's, with the quartiles of the ratio over rounds."""

    arm: str
    milliseconds: float
    ratio: float
    low: float
    high: float


def measure(
    arms: Mapping[str, Mapping[str, Any]] = ARMS,
    *,
    model: str = "resnet20",
    batch_size: int = 8,
    rounds: int = 12,
    evaluation: bool = False,
) -> list[StepCost]:
    """Whole training steps, or forwards in eval mode, on noise images of CIFAR's size. The first arm is the measure."""
    random = torch.Generator().manual_seed(0)
    images = torch.randn(batch_size, 3, 32, 32, generator=random)
    labels = torch.randint(10, (batch_size,), generator=random)

    def stepper(arm: Mapping[str, Any]) -> Callable[[int], object]:
        training = Training(RunSpec(model=model, batch_size=batch_size, **arm), 10, (3, 32, 32), "cpu")
        if evaluation:
            training.step(0, images, labels)
            training.model.eval()
            return lambda iteration: training.model(images)
        return lambda iteration: training.step(iteration, images, labels)

    steps = {name: stepper(arm) for name, arm in arms.items()}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    with torch.set_grad_enabled(not evaluation):
        for iteration in range(2 + rounds):
            for name, step in steps.items():
                start = time.perf_counter()
                step(iteration)
                if iteration >= 2:  # the first ones allocate
                    seconds[name].append(time.perf_counter() - start)
    return [_cost(name, seconds[name], next(iter(seconds.values()))) for name in arms]


def _cost(arm: str, own: list[float], base: list[float]) -> StepCost:
    ratios = [one / other for one, other in zip(own, base, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return StepCost(arm, 1000 * statistics.median(own), middle, low, high)
