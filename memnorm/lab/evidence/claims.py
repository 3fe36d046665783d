"""What our records say about the paper's claims: a judge for each claim that they can judge.

A claim has parts: one for every comparison that we ran, and one for each thing it says that we did not try. A part that
one arm has less error than another is *held* where the 95 % interval of the paired difference lies on its side, *not
held* where it lies on the other, and *undecided* where it includes zero or there is one seed only. A claim is held if
all its parts are, and held in part if some are, unless it is about all of them at once. What only runs in settings of
our own refute (another network, length or learning rate than the paper's) is not held *in our settings*.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from memnorm.lab.bench.clock import geometric_mean
from memnorm.lab.evidence.findings import STUCK, Findings, Found, apart, evidence_text, over_common_seeds, significant
from memnorm.lab.group import measured
from memnorm.lab.significance import Difference, Sample, number
from memnorm.lab.store import StoredRun
from memnorm.lab.tables import Claim
from memnorm.milestones import in_steps

Standing = Literal["held", "held in part", "not held", "not held in our settings", "undecided", "not tested"]
LONG, TINY = "ablation-resnet8", "tiny-batch-resnet8"
CLOSE = 0.5  # points: what we call close; the least gain over BN on CIFAR-10 that the paper puts into words is 0.48
LARGEST = 8  # batch size of the study of tiny ones
ABOUT = 0.1  # how far a measured share of time may be from the stated one


class Part(NamedTuple):
    """One thing that a claim says: how it stands, and the numbers, or what it is if nothing was tried."""

    standing: Standing
    words: str
    ours: bool = False  # tried in a setting of our own, not in the paper's


@dataclass(frozen=True)
class Judgement:
    """How a claim stands, what we did to find out, and the numbers."""

    standing: Standing
    test: str = ""
    found: str = ""
    tally: str = ""  # how its parts stand, if there are several


class Material(NamedTuple):
    """What judges look at."""

    findings: Findings
    bench: Mapping[str, Any]


Judge = Callable[[Material], Judgement]
NOT_TESTED = Judgement("not tested")


def judge(claim: Claim, records: Material) -> Judgement:
    found = JUDGES.get(claim.name)
    return found(records) if found else NOT_TESTED


def together(test: str, parts: Sequence[Part], untried: Sequence[str] = (), *, whole: bool = False) -> Judgement:
    """A claim from its parts; `untried` are further parts. A `whole` claim says something of all of them at once: one
    part that is not held refutes it, and some that are held are no part of it.
    """
    if not parts:
        return NOT_TESTED
    kinds = [*(part.standing for part in parts), *(["not tested"] * len(untried))]
    if set(kinds) == {"held"}:
        standing: Standing = "held"
    elif "held" in kinds and not whole:
        standing = "held in part"
    else:
        against = [part for part in parts if part.standing == "not held"]
        elsewhere = bool(against) and all(part.ours for part in against)
        standing = "not held in our settings" if elsewhere else "not held" if against else "undecided"
    missing = [f"not tried: {', '.join(untried)}"] if untried else []
    counts = [
        f"{kinds.count(kind)} {kind}" for kind in ("held", "not held", "undecided", "not tested") if kind in kinds
    ]
    tally = f"{len(kinds)} parts: {', '.join(counts)}" if len(kinds) > 1 else ""
    return Judgement(standing, test, "; ".join([*(part.words for part in parts), *missing]), tally)


class Less(NamedTuple):
    """The first arm is claimed to have less of something than the second, wherever both were run."""

    first: str
    second: str
    metric: str = "test_error"
    sizes: Collection[int] = ()  # empty: every batch size
    model: str = ""  # empty: every one

    def places(self, findings: Findings) -> list[tuple[Found, Difference | None]]:
        """The first arm wherever both are planned, and how far they are apart."""
        return [
            (one, apart(one, other, self.metric))
            for one, other in findings.pairs(self.first, self.second)
            if (not self.sizes or one.arm.spec.batch_size in self.sizes) and self.model in ("", one.arm.spec.model)
        ]

    def parts(self, findings: Findings) -> list[Part]:
        what = ", training error" if self.metric == "train_error" else ""
        return [
            below_zero(f"{self.first} − {self.second} ({one.place}{what})", gap, ours=one.arm.cell is None)
            for one, gap in self.places(findings)
            if gap is not None
        ]

    def missing(self, findings: Findings) -> list[str]:
        """What is planned in the paper's own setting and not run yet."""
        return [one.place for one, gap in self.places(findings) if gap is None and one.arm.cell is not None]


