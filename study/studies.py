"""The runs of each study, in the order in which they are made. See README.md for the questions and the rules.

A list is committed before its first run and is not changed afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from memnorm.lab import runner
from memnorm.lab.spec import RunSpec, arm_name
from study import brain
from study.probe import probe

Records = Mapping[str, Mapping[str, Any]]  # finished runs by digest
RATES = (0.1, 0.03, 0.01)
HELD_OUT = 5_000  # training images that choose a learning rate
TRIAL_SEED = 1000
IMAGES = 48_000
PAIR = ("BN", "two-way")  # run before the other arms
SETTINGS = {"2 × 16": (2, 16), "2": (2, 1), "8": (8, 1), "32": (32, 1)}  # micro-batch, micro-batches per update


@dataclass(frozen=True)
class Arm:
    """One thing that is compared, at one batch size. Its runs are `spec` with the seeds 0, 1, …"""

    label: str
    spec: RunSpec
    seeds: int
    rates: tuple[float, ...] = ()  # learning rates to choose from; empty: the one of `spec`
    tried_at: tuple[int, int] | None = None  # micro-batch and micro-batches per update of the trials; None: of `spec`
    printed: float | None = None  # test error in the paper, for the same model and protocol
    setting: str = ""  # arms are compared within a setting; empty: with those of the same batch size
    error: str = "test_error"  # what is compared; the other is "test_error_recalibrated"

    @property
    def place(self) -> str:
        """Where the arm is compared with others: its setting or its batch size."""
        return self.setting or str(self.spec.batch_size)

    @property
    def key(self) -> str:
        """The name of the arm in markers of pages: MBN-2/4."""
        return f"{self.label}/{self.place}"

    def trials(self) -> list[RunSpec]:
        """The short runs on held-out training images that choose the learning rate."""
        recalibrate = 0 if self.error == "test_error" else self.spec.recalibrate
        short = self.spec.but(
            iterations=self.spec.iterations // 4, evaluations=1, recalibrate=recalibrate, holdout=HELD_OUT
        )
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
        finals = [(one and one["final"]) or {} for one in found]
        errors = [101.0 if final.get(self.error) is None else final[self.error] for final in finals]
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
    before: Sequence[RunSpec] = ()  # runs whose weights the others start from
    make: Callable[..., dict[str, Any]] = runner.run  # makes one run

    def specs(self, records: Records, failed: Collection[str] = ()) -> list[RunSpec]:
        """What can be run now: first what the others start from, then the trials, then BN and two-way memory seed by
        seed, then the other arms seed by seed, so that an unfinished study has pairs to compare. An arm with a trial
        that has `failed` (digests) is left out.
        """
        found = list(self.before)
        if all(spec.digest in records for spec in found):
            trials = [trial for arm in self.arms for trial in arm.trials()]
            found += trials
            if all(trial.digest in records or trial.digest in failed for trial in trials):
                runs = [(arm.label not in PAIR, run.seed, run) for arm in self.arms for run in arm.runs(records)]
                found += [run for *_, run in sorted(runs, key=lambda one: one[:2])]
        return list({spec.digest: spec for spec in found}.values())

    @property
    def places(self) -> list[str]:
        return list(dict.fromkeys(arm.place for arm in self.arms))


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


def chosen(images: int, center: str = "weights") -> dict[str, Any]:
    """What `defaults` has chosen for this many images per update; `center="gradients"` for pretrained networks."""
    return {"decay": 1 - 0.25 * math.sqrt(images / 32), "center": center}


def short_runs() -> list[Arm]:
    """BN and two-way memory as users first meet them: `memnorm train --accumulate 16` with the lab's defaults."""
    bases = {
        "ResNet-8": RunSpec(model="resnet8", iterations=1_500, batch_size=2, accumulate=16),
        "ResNet-20": RunSpec(model="resnet20", iterations=1_000, batch_size=2, accumulate=16),
    }
    return [
        Arm(label, base.but(norm=norm), seeds=3, setting=setting)
        for setting, base in bases.items()
        for label, norm in (("BN", "bn"), ("two-way", "two_way"))
    ]


