"""Reports: one HTML file, Markdown, CSV. Reads stored runs and trains nothing.

    comparison ← collect ← present, (plot ← figures) ← html, markdown; collect ← tables_csv

The same runs give the same bytes: no clock, no random ids, no paths, one order for everything.
"""

from __future__ import annotations

from pathlib import Path

from memnorm.lab.disk import write_text
from memnorm.lab.report.collect import Page, Section, collect

__all__ = ["Page", "Section", "collect", "write"]


def write(page: Page, out: Path | str) -> list[Path]:
    """Write report.html, report.md, csv/ and figures/ to `out`; returns the files, report.html first."""
    from memnorm.lab.report import figures, html, markdown, plot, tables_csv  # here: they load matplotlib and jinja2

    drawn = figures.pictures(page)
    contents = {"report.html": html.render(page, drawn), "report.md": markdown.render(page, drawn)}
    contents |= {f"csv/{name}": text for name, text in tables_csv.files(page)}
    for name, picture in drawn.items():
        for index, panel in enumerate(picture.panels, 1):
            contents[markdown.figure_file(name, index)] = plot.standalone(panel.svg, panel.description)
    for name, text in contents.items():
        write_text(Path(out) / name, text)
    return [Path(out) / name for name in contents]
