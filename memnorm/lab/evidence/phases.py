"""Two arms along the run: how far apart they are at the end of each part of it.

A part goes from one milestone to the next, where the learning rate falls and MBN's strength λ grows.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

from memnorm.lab.evidence.findings import Found, over_common_seeds
from memnorm.lab.report.model import measured
from memnorm.lab.statistics import Difference
from memnorm.lab.store import StoredRun
from memnorm.schedule import in_steps


class Phase(NamedTuple):
    """The first arm minus the second at the last evaluation of a part of the run."""

    strength: float  # of the first arm
    training: Difference
    test: Difference
    first_rise: Difference  # from the first arm's own training error to its test error
    second_rise: Difference


def phases(first: Found, second: Found) -> list[Phase]:
    """Those parts of the run of which both arms have an evaluation, over the seeds that both have."""
    found = []
    for index, strength in enumerate(first.arm.spec.strength):
        ends = [_ends(one, index, metric) for one in (first, second) for metric in ("train_error", "test_error")]
        common = set.intersection(*(set(one) for one in ends))
        training, test, second_training, second_test = ({seed: one[seed] for seed in common} for one in ends)
        pairs = ((training, second_training), (test, second_test), (test, training), (second_test, second_training))
        gaps = [gap for one, other in pairs if (gap := over_common_seeds(one, other)) is not None]
        if len(gaps) == len(pairs):
            found.append(Phase(strength, *gaps))
    return found


def _ends(found: Found, phase: int, metric: str) -> dict[int, float]:
    """By seed, of the runs that finished."""
    values = {
        run.spec.seed: measured(lines[phase], metric)
        for run in found.runs
        if run.status == "finished" and (lines := last_evaluations(run))
    }
    return {seed: value for seed, value in values.items() if value is not None}


def last_evaluations(run: StoredRun) -> list[dict[str, Any]]:
    """The last evaluation of each part of a run; none at all unless every part has one."""
    ends = [in_steps(one, run.spec.iterations) for one in run.spec.milestones]
    parts = [
        [line for line in run.metrics if begin < line["iteration"] <= end]
        for begin, end in pairwise([0, *ends, run.spec.iterations])
    ]
    return [part[-1] for part in parts] if all(parts) else []
