"""memnorm demo: BN and two-way memory with micro-batches of 1 to 16 images, trained now, in two minutes.

The protocol of the comparison is fixed here, and no arm is tuned. After the result come the layers against the
equations and the cost on this machine.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memnorm.lab import check, report
from memnorm.lab.bench import step
from memnorm.lab.cli.compare import Experiment, as_dict, error_table, run_experiment
from memnorm.lab.cli.flags import parse, parser
from memnorm.lab.comparison import Comparison
from memnorm.lab.console import stderr, watching
from memnorm.lab.environment import cores
from memnorm.lab.errors import FAILED, OK
from memnorm.lab.grid import run_all
from memnorm.lab.listen import Outcome
from memnorm.lab.report import Section
from memnorm.lab.spec import Execution, RunSpec, parse_arm
from memnorm.lab.store import Store
from memnorm.text import table

EXAMPLES = """
examples:
  memnorm demo
  memnorm demo --out my-demo --json
"""
UPDATE = 16  # images per optimizer step
SIZES, SEEDS, IMAGES = (1, 2, 4, 16), 5, 3200
BASE = RunSpec(model="small", data="digits", evaluations=1)
ARMS = ("bn", "two_way")
MEASURED, ROUNDS = ("BN", "BN again", "two-way", "MBN-2"), 12  # of the costs
WIDTH = 50  # characters of the longest bar
PROTOCOL = (
    "Protocol, the same in every demo: scikit-learn's handwritten digits, a small convolutional network, "
    f"{IMAGES // UPDATE} updates of {UPDATE} images, SGD with learning rate {BASE.learning_rate:g} divided by 10 at 40 "
    f"and 60 %, {SEEDS} seeds. Both norms start from the same weights and see the same images in the same order. "
    "No arm is tuned."
)
RECORDED = (
    "This is a small task. Our recorded runs on CIFAR-10 are in docs/evidence.md of the repository. "
    "memnorm compare makes the same comparison with your network and your images."
)


@dataclass(frozen=True)
class MicroBatches(Experiment):
    """Micro-batches of several sizes that are accumulated to the same number of images per update."""

    def spec(self, arm: dict[str, Any], batch_size: int, **changes: Any) -> RunSpec:
        parts = {"batch_size": batch_size, "accumulate": UPDATE // batch_size, "iterations": self.images // UPDATE}
        return self.base.but(**parts, **arm, **changes)


def main(words: Sequence[str]) -> int:
    made = parser("demo", "See two-way memory work: a live comparison with BN at small micro-batches.", EXAMPLES)
    made.add_argument("--out", type=Path, default=Path("demo"), help="folder for the report and the runs")
    made.add_argument("--json", action="store_true", help="print the numbers as JSON")
    arguments = parse(made, words)
    console = stderr()

    def show(section: Section, *more: str) -> Section:
        if not arguments.json:
            print(as_text(section, *more), flush=True)
        return section

    console.print("1/3 training BN and two-way memory …", markup=False)
    found = live(Store(arguments.out / "runs"))
    sections = [show(live_part(found), bars(found))]
    console.print("2/3 the layers against the equations …", markup=False)
    checks = list(check.run("cpu", check.exact_checks()))
    sections.append(show(equations_part(checks)))
    console.print("3/3 what a step costs on this machine …", markup=False)
    costs = step.network_costs("resnet20", 8, {arm: step.ARMS[arm] for arm in MEASURED}, ROUNDS)["arms"]
    sections += [show(cost_part(costs)), show(Section("Recorded evidence", [RECORDED]))]
    written = report.write(report.collect([], title="memnorm demo", sections=sections, made=[found]), arguments.out)
    equations = [{"what": f"{one.what}, {one.norm}", "difference": one.error} for one in checks]
    numbers = {"live": as_dict(found), "equations": equations, "costs": costs}
    print(json.dumps(numbers, indent=1) if arguments.json else f"report: {written[0]}")
    return FAILED if found.failures else OK


def live(store: Store) -> Comparison:
    """Run the comparison now, in two processes of one thread: the network is too small for more threads."""
    experiment = MicroBatches(BASE, tuple(map(parse_arm, ARMS)), SIZES, SEEDS, IMAGES)

    def run(specs: Sequence[RunSpec]) -> list[Outcome]:
        for spec in specs:  # those of an earlier demo do not count
            shutil.rmtree(store.run(spec).path, ignore_errors=True)
        with watching(len(specs)) as listener:
            return run_all(specs, store, execution=Execution(), jobs=min(2, cores()), listener=listener)

    return run_experiment(experiment, run, store)[0]


def live_part(found: Comparison) -> Section:
    header, *rows = error_table(found)
    texts = [outcome(found), *([found.verdict.headline] if found.verdict else []), PROTOCOL]
    return Section("BN and two-way memory", texts, header, rows, figure=found.name)


def outcome(found: Comparison) -> str:
    """One sentence: the errors of both norms at the smallest and at the largest micro-batch."""
    ends = []
    for size in (min(SIZES), max(SIZES)):
        groups = [(label, group.sample()) for label, group in found.groups if group.spec.batch_size == size]
        errors = [f"{label} {sample.mean:.1f} %" if sample else f"{label} diverged" for label, sample in groups]
        ends.append(f"with micro-batches of {size}: {', '.join(errors)}")
    return f"Mean test error {'; '.join(ends)}."


def bars(found: Comparison) -> str:
    means = {(label, group.spec.batch_size): group.sample() for label, group in found.groups}
    longest = max((one.mean for one in means.values() if one), default=0.0) or 1.0
    rows = []
    for size in SIZES:
        for label in found.arms:
            sample = means.get((label, size))
            bar = "█" * round(WIDTH * sample.mean / longest) + f" {sample.mean:.1f} %" if sample else "diverged"
            rows.append((str(size) if label == found.arms[0] else "", label, bar))
    return table([("micro-batch", "norm", "test error"), *rows])


def equations_part(checks: Sequence[check.Result]) -> Section:
    about = (
        "Each layer compared with its equations as a literal program that keeps remembered batches whole "
        f"(memnorm.reference), in float64. Largest difference found: {max(one.error for one in checks):.1e}."
    )
    rows = [(one.what, one.norm, f"{one.error:.1e}") for one in checks]
    return Section("The layers against the equations", [about], ("what", "norm", "largest difference"), rows)


def cost_part(costs: Sequence[dict[str, Any]]) -> Section:
    rows = [
        (one["name"], f"{one['milliseconds']:.1f}", f"{one['ratio']:.2f}", f"{one['low']:.2f} to {one['high']:.2f}")
        for one in costs
    ]
    about = (
        "ResNet-20, batch size 8, whole steps, the norms taking turns. MBN-2 is the paper's method. The second BN "
        "shows how far two equal things differ here."
    )
    header = ("norm", "ms per step", "ratio to BN", "middle half of the ratios")
    return Section("What a training step costs on this machine", [about], header, rows)


def as_text(section: Section, *first: str) -> str:
    title = f"{section.title}\n{'=' * len(section.title)}"
    rows = [table([section.header, *section.rows])] if section.rows else []
    return "\n\n".join([title, *first, *section.paragraphs, *rows, ""])
