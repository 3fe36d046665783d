"""The runs of each study, in the order in which they are made. See README.md for the questions and the rules."""

from __future__ import annotations

from memnorm.lab.spec import RunSpec

IMAGES = 48_000
SETTINGS = {"16 × 2": (2, 16), "2": (2, 1), "8": (8, 1), "32": (32, 1)}  # micro-batch, micro-batches per update


def setting(name: str, base: RunSpec) -> RunSpec:
    """`base` with the batch size of a setting, as many images, and the learning rate in proportion."""
    batch_size, accumulate = SETTINGS[name]
    iterations = IMAGES // (batch_size * accumulate)
    return base.but(
        batch_size=batch_size, accumulate=accumulate, iterations=iterations, scaling="linear", base_batch_size=32
    )


def defaults() -> list[RunSpec]:
    """Decay and centring of two-way memory, with BN for comparison, on held-out training images."""
    base = RunSpec(model="resnet8", holdout=5_000, evaluations=5, recalibrate=5_000)
    arms = [base.but(norm="bn")] + [
        base.but(norm="two_way", norm_options={"decay": decay, "center": center})
        for center in ("gradients", "weights", None)
        for decay in (0.9, 0.75, 0.5, 0.95)
    ]
    return [setting(name, arm).but(seed=seed) for seed in (0, 1) for name in SETTINGS for arm in arms]


STUDIES = {"defaults": defaults}
