"""`to_batchnorm` and `summary`."""

import copy
import io

import pytest
import torch
from helpers.common import LAYERS, SHAPES, assert_same_state, images, small_net
from helpers.conversion import (
    VARIANTS,
    FrozenBatchNorm2d,
    assert_bitwise,
    evaluated,
    train_step,
    trained,
    with_statistics,
)
from torch import nn

import memnorm
from memnorm.errors import NothingToConvert


def test_a_model_has_torchs_classes_state_and_outputs_again():
    model = trained(memnorm.convert(small_net()))
    model[1].eval()
    parameters, before = list(model.parameters()), evaluated(model, images(5, seed=9))
    memnorm.to_batchnorm(model)
    assert_bitwise(evaluated(model, images(5, seed=9)), before)
    assert [type(module) for module in model.modules()] == [type(module) for module in small_net().modules()]
    assert list(model.state_dict()) == list(small_net().state_dict())
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    assert [model[i].training for i in (1, 4)] == [False, True]


@pytest.mark.parametrize("build", [small_net, lambda: nn.BatchNorm2d(3)], ids=["network", "layer"])
def test_a_plain_model_is_an_error(build):
    with pytest.raises(NothingToConvert, match=r"to_batchnorm: .* has no memorized layer"):
        memnorm.to_batchnorm(build())


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_conversion_and_back_restores_every_attribute(shape, options):
    layer = with_statistics(LAYERS[len(shape)][1](3, **options), shape)
    back = memnorm.to_batchnorm(memnorm.convert(copy.deepcopy(layer)))
    assert type(back) is type(layer)
    assert back.__dict__.keys() == layer.__dict__.keys()
    assert repr(back) == repr(layer)
    assert_same_state(back, layer)


def saved_bytes(model):
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


@pytest.mark.parametrize("copied", [False, True], ids=["itself", "copy"])
@pytest.mark.parametrize("how", ["trained", "with Double-Forward", "checkpointed"])
def test_a_saved_model_needs_nothing_of_memnorm_after_to_batchnorm(how, copied):
    model = memnorm.convert(small_net())
    if how == "trained":
        trained(model)
    elif how == "with Double-Forward":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        memnorm.double_forward(model, optimizer)
        train_step(model, optimizer, seed=0)
    else:
        torch.utils.checkpoint.checkpoint(model, images(4, seed=0), use_reentrant=False).sum().backward()
    assert b"memnorm" in saved_bytes(model)
    plain = memnorm.to_batchnorm(copy.deepcopy(model) if copied else model)
    assert b"memnorm" not in saved_bytes(plain)


def test_to_batchnorm_removes_double_forward():
    model = memnorm.convert(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memnorm.double_forward(model, optimizer)
    memnorm.to_batchnorm(model)
    train_step(model, optimizer, seed=0)
    assert len(model._forward_pre_hooks) == len(optimizer._optimizer_step_post_hooks) == 0
    assert int(model[1].num_batches_tracked) == 1  # once, by torch itself


def test_to_batchnorm_of_a_copy_leaves_the_original_training():
    model, other = memnorm.convert(small_net()), memnorm.convert(small_net())
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, other)]
    for net, optimizer in zip((model, other), optimizers, strict=True):
        memnorm.double_forward(net, optimizer)
        train_step(net, optimizer, seed=0)
    memnorm.to_batchnorm(copy.deepcopy(model))
    for net, optimizer in zip((model, other), optimizers, strict=True):
        train_step(net, optimizer, seed=1)
    assert_same_state(model, other)


def test_a_half_model_is_restored_bit_for_bit():
    original = trained(small_net()).half()
    back = memnorm.to_batchnorm(memnorm.convert(copy.deepcopy(original)))
    assert_same_state(back, original)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda model: model.to("cpu"), id="moved"),
        pytest.param(lambda model: memnorm.convert(model, memory_size=3), id="new options"),
        pytest.param(copy.deepcopy, id="copied"),
        pytest.param(lambda model: model.load_state_dict(model.state_dict()) and model, id="loaded"),
        pytest.param(lambda model: model.float().half(), id="widened and narrowed"),
    ],
)
@pytest.mark.parametrize("first", ["half", "convert"])
def test_a_half_model_is_restored_in_half_after_other_changes(first, change):
    model = memnorm.convert(small_net().half()) if first == "half" else memnorm.convert(small_net()).half()
    back = memnorm.to_batchnorm(change(model))
    dtypes = {tensor.dtype for tensor in (*back.parameters(), *back.buffers()) if tensor.is_floating_point()}
    assert dtypes == {torch.float16}
    assert evaluated(back, images(2, seed=0).half()).dtype == torch.float16


