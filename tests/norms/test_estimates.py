"""`recalibrate` and `diagnose` know what each norm keeps, and how it trains."""

import copy
import math

import pytest
import torch
from helpers.common import images, randn
from helpers.norms import EACH, chain, step
from torch import nn

import memnorm
from memnorm import norms
from memnorm.layers import Recording

STATISTICAL = [name for name in EACH if norms.get(name).records]
# What training normalises with is more than the moments of the batch tell: ghost batches, the number of images, the
# weights of the layer in front, the order of the samples.
UNTOLD = ["cbn", "ghost", "momentum_bn", "online"]
OPTIONS = {"brn": {"total_steps": 10, "momentum": 0.2}, "mabn": {"warmup": 0, "correct_after": 2, "window": 15}}


def trained(name, **options):
    """One layer without affine map after some drifting batches, and batches of another distribution."""
    layer = nn.BatchNorm1d(3, affine=False, eps=1e-3, dtype=torch.float64)
    net = memnorm.convert(nn.Sequential(layer), name, **OPTIONS.get(name, {}), **options)
    for index in range(6):
        net((1 + 0.2 * index) * randn(6, 3, seed=80 + index) + 0.3 * index)
    return net, [randn(5, 3, seed=index) + torch.arange(3.0) for index in range(4)]


TOLD = [(name, {}) for name in STATISTICAL if name not in UNTOLD]


@pytest.mark.parametrize(("name", "options"), TOLD, ids=str)
def test_disagreement_is_the_difference_between_the_outputs_in_training_and_eval(name, options):
    net, batches = trained(name, **options)
    with torch.no_grad(), memnorm.recording(net, False):
        in_training = torch.stack([net(batch) for batch in batches])
        in_eval = torch.stack([net.eval()(batch) for batch in batches])
    wanted = float((in_training - in_eval).square().mean().sqrt())
    (found,) = memnorm.diagnose(net.train(), batches).layers
    assert found.disagreement == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("name", UNTOLD)
def test_an_unknown_disagreement_is_called_unknown(name):
    net = memnorm.convert(chain(), name)
    step(net, 4)
    found = memnorm.diagnose(net, [images(4, seed=index) for index in range(2)])
    assert all(math.isnan(layer.disagreement) for layer in found.layers)
    assert str(found).count("unknown") == len(found.layers) == 2
    assert found.output_disagreement > 0


@pytest.mark.parametrize("name", STATISTICAL)
def test_recalibrated_statistics_are_not_stale(name):
    net, batches = trained(name)
    memnorm.recalibrate(net, batches, passes="exact")
    (found,) = memnorm.diagnose(net, batches).layers
    assert found.staleness < 1e-6


@pytest.mark.parametrize("name", STATISTICAL)
def test_one_pass_does_not_depend_on_the_statistics_of_before(name):
    """A deeper layer would otherwise be given the statistics of inputs that the old ones of the first had made."""
    nets = [memnorm.convert(chain(), name, **OPTIONS.get(name, {})) for _ in range(2)]
    for net in nets:
        for _ in range(3):
            step(net, 4)
    for layer in nets[1].modules():
        if isinstance(layer, Recording):
            layer.running_mean.add_(2.0)
            layer.running_var.mul_(9.0)
            if name == "mbn":
                layer.memory_mean.add_(2.0)
                layer.memory_var.mul_(9.0)
    batches = [images(4, seed=index) for index in range(3)]
    for net in nets:
        memnorm.recalibrate(net, batches)
    one, other = (
        {key: value for key, value in net.state_dict().items() if "running" in key and "weight" not in key}
        for net in nets
    )
    assert len(one) == 4
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["mbn", "brn", "moving_bn", "momentum_bn", "lagged_bn"])
def test_one_pass_gives_a_norm_that_reads_its_statistics_those_of_batch_norm(name):
    net = memnorm.convert(chain(), name, **OPTIONS.get(name, {}))
    for _ in range(3):
        step(net, 4)
    plain = memnorm.to_batchnorm(copy.deepcopy(net))
    batches = [images(4, seed=index) for index in range(3)]
    for one in (net, plain):
        memnorm.recalibrate(one, batches)
    for ours, torchs in ((net[1], plain[1]), (net[5], plain[5])):
        torch.testing.assert_close(ours.running_mean, torchs.running_mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours.running_var, torchs.running_var, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", STATISTICAL)
def test_recalibration_neither_rewinds_nor_advances_a_schedule(name):
    net, batches = trained(name)
    (layer,) = [one for one in net.modules() if isinstance(one, Recording)]
    before = int(layer.num_batches_tracked)
    memnorm.recalibrate(net, batches)
    assert int(layer.num_batches_tracked) == (before if name in ("brn", "momentum_bn") else 4)