def below_zero(words: str, gap: Difference, *, ours: bool) -> Part:
    standing: Standing = "undecided" if not significant(gap) else "held" if gap.mean < 0 else "not held"
    return Part(standing, f"{words}: {number(gap.mean)} points, {evidence_text(gap)}", ours)


def less(*claims: Less, untried: Sequence[str] = (), whole: bool = False) -> Judge:
    def judged(records: Material) -> Judgement:
        parts = [part for claim in claims for part in claim.parts(records.findings)]
        missing = [place for claim in claims for place in claim.missing(records.findings)]
        return together("paired differences of runs", parts, [*missing, *untried], whole=whole)

    return judged


def close(first: str, second: str) -> Judge:
    """The two hardly differ: the interval of the difference lies within `CLOSE` of zero, and not beyond it."""

    def judged(records: Material) -> Judgement:
        parts = []
        for one, other in records.findings.pairs(first, second):
            gap = apart(one, other)
            if gap is not None:
                interval = gap.interval()
                standing: Standing = "undecided"
                if interval is not None:
                    inside, beyond = max(map(abs, interval)) <= CLOSE, interval[0] > CLOSE or interval[1] < -CLOSE
                    standing = "held" if inside else "not held" if beyond else "undecided"
                words = f"{first} − {second} ({one.place}): {number(gap.mean)} points, {evidence_text(gap)}"
                parts.append(Part(standing, words, ours=one.arm.cell is None))
        return together(f"paired differences of runs; close is within {CLOSE:g} points", parts)

    return judged


def by_tests(*names: str) -> Judge:
    """An exact statement, which the test suite checks with every change."""
    return lambda _records: Judgement("held", "exact, by " + " and ".join(f"`{name}`" for name in names))


def bn_with_two_forwards(records: Material) -> Judgement:
    """The training part is exact; the test error of runs is the other."""
    exact = by_tests("tests/norms/test_bn.py::test_bn_2_trains_with_the_gradients_of_bn_1")(records)
    runs = close("BN-2", "BN")(records)
    standing: Standing = "held" if runs.standing == "held" else "held in part"
    test = f"training: {exact.test}; test error: {runs.test or 'not run yet'}"
    return Judgement(standing, test, runs.found)


def second_drop(records: Material) -> Judgement:
    """MBN's test error falls more behind the last milestone than BN's."""
    parts = []
    for ours, theirs in records.findings.pairs("MBN-2", "BN"):
        changes = [{seed: -drop for seed, drop in _drops(found).items()} for found in (ours, theirs)]
        gap = over_common_seeds(*changes)
        if gap is not None:
            means = [number(Sample(list(one.values())).mean) for one in changes]
            words = f"change of MBN-2 − change of BN ({ours.place}; {means[0]} and {means[1]})"
            parts.append(below_zero(words, gap, ours=ours.arm.cell is None))
    return together("change of the test error from the last evaluation before 60 % of the run to the next one", parts)


def _drops(found: Found) -> dict[int, float]:
    drops = {run.spec.seed: _drop(run) for run in found.runs if run.status == "finished"}
    return {seed: drop for seed, drop in drops.items() if drop is not None}


def _drop(run: StoredRun) -> float | None:
    at = in_steps(run.spec.milestones[-1], run.spec.iterations)
    before = [line for line in run.metrics if line["iteration"] <= at]
    after = [line for line in run.metrics if line["iteration"] > at]
    if not before or not after:
        return None
    high, low = measured(before[-1], "test_error"), measured(after[0], "test_error")
    return None if high is None or low is None else high - low


