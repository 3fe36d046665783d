"""Figure of test and training error on ImageNet over the run, for the models the paper trained."""

from __future__ import annotations

from memnorm.lab.tables.imagenet import PRINTED, QUOTED_ROWS
from memnorm.lab.tables.parts import Curve, Figure
from memnorm.lab.tables.protocol import IMAGENET_MODELS, NORMS, imagenet

MODELS = tuple(row for row in PRINTED if row not in QUOTED_ROWS)
PANELS = {"Testing error": "test_error", "Training error": "train_error"}

FIGURE = Figure(
    name="imagenet-curves",
    title="Convergence under BN and MBN on ImageNet",
    caption="Solid lines: MBN with Double-Forward. Dashed lines: BN. Top-1 error; test images are cropped once.",
    panels=tuple(PANELS),
    curves=tuple(
        Curve(f"{model} {norm}", panel, imagenet(IMAGENET_MODELS[model], NORMS[norm]), model, (metric,), norm == "BN")
        for panel, metric in PANELS.items()
        for model in MODELS
        for norm in ("BN", "MBN")
    ),
    kind="one-metric",
)
