"""memnorm report: HTML, Markdown and CSV from stored runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from memnorm.lab import report
from memnorm.lab.cli.flags import names, parse, parser
from memnorm.lab.errors import OK

EXAMPLES = """
examples:
  memnorm report
  memnorm report --runs runs,other-runs --out report

It reads what is stored and trains nothing. The same store gives the same files, byte for byte.
"""


def main(words: Sequence[str]) -> int:
    made = parser("report", "Write report.html, report.md and CSV files from stored runs.", EXAMPLES)
    made.add_argument("--runs", type=str, default="runs", help="folders that runs are kept in, comma-separated")
    made.add_argument("--out", type=Path, default=Path("report"), help="folder to write to")
    made.add_argument("--json", action="store_true", help="print the written files as JSON")
    arguments = parse(made, words)
    written = report.write(report.collect(names(arguments.runs)), arguments.out)
    print(json.dumps([str(path) for path in written]) if arguments.json else "\n".join(map(str, written)))
    return OK
