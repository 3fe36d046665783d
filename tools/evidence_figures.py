"""The figures of our evidence: error over the run, against batch size, and of each seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from memnorm.lab.comparison import Comparison
from memnorm.lab.evidence import Study
from memnorm.lab.evidence.findings import STUCK, Findings, Found
from memnorm.lab.report import figures, plot
from memnorm.lab.report.model import Page
from memnorm.lab.significance import Sample

TITLES = {
    "-seeds.svg": "error of each seed",
    "-sizes.svg": "error against batch size",
    "-sizes-recalibrated.svg": "error against batch size, statistics recalibrated",
}


def of_seeds(study: Study) -> str:
    """The name of a study's figure of final errors; there is one for a single batch size."""
    return f"{study.name}-seeds.svg"


def names(study: Study) -> list[str]:
    """The figures that a study can have."""
    if len(study.batch_sizes) == 1:
        return [of_seeds(study), f"{study.name}.svg"]
    against = [f"{study.name}-sizes.svg", f"{study.name}-sizes-recalibrated.svg"]
    return [*against, *(f"{study.name}-{size}.svg" for size in study.batch_sizes)]


def title(name: str, study: Study) -> str:
    what = [words for ending, words in TITLES.items() if name.endswith(ending)]
    return f"{study.title}: {what[0] if what else 'error over the run'}"


def pictures(found: Findings) -> dict[str, str]:
    """Every figure for which there are runs, by file name."""
    families: list[Comparison] = []
    of_each_seed: dict[str, str] = {}
    for study in found.studies:
        arms = found.arms(study)
        if len(study.batch_sizes) == 1:
            families += _family(f"{study.name}.svg", study, arms)
            errors = {one.label: list(one.errors().values()) for one in arms if one.runs}
            of_each_seed |= {of_seeds(study): seeds(errors)} if any(errors.values()) else {}
            continue
        families += _family(f"{study.name}-sizes.svg", study, arms)
        families += _family(f"{study.name}-sizes-recalibrated.svg", study, arms, recalibrated=True)
        for size in study.batch_sizes:
            families += _family(f"{study.name}-{size}.svg", study, found.arms(study, size))
    drawn = figures.pictures(Page("", (), (), (), tuple(families), (), ()))
    return of_each_seed | {
        name: plot.standalone(picture.panels[0].svg, f"{picture.panels[0].description} {picture.caption}")
        for name, picture in drawn.items()
    }


def _family(name: str, study: Study, arms: Sequence[Found], recalibrated: bool = False) -> list[Comparison]:
    groups = tuple((one.label, one.group) for one in arms if one.group)
    return [Comparison(name, study.title, "", groups, None, recalibrated)] if groups else []


def seeds(errors: Mapping[str, Sequence[float]]) -> str:
    """One dot per seed, the mean as a bar; an arm without a seed diverged. A seed that did not train is named, and its
    arm has no bar: it would lie where no seed is. Legible on light and dark pages.
    """
    every = [value for values in errors.values() for value in values]
    low, high, step = _axis([value for value in every if value < STUCK] or every)
    left, width, row = 30 + 8 * max(map(len, errors)), 600, 44
    height = row * len(errors) + 52

    def x(value: float) -> float:
        return left + (value - low) / (high - low) * (width - left - 20)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="13" role="img" aria-label="Test error of each seed">',
        "<style>text{fill:#444}.axis{stroke:#999}@media(prefers-color-scheme:dark){text{fill:#ccc}.axis{stroke:#777}}</style>",
    ]
    for index, (arm, values) in enumerate(errors.items()):
        y = 24 + row * index
        parts.append(f'<text x="{left - 12}" y="{y + 4}" text-anchor="end">{arm}</text>')
        if not values:
            parts.append(f'<text x="{left}" y="{y + 4}">diverged</text>')
            continue
        parts.append(f'<line class="axis" x1="{left}" x2="{width - 20}" y1="{y}" y2="{y}" stroke-width="0.5"/>')
        inside = [value for value in values if value <= high]
        parts += [f'<circle cx="{x(v):.1f}" cy="{y}" r="5" fill="#2a78d6" fill-opacity="0.55"/>' for v in inside]
        if len(inside) == len(values):
            mean = Sample(list(values)).mean
            parts.append(f'<rect x="{x(mean) - 1.5:.1f}" y="{y - 13}" width="3" height="26" fill="#e07b39"/>')
        else:
            outside = ", ".join(f"{value:.1f} %" for value in values if value > high)
            parts.append(f'<text x="{width - 20}" y="{y - 6}" text-anchor="end">did not train: {outside}</text>')
    base = 24 + row * len(errors) - 14
    for index in range(round((high - low) / step) + 1):
        tick = low + index * step
        parts.append(f'<text x="{x(tick):.1f}" y="{base + 14}" text-anchor="middle">{tick:g}</text>')
    parts.append(
        f'<text x="{width - 20}" y="{base + 34}" text-anchor="end">test error in %: seeds (dots) and mean (bar)</text>'
    )
    return "\n".join([*parts, "</svg>", ""])


def _axis(values: Sequence[float]) -> tuple[float, float, float]:
    """Where an axis begins and ends, and its step. It begins at zero unless that would leave half of it empty."""
    low, high = min(values), max(values)
    start = 0.0 if low < 0.45 * high else low
    step = next((one for one in (0.5, 1.0, 2.0, 5.0, 10.0) if high - start <= 8 * one), 20.0)
    first = math.floor(start / step) * step
    return first, max(math.floor(high / step + 1) * step, first + step), step
