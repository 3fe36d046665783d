"""The figures of the pages as SVG, legible on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from memnorm.lab.significance import Sample
from study.studies import STUDIES
from study.tables import STUCK, Values

BLUE, ORANGE = "#0a7ac2", "#c8500a"
COLOURS = {"BN": "#8a8f98", "MBN-2": ORANGE, "GROUP": BLUE, "MABN": "#00906a"}
COLOURS |= {"two-way": "#8e44c9", "BN, centred gradients": "#a88b00"}
STYLE = (
    "text{fill:#444}.axis{stroke:#999;stroke-width:.5}"
    "@media(prefers-color-scheme:dark){text{fill:#ccc}.axis{stroke:#777}}"
)
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 600, 320, 40, 80, 20, 275
ALONE = ("GROUP",)  # normalises each image alone: the same at every micro-batch size
RIGHT_OF_MEANS = 165  # its names are longer
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
    for label, found in errors_by_size(values, name).items():
        sizes[label] = [{size: errors[seed] for size, errors in found.items()} for seed in found[2]]
    made[f"{name}-sizes.svg"] = lines(sizes, "batch size")
    if "micro-batches" in STUDIES:
        made["micro-batches.svg"] = means(errors_by_size(values, "micro-batches"))
    return made


def errors_by_size(values: Values, name: str) -> dict[str, dict[int, dict[int, float]]]:
    """Errors by arm, batch size and seed, of the runs that there are; a diverged run has 100."""
    found: dict[str, dict[int, dict[int, float]]] = {}
    for arm in STUDIES[name].arms:
        diverged = {run["spec"].get("seed", 0): 100.0 for run in values.runs(arm) if run["status"] == "diverged"}
        if errors := diverged | values.errors_of(name, arm.key):
            found.setdefault(arm.label, {})[arm.spec.batch_size] = errors
    return found


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
    frame = Frame([x for x, _ in every], [y for _, y in every], by_size=title == "batch size")
    parts, last = frame.axes(), frame.xs[-1]
    for arm, curves in arms.items():
        parts += [polyline([frame.at(*point) for point in sorted(curve.items())], COLOURS[arm]) for curve in curves]
    parts += names({arm: frame.at(last, Sample([c[last] for c in curves]).mean)[1] for arm, curves in arms.items()})
    parts.append(text(WIDTH - RIGHT, BOTTOM + 40, f"{title}; test error in %, a line per seed", "end"))
    return svg(f"Test error by {title}, a line per seed", HEIGHT, parts)


def means(arms: Mapping[str, Mapping[int, Mapping[int, float]]]) -> str:
    """Errors by arm, micro-batch size and seed: a line through the means, a bar from the least to the largest seed, and
    BN at 32 as a dashed line. An arm that does not depend on the size is a level line. Seeds that did not train are
    left out and named below the figure.
    """
    trained = {
        arm: {size: found for size, seeds in sizes.items() if (found := [y for y in seeds.values() if y < STUCK])}
        for arm, sizes in arms.items()
    }
    every = [(size, y) for sizes in trained.values() for size, ys in sizes.items() for y in ys]
    frame = Frame(
        [1, 32, *(size for size, _ in every)], [y for _, y in every] or [0, 100], by_size=True, right=RIGHT_OF_MEANS
    )
    parts, ends = frame.axes(), {}
    for arm, sizes in trained.items():
        if not sizes:
            continue
        points = {size: frame.at(size, Sample(ys).mean) for size, ys in sorted(sizes.items())}
        pairs = [[points[size], points[2 * size]] for size in points if 2 * size in points]  # no line over a gap
        if arm in ALONE:
            pairs = [[(LEFT, points[32][1]), points[32]]]
        parts += [polyline(pair, COLOURS[arm], 3 if arm == "two-way" else 1.5) for pair in pairs]
        for size, (x, y) in points.items():
            top, bottom = (frame.at(size, extreme(sizes[size]))[1] for extreme in (max, min))
            parts.append(f'<path d="M{x:.1f} {top:.1f}V{bottom:.1f}" stroke="{COLOURS[arm]}" stroke-width="1.5"/>')
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{COLOURS[arm]}"/>')
        ends[arm] = points[max(points)][1]
    caption = "micro-batch size; test error in %, mean and range of seeds"
    if joint := trained.get("BN", {}).get(32):
        level = frame.at(32, Sample(joint).mean)[1]
        path = f"M{LEFT} {level:.1f}H{WIDTH - frame.right}"
        parts.append(f'<path d="{path}" stroke="{COLOURS["BN"]}" stroke-dasharray="5 4"/>')
        caption += "; dashed: BN at 32"
    parts += names(ends, frame.right)
    parts.append(text(LEFT, BOTTOM + 40, caption, "start"))
    stuck = [f"{arm} at {size}" for arm in arms for size, ys in arms[arm].items() if max(ys.values()) >= STUCK]
    if stuck:
        parts.append(text(LEFT, BOTTOM + 60, f"seeds that did not train are left out: {'; '.join(stuck)}", "start"))
    return svg("Test error by micro-batch size", HEIGHT + 20 * bool(stuck), parts)


class Frame:
    """The axes of a figure of lines, and where a point lies in it."""

    def __init__(self, xs: Sequence[int], ys: Sequence[float], *, by_size: bool, right: int = RIGHT) -> None:
        self.low, self.high, self.step = axis(ys)
        self.by_size, self.right, self.xs = by_size, right, sorted(set(xs))

    def at(self, x: int, y: float) -> tuple[float, float]:
        scale = math.log2 if self.by_size else float
        first, last = (scale(self.xs[0]) if self.by_size else 0.0), scale(self.xs[-1])
        across = (scale(x) - first) / (last - first) * (WIDTH - LEFT - self.right)
        return LEFT + across, BOTTOM - (y - self.low) / (self.high - self.low) * (BOTTOM - TOP)

    def axes(self) -> list[str]:
        parts = []
        for n in range(round((self.high - self.low) / self.step) + 1):
            value = self.low + n * self.step
            y = self.at(self.xs[-1], value)[1]
            parts.append(f'<path class="axis" d="M{LEFT} {y:.1f}H{WIDTH - self.right}"/>')
            parts.append(text(LEFT - 8, y + 4, f"{value:g}", "end"))
        shown = self.xs if self.by_size else self.xs[len(self.xs) // 5 - 1 :: len(self.xs) // 5]
        return parts + [text(self.at(x, self.low)[0], BOTTOM + 20, f"{x:,}") for x in shown]


def polyline(points: Sequence[tuple[float, float]], colour: str, width: float = 1.5) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>'


def names(ends: Mapping[str, float], right: int = RIGHT) -> list[str]:
    """The names of the arms at the ends of their lines, at least 15 pixels apart."""
    parts, below = [], 0.0
    for arm, y in sorted(ends.items(), key=lambda item: item[1]):
        below = max(y + 4, below + 15)
        parts.append(text(WIDTH - right + 8, below, arm, "start", COLOURS[arm]))
    return parts


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
