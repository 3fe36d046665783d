"""A study: a question, and the arms whose runs answer it. Data only.

Every run of an arm is its specification with another seed. An arm with `rates` gets the learning rate of them that does
best in short runs of its own, with another seed, on training images held out; the test images choose nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from memnorm.lab.experiment import TUNING_SEED
from memnorm.lab.spec import RunSpec
from memnorm.lab.tables import Cell

TRIAL_SHARE = 4  # a trial of a learning rate has a quarter of the iterations


@dataclass(frozen=True)
class Arm:
    """One thing that is compared, at one batch size."""

    label: str
    spec: RunSpec  # with seed 0
    seeds: int
    rates: tuple[float, ...] = ()  # to choose from; empty: the specification's own
    cell: Cell | None = None  # of the paper, if model and protocol are the same

    @property
    def key(self) -> str:
        return f"{self.label}/{self.spec.batch_size}"

    def run(self, seed: int, rate: float | None = None) -> RunSpec:
        return self.spec.but(seed=seed, learning_rate=self.spec.learning_rate if rate is None else rate)

    def trials(self, holdout: int) -> list[RunSpec]:
        """The runs that choose the learning rate."""
        return [
            self.spec.but(
                learning_rate=rate,
                iterations=self.spec.iterations // TRIAL_SHARE,
                evaluations=1,
                recalibrate=0,
                holdout=holdout,
                seed=TUNING_SEED,
            )
            for rate in self.rates
        ]


@dataclass(frozen=True)
class Study:
    """A question, its arms in the order of the tables, and the arm that the others are compared with."""

    name: str
    title: str
    question: str
    arms: tuple[Arm, ...]
    baseline: str = "BN"  # a label
    holdout: int = 5_000  # training images that choose a learning rate
    notes: str = ""

    @property
    def seeds(self) -> int:
        return max(arm.seeds for arm in self.arms)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        return tuple(sorted({arm.spec.batch_size for arm in self.arms}))

    def at(self, batch_size: int) -> tuple[Arm, ...]:
        return tuple(arm for arm in self.arms if arm.spec.batch_size == batch_size)
