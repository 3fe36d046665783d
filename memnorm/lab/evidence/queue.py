"""From studies to runs: an ordered list in which every run stands once, whichever studies share it.

A study goes in rounds: the trials of learning rates, then seed 0 of every arm, then seed 1 …, so that a queue stopped
anywhere leaves pairs to compare. Runs whose learning rate is not chosen yet are `locked`; the plan is made anew as
results come in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from memnorm.lab.evidence.study import Arm, Study
from memnorm.lab.experiment import choose_rates
from memnorm.lab.listen import Outcome
from memnorm.lab.spec import RunSpec

Lookup = Callable[[RunSpec], "dict[str, Any] | None"]  # the result of a run, None if it is not done


@dataclass(frozen=True)
class Plan:
    """What there is to do: runs that can be made now, and runs that wait for a learning rate, given as if it were that
    of their specification.
    """

    ready: tuple[RunSpec, ...]
    done: tuple[RunSpec, ...]
    locked: tuple[RunSpec, ...]


def plan(studies: Iterable[Study], result: Lookup) -> Plan:
    runs: dict[str, RunSpec] = {}
    locked: list[RunSpec] = []
    for study in studies:
        rates = {arm.key: chosen_rate(study, arm, result) for arm in study.arms}
        for arm in study.arms:
            runs.update({trial.digest: trial for trial in arm.trials(study.holdout) if trial.digest not in runs})
        for seed in range(study.seeds):
            for arm in study.arms:
                if seed >= arm.seeds:
                    continue
                spec = arm.run(seed, rates[arm.key])
                if rates[arm.key] is None:
                    locked.append(spec)
                else:
                    runs.setdefault(spec.digest, spec)
    done = {digest for digest, spec in runs.items() if result(spec) is not None}
    return Plan(
        tuple(spec for digest, spec in runs.items() if digest not in done),
        tuple(spec for digest, spec in runs.items() if digest in done),
        tuple(locked),
    )


def chosen_rate(study: Study, arm: Arm, result: Lookup) -> float | None:
    """The learning rate of an arm: the specification's, or the one with the lowest error on the held-out images, the
    larger of equals; None while trials are missing. A diverged trial is the worst; if all diverged, the least rate is
    taken.
    """
    if not arm.rates:
        return arm.spec.learning_rate
    outcomes = []
    for trial in arm.trials(study.holdout):
        found = result(trial)
        if found is None:
            return None
        outcomes.append(Outcome(trial, found["status"], result=found))
    return next(iter(choose_rates(outcomes).values()), min(arm.rates))
