"""Measure what each way of training in two processes costs on this machine, and write results/distributed.json.

    torchrun --standalone --nproc-per-node 2 benchmarks/distributed_costs.py

Run it with nothing else running, on two cores or more. ResNet-20 at batch size 4 per process, with Double-Forward where
there is a memory. The modes take turns; the second BN is the noise floor.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memnorm
from memnorm.lab import environment, models

OUT = Path(__file__).resolve().parent.parent / "results/distributed.json"
MODES = ("bn", "bn again", "local", "exchange", "sync")
BATCH, STEPS, ROUNDS = 4, 8, 11


def trainer(mode: str) -> Callable[[], None]:
    """One training step."""
    torch.manual_seed(0)
    model = models.build("resnet20", classes=10, image_shape=(3, 32, 32))
    if not mode.startswith("bn"):
        memnorm.convert(model, sync=mode == "sync", strength=0.1)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01, momentum=0.9)
    if not mode.startswith("bn"):
        memnorm.double_forward(wrapped, optimizer)
    if mode == "exchange":
        memnorm.distributed.exchange_memory(wrapped, optimizer)
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(images), labels).backward()
        optimizer.step()

    return step


def collectives(step: Callable[[], None]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    return sum(event.name.startswith("gloo:") for event in profile.events())


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps = {mode: trainer(mode) for mode in MODES}
    record: dict[str, Any] = {}
    for mode, step in steps.items():
        step()
        step()
        record[mode] = {"collectives": collectives(step), "milliseconds": []}
    for _ in range(ROUNDS):
        for mode, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(STEPS):
                step()
            dist.barrier()
            record[mode]["milliseconds"].append(round(1000 * (time.perf_counter() - start) / STEPS, 3))
    for found in record.values():
        found["steps_per_second"] = round(1000 / statistics.median(found["milliseconds"]), 2)
    if dist.get_rank() == 0:
        about = {"model": "resnet20", "batch_size_per_process": BATCH, "processes": dist.get_world_size()}
        where = environment.session("cpu", torch.get_num_threads(), 0)
        OUT.write_text(json.dumps({**about, "rounds": ROUNDS, "where": where, "modes": record}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
