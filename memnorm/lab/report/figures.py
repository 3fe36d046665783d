"""The lines of the figures. Thin is training error, bold is test error, as in the paper.

Seeds are drawn as their mean with a band from the lowest to the highest. Runs that diverged or are not finished are
faint lines, with a cross where one diverged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from memnorm.lab.comparison import Comparison, Group, measured
from memnorm.lab.report.collect import FigureView, Page
from memnorm.lab.report.plot import Line, Plot, draw
from memnorm.lab.significance import Sample, number
from memnorm.lab.spec import RunSpec
from memnorm.lab.store import StoredRun

ARM_COLOURS = {"BN": "orange", "MBN": "blue", "BRN": "green", "NORMPROP": "purple"}
FREE_COLOURS = ("green", "purple", "gold", "brown", "grey", "orange", "blue")
MODEL_COLOURS = ("orange", "blue", "green", "purple", "gold", "brown", "grey")
DASH_NOTE = "Dashed: one forward. Solid: two."
STEEP = 0.1  # of the run, whose steep beginning may lie outside the panel


@dataclass(frozen=True)
class Panel:
    title: str
    svg: str
    description: str


@dataclass(frozen=True)
class Picture:
    name: str
    title: str
    caption: str
    panels: tuple[Panel, ...]


def pictures(page: Page) -> dict[str, Picture]:
    """Every figure of a report, by the name of its view."""
    found = {view.name: _of_the_paper(view) for view in page.figures}
    shared = colours(sorted({arm for comparison in page.comparisons for arm in comparison.arms}))
    for comparison in page.comparisons:
        paint = {arm: shared[arm] for arm in comparison.arms}
        crowded = len(set(paint.values())) < len(set(map(_norm, comparison.arms)))
        picture = _of_a_comparison(comparison, colours(comparison.arms) if crowded else paint)
        if picture is not None:
            found[comparison.name] = picture
    return {name: picture for name, picture in found.items() if picture.panels}


def colours(styles: Sequence[str]) -> dict[str, str]:
    """A colour for each style: the arm's own where it is an arm, BN-1 and BN-2 alike; else the next that is free."""
    chosen = {style: ARM_COLOURS[_norm(style)] for style in styles if _norm(style) in ARM_COLOURS}
    used = set(chosen.values())
    free: Sequence[str] = MODEL_COLOURS
    if chosen:
        free = sorted(FREE_COLOURS, key=lambda colour: colour in used)
    others = [style for style in dict.fromkeys(styles) if style not in chosen]
    return chosen | {style: free[index % len(free)] for index, style in enumerate(others)}


def _norm(style: str) -> str:
    """MBN for MBN-2; a label with options is returned as it is."""
    base, _, forwards = style.partition("-")
    return base if forwards in ("", "1", "2") else style


def _of_the_paper(view: FigureView) -> Picture:
    paint = colours([curve.style for curve, _ in view.curves])
    single = one_forward([curve.spec for curve, _ in view.curves])
    panels = []
    for title in view.figure.panels:
        curves = [(curve, group) for curve, group in view.curves if curve.panel == title and group]
        lines: list[Line] = []
        for curve, group in curves:
            dashed = curve.dashed or curve.spec.arm in single
            for metric in curve.metrics:
                bold = metric.startswith("test") or len(curve.metrics) == 1
                label = curve.label if metric == curve.metrics[-1] else ""
                lines += _curve(group, metric, paint[curve.style], bold, dashed, label)
        if lines:
            metrics = sorted({metric for curve, _ in curves for metric in curve.metrics})
            panels.append(_curves_panel(title, lines, [group for _, group in curves], metrics))
    caption = " ".join([view.figure.caption, *([DASH_NOTE] if single else []), *_seed_notes(view.groups)])
    title = view.figure.title if view.scale == "paper" else f"{view.figure.title} ({view.scale} scale)"
    return Picture(view.name, title, caption, tuple(panels))


