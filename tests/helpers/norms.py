"""What the tests of all registered norms share: a network that supports all of them, and a training step."""

import pytest
import torch
from helpers.common import images, labels
from torch import nn

from memnorm import norms

EACH = norms.available()
each_norm = pytest.mark.parametrize("name", EACH)


def chain(seed=0):
    """A network every norm can be put into: convolutions, norms and ReLUs in a row."""
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def step(net, batch, rate=0.01, seed=1):
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(images(batch, seed=seed)), labels(batch, seed=seed)).backward()
    optimizer.step()
