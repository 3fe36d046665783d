"""The generated parts and the two figures of docs/performance.md, from results/bench.json."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mbn_figure import BLUE, GREY, drawing

from memnorm.lab.bench.clock import Target


def parts(record: dict[str, Any]) -> dict[str, str]:
    where, layer, step = record["where"], record["layer"], record["step"]
    targets = [Target(**one) for part in ("layer", "step", "data", "rest") for one in record[part]["targets"]]
    bounds = [
        (
            one.what,
            f"{one.value:.3g} {one.unit}",
            f"{one.must:.3g}",
            "" if one.good is None else f"{one.good:g}",
            one.verdict,
        )
        for one in targets
    ]
    layers = [
        (
            *("×".join(map(str, row["shape"])), row["layout"], f"{row['BN milliseconds']:.2f}"),
            *(f"**{row['train']['ratio']:.2f}**", quartiles(row["train"]), quartiles(row["noise"])),
            *(f"{row['forward']['ratio']:.2f}", f"{row['eval']['ratio']:.2f}", f"{100 * row['of bandwidth']:.0f} %"),
        )
        for row in layer["shapes"]
    ]
    steps = [
        (
            *(network["model"], network["batch_size"], arm["name"], f"{arm['milliseconds']:.1f}"),
            *(f"**{arm['ratio']:.2f}**", quartiles(arm), *(f"{one:.1f}" for one in arm["milliseconds of"].values())),
        )
        for network in step["networks"]
        for arm in network["arms"]
    ]
    arms = sorted(step["rivals"]["arms"], key=lambda arm: arm["ratio"])
    rivals = [(arm["name"], f"{arm['ratio']:.2f}", quartiles(arm)) for arm in arms]
    title = f"{step['rivals']['model']}, batch size {step['rivals']['batch_size']}"
    layer_head = [
        "shape",
        "layout",
        "BN, ms",
        "training",
        "quartiles",
        "noise floor",
        "forward",
        "eval",
        "of bandwidth",
    ]
    step_head = ["network", "batch", "", "ms", "to BN", "quartiles", "forward, ms", "backward", "update"]
    return {
        "machine": f"{where['machine']}, {where['threads']} threads, float32, torch {where['torch']}, kernels: "
        f"{where['kernels']}, commit {where['commit']}, {where['started'][:10]}. A copy moves "
        f"{layer['copy bandwidth'] / 1e9:.0f} GB/s.",
        "bounds": table(["what", "measured", "must be at most", "good", ""], bounds),
        "layers": table(layer_head, layers),
        "steps": table(step_head, steps),
        "rivals": table([title, "to BN", "quartiles"], rivals),
    }


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (head, ["---"] * len(head), *rows))


def quartiles(row: dict[str, float]) -> str:
    return f"{row['low']:.2f} to {row['high']:.2f}"


def figures(record: dict[str, Any]) -> dict[str, str]:
    layer = record["layer"]
    batches = {str(row["batch_size"]): row for row in layer["batch sizes"]}
    sizes = {str(row["memory_size"] or "all"): row for row in layer["memory sizes"] if row["memory_size"] != "BN again"}
    return {
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
