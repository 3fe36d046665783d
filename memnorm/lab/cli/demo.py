"""memnorm demo: the equations, the cost on this machine, and a live comparison, in two minutes.

The protocol of the comparison is fixed here in advance, and no arm is tuned.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memnorm.lab import equations, report
from memnorm.lab.arms import parse_arm
from memnorm.lab.bench.clock import Ratio
from memnorm.lab.cli.compare import as_dict, error_table
from memnorm.lab.cli.flags import parse, parser
from memnorm.lab.comparison import Comparison
from memnorm.lab.console import stderr, watching
from memnorm.lab.cost import measure
from memnorm.lab.environment import cores
from memnorm.lab.errors import FAILED, OK
from memnorm.lab.experiment import Experiment, run_experiment
from memnorm.lab.grid import run_all
from memnorm.lab.listen import Outcome
from memnorm.lab.report import Section
from memnorm.lab.spec import Execution, RunSpec
from memnorm.lab.store import Store
from memnorm.text import table

EXAMPLES = """
examples:
  memnorm demo
  memnorm demo --out my-demo --json
"""
BATCH_SIZES, SEEDS, IMAGES = (4,), 5, 2400
BASE = RunSpec(model="small", data="digits", evaluations=5, scaling="linear", base_batch_size=4)
ARMS = ("bn", "mbn-1", "mbn-2")
PROTOCOL = (
    f"scikit-learn's handwritten digits, a small convolutional network, batch size {BATCH_SIZES[0]}, "
    f"{IMAGES // BATCH_SIZES[0]} steps, learning rate {BASE.learning_rate:g} divided by 10 at 40 % and 60 %, "
    f"{SEEDS} seeds; the same initial weights, batches and schedule for every arm of a seed; no arm tuned"
)
MORE = "memnorm compare --norms bn,mbn --batch-sizes 1,2,4,8 --seeds 10 --jobs 2"
RECORDED = "Our runs on CIFAR-10 are on the page docs/evidence.md of the repository."


def main(words: Sequence[str]) -> int:
    made = parser("demo", "See the layer work: equations, cost on this machine, a live comparison.", EXAMPLES)
    made.add_argument("--out", type=Path, default=Path("demo"), help="folder for the report and the runs")
    made.add_argument("--json", action="store_true", help="print the numbers as JSON")
    arguments = parse(made, words)
    console = stderr()
    console.print("1/3 the layers against the paper's equations …", markup=False)
    checks = equations.check()
    console.print("2/3 what a step costs on this machine …", markup=False)
    costs = measure()
    console.print(f"3/3 live comparison: {PROTOCOL} …", markup=False)
    found = live(Store(arguments.out / "runs"))
    result, parts = live_part(found), [equations_part(checks), cost_part(costs)]
    page = report.collect([], title="memnorm demo", sections=[result, *parts], made=[found])
    written = report.write(page, arguments.out)
    print(numbers_of(checks, costs, found) if arguments.json else as_text([*parts, result], written[0]))
    return FAILED if found.failures else OK


def live(store: Store) -> Comparison:
    """Run the comparison now, in two processes of one thread: the network is too small for more threads."""
    experiment = Experiment(BASE, tuple(map(parse_arm, ARMS)), BATCH_SIZES, SEEDS, IMAGES)

    def run(specs: Sequence[RunSpec]) -> list[Outcome]:
        for spec in specs:  # those of an earlier demo do not count
            shutil.rmtree(store.run(spec).path, ignore_errors=True)
        with watching(len(specs)) as listener:
            jobs = min(2, cores())
            return run_all(specs, store, execution=Execution(), jobs=jobs, listener=listener)

    return run_experiment(experiment, run, store)[0]


def equations_part(checks: Sequence[equations.Check]) -> Section:
    largest = max(check.difference for check in checks)
    return Section(
        "The layers against the equations",
        [
            "Each layer compared with the paper's Eq. 5 and Algorithm 1 as a literal program, which keeps remembered "
            f"batches whole (memnorm.reference), in float64. Largest difference found: {largest:.1e}."
        ],
        ("what", "largest difference"),
        [(one.what, f"{one.difference:.1e}") for one in checks],
    )


def cost_part(costs: Sequence[Ratio]) -> Section:
    rows = [
        (one.name, f"{one.milliseconds:.1f}", f"{one.ratio:.2f}", f"{one.low:.2f} to {one.high:.2f}") for one in costs
    ]
    return Section(
        "What a training step costs on this machine",
        [
            "ResNet-20, batch size 8, whole steps, the arms taking turns. MBN-1 is the memory alone, MBN-2 has "
            "Double-Forward. The second BN shows how far two equal things differ here."
        ],
        ("norm", "ms per step", "ratio to BN", "middle half of the ratios"),
        rows,
    )


def live_part(found: Comparison) -> Section:
    header, *rows = error_table(found)
    return Section(
        "Live comparison",
        [
            *([found.verdict.headline, *found.verdict.details] if found.verdict else []),
            f"Protocol, fixed beforehand: {PROTOCOL}.",
            f"A small data set and few seeds separate little; this shows more: {MORE}",
            RECORDED,
        ],
        header,
        rows,
    )


def numbers_of(checks: Sequence[equations.Check], costs: Sequence[Ratio], found: Comparison) -> str:
    plain: dict[str, Any] = {"equations": [vars(one) for one in checks], "costs": [vars(one) for one in costs]}
    return json.dumps({**plain, "live": as_dict(found)}, indent=1)


def as_text(parts: Sequence[Section], page: Path) -> str:
    blocks = []
    for part in parts:
        title = f"{part.title}\n{'=' * len(part.title)}"
        blocks.append("\n\n".join([title, *part.paragraphs, table([part.header, *part.rows])]))
    return "\n\n\n".join([*blocks, f"report: {page}"])
