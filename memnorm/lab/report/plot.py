"""One panel as SVG: lines, bands and a legend, in colours that the page can change.

Matplotlib lays the panel out; the text stays text, and every colour becomes a CSS variable with a light and a dark
value. The same input gives the same bytes.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import Affine2D

# After Okabe and Ito, safe for colour-blind readers; dark enough for text on white, light enough on black.
COLOURS = {
    "orange": ("#c8500a", "#f0883e"),
    "blue": ("#0067a8", "#58b0f0"),
    "green": ("#00805c", "#2fc39b"),
    "purple": ("#b0548a", "#e29cc6"),
    "gold": ("#94700a", "#e0b83a"),
    "brown": ("#7d5340", "#cfa58f"),
    "grey": ("#6a6f76", "#a5abb3"),
    "ink": ("#24292f", "#d5d9df"),
    "faint": ("#dfe3e8", "#363c45"),
}
WIDTH, HEIGHT = 310.0, 212.0  # points
LEFT, TOP, BOTTOM, SIZE = 28.0, 22.0, 34.0, 10.5
LONGEST = 28
STEPS = (1, 2, 5, 10)
LETTER, CAPITAL = 0.56 * SIZE, 0.72 * SIZE  # about the width of one
NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))


@dataclass(frozen=True)
class Line:
    """A curve, its spread over seeds, and how it ends."""

    points: Sequence[tuple[float, float]]
    colour: str
    bold: bool = True
    dashed: bool = False
    faint: bool = False  # a run that is not part of the main curve
    band: Sequence[tuple[float, float, float]] = ()  # x, lowest, highest
    label: str = ""  # in the legend
    cross: bool = False  # it ended there: diverged
    dots: bool = False


@dataclass(frozen=True)
class Plot:
    lines: Sequence[Line]
    x_title: str
    y_title: str
    y_limits: tuple[float, float]
    marks: Sequence[float] = ()  # vertical lines
    ticks: Sequence[tuple[float, str]] | None = None


def draw(plot: Plot) -> str:
    """The panel as an `<svg>` element with CSS variables for colours, without ids."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the page's font may have it
        matplotlib.rcdefaults()  # ignore the user's matplotlibrc
        matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "memnorm", "font.size": SIZE})
        matplotlib.rcParams.update({"legend.borderpad": 0, "legend.handlelength": 1.2, "legend.handletextpad": 0.5})
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), dpi=72)  # a pixel is a point
        FigureCanvasSVG(figure)
        widths = [[CAPITAL if one.isupper() else LETTER for one in legible(line.label)] for line in plot.lines]
        right = 28 + max(map(sum, widths), default=0)
        box = (LEFT / WIDTH, BOTTOM / HEIGHT, (WIDTH - LEFT - right) / WIDTH, (HEIGHT - TOP - BOTTOM) / HEIGHT)
        axes = figure.add_axes(box)
        for line in plot.lines:
            _line(axes, line)
        _frame(axes, plot)
        _legend(axes, plot)
        target = io.StringIO()
        figure.savefig(target, format="svg", transparent=True, metadata=NO_METADATA)
    return _themed(target.getvalue())


def legible(label: str) -> str:
    """A label for the legend: printable characters, not too long."""
    label = " ".join("".join(letter if letter.isprintable() else " " for letter in label).split())
    return label if len(label) <= LONGEST else f"{label[: LONGEST - 1]}…"


def _colour(name: str) -> str:
    return COLOURS[name][0]


def _line(axes: Axes, line: Line) -> None:
    colour = _colour(line.colour)
    if line.band:
        x, low, high = zip(*line.band, strict=True)
        axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
    x, y = zip(*line.points, strict=True)
    width = 1.9 if line.bold else 0.8
    style = (0, (4, 1.6) if line.bold else (5, 2)) if line.dashed else "-"
    alpha = 0.45 if line.faint else 1.0
    if len(x) > 1:
        axes.plot(x, y, color=colour, linewidth=width, linestyle=style, alpha=alpha, solid_joinstyle="round", zorder=3)
    if line.dots or (len(x) == 1 and not line.cross):
        size = 4 if line.bold else 2.5
        axes.plot(x, y, color=colour, marker="o", markersize=size, linestyle="none", alpha=alpha, zorder=4)
    if line.cross:
        axes.plot(x[-1:], y[-1:], color=colour, marker="x", markersize=6, markeredgewidth=1.6, zorder=5, clip_on=False)