def checks() -> list[Arm]:
    """What `defaults` has chosen, in ResNet-20 with each warm-up, and at a smaller learning rate."""
    base = RunSpec(holdout=5_000, evaluations=5, recalibrate=5_000, norm="two_way")
    arms = []
    for warmup in (100, 0, 500):
        for name, (batch_size, accumulate) in SETTINGS.items():
            options = {**chosen(batch_size * accumulate), "warmup": warmup}
            spec = setting(name, base.but(model="resnet20", norm_options=options))
            arms.append(Arm(f"ResNet-20, warm-up {warmup}", spec, seeds=1, setting=name))
    best = {"2 × 16": 0.9, "2": 0.95, "8": 0.9, "32": 0.9}  # the best arm, or the second if the rule gives the best
    for name, (batch_size, accumulate) in SETTINGS.items():
        spec = setting(name, base.but(model="resnet8", learning_rate=0.03))
        for label, decay in (("the rule", chosen(batch_size * accumulate)["decay"]), ("best other", best[name])):
            one = spec.but(norm_options={"decay": decay, "center": "weights"})
            arms.append(Arm(f"{label}, learning rate 0.03", one, seeds=2, setting=name))
    return arms


def rivals(base: RunSpec, options: dict[str, Any], seeds: int) -> list[Arm]:
    """The norms of the studies of two-way memory. An arm of MABN states its window: older records have another one."""
    return [
        Arm("BN", base.but(norm="bn"), seeds),
        Arm("two-way", base.but(norm="two_way", norm_options=options), seeds),
        Arm("GROUP", base.but(norm="group", norm_options={"num_groups": 8}, recalibrate=0), seeds),
        Arm("MABN", base.but(norm="mabn", norm_options={"window": 32}), seeds),
    ]


