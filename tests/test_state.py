"""The state of memorized layers: buffers, casts, copies, resets, checkpoints, files."""

from __future__ import annotations

import copy
import importlib
import io
import pickle
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from helpers.common import assert_same_state, images, labels, small_net
from helpers.optional import library
from helpers.states import (
    DECAY,
    MEMORY,
    NAMES,
    STRENGTH,
    C,
    Layer,
    assert_bitwise,
    batch,
    make,
    narrowed,
    plain,
    snapshot,
    steps,
    trained,
)
from torch import Tensor, nn
from torch.nn import functional as F

import memnorm
from memnorm.functional import Moments, batch_moments, merge

# Buffers

CASTS = {
    "half()": lambda module: module.half(),
    "to(bfloat16)": lambda module: module.to(torch.bfloat16),
    "float()": lambda module: module.float(),
    "half().double()": lambda module: module.half().double(),
}


@pytest.mark.parametrize(("memory_size", "rows"), [(5, 5), (None, 0)])
def test_state_dict_has_these_names_in_this_order_and_these_shapes(memory_size, rows):
    shapes = {name: tuple(value.shape) for name, value in Layer(C, memory_size=memory_size).state_dict().items()}
    slots = {"memory_mean": (rows, C), "memory_var": (rows, C), "memory_count": (rows,)}
    scalars = dict.fromkeys(("num_batches_tracked", "running_weight", "strength"), ())
    expected = {name: slots.get(name, scalars.get(name, (C,))) for name in NAMES}
    assert list(shapes.items()) == list(expected.items())


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_no_cast_narrows_a_buffer_below_float32(cast, dtype):
    for name, buffer in cast(trained(dtype=dtype)).named_buffers():
        assert buffer.dtype in (torch.float32, torch.float64, torch.int64), name


def test_half_and_back_leaves_the_statistics_as_they_were():
    layer = trained(dtype=torch.float32)
    before = {name: value for name, value in snapshot(layer).items() if name not in ("weight", "bias", "strength")}
    after = {name: layer.half().float().state_dict()[name] for name in before}
    assert_bitwise(after, before)


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS.keys())
def test_the_strength_keeps_all_its_digits_in_a_layer_made_double(cast):
    assert cast(Layer(C, strength=0.1)).double().strength.item() == 0.1


def by_saving(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "torch.save": by_saving}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
@pytest.mark.parametrize("memory_size", [5, None])
def test_a_copy_trains_like_the_original(copied, memory_size):
    layer = trained(memory_size=memory_size)
    other = copied(layer)
    for index in range(3, 6):
        torch.testing.assert_close(other(batch(index)), layer(batch(index)), rtol=0, atol=0)
    assert_same_state(other, layer)


def test_a_shared_layer_keeps_its_values_and_stays_shared_while_it_trains():
    layer = trained(2).share_memory()
    layer(batch(2))
    assert_same_state(layer, trained(3))
    assert all(value.is_shared() for value in layer.state_dict().values())


def fill_with_garbage(module: nn.Module) -> None:
    """Simulate the uninitialized memory after to_empty."""
    with torch.no_grad():
        for value in module.state_dict().values():
            value.fill_(float("nan") if value.is_floating_point() else -1)


@pytest.mark.parametrize("memory_size", [5, None])
@pytest.mark.parametrize("dtype", [torch.half, torch.float32, torch.float64], ids=str)
def test_a_layer_built_on_meta_emptied_and_reset_is_a_fresh_one(memory_size, dtype):
    options = {"memory_size": memory_size, "strength": 0.1, "dtype": dtype}
    layer = Layer(C, device="meta", **options).to_empty(device="cpu")
    fill_with_garbage(layer)
    layer.reset_parameters()
    assert_bitwise(snapshot(layer), snapshot(Layer(C, **options)))


def test_a_layer_emptied_from_meta_and_loaded_from_a_plain_checkpoint_is_like_any_that_loaded_it():
    options = {"memory_size": 5, "strength": 0.1}
    layer, other = Layer(C, device="meta", **options).to_empty(device="cpu"), Layer(C, **options)
    strength = layer.strength.clone()
    fill_with_garbage(layer)
    layer.strength.copy_(strength)
    for each in (layer, other):
        each.load_state_dict(plain(torch.float32).state_dict())
    assert_bitwise(snapshot(layer), snapshot(other))


