"""memnorm bench: what a layer and a training step cost on this machine, as ratios to torch's batch norm."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from memnorm.lab.bench.clock import Target, require_quiet
from memnorm.lab.cli.flags import names, parse, parser
from memnorm.lab.console import stderr
from memnorm.lab.disk import write_text
from memnorm.lab.errors import FAILED, OK, UsageError
from memnorm.text import table

EXAMPLES = """
examples:
  memnorm bench layer
  memnorm bench step --models resnet20
  memnorm bench all --out bench.json
"""
PARTS, PHASES = ("layer", "step", "data", "rest"), ("forward", "backward", "update")


def main(words: Sequence[str]) -> int:
    made = parser(
        "bench",
        "Measure costs as ratios to torch's batch norm. Exit code 1 if a bound that must be reached is missed.",
        EXAMPLES,
        "layer|step|data|rest|all",
    )
    made.add_argument("part", choices=[*PARTS, "all"], help="what to measure; rest: memory, import, convert()")
    made.add_argument("--models", default="resnet20,resnet56", help="networks of `step`, comma-separated")
    made.add_argument("--scale", type=float, default=1.0, help="multiply the number of rounds by this")
    made.add_argument("--threads", type=int, default=2, help="threads of torch")
    made.add_argument("--busy", action="store_true", help="measure on a busy machine as well")
    made.add_argument("--out", type=Path, default=None, help="JSON file for the whole record")
    made.add_argument("--json", action="store_true", help="print the record as JSON")
    arguments = parse(made, words)
    record = known(arguments.out)
    for name, part in measure(arguments):
        record[name] = part
        if arguments.out:
            write_text(arguments.out, json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1) if arguments.json else text(record))
    return OK if all(target["value"] <= target["must"] for target in _targets(record)) else FAILED


def known(path: Path | None) -> dict[str, Any]:
    """The record in the file, to which parts are added."""
    if path is None or not path.exists():
        return {}
    try:
        record = json.loads(path.read_text())
        if not isinstance(record, dict):
            raise ValueError(f"it holds a {type(record).__name__}")
    except (OSError, ValueError) as error:
        raise UsageError(f"--out {path}: not a record of memnorm bench ({error}); choose another file") from error
    return record


def measure(arguments: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The machine, then each requested part when it is done."""
    import torch

    from memnorm.lab import environment
    from memnorm.lab.bench import layer, rest, step

    torch.set_num_threads(arguments.threads)
    share = None if arguments.busy else require_quiet()
    rounds = max(5, round(21 * arguments.scale))
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "layer": lambda: layer.measure(rounds),
        "step": lambda: step.measure(tuple(names(arguments.models)), arguments.scale),
        "data": rest.measure_data,
        "rest": rest.measure_rest,
    }
    yield "where", {**environment.session("cpu", arguments.threads, 0), "busy before": share}
    for name in PARTS if arguments.part == "all" else (arguments.part,):
        stderr().print(f"measuring {name} …", markup=False)
        yield name, parts[name]()


def _targets(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [target for name in PARTS for target in record.get(name, {}).get("targets", [])]


def text(record: dict[str, Any]) -> str:
    """The targets, and for layers and steps the ratios behind them."""
    tables: list[list[Sequence[str]]] = []
    if "layer" in record:
        header = ("layer: shape", "layout", "MBN/BN", "quartiles", "noise floor", "eval", "of bandwidth")
        tables.append([header, *map(_layer_row, record["layer"]["shapes"])])
    for network in record.get("step", {}).get("networks", []):
        name = f"{network['model']}, batch {network['batch_size']}"
        tables.append([(name, "ms", "/BN", "quartiles", *PHASES), *map(_step_row, network["arms"])])
    targets: list[Sequence[str]] = [("target", "measured", "must", "good", "")]
    for one in (Target(**target) for target in _targets(record)):
        good = "" if one.good is None else f"{one.good:g}"
        targets.append((one.what, f"{one.value:.3g} {one.unit}", f"{one.must:.3g}", good, one.verdict))
    return "\n\n".join(map(table, [*tables, targets]))


def _layer_row(row: dict[str, Any]) -> Sequence[str]:
    train, noise = row["train"], row["noise"]
    return (
        "×".join(map(str, row["shape"])),
        row["layout"],
        f"{train['ratio']:.2f}",
        f"{train['low']:.2f} to {train['high']:.2f}",
        f"{noise['low']:.2f} to {noise['high']:.2f}",
        f"{row['eval']['ratio']:.2f}",
        f"{100 * row['of bandwidth']:.0f} %",
    )


def _step_row(arm: dict[str, Any]) -> Sequence[str]:
    quartiles = f"{arm['low']:.2f} to {arm['high']:.2f}"
    split = (f"{arm['milliseconds of'][phase]:.1f}" for phase in PHASES)
    return arm["name"], f"{arm['milliseconds']:.1f}", f"{arm['ratio']:.3f}", quartiles, *split
