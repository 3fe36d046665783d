"""Reports: one HTML file, Markdown, CSV. Reads stored runs and trains nothing.

    comparison ← collect ← present, (plot ← figures) ← page, markdown; collect ← tables_csv

The same runs give the same bytes: no clock, no random ids, no paths, one order for everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memnorm.lab.disk import write_text
from memnorm.lab.report.collect import Page, Section, collect

__all__ = ["Page", "Section", "collect", "write"]


def write(page: Page, out: Path | str) -> list[Path]:
    """Write report.html, report.md, csv/ and figures/ to `out`; returns the files, report.html first."""
    from memnorm.lab.report import figures, markdown, plot, tables_csv  # here: they load matplotlib

    drawn = figures.pictures(page)
    contents = {"report.html": _html(page, drawn), "report.md": markdown.render(page, drawn)}
    contents |= {f"csv/{name}": text for name, text in tables_csv.files(page)}
    for name, picture in drawn.items():
        for index, panel in enumerate(picture.panels, 1):
            contents[markdown.figure_file(name, index)] = plot.standalone(panel.svg, panel.description)
    for name, text in contents.items():
        write_text(Path(out) / name, text)
    return [Path(out) / name for name in contents]


def _html(page: Page, pictures: Mapping[str, Any]) -> str:
    """The report as one HTML file without network access or scripts. Texts from runs are escaped."""
    import jinja2
    from markupsafe import Markup

    from memnorm.lab.report import plot, present

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    light, dark = (
        Markup(" ".join(f"--{name}: {both[which]};" for name, both in plot.COLOURS.items())) for which in (0, 1)
    )
    return environment.get_template("report.html.j2").render(
        page=page,
        present=present,
        pictures=pictures,
        placed=lambda *drawing: Markup(plot.placed(*drawing)),  # drawn by us; matplotlib escapes the texts in it
        light=light,
        dark=dark,
    )