@pytest.mark.parametrize("memory_size", [5, None])
def test_reset_memory_empties_the_memory_and_changes_nothing_else(memory_size):
    layer = trained(memory_size=memory_size)
    before = snapshot(layer)
    layer.reset_memory()
    emptied = {name: torch.zeros_like(value) if name in MEMORY else value for name, value in before.items()}
    assert_bitwise(snapshot(layer), emptied)


def test_after_reset_memory_the_running_statistics_replace_the_memory():
    layer, other = trained(), make()
    layer.reset_memory()
    other.load_state_dict(memnorm.to_batchnorm(copy.deepcopy(layer)).state_dict())
    torch.testing.assert_close(layer(batch(5)), other(batch(5)), rtol=0, atol=0)
    assert_same_state(layer, other)


@pytest.mark.parametrize("memory_size", [5, None])
def test_reset_running_stats_makes_all_statistics_initial_and_keeps_parameters_and_strength(memory_size):
    layer, fresh = trained(memory_size=memory_size), make(memory_size=memory_size)
    layer.set_strength(0.9)
    fresh.set_strength(0.9)
    layer.reset_running_stats()
    assert_bitwise(snapshot(layer), snapshot(fresh))


@pytest.mark.parametrize("memory_size", [5, None])
def test_reset_parameters_makes_everything_initial(memory_size):
    layer = trained(memory_size=memory_size)
    layer.set_strength(0.9)
    layer.reset_parameters()
    fresh = Layer(C, dtype=torch.float64, memory_size=memory_size, strength=STRENGTH)
    assert_bitwise(snapshot(layer), snapshot(fresh))


