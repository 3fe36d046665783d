"""Plain text: sentences, tables, and what somebody may have meant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def suggestion(near: Sequence[str]) -> str:
    """A sentence to go between two others; nothing if nothing is near."""
    return f" Did you mean {' or '.join(near)}?" if near else ""


def capital(words: str) -> str:
    """The beginning of a sentence; `str.capitalize` would take the capitals of names."""
    return f"{words[:1].upper()}{words[1:]}"


def table(rows: Iterable[Sequence[str]]) -> str:
    """Columns of text, left-aligned, the first row a header."""
    rows = [tuple(row) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths).rstrip(), *lines[1:]])
