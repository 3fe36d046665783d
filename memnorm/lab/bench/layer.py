"""One layer compared with torch's: training forward and backward with recording, eval, memory sizes, batch sizes, and
the share of the memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor, nn

import memnorm
from memnorm.lab.bench.clock import Target, ratios, take_turns

SHAPES = [
    (2, 64, 8, 8),
    (8, 16, 32, 32),
    (8, 64, 8, 8),
    (8, 256, 28, 28),
    (32, 512, 14, 14),
    (128, 16, 32, 32),
    (128, 64, 8, 8),
    (2, 64, 112, 112),
    (64, 512),
    (2, 32, 16, 32, 32),
]
LAYOUTS: dict[int, Any] = {4: torch.channels_last, 5: torch.channels_last_3d}
LAYERS: dict[int, Any] = {  # by the number of dimensions
    2: (nn.BatchNorm1d, memnorm.MemorizedBatchNorm1d),
    4: (nn.BatchNorm2d, memnorm.MemorizedBatchNorm2d),
    5: (nn.BatchNorm3d, memnorm.MemorizedBatchNorm3d),
}
MEMORY_SIZES = (1, 5, 10, 20, 40, None, 1000)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
CURVE = (64, 16, 16)  # of the curves over memory and batch size


def measure(rounds: int = 21) -> dict[str, Any]:
    bandwidth = copy_bandwidth()
    shapes = [
        _shape(shape, layout, rounds, bandwidth)
        for shape in SHAPES
        for layout in ("contiguous", "channels_last")
        if layout == "contiguous" or len(shape) in LAYOUTS
    ]
    sizes = memory_sizes(rounds)
    return {
        "shapes": shapes,
        "memory sizes": sizes,
        "batch sizes": batch_sizes(rounds),
        "copy bandwidth": bandwidth,
        "targets": [asdict(target) for target in targets(shapes, sizes)],
    }


def targets(shapes: list[dict[str, Any]], sizes: list[dict[str, Any]]) -> list[Target]:
    floor = next(row for row in sizes if row["memory_size"] == "BN again")
    noise = max(0.05, 1 - floor["low"], floor["high"] - 1)
    small = [row["ratio"] for row in sizes if row["memory_size"] not in (1000, "BN again")]
    return [
        Target("layer, training, geometric mean", geometric_mean(row["train"]["ratio"] for row in shapes), 0.8, 0.6),
        Target("layer, training, worst shape", max(row["train"]["ratio"] for row in shapes), 1.15),
        Target("layer, eval, geometric mean", geometric_mean(row["eval"]["ratio"] for row in shapes), 1.02, 1.0),
        Target("layer, memory of 40 or all batches over one", max(small) / small[0], 1 + noise, unit="× k = 1"),
    ]


def _shape(shape: tuple[int, ...], layout: str, rounds: int, bandwidth: float) -> dict[str, Any]:
    x, gradient = data(shape, layout)
    plain, ours = LAYERS[len(shape)]
    layers = {"BN": plain(shape[1]), "BN again": plain(shape[1]), "MBN": ours(shape[1])}
    forwards = {name: partial(layer, x) for name, layer in layers.items()}
    train = take_turns({name: training(layer, x, gradient) for name, layer in layers.items()}, rounds=rounds)
    forward = take_turns(forwards, rounds=rounds)
    for layer in layers.values():
        layer.eval()
    with torch.no_grad():
        evaluation = take_turns(forwards, rounds=rounds)
    found = {name: ratios(seconds) for name, seconds in (("train", train), ("forward", forward), ("eval", evaluation))}
    least = 5 * x.numel() * x.element_size() / bandwidth  # x and y; x, the gradient and its own
    return {
        "shape": list(shape),
        "layout": layout,
        "noise": asdict(found["train"][1]),
        **{name: asdict(three[2]) for name, three in found.items()},
        "BN milliseconds": found["train"][0].milliseconds,
        "of bandwidth": 1000 * least / found["train"][2].milliseconds,
    }


def data(shape: tuple[int, ...], layout: str = "contiguous") -> tuple[Tensor, Tensor]:
    x, gradient = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    if layout == "channels_last":
        x, gradient = (one.to(memory_format=LAYOUTS[len(shape)]) for one in (x, gradient))
    return x.requires_grad_(), gradient


def training(layer: nn.Module, x: Tensor, gradient: Tensor) -> Callable[[], None]:
    def call() -> None:
        x.grad = None
        layer(x).backward(gradient)

    return call


def memory_sizes(rounds: int) -> list[dict[str, Any]]:
    """Training cost by the number of batches remembered."""
    x, gradient = data((8, *CURVE))
    layers: dict[Any, nn.Module] = {"BN": nn.BatchNorm2d(CURVE[0]), "BN again": nn.BatchNorm2d(CURVE[0])}
    layers |= {size: memnorm.MemorizedBatchNorm2d(CURVE[0], memory_size=size) for size in MEMORY_SIZES}
    for size, layer in layers.items():
        for _ in range(size if isinstance(size, int) else 40):  # fill the memory
            layer(x)
    calls = {str(size): training(layer, x, gradient) for size, layer in layers.items()}
    found = {one.name: one for one in ratios(take_turns(calls, rounds=2 * rounds))}
    return [{"memory_size": size, **asdict(found[str(size)])} for size in layers if size != "BN"]


def batch_sizes(rounds: int) -> list[dict[str, Any]]:
    """Training cost by the number of images."""
    rows = []
    for count in BATCH_SIZES:
        x, gradient = data((count, *CURVE))
        layers = {"BN": nn.BatchNorm2d(CURVE[0]), "MBN": memnorm.MemorizedBatchNorm2d(CURVE[0])}
        found = ratios(take_turns({name: training(one, x, gradient) for name, one in layers.items()}, rounds=rounds))
        rows.append({"batch_size": count, **asdict(found[1])})
    return rows


def copy_bandwidth(megabytes: int = 128) -> float:
    """Bytes per second that a copy far larger than the caches reads and writes."""
    source = torch.ones(megabytes * 2**18)
    target = torch.empty_like(source)
    seconds = min(take_turns({"copy": lambda: target.copy_(source)}, rounds=9)["copy"])
    return 2 * source.numel() * source.element_size() / seconds