IN_PLACE = {
    "training": steps,
    "set_strength": lambda layer: layer.set_strength(0.2),
    "reset_memory": Layer.reset_memory,
    "reset_running_stats": Layer.reset_running_stats,
    "reset_parameters": Layer.reset_parameters,
    "load memorized": lambda layer: layer.load_state_dict(trained(6).state_dict()),
    "load plain": lambda layer: layer.load_state_dict(plain().state_dict()),
    "load smaller": lambda layer: layer.load_state_dict(trained(2, memory_size=2).state_dict()),
    "load larger": lambda layer: layer.load_state_dict(trained(8, memory_size=9).state_dict()),
    "load narrowed": lambda layer: layer.load_state_dict(narrowed(trained(6).state_dict())),
    "to(cpu)": lambda layer: layer.to("cpu"),
    "double()": nn.Module.double,
    "share_memory": nn.Module.share_memory,
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_every_change_leaves_each_buffer_the_same_tensor_at_the_same_address(name):
    layer = trained()
    before = {key: (buffer, buffer.data_ptr()) for key, buffer in layer.named_buffers()}
    IN_PLACE[name](layer)
    for key, buffer in layer.named_buffers():
        assert buffer is before[key][0], key
        assert buffer.data_ptr() == before[key][1] or name == "share_memory", key


# Checkpoints of layers


def union(*sets: tuple[Tensor, Tensor, float]) -> tuple[Tensor, Tensor, Tensor]:
    """Moments of weighted sets, by hand: E[x²] − E[x]²."""
    total = sum(weight for _, _, weight in sets)
    mean = sum(weight * mean for mean, _, weight in sets) / total
    square = sum(weight * (var + mean**2) for mean, var, weight in sets) / total
    return mean, square - mean**2, torch.tensor(total, dtype=torch.float64)


def assert_pooled(layer: Any, *sets: tuple[Tensor, Tensor, float]) -> None:
    pooled = (layer.running_mean, layer.running_var, layer.running_weight)
    torch.testing.assert_close(pooled, union(*sets), rtol=0, atol=1e-11)


def old_style(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """As written before torch 0.4.1: no counter, no version."""
    return {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}


def from_sync(state: dict[str, Tensor]) -> dict[str, Tensor]:
    sync = nn.SyncBatchNorm(C, dtype=torch.float64)
    sync.load_state_dict(state)
    return sync.state_dict()


@pytest.mark.parametrize("source", [dict, old_style, from_sync], ids=["plain", "without-counter", "sync"])
@pytest.mark.parametrize("memory_size", [5, None])
def test_a_plain_checkpoint_loads_strictly_brings_its_statistics_and_empties_the_memory(source, memory_size):
    layer, checkpoint = trained(memory_size=memory_size), plain().state_dict()
    layer.load_state_dict(source(checkpoint), strict=True)
    taken = {name: layer.state_dict()[name] for name in old_style(checkpoint)}
    assert_bitwise(taken, old_style(checkpoint))
    assert all(not layer.get_buffer(name).any() for name in MEMORY)


def test_a_plain_checkpoint_leaves_the_strength_as_it_is():
    layer = trained()
    layer.set_strength(0.8)
    layer.load_state_dict(plain().state_dict(), strict=True)
    assert layer.strength.item() == 0.8


@pytest.mark.parametrize("prior_weight", [1.0, 3.0, 0.0])
def test_trained_statistics_replace_an_empty_memory_in_the_next_forward(prior_weight):
    source = plain()
    layer = make(prior_weight=prior_weight)
    layer.load_state_dict(source.state_dict())
    x = batch(4)
    count = x.numel() / C
    hat = merge(
        Moments(source.running_mean, source.running_var, STRENGTH * prior_weight * count),
        batch_moments(x),
    )
    expected = F.batch_norm(x, hat.mean, hat.var, source.weight, source.bias, False, 0.0, layer.eps)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


def after_plain_checkpoint(
    prior_weight: float, memory_size: int | None
) -> tuple[Any, list[tuple[Tensor, Tensor, float]]]:
    """A layer after a plain checkpoint and one batch, and that batch's and the checkpoint's moments by hand."""
    source, x = plain(), batch(4)
    layer = make(memory_size=memory_size, prior_weight=prior_weight)
    layer.load_state_dict(source.state_dict())
    layer(x)
    count = x.numel() / C
    newest = (x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0), count)
    return layer, [newest, (source.running_mean, source.running_var, prior_weight * count)]


@pytest.mark.parametrize("prior_weight", [1.0, 3.0])
@pytest.mark.parametrize("memory_size", [5, 2, None])
def test_trained_statistics_are_pooled_as_one_batch_older(prior_weight, memory_size):
    layer, (newest, (mean, var, count)) = after_plain_checkpoint(prior_weight, memory_size)
    assert_pooled(layer, newest, (mean, var, DECAY * count))


@pytest.mark.parametrize(
    ("prior_weight", "memory_size"),
    [(1.0, 1), (3.0, 1), (0.0, 1), (0.0, 5), (0.0, None)],
)
def test_trained_statistics_are_discarded_without_room_or_without_weight(prior_weight, memory_size):
    layer, (newest, _) = after_plain_checkpoint(prior_weight, memory_size)
    assert_pooled(layer, newest)


def test_initial_statistics_of_a_plain_checkpoint_do_not_replace_an_empty_memory():
    source = plain(steps=0)
    layer = make()
    layer.load_state_dict(source.state_dict())
    x = batch(4)
    torch.testing.assert_close(layer(x), source(x), rtol=0, atol=1e-12)
    assert_pooled(layer, (x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0), x.numel() / C))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("memory_size", [1, 5, None])
def test_a_first_batch_that_is_not_finite_leaves_trained_statistics_untouched(value, memory_size):
    layer = make(memory_size=memory_size)
    layer.load_state_dict(plain().state_dict())
    before = snapshot(layer)
    x = batch(4)
    x[1, 2, 0, 1] = value
    layer(x)
    assert_bitwise(snapshot(layer), before)


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_smaller_memory_loads_what_it_would_have_remembered(steps, size):
    layer = make(memory_size=size)
    layer.load_state_dict(trained(steps, memory_size=5).state_dict())
    assert_same_state(layer, trained(steps, memory_size=size), atol=1e-12)


def test_a_smaller_memory_is_pooled_with_its_own_decay():
    source, layer = trained(5, memory_size=5, decay=0.5), make(memory_size=2, decay=0.9)
    layer.load_state_dict(source.state_dict())
    rows = list(zip(source.memory_mean, source.memory_var, source.memory_count.tolist(), strict=True))
    assert_pooled(layer, rows[0], (rows[1][0], rows[1][1], 0.9 * rows[1][2]))


