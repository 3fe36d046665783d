"""Settings of the documentation site: `make docs`, which turns every warning into an error."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

import memnorm

project = "memnorm"
release = memnorm.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["conf.py"]
highlight_language = "default"
default_role = "code"

myst_heading_anchors = 3

autodoc_default_options = {"undoc-members": True}
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_mock_imports = ["accelerate", "lightning", "transformers"]

html_theme = "furo"
html_title = "memnorm"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]

log = logging.getLogger(__name__)


def require_docstring(_app: Sphinx, what: str, name: str, _thing: Any, _options: Any, lines: list[str]) -> None:
    """What the reference shows says something about itself."""
    if what in ("class", "exception", "function", "method") and not any(lines):
        log.warning("%s has no docstring", name)


def mark_code(_app: Sphinx, _what: str, _name: str, _thing: Any, _options: Any, lines: list[str]) -> None:
    """An indented block of a docstring is code, as in Markdown."""
    marked: list[str] = []
    inside = False
    for line, before in zip(lines, ["", *lines], strict=False):
        if line.startswith("    ") and not before.strip() and not inside:
            marked += ["::", ""]
            inside = True
        elif line.strip() and not line.startswith("    "):
            inside = False
        marked.append(line)
    lines[:] = marked


def list_cards(_app: Sphinx, docname: str, source: list[str]) -> None:
    """The norms' overview leads to their cards in the sidebar; its text itself is also read without Sphinx."""
    if docname == "norms/README":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n[a-z]*\n```\n"


def setup(app: Sphinx) -> None:
    """The docstrings' hooks come before napoleon, which reads their sections."""
    app.connect("source-read", list_cards)
    app.connect("autodoc-process-docstring", require_docstring, priority=300)
    app.connect("autodoc-process-docstring", mark_code, priority=400)
