"""Two arms along the run: how far apart they are at the end of each part of it.

A part goes from one milestone to the next. The learning rate falls there, and MBN's strength λ grows.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

from memnorm.lab.evidence.findings import Found
from memnorm.lab.group import measured
from memnorm.lab.significance import Difference, difference
from memnorm.milestones import in_steps

Lines = dict[tuple[int, int], dict[str, Any]]  # of metrics, by seed and iteration


class Errors(NamedTuple):
    training: float
    test: float


class Phase(NamedTuple):
    """The first arm minus the second, over the seeds that both have, at the last evaluation of a part of the run."""

    iteration: int
    strength: float | None  # of the first arm, if it has any
    training: Difference  # of training errors
    test: Difference  # of test errors
    excess: Difference  # of how far the test error is above the arm's own training error


def phases(first: Found, second: Found) -> list[Phase]:
    """Those parts that both arms have an evaluation of; none if their runs are not divided alike."""
    spec, other = first.arm.spec, second.arm.spec
    if (spec.iterations, spec.milestones) != (other.iterations, other.milestones):
        return []
    ends = [0, *(in_steps(one, spec.iterations) for one in spec.milestones), spec.iterations]
    parts = [_phase(_last_lines(first, *part), _last_lines(second, *part)) for part in pairwise(ends)]
    return [part for part in parts if part is not None]


def _last_lines(found: Found, begin: int, end: int) -> Lines:
    """The last evaluation between two iterations of each run that finished."""
    lines = {}
    for run in found.runs:
        inside = [line for line in run.metrics if begin < line["iteration"] <= end]
        if inside and run.status == "finished":
            lines[run.spec.seed, int(inside[-1]["iteration"])] = inside[-1]
    return lines


def _phase(first: Lines, second: Lines) -> Phase | None:
    """Over evaluations that both have, at the same iteration."""
    pairs = {}
    for key in sorted(first.keys() & second.keys()):
        one, other = _errors(first[key]), _errors(second[key])
        if one is not None and other is not None:
            pairs[key] = (one, other)
    if not pairs:
        return None
    key = next(iter(pairs))
    gaps = []
    for of in (lambda one: one.training, lambda one: one.test, lambda one: one.test - one.training):
        gap = difference(*({seed: of(pair[arm]) for (seed, _), pair in pairs.items()} for arm in (0, 1)))
        assert gap is not None
        gaps.append(gap)
    return Phase(key[1], measured(first[key], "strength"), *gaps)


def _errors(line: dict[str, Any]) -> Errors | None:
    training, test = measured(line, "train_error"), measured(line, "test_error")
    return None if training is None or test is None else Errors(training, test)
