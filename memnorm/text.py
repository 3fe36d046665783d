"""Formatting of messages and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def suggestion(near: Sequence[str]) -> str:
    """A sentence that names similar words; empty if there are none."""
    return f" Did you mean {' or '.join(near)}?" if near else ""


def visible(text: str) -> str:
    """The text with control characters escaped: those of a file's content must not reach the terminal."""
    return "".join(one if one.isprintable() or one in "\n\t" else ascii(one)[1:-1] for one in text)


def table(rows: Iterable[Sequence[str]]) -> str:
    """A table of left-aligned columns; the first row is the header."""
    rows = [tuple(row) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths).rstrip(), *lines[1:]])
