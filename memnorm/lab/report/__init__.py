"""Reports from stored runs: one HTML file, Markdown, CSV. Reads the store, trains nothing, and does without torch.

    verdict ← model ← families ← collect ← (plot ← figures) ← present ← html, markdown, tables_csv

The same store gives the same bytes: no clock, no random ids, no paths, one order for everything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from memnorm.lab.report.model import Grid, Section
from memnorm.lab.spec import RunSpec

__all__ = ["Grid", "Section", "write"]

TITLE = "Memorized Batch Normalization: report of runs"


def write(
    store_roots: Sequence[Path | str],
    out: Path | str,
    *,
    title: str = TITLE,
    sections: Sequence[Section] = (),
    registered: Mapping[str, bool] | None = None,
    only: Collection[RunSpec] | None = None,
) -> list[Path]:
    """Write report.html, report.md, csv/ and figures/ to `out`; returns the files, report.html first.

    `sections` come first in the report. `registered` norms (see `tables.why_not`) tell cells that could not be run from
    those that were not. With `only`, the report is on the runs of these specifications and the tables they fill.
    """
    from memnorm.lab.disk import write_text  # what only asks for a verdict need not load matplotlib
    from memnorm.lab.report import figures, html, markdown, plot, tables_csv
    from memnorm.lab.report.collect import collect

    page = collect(store_roots, title=title, sections=sections, registered=registered, only=only)
    drawn = figures.pictures(page)
    contents = {"report.html": html.render(page, drawn), "report.md": markdown.render(page, drawn)}
    contents |= {f"csv/{name}": text for name, text in tables_csv.files(page)}
    for name, picture in drawn.items():
        for index, panel in enumerate(picture.panels, 1):
            contents[markdown.figure_file(name, index)] = plot.standing_alone(panel.svg, panel.description)
    for name, text in contents.items():
        write_text(Path(out) / name, text)
    return [Path(out) / name for name in contents]
