"""What the explanation of two-way memory predicts, measured during a run on fixed training images.

`probe` lets the training make an update on 32 fixed images, as it would in the run, and undoes it. It compares this
with plain batch norm on the same 32 images as one batch, with the same weights:

    cosine    between the accumulated gradient and that of the joint batch; where the run centres gradients, both are
    drift     |change of a channel's mean by the update| / its standard deviation, of the inputs of the norms in the
              joint batch, averaged over channels
    norm      of all weights of convolutions

Each is the mean over `BATCHES` fixed batches.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import memnorm
from memnorm.centering import ATTRIBUTE
from memnorm.lab.data import Source
from memnorm.lab.training import Training
from memnorm.layers import MemorizedBatchNorm

BATCHES = 4
EPS = 1e-5  # that of batch norm: a channel may be constant


def probe(training: Training, source: Source, iteration: int) -> dict[str, float]:
    """The measurements at an evaluation, as `memnorm.lab.runner.run` takes them."""
    size = training.spec.images_per_step
    plan = ((torch.arange(number * size, (number + 1) * size), None) for number in range(BATCHES))
    found = [_measure(training, iteration, *training.place(*batch)) for batch in source.batches(plan)]
    cosine, drift = torch.tensor(found).mean(0).tolist()
    filters = [one.weight for one in training.model.modules() if isinstance(one, nn.Conv2d)]
    norm = torch.cat([one.detach().flatten() for one in filters]).norm().item()
    return {"probe_cosine": cosine, "probe_drift": drift, "probe_norm": norm}


def _measure(training: Training, iteration: int, images: Tensor, labels: Tensor) -> tuple[float, float]:
    joint = joint_network(training.model)
    with observed(joint) as inputs:
        nn.functional.cross_entropy(joint(images), labels).backward()
        before = dict(inputs)
        with undone(training):
            if not training.step(iteration - 1, images, labels):
                return float("nan"), float("nan")
            accumulated = gradient(training.model)
            updated = [one.detach().clone() for one in training.model.parameters()]
        cosine = nn.functional.cosine_similarity(accumulated, gradient(joint), 0)
        with torch.no_grad():
            for own, new in zip(joint.parameters(), updated, strict=True):
                own.copy_(new)
            joint(images)
    changes = [((inputs[name][0] - mean) / (var + EPS).sqrt()).abs() for name, (mean, var) in before.items()]
    return cosine.item(), torch.cat(changes).mean().item()


def joint_network(model: nn.Module) -> nn.Module:
    """A copy with plain batch norm in training mode, which centres gradients if `model` does."""
    joint = copy.deepcopy(model)
    if any(isinstance(layer, MemorizedBatchNorm) for layer in joint.modules()):
        memnorm.to_batchnorm(joint)
        if any(ATTRIBUTE in vars(layer) for layer in model.modules()):
            memnorm.center(joint)
    joint.zero_grad()
    return joint


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])


@contextlib.contextmanager
def observed(model: nn.Module) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Mean and variance per channel of the latest input of each batch norm, by its name."""
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(name: str, layer: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def hook(_layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            var, mean = torch.var_mean(args[0].detach(), (0, 2, 3), correction=0)
            found[name] = mean, var

        return layer.register_forward_pre_hook(hook)

    handles = [watch(name, one) for name, one in model.named_modules() if isinstance(one, nn.BatchNorm2d)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def undone(training: Training) -> Iterator[None]:
    """Undo what happens to the training inside, bit for bit."""
    state, random = copy.deepcopy(training.state()), torch.get_rng_state()
    gradients = [one.grad for one in training.model.parameters()]
    try:
        yield
    finally:
        training.load_state(state)
        for own, old in zip(training.model.parameters(), gradients, strict=True):
            own.grad = old
        torch.set_rng_state(random)
