"""memnorm train: one run, from flags or a YAML file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from memnorm.lab.cli.data import ensure
from memnorm.lab.cli.flags import add_config, add_fields, add_places, filled, filled_spec, parse, parser
from memnorm.lab.console import watching
from memnorm.lab.errors import FAILED, OK
from memnorm.lab.listen import relay
from memnorm.lab.processes import is_first, launched
from memnorm.lab.runner import run
from memnorm.lab.spec import Execution, RunSpec, parse_arm
from memnorm.lab.store import Store

EXAMPLES = """
examples:
  memnorm train --data digits --model small --norm mbn --batch-size 4 --iterations 600
  memnorm train --data cifar10 --model resnet20 --norm mbn --batch-size 8 --iterations 20000
  memnorm train --data cifar10 --model resnet8 --norm two_way --batch-size 2 --accumulate 16 --iterations 1500
  memnorm train --data path/to/images --model my_package.models:net --norm mbn --batch-size 2 --learning-rate 0.01
  memnorm train --config run.yaml --seed 1            flags after --config override the file
  memnorm train --norm mbn --print-config > run.yaml  write such a file
  torchrun --nproc-per-node 2 -m memnorm.lab train --data digits --model small --norm mbn --device cpu

The run is kept in a folder under --runs. The same command again shows its result, or resumes an
interrupted run. A config file is code if it names a model or task of your own, package.module:factory: the run imports
and calls it. Such a file needs --trust-config.
"""
NORM = (
    "a name of memnorm.norms, with options as in two_way:decay=0.75; bn is the model as it is. mbn means mbn-2, with "
    "Double-Forward; mbn-1 is without"
)
SCHEME = "double adds Double-Forward; without this flag the norm decides"


def main(words: Sequence[str]) -> int:
    made = parser("train", "Train one network and keep the record.", EXAMPLES)
    add_config(made)
    run_flags = made.add_argument_group("the run: what its numbers depend on")
    add_fields(run_flags, RunSpec, skip=("norm", "scheme"))
    run_flags.add_argument("--norm", type=str, default="bn", help=NORM)
    scheme = Literal["single", "double"] | None
    run_flags.add_argument("--scheme", type=scheme, default=None, metavar="{single,double}", help=SCHEME)
    add_fields(made.add_argument_group("how it is computed"), Execution)
    places = made.add_argument_group("folders")
    add_places(places)
    places.add_argument("--json", action="store_true", help="print the result as JSON")
    arguments = parse(made, words)
    arm = parse_arm(arguments.norm, arguments.scheme)
    vars(arguments).update(arm, norm_options={**arguments.norm_options, **arm.get("norm_options", {})})
    spec, execution = filled_spec(arguments), filled(Execution, arguments)
    if spec.processes == 1:
        spec = spec.but(processes=launched())
    ensure([spec.data], arguments.data_root, arguments.download)
    store = Store(arguments.runs)
    if not is_first():  # rank 0 prints
        run(spec, store, execution=execution, data_root=arguments.data_root)
        return OK
    with watching(1) as listener:
        result = run(spec, store, execution=execution, data_root=arguments.data_root, listener=relay(listener))
    print(json.dumps(result, indent=1) if arguments.json else describe(result, str(store.run(spec).path)))
    return OK if result["status"] == "finished" else FAILED


def describe(result: dict[str, Any], path: str) -> str:
    if result["status"] == "diverged":
        return (
            f"diverged: the loss was not finite at iteration {result['diverged_at']:,}. A lower --learning-rate or a "
            f"--warmup may help.\nrecord: {path}"
        )
    final, best = result["final"], result["best"]
    top5 = f" (top-5 {final['test_error_top5']:.2f} %)" if final.get("test_error_top5") is not None else ""
    recalibrated = final.get("test_error_recalibrated")
    again = f"recalibrated {recalibrated:.2f} % with recomputed statistics\n" if recalibrated is not None else ""
    more = "".join(f"{name:<11} {final[f'test_{name}']:.2f} %\n" for name in ("iou", "dice") if f"test_{name}" in final)
    return (
        f"test error  {final['test_error']:.2f} %{top5} at the last iteration, the headline number\n"
        f"{again}{more}"
        f"best        {best['test_error']:.2f} % at iteration {best['iteration']:,} (chosen on the test images)\n"
        f"train error {final['train_error']:.2f} % over the last batches\n"
        f"time        {result['seconds']:.0f} s of training, {final['step_ms']:.1f} ms per step\n"
        f"record      {path}"
    )
