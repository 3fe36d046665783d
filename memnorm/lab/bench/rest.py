"""Costs of data, memory, the import and the conversion."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import memnorm
from memnorm.lab import data
from memnorm.lab.bench.clock import Target
from memnorm.lab.bench.layer import CURVE
from memnorm.lab.bench.layer import data as layer_data
from memnorm.lab.bench.step import stepper

IMPORT = """
import time, torch
start = time.perf_counter()
import memnorm
there = time.perf_counter()
memnorm.convert, memnorm.double_forward
print(time.perf_counter() - there, there - start)
"""
PEAK = """
import sys, torch
from memnorm.lab.bench.step import stepper
from memnorm.lab.environment import PeakMemory
torch.set_num_threads(2)
step = stepper("resnet20", 32, norm=sys.argv[1], double={} if sys.argv[2] == "double" else None)
step()
peak = PeakMemory("cpu")
for _ in range(4):
    step()
print(peak.read())
"""
PROCESSES = {"BN": ("bn", "single"), "MBN-1": ("mbn", "single"), "MBN-2": ("mbn", "double")}


def measure_data(rounds: int = 15) -> dict[str, Any]:
    """Batches of CIFAR's size, drawn, normalised and augmented, as a share of a ResNet-20 step with batch norm."""
    source = data.load("synthetic", channels=3, image_size=32, train=50_000, test=10).train
    rows, found = [], []
    for batch_size in (8, 128):
        step = stepper("resnet20", batch_size, norm="bn")
        plan = data.order(source.labels, batch_size=batch_size, iterations=rounds + 1, seed=0, augment=True)
        batches = source.batches(plan)
        shares = []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            next(batches)
            drawn = time.perf_counter() - start
            shares.append(100 * drawn / sum(step()))
        share = statistics.median(shares[1:])
        rows.append({"batch_size": batch_size, "percent of a step": share})
        found.append(Target(f"data, batch {batch_size}", share, 3, unit="% of a step"))
    return {"rows": rows, "targets": [asdict(target) for target in found]}


def measure_rest() -> dict[str, Any]:
    """Bytes kept for backward, peak memory of a step, import, conversion."""
    saved = {kind: saved_bytes(kind) for kind in ("BN", "MBN")}
    peaks: dict[str, list[float]] = {name: [] for name in PROCESSES}
    for _ in range(7):  # in turns: the allocator makes each process differ from the last
        for name, settings in PROCESSES.items():
            peaks[name].append(peak(*settings))
    uses, imports = zip(*(_child(IMPORT) for _ in range(20)), strict=True)
    more_kept = saved["MBN"] - saved["BN"] - memory_bytes()
    more_used = statistics.median(peaks["MBN-1"]) - statistics.median(peaks["BN"])
    allowed = max(peaks["BN"]) - min(peaks["BN"]) + model_memory() / 2**20
    targets = [
        Target("layer, bytes kept for backward beyond BN's and the memory", more_kept, 0, unit="B"),
        Target("ResNet-20, batch 32, peak memory over BN's, MBN-1", more_used, allowed, unit="MiB"),
        Target("import over torch's, median of 20", 1000 * statistics.median(imports), 30, unit="ms"),
        Target("convert() of 1,000 layers", convert_seconds(), 0.5, unit="s"),
    ]
    return {
        "saved bytes": saved,
        "peak MiB": peaks,
        "import milliseconds": [1000 * one for one in imports],
        "first use milliseconds": [1000 * one for one in uses],
        "targets": [asdict(target) for target in targets],
    }


def saved_bytes(kind: str) -> int:
    """Bytes that autograd keeps for the backward of a layer."""
    x, _ = layer_data((8, *CURVE))
    layer = nn.BatchNorm2d(CURVE[0]) if kind == "BN" else memnorm.MemorizedBatchNorm2d(CURVE[0])
    layer(x)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    (vectors, *_) = getattr(y.grad_fn, "call", (b"",))  # what the kernels save are no tensors
    return sum(kept) + len(vectors)


def memory_bytes() -> int:
    layer = memnorm.MemorizedBatchNorm2d(CURVE[0])
    names = ("memory_mean", "memory_var", "memory_count", "running_weight", "strength")
    return sum(layer.get_buffer(name).nbytes for name in names)


def model_memory() -> int:
    """Bytes of every buffer that MBN adds to ResNet-20."""
    from memnorm.lab import models

    plain = models.build("resnet20", classes=10, image_shape=(3, 32, 32))
    before = sum(buffer.nbytes for buffer in plain.buffers())
    return sum(buffer.nbytes for buffer in memnorm.convert(plain).buffers()) - before


def peak(norm: str, scheme: str) -> float:
    return _child(PEAK, norm, scheme)[0]


def convert_seconds(layers: int = 1000) -> float:
    times = []
    for _ in range(5):
        model = nn.Sequential(*(nn.BatchNorm2d(16) for _ in range(layers)))
        start = time.perf_counter()
        memnorm.convert(model)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _child(program: str, *words: str) -> list[float]:
    """The numbers that a fresh process prints. It runs in another folder, since Python would prefer a folder memnorm
    in the current one, such as a clone's, which has no kernels, to the installed package.
    """
    command, folder = [sys.executable, "-c", program, *words], Path(sys.executable).parent
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return [float(word) for word in done.stdout.split()]
