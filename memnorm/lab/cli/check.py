"""memnorm check: do the layers compute the right numbers on this device? It works without the lab's packages."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

from memnorm.kernels import cpu
from memnorm.lab import check, environment
from memnorm.lab.cli import plain_parser
from memnorm.lab.errors import FAILED, OK
from memnorm.text import table

DESCRIPTION = """\
Compare the layers on a device with the paper's equations on the CPU: float32, float16 and
bfloat16, both layouts, compiled, two-way, and a short training. Takes about a minute.

examples:
  memnorm check --device cuda
  memnorm check --device mps --json
"""


def main(words: Sequence[str]) -> int:
    made = plain_parser("check", DESCRIPTION)
    made.add_argument("--device", default="cpu", help="a device of torch: cuda, cuda:1, mps, xpu, … (default: cpu)")
    made.add_argument("--json", action="store_true", help="print the results as JSON")
    arguments = made.parse_args(words)
    results = []
    for result in check.run(arguments.device):
        print(f"{result.what}, {result.norm}: {result.outcome}", file=sys.stderr)
        results.append(result)
    facts = about(arguments.device)
    if arguments.json:
        rows = [{**dataclasses.asdict(one), "outcome": one.outcome} for one in results]
        for row in rows:
            row["error"] = row["error"] if math.isfinite(row["error"]) else None  # JSON has no nan
        print(json.dumps({**facts, "results": rows}, indent=1))
    else:
        cells = [
            (one.what, one.norm, "–" if one.problem else f"{one.error:.1e}", f"{one.allowed:.0e}", one.outcome)
            for one in results
        ]
        print(table([("check", "norm", "error", "allowed", "result"), *cells]), *report(facts, results), sep="\n")
    outcomes = {result.outcome for result in results}
    return OK if "FAILED" not in outcomes and "passed" in outcomes else FAILED


def about(device: str) -> dict[str, Any]:
    return {**environment.software_and_machine(), "device": device, "name": _device_name(torch.device(device))}


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return cpu.description()
    ask = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(ask(device)) if ask else "unknown"


def report(facts: dict[str, Any], results: Sequence[check.Result]) -> list[str]:
    counts = {word: sum(one.outcome == word for one in results) for word in ("passed", "FAILED", "skipped")}
    lines = [
        "",
        "For a report, with the table:",
        f"  memnorm {facts['memnorm']} (commit {facts['commit'] or 'unknown'}), torch {facts['torch']}, "
        f"Python {facts['python']}",
        f"  {facts['machine']}",
        f"  device {facts['device']}: {facts['name']}",
        f"  {counts['passed']} passed, {counts['FAILED']} failed, {counts['skipped']} skipped",
    ]
    return lines + [
        f"  {one.what}, {one.norm}, {one.outcome}: {_why(one)}" for one in results if one.outcome != "passed"
    ]


def _why(result: check.Result) -> str:
    if result.skipped:
        return f"torch's batch norm raises as well: {result.problem}"
    return result.problem or f"error {result.error:.1e}, allowed {result.allowed:.0e}"
