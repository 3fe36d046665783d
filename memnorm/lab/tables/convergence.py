"""Figure of training and test error over the run: three models under BN and MBN on CIFAR-10."""

from __future__ import annotations

from memnorm.lab.tables.parts import Curve, Figure
from memnorm.lab.tables.protocol import NORMS, cifar

MODELS = {"ResNet-20": "resnet20", "ResNet-56": "resnet56", "VGG-16": "vgg16"}

FIGURE = Figure(
    name="convergence",
    title="Convergence under BN and MBN on CIFAR-10",
    caption="Thin lines: training error. Bold lines: test error. MBN with Double-Forward.",
    panels=tuple(MODELS),
    curves=tuple(
        Curve(label, panel, cifar(model, NORMS[label]), cifar(model, NORMS[label]).arm)
        for panel, model in MODELS.items()
        for label in ("BN", "MBN")
    ),
    kind="train-and-test",
)
