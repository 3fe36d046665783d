"""Every norm in the networks of the zoo: it lowers the loss on a fixed batch, evaluates, and comes back from a file."""

import statistics

import pytest
import torch
from torch import nn

import memnorm
from memnorm import norms
from memnorm.lab import models

torch.set_num_threads(1)

SMALL = {"small": 16, "resnet8": 16, "nin": 16, "vgg16_cifar": 32}
LARGE = {"resnet20": 16, "resnet18": 64, "googlenet": 64}
CHAINS = ("small", "nin", "vgg16_cifar")
ADAM = ("normprop", "weight_norm")  # their scale grows with depth, and plain SGD needs a rate for each network
cases = [
    pytest.param(name, model, size, batch, id=f"{name}-{model}-{batch}", marks=[pytest.mark.slow] if slow else [])
    for name in norms.available()
    for zoo, slow in ((SMALL, True), (LARGE, True), ({"small": 8}, False))
    for model, size in zoo.items()
    for batch in (2, 16)
    if name != "normprop" or model in CHAINS
]


def losses(net, batch, size, steps, adam):
    random = torch.Generator().manual_seed(batch)
    images, labels = torch.randn(batch, 3, size, size, generator=random), torch.arange(batch) % 10
    sgd = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.001) if adam else sgd
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found, images


@pytest.mark.parametrize(("name", "model", "size", "batch"), cases)
def test_a_norm_lowers_the_loss_evaluates_and_comes_back(name, model, size, batch, tmp_path):
    def network(seed):
        torch.manual_seed(seed)
        return memnorm.convert(models.build(model, classes=10, image_shape=(3, size, size)), name)

    net = network(0)
    found, images = losses(net, batch, size, 40, name in ADAM)
    assert statistics.mean(found[-5:]) < statistics.mean(found[:5])
    wanted = net.eval()(images)
    assert wanted.isfinite().all()
    torch.save(net.state_dict(), tmp_path / "net.pt")
    again = network(1)
    again.load_state_dict(torch.load(tmp_path / "net.pt", weights_only=True))
    assert torch.equal(again.eval()(images), wanted)


def test_residual_networks_do_not_take_normprop():
    net = models.build("resnet8", classes=10, image_shape=(3, 16, 16))
    with pytest.raises(memnorm.MemnormError, match="branches are joined"):
        memnorm.convert(net, "normprop")
