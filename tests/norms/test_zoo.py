"""Every norm in every network of the lab: it lowers the loss on a fixed batch, evaluates, and loads from a file."""

import statistics
from typing import NamedTuple

import pytest
import torch
from torch import nn

import memnorm
from memnorm import norms
from memnorm.lab import models

torch.set_num_threads(1)


class Trial(NamedTuple):
    """How a network is trained. The images are so small that the last norm gets 2×2 pixels."""

    size: int
    steps: int = 40
    batches: tuple[int, ...] = (2, 16)


# Networks made by the same code as another one, and large ones, are tried at the batch size that is harder for a norm;
# large ones over fewer steps, which takes long enough.
ZOO = {
    "small": Trial(8),
    "nin": Trial(8),
    "resnet8": Trial(8),
    "resnet20": Trial(8),
    "resnet32": Trial(8, steps=10, batches=(2,)),
    "resnet44": Trial(8, steps=10, batches=(2,)),
    "resnet56": Trial(8),
    "resnet110": Trial(8, steps=10, batches=(2,)),
    "vgg16_cifar": Trial(32, steps=10, batches=(2,)),
    "vgg16_imagenet": Trial(32, steps=10, batches=(2,)),
    "resnet18": Trial(64, steps=10),
    "resnet34": Trial(64, steps=10, batches=(2,)),
    "resnet50": Trial(64, steps=10, batches=(2,)),
    "googlenet": Trial(64, steps=10, batches=(2,)),
    "prelu_net": Trial(32, steps=10, batches=(2,)),
}
SYNONYMS = {"vgg16"}  # one of the two other names for VGG-16, by the size of the images
CHAINS = {"small", "nin", "vgg16_cifar", "vgg16_imagenet"}  # what normprop knows the moments of; see below
SHALLOW = {"small", "resnet8", "resnet20"}  # moving averages alone are the example of what blows up in deeper ones
ADAM = ("normprop", "weight_norm")  # their scale grows with depth, and plain SGD needs a rate for each network; the
# authors of weight norm use Adam, too
SHORT = {"brn": {"momentum": 0.1}}  # with its 0.01 the averages it corrects to would still be the initial ones


def applies(norm, model):
    return model in {"normprop": CHAINS, "moving_bn": SHALLOW}.get(norm, ZOO)


def network(model, norm, seed):
    torch.manual_seed(seed)
    trial = ZOO[model]
    options = {"dropout": 0.0} if "dropout" in models.get(model).options else {}  # whose noise hides a few steps' gain
    net = models.build(model, classes=10, image_shape=(3, trial.size, trial.size), **options)
    for module in net.modules():
        if isinstance(module, nn.Linear) and module.weight.numel() > 1e6:
            module.requires_grad_(False)  # a hundred million weights that no norm touches
    schedule = {"total_steps": trial.steps} if norms.get(norm).scales_with_run else {}
    return memnorm.convert(net, norm, **schedule, **SHORT.get(norm, {}))


def losses(net, images, steps, adam):
    """The losses of a training on one batch with a learning rate of 0.1 per 64 images."""
    labels = torch.arange(len(images)) % 10
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    sgd = torch.optim.SGD(parameters, lr=0.1 * len(images) / 64, momentum=0.9)
    optimizer = torch.optim.Adam(parameters, lr=0.0003) if adam else sgd
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    ("norm", "model", "batch"),
    [
        pytest.param(norm, model, batch, marks=[] if model == "small" else pytest.mark.slow)
        for norm in norms.available()
        for model, trial in ZOO.items()
        for batch in trial.batches
        if applies(norm, model)
    ],
)
def test_a_norm_lowers_the_loss_evaluates_and_loads_from_a_file(norm, model, batch, tmp_path):
    size, steps, _ = ZOO[model]
    images = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(batch))
    net = network(model, norm, seed=0)
    if norm == "weight_norm":
        net(torch.randn(16, 3, size, size, generator=torch.Generator().manual_seed(0)))  # sets all scales: a large one
    found = losses(net, images, steps, norm in ADAM)
    edge = max(2, steps // 8)
    assert statistics.mean(found[-edge:]) < statistics.mean(found[:edge]), found
    wanted = net.eval()(images)
    assert wanted.isfinite().all()
    torch.save(net.state_dict(), tmp_path / "net.pt")
    again = network(model, norm, seed=1)
    again.load_state_dict(torch.load(tmp_path / "net.pt", weights_only=True, mmap=True))
    assert torch.equal(again.eval()(images), wanted)


@pytest.mark.slow
def test_moving_averages_alone_blow_up_in_a_deep_network():
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    first, *_, last = losses(network("resnet110", "moving_bn", seed=0), images, 10, adam=False)
    assert first > 100
    assert not last < first


def test_the_whole_zoo_is_tried():
    assert set(models.available()) - SYNONYMS == set(ZOO)


@pytest.mark.parametrize("model", sorted(ZOO.keys() - CHAINS))
def test_networks_with_branches_do_not_take_normprop(model):
    with torch.device("meta"):
        net = models.build(model, classes=10, image_shape=(3, 64, 64))
    with pytest.raises(memnorm.MemnormError, match="branches are joined"):
        memnorm.convert(net, "normprop")