def one_forward(specs: Sequence[RunSpec]) -> set[str]:
    """The arms to draw dashed: those with one forward whose norm is also there with two."""
    double = {spec.norm for spec in specs if spec.scheme == "double"}
    return {spec.arm for spec in specs if spec.scheme == "single" and spec.norm in double}


def _seed_notes(groups: Sequence[Group]) -> list[str]:
    runs = [len(group.having("finished")) for group in groups]
    notes = []
    if runs and max(runs) > 1:
        span = f"{min(runs)} to {max(runs)}" if min(runs) != max(runs) else f"{max(runs)}"
        notes.append(f"Lines are means of {span} seeds, bands go from the lowest to the highest.")
    if any(run.status != "finished" for group in groups for run in group.runs):
        notes.append("Faint: runs that are not finished or diverged (×).")
    return notes


def _series(run: StoredRun, metric: str) -> list[tuple[float, float]]:
    found = []
    for line in run.metrics:
        x, y = measured(line, "epoch"), measured(line, metric)
        if x is not None and y is not None:
            found.append((x, y))
    return found


def _curve(group: Group, metric: str, colour: str, bold: bool, dashed: bool, label: str) -> list[Line]:
    """The mean of the finished runs with its band, and each other run."""
    finished = [series for run in group.having("finished") if (series := _series(run, metric))]
    lines = []
    for run in group.runs:
        series = _series(run, metric)
        if run.status != "finished" and series:
            own = "" if finished else label
            cross = run.status == "diverged"
            lines.append(Line(series, colour, bold, dashed, faint=True, label=own, cross=cross))
            label = label if finished else ""
    if finished:
        at: dict[float, list[float]] = {}
        for x, y in (point for series in finished for point in series):
            at.setdefault(x, []).append(y)
        whole = {x: at[x] for x in sorted(at) if len(at[x]) == len(finished)} or {x: at[x] for x in sorted(at)}
        points = [(x, Sample(values).mean) for x, values in whole.items()]
        band = [(x, min(values), max(values)) for x, values in whole.items()] if len(finished) > 1 else []
        lines.append(Line(points, colour, bold, dashed, band=band, label=label))
    return lines


def _curves_panel(title: str, lines: Sequence[Line], groups: Sequence[Group], metrics: Sequence[str]) -> Panel:
    what = {"test_error": "test error (%)", "train_error": "training error (%)"}.get(" ".join(metrics), "error (%)")
    plot = Plot(lines, "epoch", what, _curve_limits(lines), _milestones(groups, lines))
    ends = ", ".join(f"{line.label} ends at {number(line.points[-1][1], 1)}" for line in lines if line.label)
    where = f"{title}: " if title else ""
    return Panel(title, draw(plot), f"{where}{what} against epochs. {ends}.")


def _curve_limits(lines: Sequence[Line]) -> tuple[float, float]:
    """Limits that fit all but the steep beginning of the curves."""
    last = max(line.points[-1][0] for line in lines)
    settled = [y for line in lines for x, y in line.points if x >= STEEP * last or x == line.points[-1][0]]
    lowest = min(y for line in lines for _, y in line.points)
    return _limits(lowest, min(max(1.04 * max(settled), lowest + 1.0), 101.0))


def _limits(low: float, high: float) -> tuple[float, float]:
    """Zero at the bottom, unless that would leave half the panel empty."""
    if low < 0.45 * high:
        return 0.0, high
    room = max(0.12 * (high - low), 0.5)
    return max(0.0, low - room), min(high + room, 101.0)


def _milestones(groups: Sequence[Group], lines: Sequence[Line]) -> list[float]:
    """The epochs at which the learning rate changes, if they are the same for all."""
    plans = {(group.spec.schedule, group.spec.milestones) for group in groups}
    ends = {max(x for x, _ in line.points) for line in lines if not line.faint}
    if len(plans) != 1 or len(ends) != 1 or next(iter(plans))[0] != "step" or all(len(x.points) < 3 for x in lines):
        return []
    return [ends.copy().pop() * one for one in next(iter(plans))[1]]


