"""memnorm reproduce: the tables and figures of the paper, cell by cell."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memnorm.lab import report
from memnorm.lab.checkpoint import reached
from memnorm.lab.cli.data import ensure
from memnorm.lab.cli.flags import add_fields, add_places, filled, names, parse, parser
from memnorm.lab.console import stderr, watching
from memnorm.lab.errors import FAILED, OK, LabError, UsageError
from memnorm.lab.grid import run_all
from memnorm.lab.paper import FIGURES, TABLES, Cell
from memnorm.lab.spec import Execution, RunSpec, unsupported
from memnorm.lab.store import Store
from memnorm.lab.tables import RULES, SCALES, Item, at_scale, select, unique_specs
from memnorm.text import table

EXAMPLES = """
examples:
  memnorm reproduce all --scale smoke --jobs 2            every cell, two iterations each: does it run?
  memnorm reproduce small-batch --scale reduced --list    cells, the paper's numbers, iterations, status
  memnorm reproduce small-batch --scale reduced --only 8/* --seeds 3 --jobs 2
  memnorm reproduce cifar10 --scale paper --only MBN/ResNet-20 --dry-run
  memnorm reproduce all --scale reduced --launcher ray    on the Ray cluster at RAY_ADDRESS

It can be interrupted at any time: the same command skips finished runs and resumes the others.
"""


@dataclass(frozen=True)
class Entry:
    """A cell or curve, and its runs at the scale that was asked for."""

    item: Item
    specs: tuple[RunSpec, ...]
    obstacle: str | None  # why it cannot be run


def main(words: Sequence[str]) -> int:
    arguments = parse(flags(), words)
    execution = filled(Execution, arguments)
    if arguments.seeds < 1 or arguments.jobs < 0:
        raise UsageError("--seeds needs at least 1, and --jobs must not be negative")
    seeds = range(arguments.seeds)
    only = [pattern for word in arguments.only or [] for pattern in names(word)]
    entries = [entry(item, arguments.scale, seeds) for item in select(arguments.names, only)]
    runnable = [one.item for one in entries if one.obstacle is None]
    specs = unique_specs(runnable, arguments.scale, seeds)
    store = Store(arguments.runs)
    if arguments.list or arguments.dry_run:
        print(listing(entries, specs, store, arguments) if arguments.list else queue(specs, store, arguments.json))
        return OK
    return carry_out(entries, specs, store, execution, arguments)


def flags() -> Any:
    everything = ", ".join(dict.fromkeys([*TABLES, *FIGURES]))
    examples = f"{EXAMPLES.rstrip()}\n\nnames: {everything}, all"
    made = parser("reproduce", "Rerun the paper's tables and figures.", examples, positional="NAME ...")
    made.add_argument("names", nargs="+", metavar="NAME", help="tables and figures, or all")
    asked = made.add_argument_group("what to run")
    asked.add_argument(
        "--scale",
        choices=SCALES,
        default="reduced",
        help="length: a few steps, shorter, full",
    )
    only = "cells to run, comma-separated; * stands for anything"
    asked.add_argument("--only", action="append", metavar="ROW/COLUMN", help=only)
    asked.add_argument("--seeds", type=int, default=1, help="runs per cell")
    asked.add_argument("--list", action="store_true", help="show the cells and their state, and run nothing")
    asked.add_argument("--dry-run", action="store_true", help="show the runs left to do, and run nothing")
    asked.add_argument("--json", action="store_true", help="print JSON")
    asked.add_argument("--out", type=Path, default=Path("report"), help="folder for the report")
    computed = made.add_argument_group("how it is computed")
    computed.add_argument("--jobs", type=int, default=0, help="parallel runs of one thread each; 0: in this process")
    launcher = "ray: on the cluster at RAY_ADDRESS, else a local one; --jobs limits the runs at a time, 0: one per CPU"
    computed.add_argument("--launcher", choices=("processes", "ray"), default="processes", help=launcher)
    add_fields(computed, Execution)
    add_places(made.add_argument_group("folders"))
    return made


def entry(item: Item, scale: str, seeds: Sequence[int]) -> Entry:
    spec = item.part.spec
    if spec is None:
        return Entry(item, (), item.part.note if isinstance(item.part, Cell) else "does not apply")
    scaled = at_scale(spec, scale)
    return Entry(item, tuple(scaled.but(seed=seed) for seed in seeds), unsupported(scaled))


def carry_out(
    entries: Sequence[Entry], specs: Sequence[RunSpec], store: Store, execution: Execution, arguments: Any
) -> int:
    console = stderr()
    console.print(f"scale {arguments.scale}: {RULES[arguments.scale]}", markup=False)
    left_out = Counter(one.obstacle for one in entries if one.obstacle)
    for obstacle, count in sorted(left_out.items()):
        console.print(f"left out, {count} cells: {obstacle}", markup=False)
    if not specs:
        raise UsageError("none of these cells can be run here; see the reasons above")
    ensure(sorted({spec.data for spec in specs}), arguments.data_root, arguments.download)
    with watching(len(specs)) as listener:
        shared: dict[str, Any] = {name: getattr(arguments, name) for name in ("data_root", "jobs", "launcher")}
        outcomes = run_all(specs, store, execution=execution, listener=listener, **shared)
    written = report.write(report.collect([arguments.runs]), arguments.out)
    if arguments.json:
        print(json.dumps([{"run": one.spec.name, "status": one.status, "message": one.message} for one in outcomes]))
    else:
        print(results(entries, store, arguments.scale))
        print(f"\nreport: {written[0]}")
    return FAILED if any(outcome.status == "failed" for outcome in outcomes) else OK


def status(one: Entry, store: Store, values: bool) -> str:
    """State of a cell: done, under way, to do, or why it cannot be run; `values` adds the result."""
    if one.obstacle:
        return one.obstacle
    found = [_state(store, spec, one.item, values) for spec in one.specs]
    return "; ".join(dict.fromkeys(found))


def _state(store: Store, spec: RunSpec, item: Item, values: bool) -> str:
    folder = store.run(spec)
    try:
        result, lines = folder.result(), folder.metrics()
    except (LabError, OSError):
        return "damaged record"
    if result is None:
        return f"under way, {lines[-1]['iteration'] / spec.iterations:.0%}" if lines else "to do"
    if result["status"] == "diverged":
        return f"diverged at iteration {result['diverged_at']:,}"
    metrics = (item.part.metric,) if isinstance(item.part, Cell) else item.part.metrics
    metric = "test_error" if "test_error" in metrics else metrics[0]
    return f"done: {result['final'][metric]:.2f}" if values else "done"


def listing(entries: Sequence[Entry], specs: Sequence[RunSpec], store: Store, arguments: Any) -> str:
    rows: list[dict[str, Any]] = [
        {
            "name": one.item.name,
            "cell": one.item.part.key,
            "paper": getattr(one.item.part, "printed", None),
            "iterations": None if one.obstacle else sum(spec.iterations for spec in one.specs),
            "status": status(one, store, arguments.scale == "paper"),
        }
        for one in entries
    ]
    if arguments.json:
        return json.dumps(rows, indent=1)
    shown = ("{}", "{}", "{:.2f}", "{:,}", "{}")
    text = [
        tuple("" if value is None else form.format(value) for form, value in zip(shown, row.values(), strict=True))
        for row in rows
    ]
    cells = table([("name", "cell", "paper", "iterations", "status"), *text])
    return f"scale {arguments.scale}: {RULES[arguments.scale]}\n\n{cells}\n\n{len(specs)} runs behind these cells"


def queue(specs: Sequence[RunSpec], store: Store, as_json: bool) -> str:
    todo = [spec for spec in specs if store.run(spec).result() is None]
    rows = [(spec.name, spec.iterations, reached(store.run(spec).path)) for spec in todo]
    names_of = ("run", "iterations", "done")
    if as_json:
        return json.dumps([dict(zip(names_of, row, strict=True)) for row in rows], indent=1)
    text = [(name, f"{iterations:,}", f"{done:,}") for name, iterations, done in rows]
    cells = f"{table([names_of, *text])}\n\n" if rows else ""
    return f"{cells}{len(todo)} runs to do, {len(specs) - len(todo)} done"


def results(entries: Sequence[Entry], store: Store, scale: str) -> str:
    """Our numbers; next to the printed ones at paper scale."""
    rows = [("name", "cell", "paper", "here")]
    for one in entries:
        printed = getattr(one.item.part, "printed", None)
        paper = "" if printed is None else f"{printed:.2f}"
        rows.append((one.item.name, one.item.part.key, paper, status(one, store, values=True)))
    return table(rows if scale == "paper" else [(*row[:2], row[3]) for row in rows])
