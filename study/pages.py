"""Fill the tables, figures and numbers of the pages from the records: `python -m study.pages`.

A page is written by hand. What stands between `<!-- NAME argument; argument -->` and `<!-- end -->` is what the method
NAME of `Values` returns for these arguments.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from memnorm.lab.disk import write_text
from study.drawings import drawings
from study.figures import figures
from study.run import load
from study.tables import Values

ROOT = Path(__file__).resolve().parent.parent
MARKER = re.compile(r"<!-- (\w+)(?: ([^>]*?))? -->.*?<!-- end -->", re.DOTALL)


def values() -> Values:
    measured = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "results").glob("*.json"))}
    return Values(load(), measured)


def fill(page: str, found: Values) -> str:
    """The page with the value of each marker. Text of several lines gets lines of its own."""

    def filled(match: re.Match[str]) -> str:
        name, words = match.groups()
        arguments = [word.strip() for word in words.split(";")] if words else []
        if not callable(getattr(found, name, None)):
            raise SystemExit(f"<!-- {name} -->: there is no such value; see study/tables.py and study/measurements.py")
        value = getattr(found, name)(*arguments)
        if "\n" in value:
            value = f"\n{value}\n"
        elif not page[page.rfind("\n", 0, match.start()) + 1 : match.start()].strip():
            raise SystemExit(f"<!-- {name} {words} --> begins a line: Markdown would take all of it for HTML")
        return f"<!-- {name}{f' {words}' if words else ''} -->{value}<!-- end -->"

    return MARKER.sub(filled, page)


def render() -> dict[Path, str]:
    """Every page with markers, and every figure, as it should be."""
    found = values()
    pages = [ROOT / "README.md", ROOT / "study/README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
    made = {path: fill(path.read_text(), found) for path in pages if MARKER.search(path.read_text())}
    drawn = figures(found) | drawings(found._measured["bench"])
    return made | {ROOT / "docs/figures" / name: text for name, text in drawn.items()}


def main() -> None:
    os.environ.setdefault("MEMNORM_KERNELS", "off")  # they are not built in the source tree, and hardly needed
    for path, text in render().items():
        if not path.exists() or path.read_text() != text:
            write_text(path, text)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