def micro_batches() -> list[Arm]:
    """Micro-batches of 1 to 32 images at 32 images per update. Learning rates are chosen at micro-batches of 2. Runs at
    2 and 32, which the expectation is about, come first. Group norm, which normalises each image alone, is the same
    function at every size and runs at 32.
    """
    base = RunSpec(model="resnet8", iterations=5_000, evaluations=5, recalibrate=10_000, batch_size=32)
    bn, two_way, group, mabn = rivals(base, chosen(32), seeds=3)
    arms = [
        *(bn, two_way, mabn),
        Arm("BN, centred gradients", base.but(norm="bn", model="study.networks:resnet8_centred"), seeds=3),
        Arm("MBN-2", base.but(norm="mbn", scheme="double"), seeds=3),
    ]
    return [
        replace(one, spec=one.spec.but(batch_size=size, accumulate=32 // size), rates=RATES, tried_at=(2, 16))
        for size in (2, 32, 4, 1, 8, 16)
        for one in arms
    ] + [replace(group, rates=RATES)]


def joint_batch() -> list[Arm]:
    """BN and two-way memory of `micro_batches` with all 32 images in one batch, at a learning rate chosen there."""
    return [replace(one, tried_at=None) for one in micro_batches() if one.spec.batch_size == 32 and one.label in PAIR]


def micro_batches_resnet20() -> list[Arm]:
    """Micro-batches of 2 at 32 images per update, and BN at 32."""
    base = RunSpec(model="resnet20", iterations=5_000, evaluations=5, recalibrate=10_000, batch_size=2, accumulate=16)
    bn, two_way, _, mabn = rivals(base, chosen(32), seeds=5)
    joint = Arm("BN at 32", base.but(batch_size=32, accumulate=1), seeds=5)
    return [replace(one, rates=RATES, setting="2") for one in (bn, two_way, joint, mabn)]


def resnet56() -> list[Arm]:
    """BN and two-way memory in a deep network, at learning rate 0.1."""
    base = RunSpec(model="resnet56", iterations=5_000, evaluations=5, recalibrate=10_000, batch_size=2, accumulate=16)
    return rivals(base, chosen(32), seeds=2)[:2]


def update_per_batch() -> list[Arm]:
    """Batches of 1 to 8 images, an update each, as many images as in `micro_batches`."""
    base = RunSpec(
        model="resnet8", evaluations=5, recalibrate=10_000, scaling="linear", base_batch_size=32, batch_size=8
    )
    return [
        replace(one, spec=one.spec.but(batch_size=size, iterations=160_000 // size), rates=RATES, tried_at=(2, 1))
        for size in (2, 4, 8, 1)
        for one in (*rivals(base, chosen(size), seeds=3), Arm("BRN", base.but(norm="brn"), seeds=3))
    ]


def few_classes() -> list[Arm]:
    """Batches of 8 images from one or two classes."""
    base = RunSpec(
        model="resnet8", iterations=20_000, evaluations=5, recalibrate=10_000, batch_size=8, sampler="few-classes"
    )
    arms = [*rivals(base, chosen(8), seeds=3)[:2], Arm("MBN-2", base.but(norm="mbn", scheme="double"), seeds=3)]
    return [
        replace(one, setting=setting, spec=one.spec.but(classes_per_batch=count), rates=RATES)
        for setting, count in (("one class", 1), ("two classes", 2))
        for one in arms
    ]


def fine_tuning() -> list[Arm]:
    """A pretrained ResNet-20 on all of CIFAR-10 and on a tenth of it, at batches of 2. Where BN with recalibrated
    statistics chooses the same learning rate as BN, they are the same runs.
    """
    start = {"network": "resnet20", "run": PRETRAINING.name}
    base = RunSpec(
        model="study.networks:pretrained",
        model_options=start,
        batch_size=2,
        iterations=10_000,
        evaluations=5,
        recalibrate=5_000,
    )
    arms = [
        Arm("BN", base, seeds=5),
        Arm("two-way", base.but(norm="two_way", norm_options=chosen(2, "gradients")), seeds=5),
        Arm("frozen BN", base.but(model_options={**start, "frozen": True}, recalibrate=0), seeds=5),
        Arm("BN, recalibrated", base, seeds=5, error="test_error_recalibrated"),
    ]
    return [
        replace(one, setting=setting, spec=one.spec.but(train_images=images), rates=(0.01, 0.003, 0.001))
        for setting, images in (("all images", None), ("10 % of them", 5_000))
        for one in arms
    ]


def segmentation() -> list[Arm]:
    """A 3-D U-Net, one cube at a time, 8 of them per update; the seeds are folds."""
    base = RunSpec(
        model="study.brain:UNet", data=brain.DATA, batch_size=1, accumulate=8, iterations=1_000, evaluations=4
    )
    arms = [
        Arm("BN", base, seeds=5),
        Arm("two-way", base.but(norm="two_way", norm_options=chosen(8)), seeds=5),
        Arm("INSTANCE", base.but(norm="instance"), seeds=5),
        Arm("GROUP", base.but(norm="group", norm_options={"num_groups": 4}), seeds=5),
    ]
    return [replace(one, rates=RATES) for one in arms]


def parts() -> list[Arm]:
    """The parts of two-way memory at micro-batches of 2, with a probe every 500 updates. Both halves of the memory are
    centred as chosen.
    """
    base = RunSpec(model="resnet8", iterations=5_000, evaluations=10, recalibrate=10_000, batch_size=2, accumulate=16)
    options = chosen(32)
    both = base.but(norm="two_way", norm_options=options)
    half = base.but(model="study.networks:resnet8_half")
    arms = {
        "BN": base,
        "two-way": both,
        "centring alone": base.but(model="study.networks:resnet8_centred", model_options={"mode": "weights"}),
        "forward memory alone": half.but(model_options={**options, "half": "forward"}),
        "backward memory alone": half.but(model_options={**options, "half": "backward"}),
        "two-way, not centred": both.but(norm_options={**options, "center": None}),
        "two-way, Double-Forward": both.but(scheme="double"),
    }
    return [Arm(label, spec, seeds=3, rates=RATES) for label, spec in arms.items()]


SHORT = RunSpec(model="resnet20", batch_size=8, iterations=20_000, evaluations=10, recalibrate=10_000)
PAPER = RunSpec(model="resnet56", batch_size=8, evaluations=20, recalibrate=10_000)
LONG = RunSpec(model="resnet8", batch_size=8, evaluations=10, recalibrate=10_000)
EQUAL_SAMPLES = LONG.but(iterations=20_000, scaling="linear", base_batch_size=8)
PRETRAINING = RunSpec(model="resnet20", data="cifar100", batch_size=128, iterations=8_000, evaluations=4)
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
    "short-runs": Study(short_runs()),
    "defaults": Study(defaults()),
    "defaults-checks": Study(checks()),
    "micro-batches": Study(micro_batches()),
    "joint-batch": Study(joint_batch()),
    "micro-batches-resnet20": Study(micro_batches_resnet20()),
    "resnet56": Study(resnet56()),
    "parts": Study(parts(), make=partial(runner.run, probe=probe)),
    "fine-tuning": Study(fine_tuning(), before=(PRETRAINING,)),
    "update-per-batch": Study(update_per_batch()),
    "segmentation": Study(segmentation(), make=brain.run),
    "few-classes": Study(few_classes()),
}
