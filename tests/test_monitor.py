"""monitor: what its numbers are, and that a training does not notice it."""

import copy
import math
import pickle

import pytest
import torch
from helpers.common import assert_same_state, images, labels, randn, small_net
from torch import nn
from torch.utils.checkpoint import checkpoint

import memnorm
from memnorm.errors import DTypeError, NothingToRecord, OptionError

KINDS = {
    "mbn": lambda: memnorm.MemorizedBatchNorm2d(3, dtype=torch.float64),
    "mbn, all batches": lambda: memnorm.MemorizedBatchNorm2d(3, memory_size=None, dtype=torch.float64),
    "two_way": lambda: memnorm.TwoWayBatchNorm2d(3, warmup=0, dtype=torch.float64),
}
COUNT = 4 * 5 * 5


@pytest.fixture(params=KINDS)
def layer(request):
    return KINDS[request.param]()


def batch(seed):
    return randn(4, 3, 5, 5, seed=seed)


def train(layer, steps, make=batch, micro_batches=1, first=0):
    """Updates that change nothing but the memory."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    for step in range(first, first + steps):
        for part in range(micro_batches):
            layer(make(step * micro_batches + part)).square().sum().backward()
        optimizer.step()


def test_the_noise_is_the_distance_of_the_next_batch_from_the_memory(layer):
    monitor = memnorm.monitor(layer)
    train(layer, 3)
    monitor.read(3)
    mean, var = layer.running_mean.clone(), layer.running_var.clone()
    train(layer, 2, first=3)
    seen = batch(3)
    shift = (seen.mean((0, 2, 3)) - mean) / (var + layer.eps).sqrt()
    ratio = ((seen.var((0, 2, 3), correction=0) + layer.eps) / (var + layer.eps)).log() / 2
    expected = float((shift.square() + ratio.square()).mean().sqrt())
    assert monitor.read(5)["memnorm/noise/model"] == pytest.approx(expected, rel=1e-9)


def test_statistics_that_move_steadily_drift_by_their_speed(layer):
    monitor = memnorm.monitor(layer)
    train(layer, 60, lambda step: batch(0) + 0.05 * step)
    monitor.read(60)
    train(layer, 50, lambda step: batch(0) + 0.05 * step, first=60)
    speed = 0.05 * float((1 / layer.running_var).mean().sqrt())
    assert monitor.read(110)["memnorm/drift"] == pytest.approx(speed, rel=0.03)


@pytest.mark.parametrize("every", [2, 50])
def test_noise_alone_is_hardly_called_drift(layer, every):
    """Root mean square over many readings, compared with the change that contains the noise."""
    layer = type(layer)(64)
    monitor, drifts, changes = memnorm.monitor(layer), [], []

    def make(seed):
        return randn(4, 64, 5, 5, seed=seed, dtype=torch.float32) + randn(4, 64, 1, 1, seed=~seed % 2**31)

    train(layer, 60, make)
    monitor.read(60)
    before = layer.running_mean.clone()
    for step in range(60, 60 + 12 * every, every):
        train(layer, every, make, first=step)
        drifts.append(monitor.read(step + every)["memnorm/drift"] * every)
        changes.append(float(((layer.running_mean - before) / layer.running_var.sqrt()).square().mean()))
        before = layer.running_mean.clone()
    assert sum(one**2 for one in drifts) < 0.25 * sum(changes)


@pytest.mark.parametrize("steps", [1, 2, 30])
def test_age_and_weight_are_those_of_the_remembered_batches(layer, steps):
    monitor = memnorm.monitor(layer)
    two_way = isinstance(layer, memnorm.TwoWayBatchNorm2d)
    micro_batches = 3 if two_way else 1
    decay = layer.decay or 1 - math.sqrt(4 * micro_batches / 32) / 4
    monitor.read(0)
    train(layer, steps, micro_batches=micro_batches)
    found = monitor.read(steps)
    kept = steps if layer.memory_size is None else min(steps, layer.memory_size)
    ages = [age + two_way for age in range(kept)]
    weights = [micro_batches * COUNT * decay**age for age in ages]
    mean_age = sum(age * weight for age, weight in zip(ages, weights, strict=True)) / sum(weights)
    assert found["memnorm/age"] == pytest.approx(mean_age, rel=1e-6, abs=1e-6)
    memory = float(layer.strength) * sum(weights)
    assert found["memnorm/weight"] == pytest.approx(memory / (COUNT + memory), rel=1e-6)


def test_a_memory_that_does_not_fade_has_the_age_of_half_its_batches():
    layer = memnorm.MemorizedBatchNorm2d(3, memory_size=None, decay=1.0)
    monitor = memnorm.monitor(layer)
    monitor.read(0)
    train(layer, 9, lambda seed: batch(seed).float())
    assert monitor.read(9)["memnorm/age"] == pytest.approx(4)


def loop(norm, read, steps=8, accumulate=2):
    net = memnorm.convert(small_net(), norm)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if norm == "mbn":
        memnorm.double_forward(net, optimizer)
    monitor = memnorm.monitor(net) if read else None
    for step in range(steps):
        for part in range(accumulate):
            seed = step * accumulate + part
            nn.functional.cross_entropy(net(images(4, seed=seed)), labels(4, seed=seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None and step % 2:
            monitor.read(step)
    return net


@pytest.mark.parametrize("norm", ["mbn", "two_way"])
def test_a_monitored_training_is_the_same_bit_for_bit(norm):
    assert_same_state(loop(norm, True), loop(norm, False))


def test_it_returns_floats_per_layer_and_in_total():
    net = memnorm.convert(small_net(), "two_way")
    monitor = memnorm.monitor(net)
    for step in range(1, 5):
        net(images(4, seed=step)).square().sum().backward()
        found = monitor.read(step)
    assert set(found) == {
        f"memnorm/{key}{layer}" for key in ("noise", "drift", "age", "weight") for layer in ("", "/1", "/4")
    }
    assert all(type(value) is float for value in found.values())
    for key, power in {"noise": 2, "drift": 2, "age": 1, "weight": 1}.items():
        parts = [found[f"memnorm/{key}/{name}"] for name in "14"]
        total = (sum(part**power for part in parts) / 2) ** (1 / power)
        assert found[f"memnorm/{key}"] == pytest.approx(total)


def test_what_is_not_known_is_left_out(layer):
    monitor = memnorm.monitor(layer)
    assert monitor.read(0) == {}
    train(layer, 1)
    first = monitor.read(1)
    assert "memnorm/noise" not in first  # there was no memory to compare the first batch with
    train(layer, 1, first=1)
    assert "memnorm/drift" not in monitor.read(1)  # no update since


def test_trained_statistics_are_a_memory_to_compare_with(layer):
    layer.running_mean.fill_(2.0)
    monitor = memnorm.monitor(layer)
    train(layer, 1)
    assert monitor.read(1)["memnorm/noise"] == pytest.approx(2, rel=0.1)


def test_no_hook_is_left_after_the_observed_forward(layer):
    with memnorm.monitor(layer) as monitor:
        assert layer._forward_pre_hooks
        layer.eval()(batch(0))
        assert layer._forward_pre_hooks  # eval is not observed
        layer.train()(batch(0))
        assert not layer._forward_pre_hooks
        monitor.read(1)
        assert len(layer._forward_pre_hooks) == 1
        monitor.read(2)
        assert len(layer._forward_pre_hooks) == 1
    assert not layer._forward_pre_hooks


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_of_the_model_is_not_observed(layer, duplicate):
    monitor = memnorm.monitor(layer)
    train(layer, 2)
    monitor.read(2)
    copied = duplicate(layer)
    train(copied, 1)
    assert layer._forward_pre_hooks
    assert [hook.batch for hook in copied._forward_pre_hooks.values()] == [None]
    assert "memnorm/noise" not in monitor.read(3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing_the_first_forward_is_observed(layer, reentrant):
    train(layer, 2)
    monitor = memnorm.monitor(layer)
    expected = copy.deepcopy(layer)
    watched = memnorm.monitor(expected)
    train(expected, 1, first=2)
    x = batch(2).requires_grad_()
    checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
    assert monitor.read(3)["memnorm/noise"] == watched.read(3)["memnorm/noise"]


def test_a_forward_that_backward_repeats_is_not_observed(layer):
    monitor = memnorm.monitor(layer)
    x = batch(0).requires_grad_()
    y = checkpoint(layer, x, use_reentrant=False)
    monitor.read(1)
    y.square().sum().backward()
    assert layer._forward_pre_hooks


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_model_compiles_whole_and_once_and_lacks_the_noise(layer):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    monitor = memnorm.monitor(layer)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    with torch.no_grad():
        for step in range(1, 5):
            compiled(batch(step))
            found = monitor.read(step)
    assert len(graphs) == 1
    assert "memnorm/noise" not in found
    assert int(layer.num_batches_tracked) == 4


def test_layers_that_were_converted_again_are_found():
    net = memnorm.convert(small_net())
    monitor = memnorm.monitor(net)
    memnorm.convert(net, "two_way")
    net(images(4, seed=0)).sum().backward()
    assert "memnorm/weight/1" in monitor.read(1)


def test_layers_that_are_plain_again_train_unobserved():
    net = memnorm.convert(small_net())
    monitor = memnorm.monitor(net)
    memnorm.to_batchnorm(net)
    net(images(4, seed=0)).sum().backward()
    assert not net[1]._forward_pre_hooks
    with pytest.raises(NothingToRecord):
        monitor.read(1)


def test_a_model_without_memory_is_an_error_that_says_what_to_do():
    with pytest.raises(NothingToRecord, match=r"Sequential has no memorized layer. Call memnorm.convert"):
        memnorm.monitor(small_net())
    with pytest.raises(DTypeError, match=r"torch.nn.Module"):
        memnorm.monitor("net")


@pytest.mark.parametrize("step", [-1, 1.5, True, "3"])
def test_a_step_must_be_a_number_of_updates(layer, step):
    with pytest.raises(OptionError, match="number of updates so far"):
        memnorm.monitor(layer).read(step)
