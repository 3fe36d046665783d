"""docs/performance.md and its two figures, from results/bench.json."""

from __future__ import annotations

from typing import Any

from memnorm.lab.bench.clock import geometric_mean
from memnorm.lab.bench.targets import Target

PARTS = ("layer", "step", "data", "rest")


def page(record: dict[str, Any]) -> str:
    where = record["where"]
    return "\n".join(
        [
            "# Performance",
            "",
            "Costs as ratios to torch's batch norm, or to the same network with it: medians over rounds in which",
            "everything compared takes turns, quartiles behind them. Made of `results/bench.json` by `tools/docs.py`;",
            "`memnorm bench all` measures the same on your machine, and its exit code says whether the bounds below",
            "are met there. Nothing was measured on a GPU.",
            "",
            f"{where['machine']}, {where['threads']} threads, float32, torch {where['torch']}, "
            f"kernels: {where['kernels']}, commit {where['commit']}, {where['started'][:10]}.",
            "",
            "## Bounds",
            "",
            *bounds(record),
            "",
            "## A layer",
            "",
            "Training is forward and backward with recording. The noise floor is a second batch norm against the",
            "first. *Of bandwidth*: the bytes that must move (read x, write y; read x and the gradient, write the",
            f"gradient of x) over the time, against a copy's {record['layer']['copy bandwidth'] / 1e9:.0f} GB/s. Above",
            "100 % the data stay in a cache. The smallest layers are bound by the calls from Python, not by the data.",
            "",
            *layers(record["layer"]),
            "",
            "![Cost by batch size](figures/cost-batch-size.svg)",
            "",
            "![Cost by memory size](figures/cost-memory-size.svg)",
            "",
            "## A training step",
            "",
            "The networks call their norms as any network does, `layer(x)`. With a *fused call* one call computes",
            "norm, residual and ReLU; `memnorm.convert` cannot put that into a network. The paper says that backward",
            "costs about twice the forward, and a second forward hence a third of the step. `update` is the",
            "optimizer's step and, for MBN-2, the second forward.",
            "",
            *steps(record["step"]),
            "",
            "What `every` and `fraction` save is in the rows for batch size 8; what they cost in accuracy is a study",
            "of its own, *A cheaper second forward* in [Evidence](evidence.md).",
            "",
            "## Beside the other norms",
            "",
            *rivals(record["step"]["rivals"]),
            "",
            "The layers of MBN and of two-way memory run on kernels written for them; the other norms are composed of",
            "torch's operations.",
            "",
        ]
    )


def sentence(record: dict[str, Any]) -> str:
    """README's."""
    shapes = record["layer"]["shapes"]
    ratios = [row["train"]["ratio"] for row in shapes]
    networks = {(one["model"], one["batch_size"]): one["arms"] for one in record["step"]["networks"]}
    steps = ", ".join(
        f"{size}: {_arm(arms, 'two-way'):.2f}, {_arm(arms, 'MBN-1'):.2f} and {_arm(arms, 'MBN-2'):.2f}"
        for (model, size), arms in networks.items()
        if model == "resnet20"
    )
    return (
        f"Measured on {record['where']['machine']}, as ratios to torch's batch norm: a layer in training "
        f"{geometric_mean(ratios):.2f} (geometric mean over {len(ratios)} shapes and layouts, {min(ratios):.2f} to "
        f"{max(ratios):.2f}); a ResNet-20 step with two-way memory, MBN-1 and MBN-2, by batch size, {steps}. "
        "[Performance](docs/performance.md) has the rest, with the noise and what misses its bound."
    )


def _arm(arms: list[dict[str, Any]], name: str) -> float:
    return next(arm["ratio"] for arm in arms if arm["name"] == name)


def bounds(record: dict[str, Any]) -> list[str]:
    lines = ["| what | measured | must be at most | good | |", "|---|---|---|---|---|"]
    for part in PARTS:
        for one in (Target(**target) for target in record[part]["targets"]):
            good = "" if one.good is None else f"{one.good:g}"
            lines.append(f"| {one.what} | {one.value:.3g} {one.unit} | {one.must:.3g} | {good} | {one.verdict} |")
    return lines


