"""memnorm evidence: our own studies, from the queue to compact records."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from memnorm.lab.arms import registered
from memnorm.lab.cli.data import ensure
from memnorm.lab.cli.flags import add_fields, add_places, filled, names, parse, parser
from memnorm.lab.cli.queue import queue_text, seconds_here, seconds_left, total
from memnorm.lab.console import watching
from memnorm.lab.errors import FAILED, OK, UsageError
from memnorm.lab.evidence import MINIATURE, STUDIES, Plan, Records, Study, chosen_rate, plan
from memnorm.lab.grid import run_all
from memnorm.lab.listen import Together
from memnorm.lab.spec import Execution, RunSpec
from memnorm.lab.store import check_root
from memnorm.lab.tables import unsupported
from memnorm.text import suggestion, table

EXAMPLES = """
examples:
  memnorm evidence --list                                 studies, arms, what is done, estimated time left
  memnorm evidence --jobs 2                               all of it, two runs side by side on one thread each
  memnorm evidence small-batch-resnet20 --only "MBN*" --jobs 2
  memnorm evidence --miniature --runs /tmp/runs --records /tmp/records    seconds, numbers mean nothing

Interrupt it at will: the same command skips what is finished and goes on with what is not. A run that ends is copied at
once, without its checkpoints, into the folder of records; what has a record is not run again.
"""


def main(words: Sequence[str]) -> int:
    arguments = parse(flags(), words)
    if arguments.jobs < 0:
        raise UsageError(f"--jobs must not be negative; got {arguments.jobs}")
    studies = selected(arguments)
    kept = arguments.records or (arguments.runs / "miniature-records" if arguments.miniature else Path("results"))
    records = Records(arguments.runs, check_root(kept))
    now = plan(studies, records.result)
    seconds = times(now, records)
    if arguments.list:
        print(listing(studies, records, seconds))
    print(queue_text(now.ready, len(now.done), seconds, arguments.jobs), flush=True)
    if now.locked:
        upper = total(now.locked, seconds, arguments.jobs)
        print(
            f"then up to {len(now.locked)} runs whose learning rate is chosen first; at most {upper} more", flush=True
        )
    return OK if arguments.list else carry_out(studies, records, now, arguments)


def flags() -> Any:
    everything = ", ".join(study.name for study in STUDIES)
    examples = f"{EXAMPLES.rstrip()}\n\nstudies: {everything}; docs/protocol.md has them in words"
    made = parser("evidence", "Run the studies that our evidence rests on.", examples, positional="[STUDY ...]")
    made.add_argument("studies", nargs="*", metavar="STUDY", help="studies; default: all")
    asked = made.add_argument_group("what to run")
    asked.add_argument("--list", action="store_true", help="show studies and arms and run nothing")
    asked.add_argument("--only", action="append", metavar="ARM", help="arms: LABEL or LABEL/BATCH; * for anything")
    asked.add_argument("--miniature", action="store_true", help="a small queue on digits that tries the machinery")
    computed = made.add_argument_group("how it is computed")
    computed.add_argument("--jobs", type=int, default=0, help="runs side by side, one process and thread each; 0: here")
    add_fields(computed, Execution, defaults={"threads": 1})
    places = made.add_argument_group("where things are")
    add_places(places)
    kept = "folder for what is kept of each run; default: results, for --miniature one below runs"
    places.add_argument("--records", type=Path, help=kept)
    return made


def selected(arguments: Any) -> list[Study]:
    """The studies asked for, with the arms asked for."""
    every = {study.name: study for study in (MINIATURE if arguments.miniature else STUDIES)}
    for name in arguments.studies or []:
        if name not in every:
            near = difflib.get_close_matches(name, every, n=2)
            hint = " It is one of --miniature." if name in [one.name for one in MINIATURE] else suggestion(near)
            raise UsageError(f"no study {name!r}.{hint} There are {', '.join(every)}.")
    studies = [study for name, study in every.items() if not arguments.studies or name in arguments.studies]
    patterns = [pattern.lower() for word in arguments.only or [] for pattern in names(word)]
    if not patterns:
        return studies
    thinned = [
        replace(study, arms=tuple(arm for arm in study.arms if _matches((arm.label, arm.key), patterns)))
        for study in studies
    ]
    words = {word.lower(): word for study in studies for arm in study.arms for word in (arm.label, arm.key)}
    for pattern in patterns:
        if not _matches(list(words), [pattern]):
            near = [words[one] for one in difflib.get_close_matches(pattern, words, n=2)]
            labels = dict.fromkeys(arm.key for study in studies for arm in study.arms)
            raise UsageError(f"--only {pattern}: no such arm.{suggestion(near)} There are {', '.join(labels)}.")
    return [study for study in thinned if study.arms]


def _matches(words: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(word.lower(), pattern) for word in words for pattern in patterns)


def times(now: Plan, records: Records) -> dict[str, float]:
    """Seconds of what is left to do, on one thread."""
    left = (*now.ready, *now.locked)
    return seconds_left(left, seconds_here(left, records.runs(), threads=1), records.work) if left else {}


def listing(studies: Sequence[Study], records: Records, seconds: dict[str, float]) -> str:
    rows = []
    for study in studies:
        for arm in study.arms:
            rate = chosen_rate(study, arm, records.result)
            runs = [arm.run(seed, rate) for seed in range(arm.seeds)]
            left = [run for run in runs if rate is None or records.result(run) is None]
            trials = [trial for trial in arm.trials(study.holdout) if records.result(trial) is None]
            done = f"{len(runs) - len(left)} of {len(runs)}" + (f", {len(trials)} trials to do" if trials else "")
            chosen = "to be chosen" if rate is None else f"{arm.run(0, rate).base_learning_rate:g}"
            time = total([*left, *trials], seconds) if left or trials else ""
            rows.append((study.name, arm.label, str(arm.spec.batch_size), chosen, done, time))
    return table([("study", "arm", "batch", "rate", "seeds done", "time left"), *rows]) + "\n"


def carry_out(studies: Sequence[Study], records: Records, now: Plan, arguments: Any) -> int:
    for spec in now.done:
        records.keep(spec)
    if not now.ready:
        return OK
    records.prepare()
    for spec in (*now.ready, *now.locked):
        reason = unsupported(spec, registered())
        if reason:
            raise UsageError(f"{spec.arm}: {reason}")
    ensure(sorted({spec.data for spec in now.ready}), arguments.data_root, arguments.download)

    def replan() -> Sequence[RunSpec]:
        return plan(studies, records.result).ready

    with watching(len(now.ready) + len(now.locked)) as listener:
        outcomes = run_all(
            now.ready,
            records.work,
            execution=filled(Execution, arguments),
            data_root=arguments.data_root,
            jobs=min(arguments.jobs, len(now.ready) + len(now.locked)),
            listener=Together(records, listener),
            replan=replan,
        )
    counts = {status: sum(one.status == status for one in outcomes) for status in ("finished", "diverged", "failed")}
    print(
        ", ".join(f"{count} {status}" for status, count in counts.items() if count) + f"; records: {records.kept.root}"
    )
    return FAILED if counts["failed"] else OK
