"""The queue of runs and how long it takes on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from memnorm.lab import duration
from memnorm.lab.checkpoint import reached
from memnorm.lab.console import stderr
from memnorm.lab.environment import machine
from memnorm.lab.spec import RunSpec
from memnorm.lab.store import Store, StoredRun
from memnorm.text import table


def seconds_here(specs: Sequence[RunSpec], stored: Iterable[StoredRun], threads: int) -> dict[str, float]:
    """Seconds of each run on this machine, by digest."""
    stderr().print("measuring this machine …", markup=False)
    known = duration.measured(stored, threads, machine())
    return duration.estimate(specs, threads=threads, known=known)


def seconds_left(specs: Iterable[RunSpec], seconds: Mapping[str, float], runs: Store) -> dict[str, float]:
    """The seconds left of each run, by its last checkpoint."""
    return {
        spec.digest: seconds[spec.digest] * max(1 - reached(runs.run(spec).path) / spec.iterations, 0.0)
        for spec in specs
        if spec.digest in seconds
    }


def total(specs: Iterable[RunSpec], seconds: Mapping[str, float], jobs: int = 0) -> str:
    """How long these runs take, `jobs` at a time."""
    return duration.human(sum(seconds.get(spec.digest, 0.0) for spec in specs) / max(jobs, 1))


def queue_text(todo: Sequence[RunSpec], done: int, seconds: Mapping[str, float], jobs: int) -> str:
    """`seconds` are those left."""
    rows = [(spec.name, f"{spec.iterations:,}", total([spec], seconds)) for spec in todo]
    summary = f"{len(todo)} runs to do, {done} done; {total(todo, seconds, jobs)} on this machine"
    return "\n\n".join([*([table([("run", "iterations", "time left"), *rows])] if rows else []), summary])


def queue_json(todo: Sequence[RunSpec], seconds: Mapping[str, float]) -> str:
    return json.dumps([{"run": spec.name, "seconds": seconds.get(spec.digest)} for spec in todo], indent=1)
