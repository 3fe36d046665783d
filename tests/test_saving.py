"""A whole network through the ways people save, average and load one."""

import importlib

import pytest
import torch
from helpers.common import assert_same_state, images, labels, small_net
from helpers.optional import library
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import memnorm

MEMORIES = [3, None]
COUNTER = "num_batches_tracked"  # torch supplies it where a checkpoint without metadata has none


def network(memory_size=3, *, seed=0, steps=4):
    """A converted network that has trained a little."""
    net = memnorm.convert(small_net(seed=seed), memory_size=memory_size)
    go_on(net, range(steps))
    return net


def go_on(net, seeds):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with memnorm.double_forward(net, optimizer):
        for seed in seeds:
            optimizer.zero_grad()
            F.cross_entropy(net(images(6, seed=seed)), labels(6, seed=seed)).backward()
            optimizer.step()


def assert_goes_on_alike(net, other):
    assert_same_state(net, other)
    for each in (net, other):
        go_on(each.train(), range(10, 13))
    assert_same_state(net, other)


# Averages


@pytest.mark.parametrize("memory_size", MEMORIES)
def test_an_average_with_buffers_averages_every_one_of_them(memory_size):
    """By torch's rule, which cuts the counter of batches down to a whole number as that of any batch norm."""
    net = network(memory_size, steps=0)
    averaged = AveragedModel(net, use_buffers=True, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    expected = None
    for step in range(4):
        go_on(net, [step])
        averaged.update_parameters(net)
        now = {name: value.clone() for name, value in net.state_dict().items()}
        if expected is not None:
            now = {name: mixed(expected[name], value) for name, value in now.items()}
        expected = now
    for name, value in averaged.module.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def mixed(old, new):
    return old.lerp(new, 0.25) if old.is_floating_point() else (0.75 * old + 0.25 * new).long()


def test_an_average_without_buffers_has_those_of_the_last_update():
    net = network()
    averaged = AveragedModel(net)
    go_on(net, [5])
    averaged.update_parameters(net)
    go_on(net, [6])
    averaged.update_parameters(net)
    for name, value in averaged.module.named_buffers():
        torch.testing.assert_close(value, net.get_buffer(name), rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}")


def test_averaging_by_name_as_training_scripts_do_leaves_a_network_that_evaluates_and_trains():
    """The loop of many repositories: every floating-point entry of the state dict, in place."""
    net, average = network(), network()
    go_on(net, range(5, 9))
    before = average.state_dict()["1.running_mean"].clone()
    with torch.no_grad():
        for name, value in average.state_dict().items():
            if value.is_floating_point():
                value.mul_(0.5).add_(net.state_dict()[name], alpha=0.5)
    halfway = (before + net.state_dict()["1.running_mean"]) / 2
    torch.testing.assert_close(average[1].running_mean, halfway, rtol=0, atol=1e-7)
    assert average.eval()(images(2, seed=1)).isfinite().all()
    go_on(average.train(), [20])
    assert float(average[1].memory_count[0]) == 6 * 6 * 6


def test_an_average_is_saved_and_loaded_bit_for_bit():
    averaged = AveragedModel(network(), use_buffers=True)
    go_on(averaged.module, [7])
    other = AveragedModel(network(seed=1), use_buffers=True)
    other.load_state_dict(averaged.state_dict())
    assert_same_state(other, averaged)


# Files


@pytest.mark.parametrize("memory_size", MEMORIES)
def test_safetensors_brings_back_every_bit(tmp_path, memory_size):
    safetensors = library("safetensors.torch")
    net, other = network(memory_size), network(memory_size, seed=1, steps=1)
    safetensors.save_file(net.state_dict(), tmp_path / "net.safetensors")
    other.load_state_dict(safetensors.load_file(tmp_path / "net.safetensors"))
    assert_goes_on_alike(other, net)


def test_a_whole_training_state_loads_with_weights_only(tmp_path):
    net = memnorm.convert(small_net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    handle, schedule = memnorm.double_forward(net, optimizer, every=2), memnorm.StrengthSchedule(net, 4)
    F.cross_entropy(net(images(4, seed=1)), labels(4, seed=1)).backward()
    optimizer.step()
    schedule.step()
    parts = {"net": net, "optimizer": optimizer, "handle": handle, "schedule": schedule}
    torch.save({name: part.state_dict() for name, part in parts.items()}, tmp_path / "training.pt")
    loaded = torch.load(tmp_path / "training.pt", weights_only=True)
    twin = memnorm.convert(small_net(seed=1))
    twin.load_state_dict(loaded["net"])
    assert_same_state(twin, net)
    assert loaded["handle"] == handle.state_dict() == {"steps": 1, "looks": 1, "draws": 0}
    assert loaded["schedule"] == schedule.state_dict()


@pytest.mark.parametrize("memory_size", MEMORIES)
@pytest.mark.parametrize("attached", [False, True], ids=["bare", "with-double-forward"])
def test_a_whole_module_loads_through_safe_globals(tmp_path, memory_size, attached):
    net = network(memory_size)
    handle = memnorm.double_forward(net, torch.optim.SGD(net.parameters(), lr=0.1)) if attached else None
    torch.save(net, tmp_path / "net.pt")
    names = torch.serialization.get_unsafe_globals_in_checkpoint(tmp_path / "net.pt")
    with torch.serialization.safe_globals([by_name(name) for name in names]):
        loaded = torch.load(tmp_path / "net.pt", weights_only=True)
    if handle is not None:
        handle.remove()
    assert_goes_on_alike(loaded, net)


def test_what_safe_globals_must_admit_of_memnorm_are_its_layers_and_inert_hooks(tmp_path):
    net = network()
    memnorm.double_forward(net, torch.optim.SGD(net.parameters(), lr=0.1))
    torch.save(net, tmp_path / "net.pt")
    names = torch.serialization.get_unsafe_globals_in_checkpoint(tmp_path / "net.pt")
    assert {name for name in names if name.startswith("memnorm")} == {
        "memnorm.layers.MemorizedBatchNorm2d",
        "memnorm.stripped.report_stripped",
        "memnorm.capture._get_inert",
    }


def by_name(path):
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


# Parts of a checkpoint


def with_head(classes, *, seed):
    net = network(seed=seed)
    net[8] = nn.Linear(4, classes)
    return net


@pytest.mark.parametrize("plain", [False, True], ids=["memorized", "plain"])
def test_a_checkpoint_without_the_head_fills_the_trunk_and_names_what_is_missing(plain):
    source = memnorm.to_batchnorm(network()) if plain else network()
    trunk = {name: value for name, value in source.state_dict().items() if not name.startswith("8.")}
    net = with_head(3, seed=1)
    head = {name: value.clone() for name, value in net[8].state_dict().items()}
    report = net.load_state_dict(trunk, strict=False)
    assert report.missing_keys == ["8.weight", "8.bias"]
    assert report.unexpected_keys == []
    for name, value in trunk.items():
        torch.testing.assert_close(net.state_dict()[name], value, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")
    assert float(net[1].running_weight) == 0 if plain else float(net[1].running_weight) > 0
    torch.testing.assert_close(net[8].state_dict(), head, rtol=0, atol=0)


def test_a_checkpoint_without_one_norm_leaves_that_norm_as_it_was():
    source, net = network(), network(seed=1)
    kept = {name: value.clone() for name, value in net[4].state_dict().items()}
    part = {name: value for name, value in source.state_dict().items() if not name.startswith("4.")}
    report = net.load_state_dict(part, strict=False)
    assert report.missing_keys == [f"4.{name}" for name in kept if name != COUNTER]
    torch.testing.assert_close(dict(net[4].state_dict()), kept, rtol=0, atol=0)
    torch.testing.assert_close(dict(net[1].state_dict()), dict(source[1].state_dict()), rtol=0, atol=0)


def test_a_checkpoint_without_statistics_keeps_them_and_names_them():
    source, net = network(), network(seed=1)
    kept = {name: value.clone() for name, value in net.state_dict().items()}
    weights = {name: value for name, value in source.state_dict().items() if name in dict(source.named_parameters())}
    report = net.load_state_dict(weights, strict=False)
    assert report.missing_keys == [name for name, _ in net.named_buffers() if not name.endswith(COUNTER)]
    for name, _ in net.named_buffers():
        torch.testing.assert_close(net.state_dict()[name], kept[name], rtol=0, atol=0)


def test_a_memorized_checkpoint_loads_into_a_plain_network_without_its_memory():
    net, plain = network(), small_net(seed=1)
    report = plain.load_state_dict(net.state_dict(), strict=False)
    assert report.missing_keys == []
    unexpected = {name.split(".")[1] for name in report.unexpected_keys}
    assert unexpected == {"running_weight", "memory_mean", "memory_var", "memory_count", "strength"}
    x = images(3, seed=2)
    torch.testing.assert_close(plain.eval()(x), net.eval()(x), rtol=0, atol=0)
