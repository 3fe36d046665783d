"""What came out of the studies: the stored runs of each arm, and how far arms are apart, seed by seed.

Works with any part of the runs done. A run that diverged has no error; it is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memnorm.lab.evidence.queue import chosen_rate
from memnorm.lab.evidence.study import Arm, Study
from memnorm.lab.group import RECALIBRATED, Group, final
from memnorm.lab.significance import CONFIDENCE, Difference, Sample, difference, number, p_text
from memnorm.lab.spec import RunSpec
from memnorm.lab.store import StoredRun

STUCK = 80.0  # percent, of ten classes: an error from here on is no training
# Recalibrating gave deeper layers of norms that read their running statistics those of inputs that the old ones made.
# It was mended after these commits; that number of runs made by them is left out, and the rest of them is sound.
READERS = ("brn", "mabn")
FAULTY_RECALIBRATION = ("11e9744a6b8b", "f988411c379c", "444e1ac59278")
# It let MBN's old memory take part, too, until after these commits: a lesser fault, whose size is measured.
WITH_MEMORY = (
    *FAULTY_RECALIBRATION,
    *("0a3ea27bf804", "437bbfb9c9db", "4423f10dd1e4", "91bef383374b", "d9088e07ca49", "ea31bd1966aa", "f258e3855565"),
)


@dataclass(frozen=True)
class Found:
    """An arm and its runs that are done, by seed. `rate` is None while the learning rate is not chosen."""

    study: Study
    arm: Arm
    rate: float | None
    runs: tuple[StoredRun, ...]

    @property
    def label(self) -> str:
        return self.arm.label

    @property
    def place(self) -> str:
        """Where it was tried, in short: ResNet-20 at batch size 8, 20,000 iterations."""
        spec = self.arm.spec
        rate = ", chosen learning rate" if self.arm.rates else ""
        return f"{model_name(spec)} at batch size {spec.batch_size}, {spec.iterations:,} iterations{rate}"

    @property
    def group(self) -> Group | None:
        return Group(self.runs) if self.runs else None

    @property
    def diverged(self) -> list[StoredRun]:
        return [run for run in self.runs if run.status == "diverged"]

    @property
    def stuck(self) -> list[StoredRun]:
        """Finished and little better than guessing; their errors are averaged with the others."""
        return [run for run in self.runs if (error := final(run)) is not None and error >= STUCK]

    @property
    def failed(self) -> list[StoredRun]:
        return [*self.diverged, *self.stuck]

    @property
    def badly_recalibrated(self) -> list[StoredRun]:
        faulty = [run for run in self.runs if run.environment.get("commit") in FAULTY_RECALIBRATION]
        return [run for run in faulty if run.spec.norm in READERS]

    @property
    def recalibrated_with_memory(self) -> list[StoredRun]:
        """Whose old memory took part in the recalibration."""
        old = [run for run in self.runs if run.environment.get("commit") in WITH_MEMORY]
        return [run for run in old if run.spec.norm == "mbn" and final(run, RECALIBRATED) is not None]

    @property
    def missing(self) -> int:
        return self.arm.seeds - len(self.runs)

    def errors(self, metric: str = "test_error") -> dict[int, float]:
        """By seed, of the runs that finished."""
        runs = [run for run in self.runs if metric != RECALIBRATED or run not in self.badly_recalibrated]
        return {run.spec.seed: value for run in runs if (value := final(run, metric)) is not None}

    def sample(self, metric: str = "test_error") -> Sample | None:
        values = list(self.errors(metric).values())
        return Sample(values) if values else None


class Findings:
    """The studies with all that is stored of them."""

    def __init__(self, studies: Sequence[Study], runs: Iterable[StoredRun]) -> None:
        self.studies = tuple(studies)
        self._runs = {run.spec.digest: run for run in runs if run.result is not None}

    def result(self, spec: RunSpec) -> dict[str, Any] | None:
        run = self._runs.get(spec.digest)
        return run.result if run else None

    def study(self, name: str) -> Study:
        return next(study for study in self.studies if study.name == name)

    def arms(self, study: Study, batch_size: int | None = None) -> list[Found]:
        return [self._found(study, arm) for arm in (study.arms if batch_size is None else study.at(batch_size))]

    def arm(self, study: str, label: str, batch_size: int | None = None) -> Found | None:
        """By name; None where there is no such arm."""
        matching = [one for one in self.arms(self.study(study), batch_size) if one.label == label]
        return matching[0] if matching else None

    def pairs(self, first: str, second: str) -> list[tuple[Found, Found]]:
        """Wherever both arms are planned at one batch size; of studies that ask for the same runs of both, the one
        that has more of them.
        """
        by_runs: dict[str, tuple[Found, Found]] = {}
        for study in self.studies:
            for size in study.batch_sizes:
                one, other = (self.arm(study.name, label, size) for label in (first, second))
                if one and other:
                    key = " ".join([one.arm.run(0).digest, other.arm.run(0).digest, f"{one.arm.rates}"])
                    known = by_runs.get(key)
                    if known is None or len(one.runs) + len(other.runs) > sum(len(each.runs) for each in known):
                        by_runs[key] = (one, other)
        return list(by_runs.values())

    def _found(self, study: Study, arm: Arm) -> Found:
        rate = chosen_rate(study, arm, self.result)
        specs = [arm.run(seed, rate) for seed in range(arm.seeds if rate is not None else 0)]
        return Found(study, arm, rate, tuple(self._runs[one.digest] for one in specs if one.digest in self._runs))

    def specs(self) -> list[RunSpec]:
        """Of every stored run that belongs to a study, trials of learning rates included."""
        found: dict[str, RunSpec] = {}
        for study in self.studies:
            trials = [trial for arm in study.arms for trial in arm.trials(study.holdout)]
            runs = [run.spec for one in self.arms(study) for run in one.runs]
            found |= {spec.digest: spec for spec in (*trials, *runs) if spec.digest in self._runs}
        return list(found.values())

    def machines(self) -> set[str]:
        """The kinds of machine that these runs were made on."""
        sessions = [session for spec in self.specs() for session in self._runs[spec.digest].sessions]
        return {session["machine"] for session in sessions if session.get("machine")}


def model_name(spec: RunSpec) -> str:
    return spec.model.replace("resnet", "ResNet-")


def apart(first: Found, second: Found, metric: str = "test_error", other: str = "") -> Difference | None:
    """`metric` of the first minus that of the second (or `other`), over the seeds that both have: below zero, the first
    has less error.
    """
    return over_common_seeds(first.errors(metric), second.errors(other or metric))


def over_common_seeds(first: Mapping[int, float], second: Mapping[int, float]) -> Difference | None:
    common = first.keys() & second.keys()
    return difference({seed: first[seed] for seed in common}, {seed: second[seed] for seed in common})


def significant(gap: Difference) -> bool:
    return gap.p is not None and gap.p < 1 - CONFIDENCE


def interval_text(gap: Difference) -> str:
    """−3.70 to −1.14."""
    interval = gap.interval()
    return f"{number(interval[0])} to {number(interval[1])}" if interval else ""


def gap_text(gap: Difference) -> str:
    """The difference as a cell of a table: −2.42 (−3.70 to −1.14, p = 0.006)."""
    words = [interval_text(gap), p_text(gap.p) if gap.p is not None else "one seed"]
    return f"{number(gap.mean)} ({', '.join(word for word in words if word)})"


def evidence_text(gap: Difference) -> str:
    """What stands behind a difference: 95 % interval −3.70 to −1.14, p = 0.006, n = 5."""
    words = [f"{CONFIDENCE:.0%} interval {interval_text(gap)}".replace("%", " %")] if gap.interval() else []
    words += [p_text(gap.p)] if gap.p is not None else []
    return ", ".join([*words, f"n = {gap.n}"])


def seeds_text(gap: Difference) -> str:
    """In how many seeds the sign is that of the mean: lower in 4 of 5 seeds."""
    if gap.lower is None or gap.higher is None or gap.n == 1:
        return f"n = {gap.n}"
    return f"lower in {gap.lower} of {gap.n} seeds" if gap.mean <= 0 else f"higher in {gap.higher} of {gap.n} seeds"


def compared(first: str, second: str, gap: Difference | None, corrected: float | None = None) -> str:
    """Two arms in a sentence without its full stop; `first` and `second` are their names. `corrected` is the p-value
    that counts where this is one of the comparisons of its study; what has none is called a comparison by itself.
    """
    if gap is None:
        return f"{first} and {second}: not run yet"
    below = gap.mean <= 0
    points = f"{number(abs(gap.mean))} points {'below' if below else 'above'} {_of(second)}"
    if gap.p is None:
        return f"one seed, no claim: {_of(first)} error is {points}"
    doubt = "" if significant(gap) else ", which may be chance"
    if not doubt and corrected is None:
        doubt = ", as a comparison by itself"
    elif not doubt and corrected is not None and corrected >= 1 - CONFIDENCE:
        doubt = ", which may be chance once all comparisons of the study are counted"
    return f"{_of(first)} error is {points}{doubt} ({evidence_text(gap.mirrored if below else gap)})"


def _of(label: str) -> str:
    return f"{label}'s" if not label.endswith("S") else f"{label}'"
