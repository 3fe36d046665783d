"""The report as one HTML file without network access or scripts. Texts from runs are escaped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import jinja2
from markupsafe import Markup

from memnorm.lab.report import present
from memnorm.lab.report.collect import Page
from memnorm.lab.report.figures import Picture
from memnorm.lab.report.plot import COLOURS, placed


def render(page: Page, pictures: Mapping[str, Picture]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    template = environment.get_template("report.html.j2")
    return template.render(
        page=page,
        present=present,
        pictures=pictures,
        placed=_placed,
        light=Markup(_variables(0)),
        dark=Markup(_variables(1)),
    )


def _placed(svg: str, name: str, description: str) -> Markup:
    return Markup(placed(svg, name, description))  # drawn by us; matplotlib escapes the texts in it


def _variables(which: int) -> str:
    return " ".join(f"--{name}: {values[which]};" for name, values in COLOURS.items())
