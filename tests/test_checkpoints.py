"""Checkpoints of plain batch norm and of memorized layers, and training resumed from them."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from helpers.common import assert_same_state, images, labels, randomize, small_net
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
    trained,
)
from torch import Tensor, nn
from torch.nn import functional as F

import memnorm
from memnorm.functional import Moments, batch_moments, merge


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
def test_a_plain_checkpoint_loads_strictly_and_brings_its_statistics(source):
    layer, checkpoint = trained(), plain().state_dict()
    layer.load_state_dict(source(checkpoint), strict=True)
    taken = {name: layer.state_dict()[name] for name in old_style(checkpoint)}
    assert_bitwise(taken, old_style(checkpoint))


@pytest.mark.parametrize("source", [dict, old_style, from_sync], ids=["plain", "without-counter", "sync"])
@pytest.mark.parametrize("memory_size", [5, None])
def test_a_plain_checkpoint_empties_a_filled_memory(source, memory_size):
    layer = trained(memory_size=memory_size)
    layer.load_state_dict(source(plain().state_dict()), strict=True)
    assert all(not layer.get_buffer(name).any() for name in MEMORY)


def test_a_plain_checkpoint_leaves_the_strength_as_it_is():
    layer = trained()
    layer.set_strength(0.8)
    layer.load_state_dict(plain().state_dict(), strict=True)
    assert layer.strength.item() == 0.8


def test_a_plain_checkpoint_of_a_network_loads_strictly_into_its_converted_twin():
    source = small_net(seed=1)
    for index in range(3):
        source(images(4, seed=index))
    net = memnorm.convert(small_net(seed=2))
    net(images(4, seed=9))
    net.load_state_dict(source.state_dict(), strict=True)
    x = images(5, seed=10)
    torch.testing.assert_close(net.eval()(x), source.eval()(x), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}], ids=["affine", "track"])
def test_a_plain_checkpoint_without_parameters_or_statistics_loads_strictly_into_such_a_layer(options):
    source, layer = nn.BatchNorm2d(C, **options), Layer(C, **options)
    randomize(source, seed=30)
    source(batch(4, torch.float32))
    layer.load_state_dict(source.state_dict(), strict=True)
    x = batch(5, torch.float32)
    torch.testing.assert_close(layer.eval()(x), source.eval()(x), rtol=0, atol=0)


@pytest.mark.parametrize("source", [plain, trained, lambda: trained(memory_size=None)], ids=["plain", "same", "None"])
def test_loading_does_not_change_the_callers_dictionary(source):
    checkpoint = source().state_dict()
    before = {name: value.clone() for name, value in checkpoint.items()}
    layer = make()
    layer.load_state_dict(checkpoint)
    layer(batch(0))
    assert_bitwise(dict(checkpoint), before)


@pytest.mark.parametrize("prior_weight", [1.0, 3.0, 0.0])
def test_trained_statistics_stand_in_for_the_memory_in_the_next_forward(prior_weight):
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


def standing_in(prior_weight: float, memory_size: int | None) -> tuple[Any, list[tuple[Tensor, Tensor, float]]]:
    """A layer after a plain checkpoint and one batch, and that batch's and the checkpoint's moments by hand."""
    source, x = plain(), batch(4)
    layer = make(memory_size=memory_size, prior_weight=prior_weight)
    layer.load_state_dict(source.state_dict())
    layer(x)
    count = x.numel() / C
    newest = (x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0), count)
    return layer, [newest, (source.running_mean, source.running_var, prior_weight * count)]


@pytest.mark.parametrize("prior_weight", [1.0, 3.0])
def test_trained_statistics_become_the_oldest_entry_of_the_memory(prior_weight):
    layer, entries = standing_in(prior_weight, memory_size=5)
    for row, (mean, var, count) in enumerate(entries):
        torch.testing.assert_close(layer.memory_mean[row], mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(layer.memory_var[row], var, rtol=0, atol=1e-12)
        assert layer.memory_count[row] == count
    assert not layer.memory_count[2:].any()


@pytest.mark.parametrize("prior_weight", [1.0, 3.0])
@pytest.mark.parametrize("memory_size", [5, 2, None])
def test_trained_statistics_are_pooled_as_one_batch_older(prior_weight, memory_size):
    layer, (newest, (mean, var, count)) = standing_in(prior_weight, memory_size)
    assert_pooled(layer, newest, (mean, var, DECAY * count))


@pytest.mark.parametrize(
    ("prior_weight", "memory_size"),
    [(1.0, 1), (3.0, 1), (0.0, 1), (0.0, 5), (0.0, None)],
)
def test_trained_statistics_drop_out_without_room_or_without_weight(prior_weight, memory_size):
    layer, (newest, _) = standing_in(prior_weight, memory_size)
    assert_pooled(layer, newest)


@pytest.mark.parametrize("memory_size", [1, 5])
def test_statistics_that_drop_out_leave_one_entry(memory_size):
    layer, (newest, _) = standing_in(0.0, memory_size)
    assert layer.memory_count.tolist() == [newest[2]] + [0.0] * (memory_size - 1)


def test_trained_statistics_age_out_like_any_entry():
    layer, _ = standing_in(1.0, memory_size=3)
    for index in (5, 6):
        layer(batch(index))
    assert layer.memory_count.tolist() == [batch(index).numel() / C for index in (6, 5, 4)]


def test_initial_statistics_of_a_plain_checkpoint_do_not_stand_in():
    source = plain(steps=0)
    layer = make()
    layer.load_state_dict(source.state_dict())
    x = batch(4)
    torch.testing.assert_close(layer(x), source(x), rtol=0, atol=1e-12)


def test_initial_statistics_of_a_plain_checkpoint_are_not_recorded():
    layer = make()
    layer.load_state_dict(plain(steps=0).state_dict())
    x = batch(4)
    layer(x)
    assert_pooled(layer, (x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0), x.numel() / C))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("memory_size", [1, 5, None])
def test_a_first_batch_that_is_not_finite_leaves_the_stand_in_untouched(value, memory_size):
    layer = make(memory_size=memory_size)
    layer.load_state_dict(plain().state_dict())
    before = snapshot(layer)
    x = batch(4)
    x[1, 2, 0, 1] = value
    layer(x)
    assert_bitwise(snapshot(layer), before)


@pytest.mark.parametrize("memory_size", [1, 5, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_memorized_checkpoint_is_restored_bit_for_bit(memory_size, dtype):
    source = trained(7, dtype, memory_size=memory_size)
    source.set_strength(0.9)
    layer = trained(2, dtype, memory_size=memory_size)
    layer.load_state_dict(source.state_dict())
    assert_bitwise(snapshot(layer), snapshot(source))


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_smaller_memory_loads_what_it_would_have_remembered(steps, size):
    layer = make(memory_size=size)
    layer.load_state_dict(trained(steps, memory_size=5).state_dict())
    assert_same_state(layer, trained(steps, memory_size=size), atol=1e-12)


def test_a_smaller_memory_keeps_the_newest_entries_exactly():
    source, layer = trained(5, memory_size=5), make(memory_size=2)
    layer.load_state_dict(source.state_dict())
    assert torch.equal(layer.memory_mean, source.memory_mean[:2])


def test_a_smaller_memory_is_pooled_with_its_own_decay():
    source, layer = trained(5, memory_size=5, decay=0.5), make(memory_size=2, decay=0.9)
    layer.load_state_dict(source.state_dict())
    rows = list(zip(source.memory_mean, source.memory_var, source.memory_count.tolist(), strict=True))
    assert_pooled(layer, rows[0], (rows[1][0], rows[1][1], 0.9 * rows[1][2]))


@pytest.mark.parametrize("steps", [0, 1, 4, 5])
@pytest.mark.parametrize("size", [6, 8, None])
def test_a_larger_memory_keeps_everything_and_goes_on_as_if_it_always_was(steps, size):
    layer, always = make(memory_size=size), trained(steps, memory_size=size)
    layer.load_state_dict(trained(steps, memory_size=5).state_dict())
    for index in range(steps, steps + 5):
        torch.testing.assert_close(layer(batch(index)), always(batch(index)), rtol=0, atol=1e-11)
        keeps_all = size is None or index < size
        if keeps_all:
            assert_same_state(layer, always, atol=1e-11)


@pytest.mark.parametrize("size", [8, None])
def test_a_larger_memory_takes_the_pooled_statistics_over_bit_for_bit(size):
    source, layer = trained(7, memory_size=5), make(memory_size=size)
    layer.load_state_dict(source.state_dict())
    pooled = ("running_mean", "running_var", "running_weight", "num_batches_tracked", "strength")
    assert_bitwise({n: layer.state_dict()[n] for n in pooled}, {n: source.state_dict()[n] for n in pooled})


def test_an_unlimited_memory_becomes_one_entry_of_a_limited_one():
    source, layer = trained(7, memory_size=None), trained(5, memory_size=5)
    layer.load_state_dict(source.state_dict())
    assert layer.memory_count.tolist() == [source.running_weight.item(), 0, 0, 0, 0]


def test_a_limited_memory_loaded_from_an_unlimited_one_goes_on_like_it_until_it_is_full():
    source, layer = trained(7, memory_size=None), trained(5, memory_size=5)
    layer.load_state_dict(source.state_dict())
    for index in range(7, 11):
        torch.testing.assert_close(layer(batch(index)), source(batch(index)), rtol=0, atol=1e-11)
        pooled = ("running_mean", "running_var", "running_weight")
        torch.testing.assert_close(
            [layer.get_buffer(n) for n in pooled], [source.get_buffer(n) for n in pooled], rtol=0, atol=1e-11
        )


@pytest.mark.parametrize("memory_size", [2, 5, 8, None])
def test_an_empty_memory_of_another_size_loads_with_the_statistics_that_stand_in(memory_size):
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
def test_assigning_a_checkpoint_brings_a_meta_layer_to_life(source):
    copied = make(torch.float32)
    copied.load_state_dict(checkpoint_of(source))
    born = Layer(C, device="meta", memory_size=5, decay=DECAY, strength=STRENGTH)
    born.load_state_dict(checkpoint_of(source), assign=True)
    assert_bitwise(snapshot(born), snapshot(copied))


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_a_meta_layer_brought_to_life_trains_like_any_other(source):
    copied = make(torch.float32)
    copied.load_state_dict(checkpoint_of(source))
    born = Layer(C, device="meta", memory_size=5, decay=DECAY, strength=STRENGTH)
    born.load_state_dict(checkpoint_of(source), assign=True)
    for index in range(3):
        copied(batch(index, torch.float32))
        born(batch(index, torch.float32))
    assert_bitwise(snapshot(born), snapshot(copied))


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_statistics_of_a_narrowed_checkpoint_are_float32_again(source, assign):
    layer = make(torch.float32)
    layer.load_state_dict(narrowed(checkpoint_of(source)), assign=assign)
    assert {layer.get_buffer(name).dtype for name in ("running_mean", "running_var", *MEMORY)} == {torch.float32}


@pytest.mark.parametrize("source", [SOURCES["plain"], SOURCES["same-size"]], ids=["plain", "memorized"])
def test_statistics_of_a_narrowed_checkpoint_have_its_values(source):
    layer = make(torch.float32)
    layer.load_state_dict(narrowed(checkpoint_of(source)), assign=True)
    expected = checkpoint_of(source)["running_var"].half().float()
    torch.testing.assert_close(layer.running_var, expected, rtol=0, atol=0)


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_the_strength_of_a_narrowed_checkpoint_is_wide_again(assign):
    layer = make(torch.float32)
    layer.load_state_dict(narrowed(trained(dtype=torch.float32).state_dict()), assign=assign)
    assert layer.strength.dtype in (torch.float32, torch.float64)


def test_a_half_layer_takes_a_memorized_checkpoint_over_bit_for_bit():
    source, layer = trained(4, torch.float32), make(torch.float32).half()
    layer.load_state_dict(source.state_dict())
    names = NAMES[2:]
    assert_bitwise({n: layer.state_dict()[n] for n in names}, {n: source.state_dict()[n] for n in names})


def test_a_layer_made_plain_has_the_keys_of_torchs_batch_norm():
    state = memnorm.to_batchnorm(trained()).state_dict()
    assert list(state) == list(nn.BatchNorm2d(C).state_dict())


@pytest.mark.parametrize("memory_size", [5, None])
def test_a_network_made_plain_loads_strictly_into_torchs_and_evaluates_the_same(memory_size):
    net = memnorm.convert(small_net(), memory_size=memory_size)
    for index in range(3):
        net(images(4, seed=index))
    x = images(5, seed=9)
    expected = net.eval()(x)
    stock = small_net(seed=1)
    stock.load_state_dict(memnorm.to_batchnorm(net).state_dict(), strict=True)
    torch.testing.assert_close(stock.eval()(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("source", [plain, trained], ids=["plain", "memorized"])
def test_a_checkpoint_of_other_channels_is_refused_naming_both_numbers(source, assign):
    layer = Layer(4)
    with pytest.raises(RuntimeError, match=r"the checkpoint has shape \(3,\), the layer 4 channels"):
        layer.load_state_dict(source().state_dict(), assign=assign)


def test_a_refused_checkpoint_changes_nothing():
    layer = trained()
    before = snapshot(layer)
    with pytest.raises(RuntimeError, match="channels"):
        layer.load_state_dict(plain(channels=4).state_dict())
    assert_bitwise(snapshot(layer), before)


def test_a_checkpoint_without_the_layer_leaves_its_memory_alone():
    net = nn.Sequential(nn.Conv2d(C, C, 1), trained(dtype=torch.float32))
    before = snapshot(net[1])
    net.load_state_dict(nn.Sequential(nn.Conv2d(C, C, 1)).state_dict(), strict=False)
    assert_bitwise(snapshot(net[1]), before)


def test_a_checkpoint_of_parameters_alone_leaves_the_memory_alone():
    layer = trained()
    before = {name: value for name, value in snapshot(layer).items() if name not in ("weight", "bias")}
    layer.load_state_dict(dict(plain().named_parameters()), strict=False)
    assert_bitwise({name: layer.state_dict()[name] for name in before}, before)


def test_a_strict_load_still_reports_a_missing_memory_buffer():
    checkpoint = trained().state_dict()
    del checkpoint["memory_var"]
    with pytest.raises(RuntimeError, match="memory_var"):
        make().load_state_dict(checkpoint)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
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
def test_a_run_resumed_from_a_checkpoint_repeats_the_straight_run_bit_for_bit(memory_size, double):
    straight, optimizer, _handle = session(memory_size, double)
    train(straight, optimizer, range(6))

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
    assert_same_state(resumed, straight)
