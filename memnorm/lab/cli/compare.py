"""memnorm compare: which norm is best for this model, these data, this batch size?"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from memnorm.lab import report, tasks
from memnorm.lab.arms import parse_arm, unsupported
from memnorm.lab.cli.data import ensure
from memnorm.lab.cli.flags import add_config, add_fields, add_places, filled, filled_spec, names, numbers, parse, parser
from memnorm.lab.comparison import RECALIBRATED, Comparison
from memnorm.lab.console import watching
from memnorm.lab.errors import FAILED, OK, UsageError
from memnorm.lab.experiment import Experiment, place, run_experiment
from memnorm.lab.grid import run_all
from memnorm.lab.listen import Outcome
from memnorm.lab.spec import MEMORY_NORMS, Execution, RunSpec
from memnorm.lab.store import Store
from memnorm.lab.training import load_data, network
from memnorm.lab.verdict import TEST_HEADER, Verdict
from memnorm.text import table, visible

EXAMPLES = """
examples:
  memnorm compare --norms bn,mbn --batch-sizes 1,2,4,8 --seeds 3
  memnorm compare --norms bn,two_way,group --batch-sizes 1,2,4 --accumulate 8
  memnorm compare --norms bn,two_way:decay=0.75,two_way:decay=0.9:warmup=20 --batch-sizes 2
  memnorm compare --model resnet18 --data path/to/images --pretrained weights.pt --optimizer adamw --learning-rate 0.001
  memnorm compare --task segmentation --data path/to/pictures --model fcn --norms bn,two_way --batch-sizes 2
  memnorm compare --data path/to/images --model resnet18 --norms bn,mbn-1,mbn-2 --batch-sizes 2,8 --epochs 20
  memnorm compare --model my_package.models:net --data path/to/images --norms bn,mbn --batch-sizes 2 --tune --jobs 2

