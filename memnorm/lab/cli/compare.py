"""memnorm compare: which norm is best for this model, these data, this batch size?

Every arm of a seed gets the same initial weights, data order, augmentation, learning rate and number of images. With
tuning, each arm and batch size gets the learning rate with the lowest error on held-out *training* images, under a seed
of its own. Test images take no part in any choice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memnorm.lab import report, tasks
from memnorm.lab.cli.data import ensure
from memnorm.lab.cli.flags import add_config, add_fields, add_places, filled, filled_spec, names, numbers, parse, parser
from memnorm.lab.comparison import ARM_FIELDS, RECALIBRATED, Comparison, arm_key, compare, groups_of
from memnorm.lab.console import watching
from memnorm.lab.errors import FAILED, OK, LabError, UsageError
from memnorm.lab.grid import run_all
from memnorm.lab.listen import Outcome
from memnorm.lab.spec import MEMORY_NORMS, Execution, RunSpec, parse_arm, unsupported
from memnorm.lab.store import Store, StoredRun
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
OWN = ("batch_size", "iterations", "processes", "seed", "holdout")  # fields that the comparison sets
TUNING_SEED = 1000
RunAll = Callable[[Sequence[RunSpec]], list[Outcome]]


@dataclass(frozen=True)
class Experiment:
    """Arms × batch sizes × seeds on the model, data and schedule of `base`."""

    base: RunSpec
    arms: tuple[dict[str, Any], ...]
    batch_sizes: tuple[int, ...]
    seeds: int
    images: int  # seen by each run, at every batch size
    rates: tuple[float, ...] = ()  # learning rates to choose from; empty: the base's for every arm
    holdout: int = 0  # training images to choose on

    def spec(self, arm: dict[str, Any], batch_size: int, **changes: Any) -> RunSpec:
        iterations = math.ceil(self.images / (batch_size * self.base.accumulate))
        warmup = min(self.base.warmup, iterations - 1)
        return self.base.but(batch_size=batch_size, iterations=iterations, warmup=warmup, **arm, **changes)

    def trials(self) -> list[RunSpec]:
        """The runs that choose the learning rates."""
        return [
            self.spec({**arm, "recalibrate": 0}, size, learning_rate=rate, holdout=self.holdout, seed=TUNING_SEED)
            for size in self.batch_sizes
            for arm in self.arms
            for rate in self.rates
        ]

    def runs(self, rates: dict[tuple[str, int], float]) -> list[RunSpec]:
        """All runs, with the arms of a seed next to each other: a busy minute of the machine affects all arms."""
        specs = [
            self.spec(arm, size, seed=seed)
            for seed in range(self.seeds)
            for size in self.batch_sizes
            for arm in self.arms
        ]
        return [spec.but(learning_rate=rates.get(place(spec), spec.learning_rate)) for spec in specs]


def place(spec: RunSpec) -> tuple[str, int]:
    """The arm, as a key, and the batch size of a run."""
    return arm_key(spec), spec.batch_size


def run_experiment(
    experiment: Experiment, run_all: RunAll, store: Store
) -> tuple[Comparison, dict[tuple[str, int], float]]:
    """Tune if asked to, run, compare. Also returns the tuned learning rates by arm and batch size."""
    rates = choose_rates(run_all(experiment.trials())) if experiment.rates else {}
    outcomes = run_all(experiment.runs(rates))
    failures = [(one.spec.name, one.message) for one in outcomes if one.status == "failed"]
    runs = []
    for outcome in outcomes:
        folder, result = store.run(outcome.spec), outcome.result
        try:
            lines = folder.metrics()
        except LabError as error:
            failures.append((outcome.spec.name, str(error)))
            lines, result = [], None
        runs.append(StoredRun(folder.path, outcome.spec, lines, result, folder.sessions()))
    return compare(groups_of(runs), failures), rates


def choose_rates(outcomes: Sequence[Outcome]) -> dict[tuple[str, int], float]:
    """For each arm and batch size the learning rate with the lowest error; the larger of equals."""
    best: dict[tuple[str, int], tuple[float, float]] = {}
    for outcome in outcomes:
        if outcome.status != "finished" or not outcome.result:
            continue
        key = place(outcome.spec)
        found = (outcome.result["final"]["test_error"], -outcome.spec.learning_rate)
        best[key] = min(best.get(key, found), found)
    return {key: -rate for key, (_, rate) in best.items()}


def main(words: Sequence[str]) -> int:
    arguments = parse(flags(), words)
    base = filled_spec(arguments, skip=(*OWN, *ARM_FIELDS))
    execution = filled(Execution, arguments)
    ensure([base.data], arguments.data_root, arguments.download)
    experiment = asked_for(arguments, base)
    store = Store(arguments.runs)

    def run(specs: Sequence[RunSpec]) -> list[Outcome]:
        with watching(len(specs)) as listener:
            shared: dict[str, Any] = {"execution": execution, "data_root": arguments.data_root, "jobs": arguments.jobs}
            return run_all(specs, store, **shared, listener=listener)

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
    asked = made.add_argument_group("what to compare")
    asked.add_argument("--norms", type=str, default="bn,mbn", help=NORMS)
    asked.add_argument("--batch-sizes", type=str, default="1,2,4,8", help="comma-separated")
    asked.add_argument("--seeds", type=int, default=3, help="number of seeds; one seed allows no significance test")
    asked.add_argument("--epochs", type=float, default=5.0, help="passes over the training images, for each run")
    tune = "choose a learning rate per norm on held-out training images"
    asked.add_argument("--tune", action="store_true", help=tune)
    rates = "learning rates to choose from, comma-separated"
    asked.add_argument("--rates", type=str, default="0.1,0.03,0.01", help=rates)
    asked.add_argument("--out", type=Path, default=Path("compare"), help="folder for report.html, report.md, CSV files")
    asked.add_argument("--json", action="store_true", help="print table and verdict as JSON")
    shared = made.add_argument_group("shared by all runs")
    add_fields(shared, RunSpec, skip={*OWN, *ARM_FIELDS} - {"strength"}, defaults=DEFAULTS)
    computed = made.add_argument_group("how they are computed")
    computed.add_argument("--jobs", type=int, default=0, help="parallel runs of one thread each; 0: in this process")
    add_fields(computed, Execution)
    add_places(made.add_argument_group("folders"))
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
    network(base, data.classes, data.shape)  # what is wrong with the model or the options is reported once
    for arm in arms.values():
        if "norm_options" in arm:
            network(base.but(**arm), data.classes, data.shape)
    available = len(data.train)
    holdout = min(5000, available // 10) if arguments.tune else 0
    trained = min(base.train_images or available, available - holdout)
    whole = math.lcm(*sizes) * base.accumulate
    if whole <= trained:  # full batches at every size: as many images for each, and no last batch of one
        trained -= trained % whole
    base = base.but(train_images=trained)
    images = math.ceil(arguments.epochs * trained / whole) * whole
    rates = tuple(numbers(arguments.rates, float, "--rates")) if arguments.tune else ()
    return Experiment(base, tuple(arms.values()), tuple(sizes), arguments.seeds, images, rates, holdout)


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
        trouble = ", ".join(f"{row[name]} {name}" for name in ("diverged", "failed") if row[name])
        setting = row["norm"], str(row["batch_size"]), f"{row['learning_rate']:.3g}"
        error = f"{shown(row['test_error'], 2, row['sd'])} (n = {row['n']})"
        again = shown(row["test_error_recalibrated"], 2, row["sd_recalibrated"])
        rows.append((*setting, error, again, shown(row["step_ms"], 1), shown(row["peak_memory_mb"], 0), trouble))
    if found.is_recalibrated:
        return rows
    where = ERROR_HEADER.index("recalibrated %")
    return [row[:where] + row[where + 1 :] for row in rows]
