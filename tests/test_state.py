"""Buffers: names, shapes, dtypes, copies, resets, and that they change in place only."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.common import assert_same_state
from helpers.states import (
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
from torch import nn

import memnorm

CASTS = {
    "half()": lambda module: module.half(),
    "bfloat16()": lambda module: module.bfloat16(),
    "to(bfloat16)": lambda module: module.to(torch.bfloat16),
    "to(cpu, half)": lambda module: module.to("cpu", torch.half),
    "float()": lambda module: module.float(),
    "double()": lambda module: module.double(),
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
def test_casting_keeps_the_order_of_the_state_dict(cast):
    assert list(cast(trained(dtype=torch.float32)).state_dict()) == NAMES


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_no_cast_narrows_a_buffer_below_float32(cast, dtype):
    for name, buffer in cast(trained(dtype=dtype)).named_buffers():
        assert buffer.dtype in (torch.float32, torch.float64, torch.int64), name


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16], ids=str)
def test_a_layer_built_narrow_has_statistics_in_float32(dtype):
    layer = Layer(C, dtype=dtype)
    assert {layer.get_buffer(name).dtype for name in ("running_mean", "running_var", *MEMORY)} == {torch.float32}


@pytest.fixture
def half_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.half)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("half_by_default")
def test_a_layer_built_under_a_narrow_default_dtype_has_statistics_in_float32():
    layer = Layer(C)
    assert {layer.get_buffer(name).dtype for name in ("running_mean", "running_var", *MEMORY)} == {torch.float32}


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [(nn.Module.half, torch.half), (nn.Module.bfloat16, torch.bfloat16), (nn.Module.double, torch.float64)],
    ids=["half", "bfloat16", "double"],
)
def test_casting_converts_the_parameters(cast, dtype):
    assert {parameter.dtype for parameter in cast(trained(dtype=torch.float32)).parameters()} == {dtype}


def test_double_widens_every_statistic():
    layer = trained(dtype=torch.float32).double()
    assert {layer.get_buffer(name).dtype for name in ("running_mean", "running_var", *MEMORY)} == {torch.float64}


def test_half_and_back_leaves_the_statistics_as_they_were():
    layer = trained(dtype=torch.float32)
    before = {name: value for name, value in snapshot(layer).items() if name not in ("weight", "bias", "strength")}
    after = {name: layer.half().float().state_dict()[name] for name in before}
    assert_bitwise(after, before)


@pytest.mark.parametrize(
    "cast",
    [
        nn.Module.double,
        lambda module: module.half().double(),
        lambda module: module.to("cpu").double(),
        lambda module: module.float().double(),
        lambda module: module.half().float().double(),
    ],
    ids=["double", "half.double", "to-cpu.double", "float.double", "half.float.double"],
)
def test_the_strength_keeps_all_its_digits_in_a_layer_made_double(cast):
    assert cast(Layer(C, strength=0.1)).strength.item() == 0.1


def test_a_half_layer_trains_and_records_in_float32():
    wide, narrow = make(torch.float32), make(torch.float32).half()
    for index in range(3):
        x = batch(index, torch.half)
        wide(x.float())
        narrow(x)
    statistics = [name for name in NAMES if name not in ("weight", "bias", "strength")]
    torch.testing.assert_close(
        {name: narrow.get_buffer(name) for name in statistics},
        {name: wide.get_buffer(name) for name in statistics},
        rtol=0,
        atol=1e-5,
    )


def by_saving(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "torch.save": by_saving}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
@pytest.mark.parametrize("memory_size", [5, None])
def test_a_copy_goes_on_as_the_original_does(copied, memory_size):
    layer = trained(memory_size=memory_size)
    other = copied(layer)
    for index in range(3, 6):
        torch.testing.assert_close(other(batch(index)), layer(batch(index)), rtol=0, atol=0)
    assert_same_state(other, layer)


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
def test_a_copy_of_a_layer_without_the_shift_has_none_either(copied):
    layer, other = trained(shift=False), copied(trained(shift=False))
    assert not torch.equal(trained().running_var, layer.running_var)
    torch.testing.assert_close(other(batch(3)), layer(batch(3)), rtol=0, atol=0)
    assert_same_state(other, layer)
    assert layer.state_dict().keys() == trained().state_dict().keys()


def test_a_layer_pickled_before_there_was_the_option_has_the_shift():
    layer = trained()
    del vars(layer)["shift"]
    assert pickle.loads(pickle.dumps(layer)).shift


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
def test_a_copy_has_a_memory_of_its_own(copied):
    layer = trained()
    before = snapshot(layer)
    copied(layer)(batch(5))
    assert_bitwise(snapshot(layer), before)


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
def test_a_copy_made_while_recording_is_off_records(copied):
    layer = trained(3)
    with memnorm.recording(layer, False):
        other = copied(layer)
        other(batch(3))
    assert_same_state(other, trained(4))


def test_share_memory_shares_every_parameter_and_buffer():
    layer = trained().share_memory()
    assert [name for name, value in layer.state_dict().items() if not value.is_shared()] == []


def test_a_shared_layer_keeps_its_values_and_stays_shared_while_it_trains():
    layer = trained(2).share_memory()
    layer(batch(2))
    assert_same_state(layer, trained(3))
    assert all(value.is_shared() for value in layer.state_dict().values())


def test_one_layer_in_two_places_keeps_one_memory():
    layer = make()
    net = nn.Sequential(layer, nn.ReLU(), nn.Sequential(layer))
    x = batch(0)
    hidden = net[:2](x).detach()
    layer.reset_running_stats()
    net(x)
    torch.testing.assert_close(
        layer.memory_mean[:2], torch.stack([hidden.mean((0, 2, 3)), x.mean((0, 2, 3))]), rtol=0, atol=1e-12
    )
    assert layer.memory_count.tolist() == [x.numel() / C] * 2 + [0.0] * 3


def test_a_checkpoint_of_one_layer_in_two_places_is_restored_bit_for_bit():
    def net(layer: Any) -> nn.Module:
        return nn.Sequential(layer, nn.ReLU(), nn.Sequential(layer))

    source, other = net(trained(3)), net(trained(1))
    other.load_state_dict(source.state_dict())
    assert_bitwise(snapshot(other), snapshot(source))


def spoil(module: nn.Module) -> None:
    """What to_empty may leave behind."""
    with torch.no_grad():
        for value in module.state_dict().values():
            value.fill_(float("nan") if value.is_floating_point() else -1)


@pytest.mark.parametrize("memory_size", [5, None])
@pytest.mark.parametrize("dtype", [torch.half, torch.float32, torch.float64], ids=str)
def test_a_layer_built_on_meta_emptied_and_reset_is_a_fresh_one(memory_size, dtype):
    options = {"memory_size": memory_size, "strength": 0.1, "dtype": dtype}
    layer = Layer(C, device="meta", **options).to_empty(device="cpu")
    spoil(layer)
    layer.reset_parameters()
    assert_bitwise(snapshot(layer), snapshot(Layer(C, **options)))


def test_a_network_converted_on_meta_emptied_and_reset_has_fresh_layers():
    with torch.device("meta"):
        net = memnorm.convert(nn.Sequential(nn.BatchNorm2d(C), nn.ReLU(), nn.BatchNorm2d(C)), strength=0.1)
    net.to_empty(device="cpu")
    spoil(net)
    for layer in (net[0], net[2]):
        layer.reset_parameters()
        assert_bitwise(snapshot(layer), snapshot(Layer(C, strength=0.1)))


def test_a_layer_emptied_from_meta_and_loaded_from_a_plain_checkpoint_has_its_own_strength():
    layer = Layer(C, device="meta", strength=0.1).to_empty(device="cpu")
    layer.load_state_dict(plain(torch.float32).state_dict())
    assert layer.strength.item() == 0.1


def test_a_layer_emptied_from_meta_and_loaded_from_a_plain_checkpoint_is_like_any_that_loaded_it():
    options = {"memory_size": 5, "strength": 0.1}
    layer, other = Layer(C, device="meta", **options).to_empty(device="cpu"), Layer(C, **options)
    strength = layer.strength.clone()
    spoil(layer)
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


def test_reset_memory_does_not_change_eval():
    layer = trained().eval()
    x = batch(5)
    before = layer(x)
    layer.reset_memory()
    torch.testing.assert_close(layer(x), before, rtol=0, atol=0)


def test_after_reset_memory_the_running_statistics_stand_in_as_those_of_a_plain_layer_do():
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


@pytest.mark.parametrize("reset", ["reset_running_stats", "reset_parameters"])
def test_a_reset_layer_refuses_one_value_per_channel_again(reset):
    layer = trained()
    one = batch(0)[:1, :, :1, :1]
    layer(one)
    getattr(layer, reset)()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(one)


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


@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE.keys())
def test_every_buffer_stays_the_same_tensor(change):
    layer = trained()
    before = dict(layer.named_buffers())
    change(layer)
    assert [name for name, buffer in layer.named_buffers() if buffer is not before[name]] == []


@pytest.mark.parametrize("name", [name for name in IN_PLACE if name != "share_memory"])
def test_every_buffer_stays_where_it_is_in_memory(name):
    layer = trained()
    before = {key: buffer.data_ptr() for key, buffer in layer.named_buffers()}
    IN_PLACE[name](layer)
    assert {key: buffer.data_ptr() for key, buffer in layer.named_buffers()} == before