Every norm sees the same number of images, in the same order, from the same initial weights. The learning rate is meant
for --base-batch-size and is scaled with the batch; --tune chooses one per norm and batch size on held-out training
images. Runs side by side (--jobs) disturb each other's timings: use --jobs 0 to measure them. A config file is code if
it names a model or task of your own, package.module:factory: the runs import and call it. It needs --trust-config.
"""
DEFAULTS = {"model": "small", "data": "digits", "scaling": "linear", "base_batch_size": 32, "evaluations": 5}
NORMS = (
    "norms to compare, comma-separated, with options as in two_way:decay=0.9:warmup=20; mbn means mbn-2, with "
    "Double-Forward; mbn-1 is without"
)
NO_VERDICT = Verdict("One norm only: nothing to compare it with.")
ERROR_HEADER = ("norm", "batch", "rate", "test error %", "recalibrated %", "ms per step", "peak MiB", "")
OWN = (
    "norm",
    "norm_options",
    "scheme",
    "every",
    "fraction",
    "batch_size",
    "iterations",
    "processes",
    "seed",
    "holdout",
)


def main(words: Sequence[str]) -> int:
    arguments = parse(flags(), words)
    base = filled_spec(arguments, skip=(*OWN, "strength"))  # the strength belongs to some arms only
    execution = filled(Execution, arguments)
    ensure([base.data], arguments.data_root, arguments.download)
    experiment = asked_for(arguments, base)
    store = Store(arguments.runs)

    def run(specs: Sequence[RunSpec]) -> list[Outcome]:
        with watching(len(specs)) as listener:
            return run_all(
                specs,
                store,
                execution=execution,
                data_root=arguments.data_root,
                jobs=arguments.jobs,
                listener=listener,
            )

    found, rates = run_experiment(experiment, run, store)
    written = report.write(report.collect(made=[found]), arguments.out)
    if arguments.json:
        print(json.dumps(as_dict(found, rates), indent=1))
    else:
        print("\n\n".join([protocol(experiment), as_text(found), f"report: {written[0]}"]))
    return FAILED if found.failures else OK


def flags() -> Any:
    made = parser("compare", "Compare norms at several batch sizes, with significance tests.", EXAMPLES)
    add_config(made)
    asked = made.add_argument_group("the question")
    asked.add_argument("--norms", type=str, default="bn,mbn", help=NORMS)
    asked.add_argument("--batch-sizes", type=str, default="1,2,4,8", help="comma-separated")
    asked.add_argument("--seeds", type=int, default=3, help="how many; one seed supports no claim")
    asked.add_argument("--epochs", type=float, default=5.0, help="passes over the training images, for each run")
    asked.add_argument(
        "--tune", action="store_true", help="choose a learning rate per norm on held-out training images"
    )
    asked.add_argument(
        "--rates", type=str, default="0.1,0.03,0.01", help="learning rates to choose from, comma-separated"
    )
    asked.add_argument("--out", type=Path, default=Path("compare"), help="folder for report.html, report.md, CSV files")
    asked.add_argument("--json", action="store_true", help="print table and verdict as JSON")
    shared = made.add_argument_group("shared by all runs")
    add_fields(shared, RunSpec, skip=OWN, defaults=DEFAULTS)
    computed = made.add_argument_group("how they are computed")
    computed.add_argument("--jobs", type=int, default=0, help="runs side by side, one process and thread each; 0: here")
    add_fields(computed, Execution)
    add_places(made.add_argument_group("where things are"))
    return made


def asked_for(arguments: Any, base: RunSpec) -> Experiment:
    arms = {json.dumps(arm): arm for arm in map(parse_arm, names(arguments.norms))}
    for arm in arms.values():
        if arm["norm"] in MEMORY_NORMS:
            arm.setdefault("strength", tuple(arguments.strength))
        if base.recalibrate and unsupported(base.but(**arm)):  # it has no statistics to recompute
            arm["recalibrate"] = 0
    sizes = dict.fromkeys(numbers(arguments.batch_sizes, int, "--batch-sizes"))
    for name, value in (("--seeds", arguments.seeds), ("--epochs", arguments.epochs), ("--norms", len(arms))):
        if value <= 0:
            raise UsageError(f"{name} needs at least one; got {value}")
    data = load_data(base, arguments.data_root)
    for arm in arms.values():
        if "norm_options" in arm or base.pretrained:  # what is wrong with them is reported before anything runs
            network(base.but(**arm), data.classes, data.shape)
    available = len(data.train)
    holdout = min(5000, available // 10) if arguments.tune else 0
    trained = min(base.train_images or available, available - holdout)
    whole = math.lcm(*sizes) * base.accumulate
    if whole <= trained:  # full batches at every size: as many images for each, and no last batch of one
        trained -= trained % whole
    base = base.but(train_images=trained)
    images = math.ceil(arguments.epochs * trained / whole) * whole
    return Experiment(
        base,
        tuple(arms.values()),
        tuple(sizes),
        arguments.seeds,
        images,
        tuple(numbers(arguments.rates, float, "--rates")) if arguments.tune else (),
        holdout,
    )


def protocol(experiment: Experiment) -> str:
    base = experiment.base
    return (
        f"{base.data}, {base.model}: {experiment.images:,} images per run, learning rate {base.learning_rate:g} at "
        f"batch {base.base_batch_size}, {base.scaling} scaling, {experiment.seeds} seeds"
        + (f"; {base.task}: the error is {tasks.get(base.task).error}" if base.task != "classification" else "")
        + ("; learning rate chosen per norm and batch size on held-out training images" if experiment.rates else "")
    )


def as_dict(found: Comparison, rates: Collection[tuple[str, int]] = ()) -> dict[str, Any]:
    """The comparison for `--json`. `rates`: the arms and batch sizes whose learning rate was tuned."""
    judged = found.verdict or NO_VERDICT
    rows = []
    for label, group in found.groups:
        errors, again, cost = group.sample(), group.sample(RECALIBRATED), group.cost
        rows.append(
            {
                "norm": label,
                "batch_size": group.spec.batch_size,
                "learning_rate": group.spec.base_learning_rate,
                "tuned": place(group.spec) in rates,
                "n": errors.n if errors else 0,
                "test_error": errors.mean if errors else None,
                "sd": errors.sd if errors else None,
                "test_error_recalibrated": again.mean if again else None,
                "sd_recalibrated": again.sd if again else None,
                "diverged": len(group.having("diverged")),
                "failed": len(group.having("unfinished")),
                "step_ms": cost.step_ms,
                "peak_memory_mb": cost.memory_mb,
            }
        )
    return {
        "rows": rows,
        "verdict": {"headline": judged.headline, "details": judged.details, "use": judged.use},
        "tests": [dict(zip(TEST_HEADER, one.cells, strict=True)) for one in judged.tests],
        "failed": [{"run": run, "message": message} for run, message in found.failures],
    }


def as_text(found: Comparison) -> str:
    """The comparison for the terminal: errors, verdict, significance tests."""
    judged = found.verdict or NO_VERDICT
    reasons = [f"{run}: {visible(message)}" for run, message in found.failures]
    failed = ["\n".join(["failed:", *reasons])] if reasons else []
    tests = [table([TEST_HEADER, *(one.cells for one in judged.shown)])] if judged.shown else []
    return "\n\n".join([table(error_table(found)), *failed, *tests, "\n".join((judged.headline, *judged.details))])


def error_table(found: Comparison) -> list[tuple[str, ...]]:
    """ERROR_HEADER and a row per norm and batch size; without the recalibrated errors where there are none."""

    def shown(value: float | None, digits: int, sd: float | None = None) -> str:
        return "–" if value is None else f"{value:.{digits}f}" + (f" ± {sd:.2f}" if sd is not None else "")

    rows: list[tuple[str, ...]] = [ERROR_HEADER]
    for row in as_dict(found)["rows"]:
        trouble = [f"{row[name]} {name}" for name in ("diverged", "failed") if row[name]]
        rows.append(
            (
                row["norm"],
                str(row["batch_size"]),
                f"{row['learning_rate']:.3g}",
                f"{shown(row['test_error'], 2, row['sd'])} (n = {row['n']})",
                shown(row["test_error_recalibrated"], 2, row["sd_recalibrated"]),
                shown(row["step_ms"], 1),
                shown(row["peak_memory_mb"], 0),
                ", ".join(trouble),
            )
        )
    if found.is_recalibrated:
        return rows
    where = ERROR_HEADER.index("recalibrated %")
    return [row[:where] + row[where + 1 :] for row in rows]