@pytest.mark.parametrize("steps", [0, 1, 4, 5])
@pytest.mark.parametrize("size", [6, 8, None])
def test_a_larger_memory_keeps_everything_and_trains_as_if_it_always_had_that_size(steps, size):
    layer, always = make(memory_size=size), trained(steps, memory_size=size)
    layer.load_state_dict(trained(steps, memory_size=5).state_dict())
    for index in range(steps, steps + 5):
        torch.testing.assert_close(layer(batch(index)), always(batch(index)), rtol=0, atol=1e-11)
        keeps_all = size is None or index < size
        if keeps_all:
            assert_same_state(layer, always, atol=1e-11)


def test_a_limited_memory_loads_an_unlimited_one_as_one_entry():
    source, layer = trained(7, memory_size=None), trained(5, memory_size=5)
    layer.load_state_dict(source.state_dict())
    torch.testing.assert_close(layer(batch(7)), source(batch(7)), rtol=0, atol=1e-11)
    torch.testing.assert_close(layer.running_var, source.running_var, rtol=0, atol=1e-11)


@pytest.mark.parametrize("memory_size", [2, 5, 8, None])
def test_an_empty_memory_of_another_size_loads_with_its_trained_statistics(memory_size):
    source = make(memory_size=4)
    source.load_state_dict(plain().state_dict())
    layer, expected = trained(memory_size=memory_size), make(memory_size=memory_size)
    layer.load_state_dict(source.state_dict())
    expected.load_state_dict(plain().state_dict())
    assert_same_state(layer, expected)


SOURCES = {
    "plain": plain,
    "without-counter": lambda dtype: old_style(plain(dtype).state_dict()),
    "same-size": lambda dtype: trained(4, dtype),
    "larger": lambda dtype: trained(7, dtype, memory_size=7),
    "smaller": lambda dtype: trained(4, dtype, memory_size=2),
    "unlimited": lambda dtype: trained(4, dtype, memory_size=None),
}


def checkpoint_of(source: Any, dtype: torch.dtype = torch.float32) -> Any:
    made = source(dtype)
    return made.state_dict() if isinstance(made, nn.Module) else made


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_assigning_a_checkpoint_gives_the_state_that_copying_gives(source):
    copied, assigned = trained(dtype=torch.float32), trained(dtype=torch.float32)
    copied.load_state_dict(checkpoint_of(source))
    assigned.load_state_dict(checkpoint_of(source), assign=True)
    assert_bitwise(snapshot(assigned), snapshot(copied))


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_a_meta_layer_loaded_with_assign_trains_like_any_other(source):
    copied = make(torch.float32)
    copied.load_state_dict(checkpoint_of(source))
    loaded = Layer(C, device="meta", memory_size=5, decay=DECAY, strength=STRENGTH)
    loaded.load_state_dict(checkpoint_of(source), assign=True)
    for index in range(3):
        copied(batch(index, torch.float32))
        loaded(batch(index, torch.float32))
    assert_bitwise(snapshot(loaded), snapshot(copied))


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_statistics_and_strength_of_a_narrowed_checkpoint_are_wide_again(source, assign):
    layer = make(torch.float32)
    layer.load_state_dict(narrowed(checkpoint_of(source)), assign=assign)
    assert {layer.get_buffer(name).dtype for name in ("running_mean", "running_var", *MEMORY)} == {torch.float32}
    assert layer.strength.dtype == torch.float64


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("source", [plain, trained], ids=["plain", "memorized"])
def test_a_checkpoint_of_other_channels_is_an_error_that_names_both_numbers(source, assign):
    layer = Layer(4)
    with pytest.raises(RuntimeError, match=r"the checkpoint has shape \(3,\), the layer 4 channels"):
        layer.load_state_dict(source().state_dict(), assign=assign)


def test_a_rejected_checkpoint_changes_nothing():
    layer = trained()
    before = snapshot(layer)
    with pytest.raises(RuntimeError, match="channels"):
        layer.load_state_dict(plain(channels=4).state_dict())
    assert_bitwise(snapshot(layer), before)


def test_a_strict_load_still_reports_a_missing_memory_buffer():
    checkpoint = trained().state_dict()
    del checkpoint["memory_var"]
    with pytest.raises(RuntimeError, match="memory_var"):
        make().load_state_dict(checkpoint)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        F.cross_entropy(net(images(6, seed=step)), labels(6, seed=step)).backward()
        optimizer.step()


