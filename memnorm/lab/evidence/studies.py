"""The protocol of our evidence: what is run, in this order. `docs/protocol.md` says it in words, made of this list.

A study is added at the end, or an arm to a study; what is here is not changed once its runs have begun.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from memnorm.lab.evidence.study import Arm, Study
from memnorm.lab.spec import RunSpec, arm_name
from memnorm.lab.tables import small_batch

RATES = (0.1, 0.03, 0.01)
NOTHING_TO_RECALIBRATE = ("group",)


def arm(base: RunSpec, norm: str, scheme: str = "single", *, seeds: int, label: str = "", **changes: Any) -> Arm:
    """`base` with another norm; recalibrated statistics are evaluated as well where the norm has any."""
    rates, cell = changes.pop("rates", ()), changes.pop("cell", None)
    if norm in NOTHING_TO_RECALIBRATE:
        changes["recalibrate"] = 0
    spec = base.but(norm=norm, scheme=scheme, **changes)
    return Arm(label or arm_name(norm, scheme), spec, seeds, rates, cell)


def small_batch_arms(base: RunSpec) -> tuple[Arm, ...]:
    return (
        arm(base, "bn", seeds=5),
        arm(base, "mbn", seeds=5),
        arm(base, "mbn", "double", seeds=5),
        arm(base, "brn", "double", seeds=3),
        arm(base, "group", seeds=3),
        arm(base, "mabn", seeds=3),  # run with a window of 16 batches; a new arm of MABN has to state its window
    )


def ablation_arms(base: RunSpec) -> tuple[Arm, ...]:
    return (
        arm(base, "bn", seeds=3),
        arm(base, "mbn", seeds=3),
        arm(base, "mbn", "double", seeds=3),
        arm(base, "bn", "double", seeds=1),
        arm(base, "mbn", "double", seeds=1, label="MBN-2 shift=False", norm_options={"shift": False}),
        *(
            arm(base, "mbn", "double", seeds=1, label=f"MBN-2 λ={strength}", strength=(strength,))
            for strength in (0.1, 0.5, 0.9)
        ),
        arm(base, "group", seeds=1, label="GROUP tuned", rates=RATES),
        arm(base, "moving_bn", seeds=1),
    )


def tiny_batch_arms(base: RunSpec) -> tuple[Arm, ...]:
    """As many images at every batch size, and the learning rate in proportion to it."""
    images = base.batch_size * base.iterations
    sizes = [base.but(batch_size=size, iterations=images // size) for size in (2, 4, 8)]
    return tuple(
        arm(one, norm, scheme, seeds=2)
        for one in sizes
        for norm, scheme in (("bn", "single"), ("mbn", "double"), ("group", "single"), ("mabn", "single"))
    )


def cheaper_arms(base: RunSpec) -> tuple[Arm, ...]:
    return (
        arm(base, "mbn", "double", seeds=3),
        arm(base, "mbn", "double", seeds=3, label="MBN-2 every=4", every=4),
        arm(base, "mbn", "double", seeds=3, label="MBN-2 fraction=0.25", fraction=0.25),
        arm(base, "mbn", seeds=3),
        arm(base, "bn", seeds=3),
    )


SHORT = RunSpec(model="resnet20", batch_size=8, iterations=20_000, evaluations=10, recalibrate=10_000)
HEADLINE = RunSpec(model="resnet56", batch_size=8, evaluations=20, recalibrate=10_000)
LONG = RunSpec(model="resnet8", batch_size=8, evaluations=10, recalibrate=10_000)
EQUAL_SAMPLES = LONG.but(iterations=20_000, scaling="linear", base_batch_size=8)

STUDIES = (
    Study(
        name="small-batch-resnet20",
        title="Batch size 8, ResNet-20, the paper's learning rate",
        question="Does MBN have less test error than BN and its rivals at batch size 8?",
        arms=small_batch_arms(SHORT),
        notes="A quarter of the paper's iterations; everything else is its protocol for small batches, the learning "
        "rate 0.1 included, but its network there is ResNet-56. The memory size, which it does not state, is our 20.",
    ),
    Study(
        name="small-batch-resnet20-tuned",
        title="Batch size 8, ResNet-20, learning rate chosen for each norm",
        question="Does that remain so if every norm gets a learning rate of its own?",
        arms=tuple(replace(one, rates=RATES) for one in small_batch_arms(SHORT)),
        notes="The best of three rates in one short run each. An arm that gets 0.1 shares the runs of the study above.",
    ),
    Study(
        name="headline-resnet56",
        title="The paper's headline, literally: batch size 8, ResNet-56",
        question="Does the headline cell of the paper, ResNet-56 at batch size 8, come out as printed?",
        arms=(
            arm(HEADLINE, "bn", seeds=1, cell=small_batch.TABLE.cell("8", "BN")),
            arm(HEADLINE, "mbn", "double", seeds=1, cell=small_batch.TABLE.cell("8", "MBN")),
        ),
        notes="One seed: what it shows is a single pair of runs beside a single pair of printed numbers.",
    ),
    Study(
        name="ablation-resnet8",
        title="Where a gain comes from: batch size 8, ResNet-8, full length",
        question="Which part of the method is a gain due to: the memory, the second forward, the shift between the "
        "means, the growing strength λ, or better statistics at inference?",
        arms=ablation_arms(LONG),
        notes="The full length of the paper with the smallest network of the family. BN and MBN-2 with recalibrated "
        "statistics are the same runs, evaluated a second time.",
    ),
    Study(
        name="tiny-batch-resnet8",
        title="Batch sizes 2, 4 and 8, ResNet-8, equal samples",
        question="What happens at batch sizes 2 and 4, with and without recalibrated statistics?",
        arms=tiny_batch_arms(EQUAL_SAMPLES),
        notes="Every run sees 160,000 images; the learning rate, 0.1 at batch size 8, is proportional to the batch "
        "size and the same for every norm.",
    ),
    Study(
        name="cheaper-second-forward",
        title="A cheaper second forward: batch size 8, ResNet-8",
        question="What does it cost in accuracy to send only every fourth batch forward again, or a quarter of each?",
        arms=cheaper_arms(EQUAL_SAMPLES),
        baseline="MBN-2",
        notes="The baseline is the full second forward; MBN-1 has none. With a quarter of each batch the memory also "
        "weighs a quarter, as with λ/4: it counts values. Runs at batch size 8 are shared with the study above.",
    ),
)

DIGITS = RunSpec(
    model="small", data="digits", batch_size=8, iterations=40, evaluations=2, test_images=100, recalibrate=200
)
MINIATURE = (
    Study(
        name="miniature",
        title="Digits in seconds",
        question="Does the machinery work?",
        arms=(
            arm(DIGITS, "bn", seeds=2),
            arm(DIGITS, "mbn", "double", seeds=2),
            arm(DIGITS, "mbn", "double", seeds=2, label="MBN-2 shift=False", norm_options={"shift": False}),
            arm(DIGITS, "bn", seeds=2, label="BN diverging", learning_rate=1e30),
        ),
        notes="The numbers mean nothing.",
    ),
    Study(
        name="miniature-tuned",
        title="Digits in seconds, learning rate chosen",
        question="Does the choice of a learning rate work?",
        arms=(
            arm(DIGITS, "bn", seeds=2, rates=(0.1, 1e30)),
            arm(DIGITS, "group", seeds=2, rates=(0.1, 0.03)),
        ),
        holdout=200,
        notes="The numbers mean nothing. BN can only choose 0.1, and so shares the runs of the study above.",
    ),
)
