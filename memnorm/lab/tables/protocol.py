"""The paper's training protocol as specifications, and what the three scales make of it.

Most of the protocol is the defaults of `RunSpec`. What varies between cells is the model, the norm, the scheme (MBN and
BRN use Double-Forward by default, BN and NormProp do not) and one setting per table.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

from memnorm.lab.errors import UsageError
from memnorm.lab.spec import RunSpec

Scale = Literal["smoke", "reduced", "paper"]
SCALES: tuple[Scale, ...] = get_args(Scale)

NORMS = {"NormProp": "normprop", "BN": "bn", "BRN": "brn", "MBN": "mbn"}
CIFAR_MODELS = {"NIN": "nin", "ResNet-20": "resnet20", "ResNet-56": "resnet56", "VGG": "vgg16"}
IMAGENET_MODELS = {
    "GoogLeNet": "googlenet",
    "PReLU-net": "prelu_net",
    "VGG": "vgg16_imagenet",  # not vgg16, which small images make the CIFAR network: smoke keeps the architecture
    "ResNet-18": "resnet18",
    "ResNet-34": "resnet34",
    "ResNet-50": "resnet50",
}
DOUBLE_BY_DEFAULT = ("brn", "mbn")

EPOCHS = 200
CIFAR_ITERATIONS = EPOCHS * math.ceil(50_000 / 128)
IMAGENET_ITERATIONS = EPOCHS * math.ceil(1_281_167 / 128)


def cifar(model: str, norm: str, *, data: str = "cifar10", **changes: Any) -> RunSpec:
    """A run on CIFAR, evaluated after every epoch; the names are those of the models and norms in the lab."""
    return _paper(model, norm, data=data, iterations=CIFAR_ITERATIONS, **changes)


def imagenet(model: str, norm: str) -> RunSpec:
    return _paper(model, norm, data="imagenet", iterations=IMAGENET_ITERATIONS)


def _paper(model: str, norm: str, **settings: Any) -> RunSpec:
    scheme = "double" if norm in DOUBLE_BY_DEFAULT else "single"
    return RunSpec(**{"model": model, "norm": norm, "scheme": scheme, "evaluations": EPOCHS, **settings})


RULES: dict[str, str] = {
    "paper": (
        "The paper's protocol. 200 epochs at batch 128: 78,200 iterations on CIFAR, at every batch size, and 2,002,000 "
        "on ImageNet. SGD with momentum 0.9 and weight decay 1e-4; learning rate 0.1, divided by 10 at 40 % and 60 % "
        "of the run; λ 0.1, 0.5, 0.9 at the same points; an evaluation per epoch, of which the last one counts."
    ),
    "reduced": (
        "Fewer iterations than the paper, everything else as printed. A tenth of the iterations on CIFAR (7,820) and a "
        "hundredth on ImageNet (20,020), on the real data; learning rate and λ change at 40 % and 60 % of the "
        "shortened run; 20 evaluations, of which the last one counts. The protocol differs from the paper's in its "
        "length, so the numbers are to be compared with each other and not with the printed ones."
    ),
    "smoke": (
        "A check that every cell runs; its numbers mean nothing. The real architectures for the real number of "
        "classes, 2 iterations on a few synthetic images (32 pixels wide for CIFAR, 64 for ImageNet), batches of 2 to "
        "6 images, one evaluation."
    ),
}

_SMOKE_CLASSES = {"cifar10": 10, "cifar100": 100, "imagenet": 1000}
_SMOKE_BATCH = {8: 2, 16: 3, 32: 4, 64: 5, 128: 6}  # as small as can be while the batch sizes stay different
_SMOKE_ITERATIONS, _SMOKE_TRAIN, _SMOKE_TEST = 2, 12, 6


def at_scale(spec: RunSpec, scale: str) -> RunSpec:
    """The run that stands for a paper-scale run at another scale, under `RULES[scale]`."""
    if scale == "paper":
        return spec
    if scale == "reduced":
        shorter = 100 if spec.data == "imagenet" else 10
        return spec.but(iterations=max(1, spec.iterations // shorter), evaluations=20)
    if scale == "smoke":
        return _smoke(spec)
    raise UsageError(f"scale must be one of {', '.join(SCALES)}; got {scale!r}")


def _smoke(spec: RunSpec) -> RunSpec:
    if spec.data not in _SMOKE_CLASSES:
        raise UsageError(f"scale smoke stands in for {', '.join(_SMOKE_CLASSES)}; this run is on {spec.data!r}")
    on_imagenet = spec.data == "imagenet"
    return spec.but(
        data="synthetic",
        data_options={
            "classes": _SMOKE_CLASSES[spec.data],
            "image_size": 64 if on_imagenet else 32,
            "train": _SMOKE_TRAIN,
            "test": _SMOKE_TEST,
        },
        batch_size=2 if on_imagenet else _SMOKE_BATCH.get(spec.batch_size, min(spec.batch_size, 6)),
        iterations=_SMOKE_ITERATIONS,
        evaluations=1,
    )