def session(memory_size: int | None, double: dict[str, Any] | None) -> tuple[Any, torch.optim.Optimizer, Any]:
    net = memnorm.convert(small_net(), memory_size=memory_size)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, optimizer, None if double is None else memnorm.double_forward(net, optimizer, **double)


@pytest.mark.parametrize("memory_size", [2, 20, None])
@pytest.mark.parametrize(
    "double", [None, {}, {"every": 2, "fraction": 0.5}], ids=["single", "double", "double-every-2-half"]
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(memory_size, double):
    uninterrupted, optimizer, _handle = session(memory_size, double)
    train(uninterrupted, optimizer, range(6))

    net, optimizer, handle = session(memory_size, double)
    train(net, optimizer, range(3))
    file = io.BytesIO()
    torch.save([net.state_dict(), optimizer.state_dict(), handle and handle.state_dict()], file)
    file.seek(0)
    resumed, optimizer, handle = session(memory_size, double)
    for part, state in zip((resumed, optimizer, handle), torch.load(file, weights_only=True), strict=True):
        if part is not None:
            part.load_state_dict(state)
    train(resumed, optimizer, range(3, 6))
    assert_same_state(resumed, uninterrupted)


# Networks

MEMORIES = [3, None]
COUNTER = "num_batches_tracked"  # torch supplies it where a checkpoint without metadata has none


def network(memory_size=3, *, seed=0, steps=4):
    """A converted network that has trained a little."""
    net = memnorm.convert(small_net(seed=seed), memory_size=memory_size)
    train_more(net, range(steps))
    return net


def train_more(net, seeds):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with memnorm.double_forward(net, optimizer):
        train(net, optimizer, seeds)


def assert_same_state_and_training(net, other):
    assert_same_state(net, other)
    for each in (net, other):
        train_more(each.train(), range(10, 13))
    assert_same_state(net, other)


# Files


@pytest.mark.parametrize("memory_size", MEMORIES)
def test_safetensors_brings_back_every_bit(tmp_path, memory_size):
    safetensors = library("safetensors.torch")
    net, other = network(memory_size), network(memory_size, seed=1, steps=1)
    safetensors.save_file(net.state_dict(), tmp_path / "net.safetensors")
    other.load_state_dict(safetensors.load_file(tmp_path / "net.safetensors"))
    assert_same_state_and_training(other, net)


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
    assert loaded["handle"] == handle.state_dict() == {"steps": 1}
    assert loaded["schedule"] == schedule.state_dict()


@pytest.mark.parametrize("memory_size", MEMORIES)
@pytest.mark.parametrize("attached", [False, True], ids=["bare", "with-double-forward"])
def test_a_whole_module_loads_through_safe_globals_that_are_layers_and_inert_hooks(tmp_path, memory_size, attached):
    net = network(memory_size)
    handle = memnorm.double_forward(net, torch.optim.SGD(net.parameters(), lr=0.1)) if attached else None
    torch.save(net, tmp_path / "net.pt")
    names = torch.serialization.get_unsafe_globals_in_checkpoint(tmp_path / "net.pt")
    assert {name for name in names if name.startswith("memnorm")} <= {
        "memnorm.layers.MemorizedBatchNorm2d",
        "memnorm.stripped.report_stripped",
        "memnorm.capture._get_inert",
    }
    with torch.serialization.safe_globals([by_name(name) for name in names]):
        loaded = torch.load(tmp_path / "net.pt", weights_only=True)
    if handle is not None:
        handle.remove()
    assert_same_state_and_training(loaded, net)


def by_name(path):
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


# Parts of a checkpoint


def test_a_checkpoint_without_statistics_keeps_them_and_names_them():
    source, net = network(), network(seed=1)
    kept = {name: value.clone() for name, value in net.state_dict().items()}
    weights = {name: value for name, value in source.state_dict().items() if name in dict(source.named_parameters())}
    report = net.load_state_dict(weights, strict=False)
    assert report.missing_keys == [name for name, _ in net.named_buffers() if not name.endswith(COUNTER)]
    for name, _ in net.named_buffers():
        torch.testing.assert_close(net.state_dict()[name], kept[name], rtol=0, atol=0)
