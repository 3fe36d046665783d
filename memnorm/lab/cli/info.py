"""memnorm info: versions, device, threads, kernels in use, data folders. It works without the lab's packages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import memnorm
from memnorm.kernels import cpu
from memnorm.lab import data, environment
from memnorm.lab.cli import plain_parser
from memnorm.lab.errors import OK

DESCRIPTION = """\
Show versions, device, threads, kernels and data folders.

examples:
  memnorm info
  memnorm info --json
"""


def main(words: Sequence[str]) -> int:
    made = plain_parser("info", DESCRIPTION)
    made.add_argument("--data-root", type=Path, default=None, help="folder of the data sets")
    made.add_argument("--json", action="store_true", help="print it as JSON")
    arguments = made.parse_args(words)
    facts = gather(arguments.data_root)
    if arguments.json:
        print(json.dumps(facts, indent=1))
    else:
        width = max(map(len, facts))
        print("\n".join(f"{name:{width}}  {_words(value)}" for name, value in facts.items()))
    return OK


def gather(data_root: Path | None) -> dict[str, Any]:
    root, known = data_root or data.default_root(), environment.software_and_machine()
    return {
        **{name: known[name] for name in ("memnorm", "commit", "python")},
        **{library: environment.version(library) for library in environment.LIBRARIES},
        "machine": known["machine"],
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "kernels": cpu.description(),
        "norms": memnorm.norms.available(),
        "data root": str(root),
        "data present": [name for name, entry in data.DATA_SETS.items() if entry.present(root)],
    }


def _words(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return "not installed" if value is None else str(value)