def _frame(axes: Axes, plot: Plot) -> None:
    ink, faint = _colour("ink"), _colour("faint")
    axes.set_ylim(plot.y_limits)
    if plot.ticks is not None:
        axes.xaxis.set_major_locator(FixedLocator([x for x, _ in plot.ticks]))
        axes.set_xticklabels([text for _, text in plot.ticks])
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=STEPS))
        axes.set_xlim(left=0)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=STEPS))
    for mark in plot.marks:
        axes.axvline(mark, color=faint, linewidth=1, linestyle=(0, (2, 2)), zorder=1)
    axes.grid(axis="y", color=faint, linewidth=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_colour("grey"))
    axes.tick_params(length=0, labelcolor=ink, pad=5)
    axes.tick_params(axis="x", pad=7)
    axes.set_xlabel(plot.x_title, color=ink, labelpad=3)
    points = Affine2D().translate(axes.bbox.x0, axes.bbox.y0)  # from the lower left corner of the axes
    axes.text(-LEFT, axes.bbox.height + 11, plot.y_title, color=ink, transform=points)


def _legend(axes: Axes, plot: Plot) -> None:
    """Name the lines to the right of the panel, in the order in which they end."""
    named = sorted((line for line in plot.lines if line.label), key=lambda line: -line.points[-1][1])
    handles = [Line2D([], [], color=_colour(one.colour), linestyle="--" if one.dashed else "-") for one in named]
    if handles:
        legend = axes.legend(handles, [legible(one.label) for one in named], loc="center left", bbox_to_anchor=(1, 0.5))
        legend.set_frame_on(False)
        for text in legend.get_texts():
            text.set(color=_colour("ink"), parse_math=False)


def _themed(text: str) -> str:
    """The drawing alone, with CSS variables for colours and the page's font. Its texts are unchanged."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<defs>\s*<style.*?</defs>", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r"<svg [^>]*?viewBox=\"([^\"]*)\"[^>]*>", r'<svg viewBox="\1">', text, count=1)
    text = re.sub(r"<[^>]*>", lambda tag: _themed_tag(tag[0]), text)
    return re.sub(r">\s+<", "><", text).strip()


def _themed_tag(tag: str) -> str:
    tag = re.sub(r" font-family: [^;\"]*;?", "", tag)
    tag = re.sub(r' transform="rotate\(-?0 [^"]*\)"', "", tag)
    tag = re.sub(r'<g id="[^"]*"', "<g", tag)
    tag = re.sub(r"(\d\.\d\d)\d+", r"\1", tag)  # a hundredth of a point is precise enough
    tag = re.sub(r"\s*\n\s*", " ", tag)
    for name, (light, _) in COLOURS.items():
        tag = tag.replace(light, f"var(--{name})")
    return tag


def placed(svg: str, name: str, description: str) -> str:
    """The drawing for the page: with a description for screen readers and unique ids."""
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r'(id="|"#|url\(#)', rf"\g<1>{name}-", tag[0]), svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(description)}" ', 1)


def standalone(svg: str, description: str) -> str:
    """The drawing as a file: with colours for light and dark themes, and a title."""
    light = "".join(f"--{name}:{one};" for name, (one, _) in COLOURS.items())
    dark = "".join(f"--{name}:{one};" for name, (_, one) in COLOURS.items())
    style = (
        f"<style>svg{{{light}background:#fff;font-family:sans-serif}}"
        f"@media(prefers-color-scheme:dark){{svg{{{dark}background:#0f1318}}}}</style>"
    )
    head = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
    return (
        svg.replace("<svg ", f"<svg {head}", 1).replace(">", f"><title>{escape(description)}</title>{style}", 1) + "\n"
    )