def training(study: str, label: str, *, fails: bool, sizes: Sequence[int], untried: Sequence[str] = ()) -> Judge:
    """An arm is claimed to train, or that it may fail. One seed that fails decides both; one that trains is too few."""

    def judged(records: Material) -> Judgement:
        parts = []
        for size in sizes:
            found = records.findings.arm(study, label, size)
            if found is None or not found.runs:
                continue
            errors = list(found.errors().values())
            failed = len(found.failed)
            standing: Standing = "undecided"
            if failed:
                standing = "held" if fails else "not held"
            elif not fails and len(found.runs) > 1:
                standing = "held"
            told = ", ".join(f"{number(one)} %" for one in errors) or "no test error"
            count = f"{failed} of {len(found.runs)} failed"
            parts.append(Part(standing, f"{label} ({found.place}): {told}, {count}", ours=True))
        return together(f"failed is diverged, or {STUCK:g} % test error and more", parts, untried)

    return judged


def smaller_batches(records: Material) -> Judgement:
    """BN's error grows as the batch shrinks, and MBN-2's grows less."""
    parts = []
    for size in (4, 2):
        small, large = (records.findings.arm(TINY, "BN", one) for one in (size, LARGEST))
        loss = apart(large, small) if small and large else None
        if loss is not None:
            parts.append(
                below_zero(f"BN at batch size {LARGEST} − BN at {size} (ResNet-8, equal samples)", loss, ours=True)
            )
        gap = over_common_seeds(*(_growth(records.findings, label, size) for label in ("MBN-2", "BN")))
        if gap is not None:
            words = f"growth from {LARGEST} to {size}, MBN-2 − BN (ResNet-8, equal samples)"
            parts.append(below_zero(words, gap, ours=True))
    test = "paired differences of runs at several batch sizes; the learning rate is proportional to the batch size"
    return together(test, parts, ["badly sampled batches"])


def _growth(findings: Findings, label: str, size: int) -> dict[int, float]:
    """Error at this batch size minus that at the largest, by seed."""
    small, large = (findings.arm(TINY, label, one) for one in (size, LARGEST))
    if small is None or large is None:
        return {}
    errors, least = small.errors(), large.errors()
    return {seed: errors[seed] - least[seed] for seed in errors.keys() & least.keys()}


def step_ratio(arm: str, least: float, most: float) -> Callable[[Material], list[Part]]:
    """A step with this arm takes so many times BN's."""

    def parts(records: Material) -> list[Part]:
        found = []
        for network in records.bench["step"]["networks"]:
            for one in network["arms"]:
                if one["name"] == arm:
                    standing: Standing = "held" if least <= one["ratio"] <= most else "not held"
                    words = f"{_step(network)} {one['ratio']:.2f} (quartiles {one['low']:.2f} to {one['high']:.2f})"
                    found.append(Part(standing, f"{words}{', cheaper than claimed' if one['ratio'] < least else ''}"))
        return found

    return parts


def _step(network: Mapping[str, Any]) -> str:
    return f"{network['model']} at {network['batch_size']}"


def thirty_percent(records: Material) -> Judgement:
    """The second forward alone is told as well: our kernels make MBN-1 cheaper than the BN that it is measured by."""
    least, most = 1.3 - ABOUT, 1.3 + ABOUT
    test = f"MBN-2's step in BN's by batch size (the paper's is 128), between {least:.1f} and {most:.1f} times"
    judged = together(f"`memnorm bench` on a CPU: {test}", step_ratio("MBN-2", least, most)(records))
    seconds = []
    for network in records.bench["step"]["networks"]:
        ratios = {one["name"]: one["ratio"] for one in network["arms"]}
        seconds.append(f"{_step(network)} {ratios['MBN-2'] / ratios['MBN-1']:.2f}")
    return replace(
        judged, found=f"{judged.found}; in steps of MBN-1, that is for the second forward: {', '.join(seconds)}"
    )