def test_a_half_layer_without_affine_parameters_is_restored_bit_for_bit():
    original = with_statistics(nn.BatchNorm2d(3, affine=False)).half()
    back = memnorm.to_batchnorm(memnorm.convert(copy.deepcopy(original)))
    assert_same_state(back, original)


def test_a_summary_has_a_row_for_each_norm_in_order():
    net = memnorm.convert(small_net())
    net[4].eval()
    rows = memnorm.summary(net).layers
    kind = "MemorizedBatchNorm2d"
    assert [(row.name, row.kind, row.channels, row.mode) for row in rows] == [
        ("1", kind, 6, "train"),
        ("4", kind, 4, "eval"),
    ]


def scheduled():
    layer = memnorm.MemorizedBatchNorm2d(3)
    memnorm.StrengthSchedule(layer, 10)
    return layer


NOTES = {
    "plain": (lambda: nn.BatchNorm2d(3), "plain, can be converted"),
    "GroupNorm": (lambda: nn.GroupNorm(1, 3), "not a batch norm"),
    "frozen": (
        lambda: FrozenBatchNorm2d(3),
        'skipped: frozen; convert(model, frozen="convert") makes it trainable',
    ),
    "lazy": (nn.LazyBatchNorm2d, "skipped: lazy; run one batch through the model first"),
    "fresh": (lambda: memnorm.MemorizedBatchNorm2d(3), "remembers 0 of 20 batches, decay 0.9, strength 0.5"),
    "filling": (
        lambda: with_statistics(memnorm.MemorizedBatchNorm2d(3, decay=0.8)),
        "remembers 3 of 20 batches, decay 0.8, strength 0.5",
    ),
    "scheduled": (scheduled, "remembers 0 of 20 batches, decay 0.9, strength 0.1"),
    "full": (
        lambda: with_statistics(memnorm.MemorizedBatchNorm2d(3, memory_size=2)),
        "remembers 2 of 2 batches, decay 0.9, strength 0.5",
    ),
    "unlimited": (
        lambda: with_statistics(memnorm.MemorizedBatchNorm2d(3, memory_size=None)),
        "remembers all batches, decay 0.9, strength 0.5",
    ),
    "unlimited and fresh": (
        lambda: memnorm.MemorizedBatchNorm2d(3, memory_size=None),
        "remembers no batch yet, then all, decay 0.9, strength 0.5",
    ),
    "no statistics": (
        lambda: memnorm.MemorizedBatchNorm2d(3, track_running_stats=False),
        "no memory: track_running_stats=False",
    ),
    "meta": (lambda: memnorm.MemorizedBatchNorm2d(3, device="meta"), "on meta"),
}


@pytest.mark.parametrize(("build", "note"), NOTES.values(), ids=NOTES)
def test_a_summary_notes_what_each_layer_is(build, note):
    assert [row.note for row in memnorm.summary(nn.Sequential(build())).layers] == [note]


def test_a_printed_summary_is_a_table_of_names_and_memory():
    lines = str(memnorm.summary(nn.ModuleDict({"stem": with_statistics(memnorm.MemorizedBatchNorm2d(3))}))).splitlines()
    assert lines[0].split() == ["layer", "kind", "channels", "mode"]
    assert lines[2].split(maxsplit=4) == [
        "stem",
        "MemorizedBatchNorm2d",
        "3",
        "train",
        "remembers 3 of 20 batches, decay 0.9, strength 0.5",
    ]
    assert len(lines) == 3


def test_a_layer_that_is_the_model_has_a_name_in_the_printed_summary():
    assert "(the model)" in str(memnorm.summary(nn.BatchNorm2d(3)))


def test_a_printed_summary_of_a_model_without_norms_says_so():
    assert str(memnorm.summary(nn.Linear(2, 2))) == "no norm layer"


def test_a_summary_leaves_the_model_as_it_was():
    net = trained(memnorm.convert(small_net()))
    before = copy.deepcopy(net)
    memnorm.summary(net)
    assert_same_state(net, before)
