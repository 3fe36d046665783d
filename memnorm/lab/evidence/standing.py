"""How the arms of a study stand beside its baseline: who was found better, who worse, who may be either.

Each arm is compared with the baseline at its batch size, and with nothing else; p-values are corrected for all these
comparisons of the study together (Holm), those that are not run yet included, so that what is said early need not be
taken back. Arms that are planned with one seed are no such comparisons: they can never be tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memnorm.lab.evidence.findings import Findings, Found, apart, seeds_text, significant
from memnorm.lab.evidence.study import Study
from memnorm.lab.significance import CONFIDENCE, Difference, holm, number, p_text

FEW = 2  # seeds that both have: with one degree of freedom hardly anything is told apart


@dataclass(frozen=True)
class Standing:
    """An arm beside the baseline."""

    found: Found
    gap: Difference | None  # the arm minus the baseline
    p: float | None = None  # corrected; None where seeds are too few to test

    @property
    def label(self) -> str:
        return self.found.label

    @property
    def told_apart(self) -> bool:
        return self.p is not None and self.p < 1 - CONFIDENCE

    @property
    def apart_alone(self) -> bool:
        """Told apart if it were the only comparison."""
        return not self.told_apart and self.gap is not None and significant(self.gap)

    @property
    def better(self) -> bool:
        return self.told_apart and self.gap is not None and self.gap.mean < 0

    @property
    def worse(self) -> bool:
        return self.told_apart and not self.better

    @property
    def points(self) -> str:
        """2.84 points, corrected p = 0.004."""
        assert self.gap is not None
        assert self.p is not None
        return f"{number(abs(self.gap.mean))} points, corrected {p_text(self.p)}"


def standings(findings: Findings, study: Study) -> list[Standing]:
    """Every arm but the baseline, in the order of the study."""
    found = []
    for one in findings.arms(study):
        base = findings.arm(study.name, study.baseline, one.arm.spec.batch_size)
        if one.label != study.baseline and base is not None:
            found.append(Standing(one, apart(one, base)))
    tested = [one for one in found if one.found.arm.seeds > 1]
    corrected = holm([1.0 if (p := _alone_p(one)) is None else p for one in tested])
    by_arm = {one.found.arm.key: p for one, p in zip(tested, corrected, strict=True) if _alone_p(one) is not None}
    return [replace(one, p=by_arm.get(one.found.arm.key)) for one in found]


def family(findings: Findings, study: Study) -> int:
    """How many comparisons p-values are corrected for."""
    return sum(one.found.arm.seeds > 1 for one in standings(findings, study))


def corrected_p(findings: Findings, first: Found, second: Found) -> float | None:
    """Of two arms of a study, one of them its baseline; None where seeds are too few to test."""
    keys = (first.arm.key, second.arm.key)
    return next((one.p for one in standings(findings, first.study) if one.found.arm.key in keys), None)


def told(arms: Sequence[Standing], baseline: str) -> str:
    """The arms of one batch size in words, without the full stop."""
    level = f"not told apart from {baseline}"
    parts = [
        (f"less error than {baseline}", [f"{one.label} ({one.points})" for one in arms if one.better]),
        (f"more error than {baseline}", [f"{one.label} ({one.points})" for one in arms if one.worse]),
        (level, [one.label for one in arms if _level(one)]),
        (f"{level} once corrected for all comparisons", [_alone(one) for one in arms if one.apart_alone]),
        ("too few seeds to say", [one.label for one in arms if one.p is None and _finished(one)]),
        ("every run diverged", [one.label for one in arms if one.found.runs and not _finished(one)]),
        ("not run yet", [one.label for one in arms if not one.found.runs]),
    ]
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in parts if names)


def choice(arms: Sequence[Standing], base: Found) -> str:
    """What to take: the baseline, unless something was found to be better; and who has less error still."""
    if not base.sample():
        return f"no claim: {base.label} {'diverged' if base.runs else 'is not run yet'}"
    if all(one.p is None for one in arms):
        return f"no claim: too few seeds beside {base.label}"
    better = [one for one in arms if one.better]
    taken = min((one for one in better if not one.found.failed), key=lambda one: _mean(one.found), default=None)
    lower = [one for one in arms if one not in better and _below(one, taken.found if taken else base)]
    words = [_advice(taken, base, lower, bool(better))]
    words += [f"{one.label} has less error ({one.points}) but failed in {_failed(one.found)}" for one in _shaky(better)]
    if lower:
        whose = taken.label if taken else base.label
        told = ", ".join(_lower(one, taken.found if taken else base) for one in lower)
        words.append(f"Lower than {whose} over the seeds that both have, which may be chance: {told}")
    return ". ".join(words)


def _advice(taken: Standing | None, base: Found, lower: Sequence[Standing], better: bool) -> str:
    if taken:
        return f"take {taken.label}"
    if base.failed:
        return f"no advice: {base.label} failed in {_failed(base)}, and nothing that never did was found to be better"
    if lower and not better and all(one.gap is None or one.gap.n <= FEW for one in lower):
        names = ", ".join(one.label for one in lower)
        return f"no advice: too few seeds to tell {names} from {base.label}"
    which = " that trains in every seed" if better else ""
    return f"stay with {base.label}: nothing{which} was found to have less error"


def _below(one: Standing, other: Found) -> bool:
    gap = apart(one.found, other)
    return gap is not None and gap.mean < 0


def _lower(one: Standing, other: Found) -> str:
    """MABN (by 6.09 points, lower in 2 of 2 seeds)."""
    gap = apart(one.found, other)
    assert gap is not None
    return f"{one.label} (by {number(-gap.mean)} points, {seeds_text(gap)})"


def _shaky(better: Sequence[Standing]) -> list[Standing]:
    return [one for one in better if one.found.failed]


def _failed(found: Found) -> str:
    return f"{len(found.failed)} of {len(found.runs)} seeds"


def _level(one: Standing) -> bool:
    return one.p is not None and not one.told_apart and not one.apart_alone


def _alone(one: Standing) -> str:
    """GROUP (alone 9.15 points more, p = 0.011, n = 3)."""
    assert one.gap is not None
    assert one.gap.p is not None
    sign = "less" if one.gap.mean < 0 else "more"
    return f"{one.label} (alone {number(abs(one.gap.mean))} points {sign}, {p_text(one.gap.p)}, n = {one.gap.n})"


def _alone_p(one: Standing) -> float | None:
    return one.gap.p if one.gap is not None else None


def _finished(one: Standing) -> bool:
    return one.found.sample() is not None


def _mean(found: Found) -> float:
    sample = found.sample()
    assert sample is not None
    return sample.mean
