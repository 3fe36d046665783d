"""A network trained by the lab against the same one trained with the paper's equations as they are printed.

What our evidence rests on beyond the layers: that the lab puts them in, lets the strength and the learning rate change
at the same steps, sends the batch forward again after the update, and evaluates with the memory.
"""

import pytest
import torch
from torch import nn

from memnorm.lab import models
from memnorm.lab.data.seeds import mix
from memnorm.lab.spec import RunSpec
from memnorm.lab.training import Training
from memnorm.reference import ReferenceBatchNorm, set_recording

STEPS, MEMORY = 20, 5  # long enough to forget
RATES = [0.1] * 8 + [0.01] * 4 + [0.001] * 8
STRENGTHS = [0.1] * 8 + [0.5] * 4 + [0.9] * 8
SHAPE, CLASSES = (3, 8, 8), 10


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    images = torch.randn(4, *SHAPE, generator=draw, dtype=torch.float64)
    return images, torch.randint(CLASSES, (4,), generator=draw)


class Literal:
    """Momentum, weight decay and both forwards written out, over layers that keep whole batches."""

    def __init__(self, spec: RunSpec) -> None:
        self.double, self.layers = spec.scheme == "double", []
        torch.manual_seed(mix(spec.seed, "weights"))
        network = models.build(spec.model, classes=CLASSES, image_shape=SHAPE).double()
        self.network = self.put(network)
        self.velocity = [torch.zeros_like(one) for one in self.network.parameters()]

    def put(self, module: nn.Module) -> nn.Module:
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                self.layers.append(ReferenceBatchNorm(child.num_features, memory_size=MEMORY))
                setattr(module, name, self.layers[-1])
            else:
                self.put(child)
        return module

    def step(self, step: int, images: torch.Tensor, labels: torch.Tensor) -> None:
        for layer in self.layers:
            layer.strength = STRENGTHS[step]
        set_recording(self.layers, not self.double)
        loss = nn.functional.cross_entropy(self.network(images), labels)
        gradients = torch.autograd.grad(loss, list(self.network.parameters()))
        with torch.no_grad():
            for one, gradient, velocity in zip(self.network.parameters(), gradients, self.velocity, strict=True):
                velocity.mul_(0.9).add_(gradient + 1e-4 * one)
                one.sub_(RATES[step] * velocity)
            if self.double:
                set_recording(self.layers, True)
                self.network(images)


@pytest.mark.parametrize("scheme", ["single", "double"])
def test_the_lab_trains_a_network_as_the_paper_writes_it(scheme):
    options = {"memory_size": MEMORY}
    spec = RunSpec(
        model="resnet8", norm="mbn", norm_options=options, scheme=scheme, iterations=STEPS, precision="float64"
    )
    lab, literal = Training(spec, CLASSES, SHAPE, "cpu"), Literal(spec)
    unseen, _ = batch(STEPS)
    for step in range(STEPS):
        assert lab.step(step, *batch(step))
        literal.step(step, *batch(step))
        torch.testing.assert_close(
            list(lab.model.parameters()), list(literal.network.parameters()), rtol=1e-8, atol=1e-10
        )
        with torch.no_grad():
            outputs = [network.eval()(unseen) for network in (lab.model, literal.network)]
        torch.testing.assert_close(*outputs, rtol=1e-8, atol=1e-10)
        lab.model.train(), literal.network.train()
