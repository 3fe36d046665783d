"""A literal training loop that the lab is tested against: the paper's equations over layers that keep whole batches,
momentum, weight decay and both forwards. In float64, and slow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from memnorm.lab import models
from memnorm.lab.data.source import mix
from memnorm.lab.errors import UsageError
from memnorm.lab.spec import RunSpec
from memnorm.reference import ReferenceBatchNorm, set_recording

ARMS = {("bn", "single"), ("mbn", "single"), ("mbn", "double")}


class LiteralTraining:
    """Network and velocities of a run with BN or MBN; learning rate and strength are arguments of each step.

    Raises:
        UsageError: the run needs something that is not implemented here.
    """

    def __init__(self, spec: RunSpec, classes: int, shape: tuple[int, int, int]) -> None:
        self.spec = spec
        torch.manual_seed(mix(spec.seed, "weights"))
        self.network = models.build(spec.model, classes=classes, image_shape=shape, **spec.model_options).double()
        if missing := list(_not_implemented(spec, self.network)):
            raise UsageError(f"{spec.name} cannot be trained literally: {', '.join(missing)}")
        if spec.norm == "mbn":
            _use_reference(self.network, spec.norm_options.get("memory_size", 20))
        self.layers = [layer for layer in self.network.modules() if isinstance(layer, ReferenceBatchNorm)]
        self.velocity = [torch.zeros_like(one) for one in self.network.parameters()]
        self.losses: list[float] = []  # of the images since the last `training_error`
        self.wrong: list[bool] = []

    def step(self, images: Tensor, labels: Tensor, *, learning_rate: float, strength: float) -> None:
        double = self.spec.scheme == "double"
        for layer in self.layers:
            layer.strength = strength
        set_recording(self.layers, not double)
        scores = self.network(images.double())
        losses = nn.functional.cross_entropy(scores, labels, reduction="none")
        self.losses += losses.tolist()
        self.wrong += (scores.argmax(1) != labels).tolist()
        gradients = torch.autograd.grad(losses.mean(), list(self.network.parameters()))
        with torch.no_grad():
            for one, gradient, velocity in zip(self.network.parameters(), gradients, self.velocity, strict=True):
                velocity.mul_(self.spec.momentum).add_(gradient + self.spec.weight_decay * one)
                one.sub_(learning_rate * velocity)
            if double:
                set_recording(self.layers, True)
                self.network(images.double())

    def training_error(self) -> dict[str, float]:
        """Loss and error of the steps since the last call."""
        found = {"train_loss": sum(self.losses) / len(self.losses), "train_error": _percent(self.wrong)}
        self.losses, self.wrong = [], []
        return found

    @torch.no_grad()
    def test_error(self, images: Tensor, labels: Tensor) -> dict[str, float]:
        scores = self.network.eval()(images.double())
        self.network.train()
        loss = nn.functional.cross_entropy(scores, labels)
        return {"test_loss": loss.item(), "test_error": _percent((scores.argmax(1) != labels).tolist())}


def _not_implemented(spec: RunSpec, network: nn.Module) -> Iterator[str]:
    if (spec.norm, spec.scheme) not in ARMS:
        yield f"the norm {spec.norm}, {spec.scheme} forward"
    if spec.norm_options.keys() - {"memory_size"}:
        yield f"norm options {spec.norm_options}"
    if spec.scheme == "double" and (spec.every, spec.fraction) != (1, 1.0):
        yield f"every={spec.every}, fraction={spec.fraction:g}"
    if spec.optimizer != "sgd":
        yield f"the optimizer {spec.optimizer}"
    if spec.pretrained:
        yield "pretrained weights"
    if spec.processes > 1:
        yield f"{spec.processes} processes"
    if any(isinstance(module, nn.Dropout) and module.p for module in network.modules()):
        yield "dropout"


def _use_reference(module: nn.Module, memory_size: int) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, ReferenceBatchNorm(child.num_features, memory_size=memory_size, eps=child.eps))
        _use_reference(child, memory_size)


def _percent(wrong: Sequence[bool]) -> float:
    return 100 * sum(wrong) / len(wrong)