def _of_a_comparison(comparison: Comparison, paint: Mapping[str, str]) -> Picture | None:
    """Error against batch size; with a single batch size, error over the run."""
    sizes = sorted({group.spec.batch_size for _, group in comparison.groups})
    single = one_forward([group.spec for _, group in comparison.groups])
    picture = (
        _against_batch_size(comparison, sizes, single, paint)
        if len(sizes) > 1
        else _over_the_run(comparison, single, paint)
    )
    if picture is None or not single:
        return picture
    return replace(picture, caption=f"{picture.caption} {DASH_NOTE}")


def _over_the_run(comparison: Comparison, single: set[str], paint: Mapping[str, str]) -> Picture | None:
    lines: list[Line] = []
    for label, group in comparison.groups:
        dashed = group.spec.arm in single
        lines += _curve(group, "train_error", paint[label], False, dashed, "")
        lines += _curve(group, "test_error", paint[label], True, dashed, label)
    if all(len(line.points) < 2 for line in lines):
        return None
    groups = [group for _, group in comparison.groups]
    panel = _curves_panel("", lines, groups, ["test_error", "train_error"])
    caption = " ".join(["Thin: training error. Bold: test error.", *_seed_notes(groups)])
    return Picture(comparison.name, "Error over the run", caption, (panel,))


def _against_batch_size(
    comparison: Comparison, sizes: Sequence[int], single: set[str], paint: Mapping[str, str]
) -> Picture | None:
    lines: list[Line] = []
    ends = []
    for arm in comparison.arms:
        groups = [group for label, group in comparison.groups if label == arm]
        samples = [(float(sizes.index(one.spec.batch_size)), one.sample()) for one in groups]
        own = _arm_lines(arm, samples, paint[arm], groups[0].spec.arm in single)
        lines += own
        if own:
            ends.append(f"{arm} " + ", ".join(f"{number(y, 1)} at {sizes[int(x)]}" for x, y in own[0].points))
    if not lines:
        return None
    values = [y for line in lines for _, y in line.points]
    limits = _limits(min(values), 1.08 * max(values))
    failed = [(label, group) for label, group in comparison.groups if group.having("diverged")]
    lines += [
        Line([(float(sizes.index(group.spec.batch_size)), limits[1])], paint[label], cross=True)
        for label, group in failed
    ]
    ticks = [(float(index), str(size)) for index, size in enumerate(sizes)]
    what = "held-out error (%)" if comparison.groups[0][1].spec.holdout else "test error (%)"
    size = "micro-batch size" if any(group.spec.accumulate > 1 for _, group in comparison.groups) else "batch size"
    svg = draw(Plot(lines, size, what, limits, ticks=ticks))
    panel = Panel("", svg, f"{what} against {size}. {'; '.join(ends)}.")
    caption = ["Dots: mean error at the last evaluation, with a bar of one standard deviation; small dots: seeds."]
    caption += [
        f"×\u00a0{label} diverged in {len(group.having('diverged'))} of {len(group.runs)} seeds at batch size "
        f"{group.spec.batch_size}."
        for label, group in failed
    ]
    return Picture(comparison.name, f"Error against {size}", " ".join(caption), (panel,))


def _arm_lines(arm: str, samples: Sequence[tuple[float, Sample | None]], colour: str, dashed: bool) -> list[Line]:
    """The means with their label first, then deviations and seeds."""
    known = [(x, sample) for x, sample in samples if sample is not None]
    if not known:
        return []
    lines = [Line([(x, sample.mean) for x, sample in known], colour, True, dashed, label=arm, dots=True)]
    for x, sample in known:
        if sample.sd:
            lines.append(Line([(x, sample.mean - sample.sd), (x, sample.mean + sample.sd)], colour, bold=False))
            lines += [Line([(x, value)], colour, bold=False, faint=True) for value in sample.values]
    return lines
