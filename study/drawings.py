"""The figures that need no runs: how two-way memory and MBN work, and what the layers cost.

What MBN does comes from the layer itself on numbers of Python's generator, in float64; the SVG holds no date and no
random ids.
"""

from __future__ import annotations

import contextlib
import io
import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import memnorm

BLUE, ORANGE, GREY = "#2a78d6", "#e07b39", "#808080"  # legible on light and on dark pages
STEPS, MEMORY, DECAY, STRENGTH = 60, 20, 0.9, 0.9


@contextlib.contextmanager
def drawing(width: float, height: float) -> Iterator[tuple[Figure, Callable[[], str]]]:
    """A figure to draw in, and a function that returns it as SVG afterwards."""
    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "memnorm",
        "font.family": "sans-serif",
        "font.size": 9,
    }
    style |= dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), GREY)
    style |= {"axes.spines.top": False, "axes.spines.right": False}
    file = io.StringIO()
    with mpl.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, lambda: "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})


def drawings(bench: Mapping[str, Any]) -> dict[str, str]:
    """Every figure by file name."""
    layer = bench["layer"]
    batches = {str(row["batch_size"]): row for row in layer["batch sizes"]}
    sizes = {str(row["memory_size"] or "all"): row for row in layer["memory sizes"] if row["memory_size"] != "BN again"}
    return {
        "two-way.svg": two_way(),
        "mbn.svg": mbn(),
        "cost-batch-size.svg": curve("images in the batch", batches),
        "cost-memory-size.svg": curve("batches remembered", sizes),
    }


def curve(label: str, rows: dict[str, dict[str, Any]]) -> str:
    """Ratios to batch norm with their quartiles; batch norm is the line at 1."""
    with drawing(6, 2.6) as (figure, made):
        axes = figure.subplots()
        ratios = [row["ratio"] for row in rows.values()]
        below = [row["ratio"] - row["low"] for row in rows.values()]
        above = [row["high"] - row["ratio"] for row in rows.values()]
        axes.errorbar(list(rows), ratios, yerr=[below, above], color=BLUE, marker="o")
        axes.axhline(1, color=GREY, linestyle="--", linewidth=1)
        axes.text(len(rows) - 1, 1.02, "torch's batch norm", ha="right")
        axes.set_ylim(0)
        axes.set_xlabel(label)
        axes.set_ylabel("time relative to batch norm")
    return made()


def two_way() -> str:
    """The images behind the averages of forward and backward: large batch, micro-batch, micro-batch with memory."""
    columns: tuple[tuple[str, Any, str], ...] = (
        ("a large batch", [ORANGE] * 8, "all 8 images"),
        ("a micro-batch", [None] * 6 + [ORANGE] * 2, "2 images"),
        ("with two-way memory", [BLUE] * 6 + [ORANGE] * 2, "2 images and the memory"),
    )
    rows = (("forward", "mean and variance of x"), ("backward", "means of g and of g·x̂"))
    with drawing(6, 2.5) as (figure, made):
        axes = figure.subplots()
        axes.set(xlim=(-2.4, 11.9), ylim=(-0.6, 4.5), aspect="equal")
        axes.axis("off")
        for line, (direction, averaged) in enumerate(rows):
            axes.text(-2.4, 2.7 - 2.2 * line, direction, fontweight="bold", va="center")
            for place, (title, colours, seen) in enumerate(columns):
                left = 4 * place
                if line == 0:
                    axes.text(left, 3.8, title, fontweight="bold")
                for index, colour in enumerate(colours):
                    fill = {"edgecolor": GREY, "linestyle": ":", "fill": False} if colour is None else {"color": colour}
                    faded = 0.35 + 0.5 * index / 6 if colour == BLUE else 1.0  # older batches weigh less
                    corner = (left + 0.4 * index, 2.5 - 2.2 * line)
                    axes.add_patch(Rectangle(corner, 0.32, 0.55, alpha=faded, linewidth=1, **fill))
                axes.text(left, 1.9 - 2.2 * line, f"{averaged},\n{seen}", va="center")
    return made()


def mbn() -> str:
    with drawing(8, 3) as (figure, made):
        weights, means = figure.subplots(1, 2, width_ratios=(2, 3))
        draw_weights(weights)
        draw_means(means)
    return made()


def draw_weights(axes: Any) -> None:
    """The weights of the current batch (age 0) and of those before it, for the three strengths of the schedule."""
    ages = range(1, MEMORY + 1)
    axes.bar([0], [1], color=ORANGE, width=0.8)
    for strength, alpha in ((0.9, 0.35), (0.5, 0.6), (0.1, 1.0)):
        heights = [strength * DECAY ** (age - 1) for age in ages]
        axes.bar(ages, heights, color=BLUE, alpha=alpha, width=0.8, label=f"strength {strength}")
    axes.set_xlabel("age of the batch in steps")
    axes.set_ylabel("weight")
    axes.set_xticks([0, 5, 10, 15, 20])
    axes.text(0.9, 0.97, "current batch", color=ORANGE)
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.95))


def draw_means(axes: Any) -> None:
    """A drifting channel, two values at a time."""
    truth, batch, merged = simulate()
    steps = range(STEPS)
    axes.plot(steps, batch, "o", color=ORANGE, markersize=3, label="BN: two values")
    axes.plot(steps, merged, color=BLUE, linewidth=1.8, label="MBN: two values and the memory")
    axes.plot(steps, truth, color=GREY, linewidth=1, linestyle="--", label="true mean")
    axes.set_xlabel("step")
    axes.set_ylabel("mean used to normalise")
    axes.legend(frameon=False, loc="upper left", fontsize=8)
    axes.set_ylim(-2.2, 3.4)


def simulate() -> tuple[list[float], list[float], list[float]]:
    """The true mean, the batch's and the one that the layer normalises with, at every step."""
    draw = random.Random(4)
    layer = memnorm.MemorizedBatchNorm1d(
        1, dtype=torch.float64, memory_size=MEMORY, decay=DECAY, strength=STRENGTH, affine=False
    )
    truth, batch, merged = [], [], []
    for step in range(STEPS):
        mean = math.sin(step / 15)
        x = torch.tensor([[draw.gauss(mean, 1.0)], [draw.gauss(mean, 1.0)]], dtype=torch.float64)
        y = layer(x)
        deviation = float((x[0] - x[1]) / (y[0] - y[1]))  # y = (x − mean) / deviation
        truth.append(mean)
        batch.append(float(x.mean()))
        merged.append(float(x[0] - y[0] * deviation))
    return truth, batch, merged