def layers(record: dict[str, Any]) -> list[str]:
    head = ["shape", "layout", "BN, ms", "training", "quartiles", "noise floor", "forward", "eval", "of bandwidth"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in record["shapes"]:
        train, noise = row["train"], row["noise"]
        cells = [
            "×".join(map(str, row["shape"])),
            row["layout"],
            f"{row['BN milliseconds']:.2f}",
            f"**{train['ratio']:.2f}**",
            f"{train['low']:.2f} to {train['high']:.2f}",
            f"{noise['low']:.2f} to {noise['high']:.2f}",
            f"{row['forward']['ratio']:.2f}",
            f"{row['eval']['ratio']:.2f}",
            f"{100 * row['of bandwidth']:.0f} %",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def steps(record: dict[str, Any]) -> list[str]:
    head = ["network", "batch", "", "ms", "to BN", "quartiles", "forward, ms", "backward", "update"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for network in record["networks"]:
        for arm in network["arms"]:
            split = [f"{value:.1f}" for value in arm["milliseconds of"].values()]
            cells = [network["model"], str(network["batch_size"]), arm["name"], f"{arm['milliseconds']:.1f}"]
            cells += [f"**{arm['ratio']:.2f}**", f"{arm['low']:.2f} to {arm['high']:.2f}", *split]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def rivals(network: dict[str, Any]) -> list[str]:
    lines = [f"| {network['model']}, batch size {network['batch_size']} | to BN | quartiles |", "|---|---|---|"]
    arms = sorted(network["arms"], key=lambda arm: arm["ratio"])
    return lines + [f"| {arm['name']} | {arm['ratio']:.2f} | {arm['low']:.2f} to {arm['high']:.2f} |" for arm in arms]


def figures(record: dict[str, Any]) -> dict[str, str]:
    layer = record["layer"]
    batches = [(str(row["batch_size"]), row) for row in layer["batch sizes"]]
    sizes = [(_memory(row["memory_size"]), row) for row in layer["memory sizes"] if row["memory_size"] != "BN again"]
    return {
        "cost-batch-size.svg": curve("images in the batch", batches, "Cost of a layer by batch size"),
        "cost-memory-size.svg": curve("batches remembered", sizes, "Cost of a layer by memory size"),
    }


def _memory(size: int | None) -> str:
    return "all" if size is None else str(size)


def curve(label: str, points: list[tuple[str, dict[str, Any]]], title: str) -> str:
    """Ratios to batch norm with their quartiles; batch norm is the line at 1."""
    left, top, width, height = 50, 20, 560, 240
    highest = max(1.2, max(row["high"] for _, row in points))
    step = (width - left - 30) / max(len(points) - 1, 1)

    def y(value: float) -> float:
        return top + (height - top - 50) * (1 - value / highest)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="13" role="img" aria-label="{title}">',
        "<style>text{fill:#444}.axis{stroke:#999}@media(prefers-color-scheme:dark){text{fill:#ccc}.axis{stroke:#777}}</style>",
    ]
    for value in (0, 0.5, 1):
        dash = ' stroke-dasharray="4 3"' if value == 1 else ""
        parts.append(
            f'<line class="axis" x1="{left}" x2="{width - 10}" y1="{y(value):.1f}" y2="{y(value):.1f}"{dash}/>'
        )
        parts.append(f'<text x="{left - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    places = [(left + 10 + step * index, name, row) for index, (name, row) in enumerate(points)]
    path = " ".join(f"{x:.1f},{y(row['ratio']):.1f}" for x, _, row in places)
    parts.append(f'<polyline points="{path}" fill="none" stroke="#2a7ae2" stroke-width="2"/>')
    for x, name, row in places:
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y(row["low"]):.1f}" y2="{y(row["high"]):.1f}" stroke="#2a7ae2"/>'
        )
        parts.append(f'<circle cx="{x:.1f}" cy="{y(row["ratio"]):.1f}" r="4" fill="#2a7ae2"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 30}" text-anchor="middle">{name}</text>')
    parts.append(f'<text x="{(left + width) / 2}" y="{height - 8}" text-anchor="middle">{label}</text>')
    parts.append(f'<text x="{width - 12}" y="{y(1) - 6:.1f}" text-anchor="end">torch\'s batch norm</text>')
    return "\n".join([*parts, "</svg>", ""])
