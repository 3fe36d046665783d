"""Whole training steps of the paper's networks: batch norm, two-way memory, MBN-1, MBN-2, and every other norm.

The networks call their norms as any user's network does, `layer(x)`. In the arms with a fused call, one call computes
norm, residual and ReLU; `memnorm.convert` cannot put that into a user's network. Two-way memory is measured as it runs
after its warm-up.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

import memnorm
from memnorm import norms
from memnorm.lab import models
from memnorm.lab.bench.clock import Target, ratios
from memnorm.lab.models.parts import Residual

ROUNDS = {128: 11, 8: 100, 2: 150}
MUST = {128: (1.0, 1.25), 8: (1.0, 1.30), 2: (1.05, 1.35)}  # MBN-1 and MBN-2
GOOD = (0.95, 1.20)
ALONE = "two-way, not centred"
ARMS: dict[str, dict[str, Any]] = {
    "BN": {"norm": "bn"},
    "BN again": {"norm": "bn"},
    "two-way": {"norm": "two_way", "warmup": 0},
    ALONE: {"norm": "two_way", "center": None, "warmup": 0},
    "MBN-1": {"norm": "mbn"},
    "MBN-2": {"norm": "mbn", "double": {}},
    "two-way, fused call": {"norm": "two_way", "warmup": 0, "fused": True},
    "MBN-1, fused call": {"norm": "mbn", "fused": True},
}
CHEAPER: dict[str, dict[str, Any]] = {
    "MBN-2, every=4": {"norm": "mbn", "double": {"every": 4}},
    "MBN-2, fraction=0.25": {"norm": "mbn", "double": {"fraction": 0.25}},
}
PHASES = ("forward", "backward", "update")


def measure(names: tuple[str, ...] = ("resnet20", "resnet56"), scale: float = 1.0) -> dict[str, Any]:
    networks = [
        network_costs(name, batch_size, ARMS | (CHEAPER if batch_size == 8 else {}), max(5, round(scale * rounds)))
        for name in names
        for batch_size, rounds in ROUNDS.items()
    ]
    return {
        "networks": networks,
        "targets": [asdict(target) for network in networks for target in targets(network)],
    }


def targets(network: dict[str, Any]) -> list[Target]:
    found = {arm["name"]: arm["ratio"] for arm in network["arms"]}
    where = f"{network['model']}, batch {network['batch_size']}"
    against_bn = zip(("MBN-1", "MBN-2"), MUST[network["batch_size"]], GOOD, strict=True)
    return [
        Target(f"{where}, {ALONE}", found[ALONE], 1.0),
        Target(f"{where}, {ALONE}", found[ALONE] / found["MBN-1"], 1.02, unit="× MBN-1"),
        Target(f"{where}, centred gradients", found["two-way"] / found[ALONE], 1.01, unit="× not centred"),
        *(Target(f"{where}, {arm}", found[arm], must, good) for arm, must, good in against_bn),
    ]


def network_costs(name: str, batch_size: int, arms: dict[str, dict[str, Any]], rounds: int) -> dict[str, Any]:
    """Steps of one network with each arm, as ratios to the first arm. The arms take turns in random order."""
    steps = {arm: stepper(name, batch_size, **settings) for arm, settings in arms.items()}
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    phases: dict[str, list[list[float]]] = {arm: [] for arm in arms}
    every = 4  # a round is that many steps, so that the arm which does something every fourth time does it once
    order, generator = list(steps), random.Random(0)
    for turn in range(1 + rounds):
        generator.shuffle(order)  # the arm before affects the caches
        for arm in order:
            parts = [steps[arm]() for _ in range(every if "every=4" in arm else 1)]
            if turn:  # the first allocates
                phases[arm] += parts
                seconds[arm].append(sum(map(sum, parts)) / len(parts))
    rows = []
    for one in ratios(seconds):
        medians = torch.tensor(phases[one.name]).median(0).values * 1000
        split = dict(zip(PHASES, [round(value, 3) for value in medians.tolist()], strict=True))
        rows.append({**asdict(one), "milliseconds of": split})
    return {"model": name, "batch_size": batch_size, "rounds": rounds, "arms": rows}


def stepper(
    name: str, batch_size: int, *, norm: str, double: dict[str, Any] | None = None, fused: bool = False, **options: Any
) -> Callable[[], list[float]]:
    """A step that returns the seconds of its forward, its backward and its update with the second forward."""
    torch.manual_seed(0)
    model = models.build(name, classes=10, image_shape=(3, 32, 32))
    if norm != "bn":
        if norms.get(norm).scales_with_run:
            options["total_steps"] = 1000
        if norm == "mbn":
            options["strength"] = 0.1  # that of the schedule's first part
        model = memnorm.convert(model, norm, **options)
    for block in model.modules():
        if isinstance(block, Residual):
            block.fused = fused
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    if double is not None:
        memnorm.double_forward(model, optimizer, **double)
    images, labels = torch.randn(batch_size, 3, 32, 32), torch.randint(10, (batch_size,))
    loss_of = functools.partial(nn.functional.cross_entropy, target=labels)

    def step() -> list[float]:
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(model(images))
        between = time.perf_counter()
        loss.backward()
        behind = time.perf_counter()
        optimizer.step()
        return [between - start, behind - between, time.perf_counter() - behind]

    return step