def same_cost(records: Material) -> Judgement:
    """A cheaper implementation does not contradict the paper."""
    most = 1 + ABOUT
    ratio = geometric_mean([row["eval"]["ratio"] for row in records.bench["layer"]["shapes"]])
    inference = Part("held" if ratio <= most else "not held", f"a layer in eval {ratio:.2f}")
    test = f"MBN-1's step by batch size and a layer in eval, at most {most:.1f} times BN's"
    parts = [*step_ratio("MBN-1", 0.0, most)(records), inference]
    return together(f"`memnorm bench` on a CPU: {test}", parts)


def backward(records: Material) -> Judgement:
    parts = []
    for network in records.bench["step"]["networks"]:
        for one in network["arms"]:
            if one["name"] == "BN":
                share = one["milliseconds of"]["backward"] / one["milliseconds of"]["forward"]
                standing: Standing = "held" if 1.5 <= share <= 2.5 else "not held"
                parts.append(Part(standing, f"{_step(network)} {share:.2f}"))
    test = "backward against forward of BN by batch size (the paper's is 128), between 1.5 and 2.5 times"
    return together(f"`memnorm bench` on a CPU: {test}", parts)


JUDGES: dict[str, Judge] = {
    "small-batches": less(Less("MBN-2", "BN", sizes=(8,)), untried=["batch sizes 16 to 128"], whole=True),
    "very-small-batches": training(TINY, "MBN-2", fails=False, sizes=(2, 4), untried=["batch size 1"]),
    "bn-fails-when-tiny": training(TINY, "BN", fails=True, sizes=(2, 4), untried=["batch size 1"]),
    "poor-sampling": smaller_batches,
    "brn-close-to-bn": close("BRN-2", "BN"),
    "brn-starts-as-bn": by_tests("tests/norms/test_brn.py::test_limits_of_one_and_zero_are_batch_norm"),
    "single-forward-memory": less(Less("MBN-1", "BN"), Less("MBN-1", "BN-2")),
    "double-forward-gains": less(Less("MBN-2", "MBN-1"), untried=["ResNet-56", "BRN with one forward"]),
    "double-forward-in-training": less(
        Less("MBN-2", "MBN-1", metric="train_error"), untried=["ResNet-56", "BRN with one forward"]
    ),
    "double-forward-best": less(
        *(Less("MBN-2", other) for other in ("BN", "BN-2", "BRN-2", "MBN-1")),
        untried=["BRN with one forward"],
        whole=True,
    ),
    "resnet20-similar": less(
        Less("MBN-2", "MBN-1", model="resnet20"), untried=["ResNet-56 with one forward"], whole=True
    ),
    "double-forward-and-bn": bn_with_two_forwards,
    "double-forward-and-normprop": by_tests("tests/norms/test_normprop.py::test_there_is_nothing_to_record"),
    "second-drop": second_drop,
    "lower-training-error": less(Less("MBN-2", "BN", metric="train_error")),
    "fixed-strength": less(*(Less("MBN-2", f"MBN-2 λ={one}") for one in (0.1, 0.5, 0.9)), untried=["λ = 1"]),
    "correction-term": less(Less("MBN-2", "MBN-2 shift=False")),
    "zero-strength-is-bn": by_tests("tests/test_layers.py::test_zero_strength_is_plain_batch_norm"),
    "eq-6-is-eq-5": by_tests("tests/test_reference.py::test_eq_6_as_printed_equals_eq_5"),
    "restore-input": by_tests("tests/test_layers.py::test_gamma_equal_to_sigma_and_beta_to_mu_restores_the_input"),
    "moving-averages-alone": training(LONG, "MOVING-BN", fails=True, sizes=(8,)),
    "backward-costs-two-forwards": backward,
    "thirty-percent": thirty_percent,
    "same-cost": same_cost,
}
