"""What our records say about the paper's claims: a judge for each claim that they can judge.

A claim that one arm has less error than another is *held* where the 95 % interval of a paired difference lies on its
side, *not held* where one lies on the other side, and *undecided* where neither does or there is one seed only. A claim
without a judge, or whose runs are not there, is *not tested*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from memnorm.lab.evidence.findings import Findings, Found, apart, evidence_text, significant
from memnorm.lab.report.model import measured
from memnorm.lab.statistics import Difference, difference, number
from memnorm.lab.store import StoredRun
from memnorm.lab.tables import Claim

Standing = Literal["held", "not held", "undecided", "not tested"]
SHORT, LONG, TINY, HEADLINE = "small-batch-resnet20", "ablation-resnet8", "tiny-batch-resnet8", "headline-resnet56"
CLOSE = 1.0  # points: what we call close
CHANCE = 80.0  # percent of ten classes: an error from here on is no convergence
ABOUT = 0.1  # how far a measured share of time may be above the stated one


@dataclass(frozen=True)
class Judgement:
    """How a claim stands, what we did to find out, and the numbers."""

    standing: Standing
    test: str = ""
    found: str = ""


class Material(NamedTuple):
    """What judges look at."""

    findings: Findings
    bench: Mapping[str, Any]


class Versus(NamedTuple):
    """The first arm is claimed to have less of something than the second."""

    study: str
    first: str
    second: str
    batch_size: int | None = None
    metric: str = "test_error"

    def gap(self, findings: Findings) -> Difference | None:
        first, second = (findings.arm(self.study, label, self.batch_size) for label in (self.first, self.second))
        return apart(first, second, self.metric) if first and second else None

    @property
    def words(self) -> str:
        where = f"{self.study}{f', batch size {self.batch_size}' if self.batch_size else ''}"
        what = {"train_error": ", training error"}.get(self.metric, "")
        return f"{self.first} − {self.second} ({where}{what})"


Judge = Callable[[Material], Judgement]
NOT_TESTED = Judgement("not tested")


def judge(claim: Claim, records: Material) -> Judgement:
    found = JUDGES.get(claim.name)
    return found(records) if found else NOT_TESTED


def lower(*pairs: Versus, note: str = "") -> Judge:
    """The first of each pair has less. `note`: how far the test goes."""

    def judged(records: Material) -> Judgement:
        gaps = [(pair, gap) for pair in pairs if (gap := pair.gap(records.findings)) is not None]
        return _of_gaps(f"paired differences of runs{note}", [(pair.words, gap) for pair, gap in gaps])

    return judged


def _of_gaps(test: str, gaps: Sequence[tuple[str, Difference]]) -> Judgement:
    """Held if the differences are below zero."""
    if not gaps:
        return NOT_TESTED
    found = "; ".join(f"{words}: {number(gap.mean)} points, {evidence_text(gap)}" for words, gap in gaps)
    sides = {gap.mean < 0 for _, gap in gaps if significant(gap)}
    return Judgement("undecided" if not sides else "held" if sides == {True} else "not held", test, found)


def close(pair: Versus) -> Judge:
    """The two hardly differ: the interval of the difference lies within `CLOSE`."""

    def judged(records: Material) -> Judgement:
        gap = pair.gap(records.findings)
        if gap is None:
            return NOT_TESTED
        interval = gap.interval()
        inside = interval is not None and max(map(abs, interval)) <= CLOSE
        standing: Standing = "held" if inside else "not held" if significant(gap) else "undecided"
        found = f"{pair.words}: {number(gap.mean)} points, {evidence_text(gap)}"
        return Judgement(standing, f"paired difference of runs; close is within {CLOSE:g} point", found)

    return judged


def by_tests(*names: str) -> Judge:
    """An exact statement, which the test suite checks with every change."""
    return lambda _records: Judgement("held", "exact, by " + " and ".join(f"`{name}`" for name in names))


def bn_with_two_forwards(records: Material) -> Judgement:
    """The training part is exact; so the test error of runs decides, where there are any."""
    exact = by_tests("tests/norms/test_bn.py::test_bn_2_trains_with_the_gradients_of_bn_1")(records)
    runs = close(Versus(LONG, "BN-2", "BN"))(records)
    standing: Standing = "undecided" if runs.standing == "not tested" else runs.standing
    return Judgement(standing, f"{exact.test}; test error: {runs.test or 'not run yet'}", runs.found)


def second_drop(records: Material) -> Judgement:
    gaps = []
    for study in (SHORT, LONG):
        ours, theirs = (records.findings.arm(study, label) for label in ("MBN-2", "BN"))
        gap = difference(_drops(theirs), _drops(ours)) if ours and theirs else None
        gaps += [(f"BN's drop − MBN-2's ({study})", gap)] if gap else []
    return _of_gaps("test error at the last evaluation before 60 % of the run minus that at the next one", gaps)


def _drops(found: Found) -> dict[int, float]:
    drops = {run.spec.seed: _drop(run) for run in found.runs if run.status == "finished"}
    return {seed: drop for seed, drop in drops.items() if drop is not None}


def _drop(run: StoredRun) -> float | None:
    at = run.spec.milestones[-1] * run.spec.iterations
    before = [line for line in run.metrics if line["iteration"] <= at + 0.5]
    after = [line for line in run.metrics if line["iteration"] > at + 0.5]
    if not before or not after:
        return None
    high, low = measured(before[-1], "test_error"), measured(after[0], "test_error")
    return None if high is None or low is None else high - low


def moving_averages(records: Material) -> Judgement:
    found = records.findings.arm(LONG, "MOVING-BN")
    if found is None or not found.runs:
        return NOT_TESTED
    errors = list(found.errors().values())
    failed = len(found.diverged) + sum(error >= CHANCE for error in errors)
    told = [f"{len(found.diverged)} of {len(found.runs)} diverged", *(f"{number(one)} % test error" for one in errors)]
    standing: Standing = "held" if failed == len(found.runs) else "not held" if not failed else "undecided"
    return Judgement(standing, f"runs of {LONG}; not converged is diverged, or {CHANCE:g} % and more", ", ".join(told))


def step_ratio(arm: str, most: float) -> Judge:
    """A step with this arm takes `most` times BN's at the paper's batch size, or less: a cheaper implementation does
    not contradict the paper.
    """

    def judged(records: Material) -> Judgement:
        found = {
            network["model"]: one
            for network in records.bench["step"]["networks"]
            for one in network["arms"]
            if network["batch_size"] == 128 and one["name"] == arm
        }
        told = [
            f"{model} {one['ratio']:.2f} (quartiles {one['low']:.2f} to {one['high']:.2f})"
            for model, one in found.items()
        ]
        inside = [one["ratio"] <= most for one in found.values()]
        return _measured(f"{arm}'s step against BN's at batch size 128, at most {most:.1f} times", inside, told)

    return judged


def backward(records: Material) -> Judgement:
    shares = {
        network["model"]: one["milliseconds of"]["backward"] / one["milliseconds of"]["forward"]
        for network in records.bench["step"]["networks"]
        for one in network["arms"]
        if network["batch_size"] == 128 and one["name"] == "BN"
    }
    inside = [1.5 <= share <= 2.5 for share in shares.values()]
    told = [f"{model} {share:.2f}" for model, share in shares.items()]
    return _measured("backward against forward of BN at batch size 128, between 1.5 and 2.5 times", inside, told)


def _measured(test: str, inside: Sequence[bool], told: Sequence[str]) -> Judgement:
    if not inside:
        return NOT_TESTED
    standing: Standing = "held" if all(inside) else "not held" if not any(inside) else "undecided"
    return Judgement(standing, f"`memnorm bench` on a processor: {test}", ", ".join(told))


JUDGES: dict[str, Judge] = {
    "small-batches": lower(
        Versus(SHORT, "MBN-2", "BN"),
        Versus(LONG, "MBN-2", "BN"),
        Versus(HEADLINE, "MBN-2", "BN"),
        note=", batch size 8 only",
    ),
    "very-small-batches": lower(Versus(TINY, "MBN-2", "BN", 2), Versus(TINY, "MBN-2", "BN", 4)),
    "brn-close-to-bn": close(Versus(SHORT, "BRN-2", "BN")),
    "single-forward-memory": lower(
        Versus(SHORT, "MBN-1", "BN"), Versus(LONG, "MBN-1", "BN"), Versus(LONG, "MBN-1", "BN-2")
    ),
    "double-forward-gains": lower(Versus(SHORT, "MBN-2", "MBN-1"), Versus(LONG, "MBN-2", "MBN-1")),
    "resnet20-similar": lower(Versus(SHORT, "MBN-2", "MBN-1")),
    "double-forward-and-bn": bn_with_two_forwards,
    "double-forward-and-normprop": by_tests("tests/norms/test_normprop.py::test_there_is_nothing_to_record"),
    "second-drop": second_drop,
    "lower-training-error": lower(
        Versus(SHORT, "MBN-2", "BN", metric="train_error"), Versus(LONG, "MBN-2", "BN", metric="train_error")
    ),
    "fixed-strength": lower(*(Versus(LONG, "MBN-2", f"MBN-2, λ = {one}") for one in (0.1, 0.5, 0.9))),
    "correction-term": lower(Versus(LONG, "MBN-2", "MBN-2, no shift")),
    "zero-strength-is-bn": by_tests("tests/test_layers.py::test_zero_strength_is_plain_batch_norm"),
    "eq-6-is-eq-5": by_tests("tests/test_reference.py::test_eq_6_as_printed_equals_eq_5"),
    "restore-input": by_tests("tests/test_layers.py::test_gamma_equal_to_sigma_and_beta_to_mu_restores_the_input"),
    "moving-averages-alone": moving_averages,
    "backward-costs-two-forwards": backward,
    "thirty-percent": step_ratio("MBN-2", 1.3 + ABOUT),
    "same-cost": step_ratio("MBN-1", 1 + ABOUT),
}
