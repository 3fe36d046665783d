"""The runs of each study, in the order in which they are made. See README.md for the questions and the rules.

A list is committed before its first run and is not changed afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memnorm.lab.spec import RunSpec, arm_name

Records = Mapping[str, Mapping[str, Any]]  # finished runs by digest
RATES = (0.1, 0.03, 0.01)
HELD_OUT = 5_000  # training images that choose a learning rate
TRIAL_SEED = 1000
IMAGES = 48_000
SETTINGS = {"16 × 2": (2, 16), "2": (2, 1), "8": (8, 1), "32": (32, 1)}  # micro-batch, micro-batches per update


@dataclass(frozen=True)
class Arm:
    """One thing that is compared, at one batch size. Its runs are `spec` with the seeds 0, 1, …"""

    label: str
    spec: RunSpec
    seeds: int
    rates: tuple[float, ...] = ()  # learning rates to choose from; empty: the one of `spec`
    tried_at: tuple[int, int] | None = None  # micro-batch and micro-batches per update of the trials; None: of `spec`
    printed: float | None = None  # test error in the paper, for the same model and protocol

    def trials(self) -> list[RunSpec]:
        """The short runs on held-out training images that choose the learning rate."""
        short = self.spec.but(iterations=self.spec.iterations // 4, evaluations=1, recalibrate=0, holdout=HELD_OUT)
        if self.tried_at is not None:
            size, accumulate = self.tried_at
            iterations = self.spec.iterations * self.spec.images_per_step // (4 * size * accumulate)
            short = short.but(batch_size=size, accumulate=accumulate, iterations=iterations)
        return [short.but(learning_rate=rate, seed=TRIAL_SEED) for rate in self.rates]

    def rate(self, records: Records) -> float | None:
        """The rate with the lowest held-out error, the larger of equals; None while a trial is missing.

        A diverged trial is the worst. If all diverged, the smallest rate is taken.
        """
        if not self.rates:
            return self.spec.learning_rate
        found = [records.get(trial.digest) for trial in self.trials()]
        if None in found:
            return None
        errors = [one["final"]["test_error"] if one and one["final"] else 101.0 for one in found]
        best = [rate for rate, error in zip(self.rates, errors, strict=True) if error == min(errors)]
        return min(self.rates) if min(errors) > 100 else max(best)

    def runs(self, records: Records) -> list[RunSpec]:
        """One per seed; none while the learning rate is not chosen."""
        rate = self.rate(records)
        return [] if rate is None else [self.spec.but(seed=seed, learning_rate=rate) for seed in range(self.seeds)]


@dataclass(frozen=True)
class Study:
    """The arms in the order of the tables, and the arm that the others are compared with."""

    arms: Sequence[Arm]
    baseline: str = "BN"

    def specs(self, records: Records) -> list[RunSpec]:
        """Trials, and once these are done every arm seed by seed: an unfinished study has pairs to compare."""
        found = [trial for arm in self.arms for trial in arm.trials()]
        runs = [arm.runs(records) for arm in self.arms]
        if all(runs):
            found += [some[seed] for seed in range(max(map(len, runs))) for some in runs if seed < len(some)]
        return list({spec.digest: spec for spec in found}.values())

    @property
    def sizes(self) -> list[int]:
        return sorted({arm.spec.batch_size for arm in self.arms})


def arm(base: RunSpec, norm: str, scheme: str = "single", seeds: int = 1, label: str = "", **changes: Any) -> Arm:
    """`base` with another norm. Group norm has no statistics to recalibrate."""
    spec = base.but(norm=norm, scheme=scheme, **changes)
    return Arm(label or arm_name(norm, scheme), spec.but(recalibrate=0) if norm == "group" else spec, seeds)


def small_batch(base: RunSpec) -> list[Arm]:
    return [
        arm(base, "bn", seeds=5),
        arm(base, "mbn", seeds=5),
        arm(base, "mbn", "double", seeds=5),
        arm(base, "brn", "double", seeds=3),
        arm(base, "group", seeds=3),
        arm(base, "mabn", seeds=3),
    ]


def ablation(base: RunSpec) -> list[Arm]:
    return [
        arm(base, "bn", seeds=3),
        arm(base, "mbn", seeds=3),
        arm(base, "mbn", "double", seeds=3),
        arm(base, "bn", "double"),
        arm(base, "mbn", "double", label="MBN-2 shift=False", norm_options={"shift": False}),
        *(arm(base, "mbn", "double", label=f"MBN-2 λ={one}", strength=(one,)) for one in (0.1, 0.5, 0.9)),
        replace(arm(base, "group", label="GROUP tuned"), rates=RATES),
        arm(base, "moving_bn"),
    ]


def tiny_batch(base: RunSpec) -> list[Arm]:
    """As many images at every batch size, and the learning rate in proportion to it."""
    images = base.batch_size * base.iterations
    sizes = [base.but(batch_size=size, iterations=images // size) for size in (2, 4, 8)]
    norms = (("bn", "single"), ("mbn", "double"), ("group", "single"), ("mabn", "single"))
    return [arm(one, norm, scheme, seeds=2) for one in sizes for norm, scheme in norms]


def cheaper(base: RunSpec) -> list[Arm]:
    return [
        arm(base, "mbn", "double", seeds=3),
        arm(base, "mbn", "double", seeds=3, label="MBN-2 every=4", every=4),
        arm(base, "mbn", "double", seeds=3, label="MBN-2 fraction=0.25", fraction=0.25),
        arm(base, "mbn", seeds=3),
        arm(base, "bn", seeds=3),
    ]


def setting(name: str, base: RunSpec) -> RunSpec:
    """`base` with the batch size of a setting, as many images, and the learning rate in proportion."""
    batch_size, accumulate = SETTINGS[name]
    iterations = IMAGES // (batch_size * accumulate)
    return base.but(
        batch_size=batch_size, accumulate=accumulate, iterations=iterations, scaling="linear", base_batch_size=32
    )


def defaults() -> list[Arm]:
    """Decay and centring of two-way memory, with BN for comparison, on held-out training images."""
    base = RunSpec(model="resnet8", holdout=5_000, evaluations=5, recalibrate=5_000)
    arms = [Arm("BN", base.but(norm="bn"), seeds=2)]
    for center in ("gradients", "weights", None):
        for decay in (0.9, 0.75, 0.5, 0.95):
            spec = base.but(norm="two_way", norm_options={"decay": decay, "center": center})
            arms.append(Arm(f"decay {decay}, {center or 'not centred'}", spec, seeds=2))
    return [replace(one, spec=setting(name, one.spec)) for name in SETTINGS for one in arms]


def rivals(base: RunSpec, chosen: dict[str, Any], seeds: int) -> list[Arm]:
    """The norms of the studies of two-way memory. An arm of MABN states its window: older records have another one."""
    return [
        Arm("BN", base.but(norm="bn"), seeds),
        Arm("two-way", base.but(norm="two_way", norm_options=chosen), seeds),
        Arm("GROUP", base.but(norm="group", norm_options={"num_groups": 8}, recalibrate=0), seeds),
        Arm("MABN", base.but(norm="mabn", norm_options={"window": 32}), seeds),
    ]


def micro_batches(chosen: dict[str, Any]) -> list[Arm]:
    """Micro-batches of 1 to 32 images at 32 images per update. Learning rates are chosen at micro-batches of 2."""
    base = RunSpec(model="resnet8", iterations=5_000, evaluations=5, recalibrate=10_000, batch_size=32)
    arms = [
        *rivals(base, chosen, seeds=3),
        Arm("BN, centred gradients", base.but(norm="bn", model="study.networks:resnet8_centred"), seeds=3),
        Arm("MBN-2", base.but(norm="mbn", scheme="double"), seeds=3),
    ]
    sizes = (2, 4, 1, 8, 16, 32)
    return [
        replace(one, spec=one.spec.but(batch_size=size, accumulate=32 // size), rates=RATES, tried_at=(2, 16))
        for size in sizes
        for one in arms
    ]


def micro_batches_resnet20(chosen: dict[str, Any]) -> list[Arm]:
    """Micro-batches of 2 at 32 images per update, and BN at 32."""
    base = RunSpec(model="resnet20", iterations=5_000, evaluations=5, recalibrate=10_000, batch_size=2, accumulate=16)
    arms = [one for one in rivals(base, chosen, seeds=5) if one.label != "GROUP"]
    arms.append(Arm("BN at 32", base.but(batch_size=32, accumulate=1), seeds=5))
    return [replace(one, rates=RATES) for one in arms]


def resnet56(chosen: dict[str, Any]) -> list[Arm]:
    """BN and two-way memory in a deep network, at learning rate 0.1."""
    base = RunSpec(model="resnet56", iterations=5_000, evaluations=5, recalibrate=10_000, batch_size=2, accumulate=16)
    return [replace(one, seeds=2) for one in rivals(base, chosen, seeds=2)[:2]]


def update_per_batch(chosen: dict[str, Any]) -> list[Arm]:
    """Batches of 1 to 8 images, an update each, as many images as in `micro_batches`."""
    base = RunSpec(
        model="resnet8", evaluations=5, recalibrate=10_000, scaling="linear", base_batch_size=32, batch_size=8
    )
    arms = [*rivals(base, chosen, seeds=3), Arm("BRN", base.but(norm="brn"), seeds=3)]
    return [
        replace(one, spec=one.spec.but(batch_size=size, iterations=160_000 // size), rates=RATES, tried_at=(2, 1))
        for size in (2, 4, 8, 1)
        for one in arms
    ]


def few_classes(chosen: dict[str, Any]) -> list[Arm]:
    """Batches of 8 images from one or two classes."""
    base = RunSpec(
        model="resnet8", iterations=20_000, evaluations=5, recalibrate=10_000, batch_size=8, sampler="few-classes"
    )
    arms = [*rivals(base, chosen, seeds=3)[:2], Arm("MBN-2", base.but(norm="mbn", scheme="double"), seeds=3)]
    return [
        replace(one, label=f"{one.label}, {count} classes", spec=one.spec.but(classes_per_batch=count), rates=RATES)
        for count in (1, 2)
        for one in arms
    ]


SHORT = RunSpec(model="resnet20", batch_size=8, iterations=20_000, evaluations=10, recalibrate=10_000)
PAPER = RunSpec(model="resnet56", batch_size=8, evaluations=20, recalibrate=10_000)
LONG = RunSpec(model="resnet8", batch_size=8, evaluations=10, recalibrate=10_000)
EQUAL_SAMPLES = LONG.but(iterations=20_000, scaling="linear", base_batch_size=8)
DIGITS = RunSpec(
    model="small", data="digits", batch_size=4, iterations=600, scaling="linear", base_batch_size=4, evaluations=5
)

STUDIES = {
    "small-batch-resnet20": Study(small_batch(SHORT)),
    "small-batch-resnet20-tuned": Study([replace(one, rates=RATES) for one in small_batch(SHORT)]),
    "headline-resnet56": Study(
        [replace(arm(PAPER, "bn"), printed=19.64), replace(arm(PAPER, "mbn", "double"), printed=15.37)]
    ),
    "ablation-resnet8": Study(ablation(LONG)),
    "tiny-batch-resnet8": Study(tiny_batch(EQUAL_SAMPLES)),
    "cheaper-second-forward": Study(cheaper(EQUAL_SAMPLES), baseline="MBN-2"),
    "digits": Study(
        [
            arm(DIGITS, norm, scheme, seeds=5)
            for norm, scheme in (("bn", "single"), ("mbn", "single"), ("mbn", "double"))
        ]
    ),
    "defaults": Study(defaults()),
}
