"""memnorm info: versions, device, threads, kernels in use, data folders. It works without the lab's packages."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import memnorm
from memnorm.lab import data, environment
from memnorm.lab.errors import OK

EXAMPLES = """
examples:
  memnorm info
  memnorm info --json
"""


def main(words: Sequence[str]) -> int:
    made = argparse.ArgumentParser(
        prog="memnorm info",
        usage="memnorm info [options]",
        description=f"What this installation consists of and runs on.\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
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
    import torch

    root = data_root or data.default_root()
    return {
        "memnorm": memnorm.__version__,
        "commit": environment.commit(),
        "python": platform.python_version(),
        **{library: environment.version(library) for library in environment.LIBRARIES},
        "machine": environment.machine(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "kernels": environment.kernels(),
        "norms": memnorm.norms.available(),
        "data root": str(root),
        "data present": [name for name, entry in data.DATA_SETS.items() if entry.present(root)],
    }


def _words(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return "not installed" if value is None else str(value)
