"""The figures of the pages as SVG, legible on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from memnorm.lab.significance import Sample
from study.studies import STUDIES
from study.tables import STUCK, Values

BLUE, ORANGE = "#0a7ac2", "#c8500a"
COLOURS = {"BN": "#8a8f98", "MBN-2": ORANGE, "GROUP": BLUE, "MABN": "#00906a"}
STYLE = (
    "text{fill:#444}.axis{stroke:#999;stroke-width:.5}"
    "@media(prefers-color-scheme:dark){text{fill:#ccc}.axis{stroke:#777}}"
)
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 600, 320, 40, 80, 20, 275
Curve = Mapping[int, float]  # errors of one seed, by iteration or batch size


def figures(values: Values) -> dict[str, str]:
    """Every figure by file name."""
    made = {}
    dotted = ("small-batch-resnet20", "small-batch-resnet20-tuned", "ablation-resnet8", "cheaper-second-forward")
    for name in (*dotted, "digits"):
        errors = {arm.label: list(values.errors_of(name, arm.label).values()) for arm in STUDIES[name].arms}
        made["digits.svg" if name == "digits" else f"{name}-seeds.svg"] = dots(errors)
    arms = STUDIES["headline-resnet56"].arms
    made["headline-resnet56.svg"] = lines({arm.label: values.curves(arm) for arm in arms}, "iteration")
    name, sizes = "tiny-batch-resnet8", {}
    for label in COLOURS:
        found = {size: values.errors_of(name, f"{label}/{size}") for size in STUDIES[name].sizes}
        sizes[label] = [{size: errors[seed] for size, errors in found.items()} for seed in found[2]]
    made[f"{name}-sizes.svg"] = lines(sizes, "batch size")
    return made


def dots(arms: Mapping[str, Sequence[float]]) -> str:
    """One dot per seed, the mean as a bar. A seed that did not train is named, and its arm has no bar."""
    low, high, step = axis([one for values in arms.values() for one in values if one < STUCK])
    left = 30 + 8 * max(map(len, arms))

    def x(value: float) -> float:
        return left + (value - low) / (high - low) * (WIDTH - left - 20)

    parts = []
    for index, (arm, values) in enumerate(arms.items()):
        y, inside = 24 + 44 * index, [value for value in values if value <= high]
        parts += [text(left - 12, y + 4, arm, "end"), f'<path class="axis" d="M{left} {y}H{WIDTH - 20}"/>']
        parts += [f'<circle cx="{x(v):.1f}" cy="{y}" r="5" fill="{BLUE}" fill-opacity="0.55"/>' for v in inside]
        if values and len(inside) == len(values):
            mean = x(Sample(values).mean)
            parts.append(f'<rect x="{mean - 1.5:.1f}" y="{y - 13}" width="3" height="26" fill="{ORANGE}"/>')
        else:
            outside = ", ".join(f"{value:.1f} %" for value in values if value > high)
            parts.append(text(WIDTH - 20, y - 6, f"did not train: {outside}" if values else "diverged", "end"))
    base = 24 + 44 * len(arms)
    parts += [text(x(low + n * step), base, f"{low + n * step:g}") for n in range(round((high - low) / step) + 1)]
    parts.append(text(WIDTH - 20, base + 22, "test error in %: seeds (dots) and mean (bar)", "end"))
    return svg("Test error of each seed", base + 32, parts)


def lines(arms: Mapping[str, Sequence[Curve]], title: str) -> str:
    """One line per seed in the colour of its arm; the names stand at the ends, spread so that they can be read."""
    every = [point for curves in arms.values() for curve in curves for point in curve.items()]
    low, high, step = axis([y for _, y in every])
    scale = math.log2 if title == "batch size" else float
    xs = sorted({x for x, _ in every})
    first, last = (scale(xs[0]) if scale is math.log2 else 0.0), scale(xs[-1])

    def at(point: tuple[int, float]) -> tuple[float, float]:
        x = LEFT + (scale(point[0]) - first) / (last - first) * (WIDTH - LEFT - RIGHT)
        return x, BOTTOM - (point[1] - low) / (high - low) * (BOTTOM - TOP)

    parts = []
    for n in range(round((high - low) / step) + 1):
        y = at((xs[-1], low + n * step))[1]
        parts += [
            f'<path class="axis" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>',
            text(LEFT - 8, y + 4, f"{low + n * step:g}", "end"),
        ]
    shown = xs if scale is math.log2 else xs[len(xs) // 5 - 1 :: len(xs) // 5]
    parts += [text(at((x, low))[0], BOTTOM + 20, f"{x:,}") for x in shown]
    ends = {}
    for arm, curves in arms.items():
        for curve in curves:
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, sorted(curve.items())))
            parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[arm]}" stroke-width="1.5"/>')
        ends[arm] = at((xs[-1], Sample([curve[xs[-1]] for curve in curves]).mean))[1] + 4
    below = 0.0
    for arm, y in sorted(ends.items(), key=lambda item: item[1]):
        below = max(y, below + 15)
        parts.append(text(WIDTH - RIGHT + 8, below, arm, "start", COLOURS[arm]))
    parts.append(text(WIDTH - RIGHT, BOTTOM + 40, f"{title}; test error in %, a line per seed", "end"))
    return svg(f"Test error by {title}, a line per seed", HEIGHT, parts)


def axis(values: Sequence[float]) -> tuple[float, float, float]:
    """Where an axis begins and ends, and its step. It begins at zero unless that would leave half of it empty."""
    high = max(values)
    low = 0.0 if min(values) < high / 2 else min(values)
    step = next(one for one in (0.5, 1.0, 2.0, 5.0, 10.0, 20.0) if (high - low) / one <= 7)
    return math.floor(low / step) * step, math.ceil(high / step) * step, step


def text(x: float, y: float, words: str, anchor: str = "middle", colour: str = "") -> str:
    style = f' style="fill:{colour}"' if colour else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{words}</text>'


def svg(label: str, height: int, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
    head += f'font-family="sans-serif" font-size="13" role="img" aria-label="{label}">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>", ""])
