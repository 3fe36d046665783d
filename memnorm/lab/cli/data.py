"""memnorm data: list, get and verify data sets."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from memnorm.lab import data
from memnorm.lab.cli.flags import parse, parser
from memnorm.lab.console import downloading
from memnorm.lab.errors import FAILED, OK, UsageError
from memnorm.text import table

EXAMPLES = """
examples:
  memnorm data list
  memnorm data get cifar10                     download, check, unpack; an interrupted download resumes
  memnorm data verify cifar10 --data-root DIR  checksums of the files
"""


def main(words: Sequence[str]) -> int:
    made = parser("data", "List, download and verify data sets.", EXAMPLES, "list|get|verify [NAME ...]")
    made.add_argument("action", choices=["list", "get", "verify"], help="what to do")
    made.add_argument("names", nargs="*", metavar="NAME", help="data sets")
    made.add_argument("--data-root", type=Path, default=None, help="default: $MEMNORM_DATA, else the user's cache")
    made.add_argument("--json", action="store_true", help="print JSON")
    arguments = parse(made, words)
    if arguments.action == "list":
        return show(arguments)
    if not arguments.names:
        raise UsageError(f"memnorm data {arguments.action}: name a data set; there are {', '.join(data.DATA_SETS)}")
    return get(arguments) if arguments.action == "get" else verify(arguments)


def ensure(names: Iterable[str], root: Path | None, download: bool) -> None:
    """Download missing data sets with --download; without it, raise an error with the command."""
    for name in names:
        entry, place = data.DATA_SETS.get(name), root or data.default_root()
        if entry is None or entry.present(place):
            continue
        if not download:
            raise entry.missing(place)
        with downloading(name) as progress:
            data.get(name, place, progress)


def show(arguments: Any) -> int:
    root = arguments.data_root or data.default_root()
    rows: list[dict[str, Any]] = []
    for name, entry in data.DATA_SETS.items():
        if not arguments.names or name in arguments.names:
            size = sum(item.size for item in entry.downloads) / 1e6
            rows.append({"name": name, "here": entry.present(root), "megabytes": round(size), "about": entry.about})
    if arguments.json:
        print(json.dumps({"root": str(root), "data": rows}, indent=1))
        return OK
    cells = []
    for row in rows:
        download = f"{row['megabytes']} MB" if row["megabytes"] else ""
        cells.append((row["name"], "yes" if row["here"] else "no", download, row["about"]))
    print(f"data root: {root}\n\n{table([('name', 'here', 'download', 'what'), *cells])}")
    return OK


def get(arguments: Any) -> int:
    for name in arguments.names:
        with downloading(name) as progress:
            data.get(name, arguments.data_root, progress)
        print(f"{name}: complete, checksums match")
    return OK


def verify(arguments: Any) -> int:
    found = {name: data.verify(name, arguments.data_root) for name in arguments.names}
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(f"{name}: {'; '.join(problems) or 'no problems'}" for name, problems in found.items()))
    return FAILED if any(found.values()) else OK
