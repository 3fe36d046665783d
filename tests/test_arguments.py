"""Wrong arguments of the API raise errors of memnorm that say what was required, and change nothing."""

from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from helpers.common import images, small_net
from torch import nn

import memnorm
from memnorm import StrengthSchedule, convert, recalibrate
from memnorm.errors import DTypeError, InputError, MemnormError, NothingToConvert, OptionError
from memnorm.functional import memorized_batch_norm

Layer = memnorm.MemorizedBatchNorm2d


def plain():
    return nn.BatchNorm2d(3)


def handle():
    model = convert(small_net())
    return memnorm.double_forward(model, torch.optim.SGD(model.parameters(), 0.1))


def enter(context):
    with context:
        pass


def memorized(x=None, **arguments):
    x, vector = images(4, seed=0) if x is None else x, torch.ones(3)
    return memorized_batch_norm(
        x,
        **{"weight": None, "bias": None, "memory_mean": vector, "memory_var": vector}
        | {"memory_weight": 1.0}
        | arguments,
    )


OPTIONS = {
    "prior_weight too large for a float": (lambda: Layer(3, prior_weight=10**400), "prior_weight must be zero or"),
    "memory_size too large for torch": (
        lambda: Layer(3, memory_size=10**20),
        r"memory_size must be .*limit is 2\*\*63",
    ),
    "prior_from_init an array": (lambda: Layer(3, prior_from_init=np.array([1, 2])), "must be True or False"),
    "prior_from_init a word": (lambda: Layer(3, prior_from_init="no"), "must be True or False; got 'no'"),
    "convert with layer": (lambda: convert(plain(), layer=1), "unknown option layer for norm 'mbn'; its options are"),
    "brn with layer": (lambda: convert(plain(), "brn", layer=1), "unknown option layer"),
    "two_way with layer": (lambda: convert(plain(), "two_way", layer=1), "unknown option layer"),
    "group with num_features": (lambda: convert(plain(), "group", num_features=1), "its options are num_groups"),
    "frn with num_features": (lambda: convert(plain(), "frn", num_features=1), "unknown option num_features"),
    "layer with layer": (lambda: convert(plain(), "layer", layer=1), "it has no options"),
    "a factory without the option": (lambda: convert(plain(), lambda c, a=1: None, b=1), "its options are a$"),
    "frozen an array": (lambda: convert(plain(), frozen=np.array([1, 2])), "frozen must be 'keep' or 'convert'"),
    "learned_eps a word": (lambda: convert(plain(), "frn", learned_eps="no"), "learned_eps must be True or False"),
    "the weight of a memory None": (lambda: memorized(memory_weight=None), "memory_weight must be a number"),
    "the weight of a memory too large": (lambda: memorized(memory_weight=10**400), "memory_weight must be a number"),
    "eps None": (lambda: memorized(eps=None), "eps must be a positive number"),
    "eps zero": (lambda: memorized(eps=0.0), "eps must be a positive number"),
    "center an array": (lambda: memnorm.center(small_net(), np.array([1, 2])), "mode must be"),
    "two_way with center an array": (lambda: convert(plain(), "two_way", center=np.array([1, 2])), "center must be"),
    "total_steps too large": (lambda: StrengthSchedule(Layer(3), 10**20), "total_steps must be a positive number"),
    "passes an array": (lambda: recalibrate(plain(), [], passes=np.array([1, 2])), "passes must be 1 or"),
    "batches an array": (lambda: recalibrate(plain(), np.zeros((4, 3, 8, 8))), "got ndarray: put a single batch in a"),
    "batches None": (lambda: recalibrate(plain(), None, passes="exact"), "recalibrate: expected an iterable"),
    "recording on a word": (lambda: enter(memnorm.recording(Layer(3), "no")), "on must be True or False"),
    "a norm's name a list": (lambda: memnorm.norms.get([]), r"unknown norm \[\]; available: bn"),
    "a handle's state without steps": (lambda: handle().load_state_dict({}), "the whole number steps"),
    "a handle's state a word": (lambda: handle().load_state_dict("a"), "the whole number steps"),
    "a handle's steps a word": (lambda: handle().load_state_dict({"steps": "a"}), "the whole number steps"),
}

TYPES = {
    "a factory that returns None": (lambda: convert(plain(), lambda c: None), "must return a torch.nn.Module"),
    "values a number": (lambda: StrengthSchedule(Layer(3), 10, values=0.5), "values must be a list of numbers"),
    "milestones a number": (lambda: StrengthSchedule(Layer(3), 10, milestones=5), "milestones must be a list"),
    "a schedule's state a word": (lambda: StrengthSchedule(Layer(3), 10).load_state_dict("a"), "a state_dict.., got"),
    "forward a number": (
        lambda: recalibrate(plain(), [images(4, seed=0)], forward=5),
        "forward must be a function; got 5",
    ),
    "forward an array": (
        lambda: recalibrate(plain(), [images(4, seed=0)], forward=np.array([1, 2])),
        "forward must be a function",
    ),
    "recording of None": (lambda: enter(memnorm.recording(None, True)), "recording: expected a torch.nn.Module"),
    "rerecord of None": (lambda: memnorm.rerecord(None, images(4, seed=0)), "rerecord: expected a torch.nn.Module"),
}


@pytest.mark.parametrize(("call", "message"), OPTIONS.values(), ids=OPTIONS)
def test_a_wrong_option_raises_an_option_error(call, message):
    with pytest.raises(OptionError, match=message):
        call()


@pytest.mark.parametrize(("call", "message"), TYPES.values(), ids=TYPES)
def test_an_argument_of_a_wrong_type_raises_a_dtype_error(call, message):
    with pytest.raises(DTypeError, match=message):
        call()


@pytest.mark.parametrize("batch", [[], (), {}], ids=repr)
def test_a_batch_without_input_raises_an_input_error(batch):
    with pytest.raises(InputError, match="has no input: a batch is the input, a tuple or list that starts with it"):
        recalibrate(plain(), [batch])


def test_the_function_needs_a_dimension_of_channels():
    with pytest.raises(InputError, match=r"expected input .*, got shape"):
        memorized(torch.zeros(()))


@pytest.mark.parametrize("name", ["mbn", "two_way", "mabn", "momentum_bn", "brn", "cbn"])
@pytest.mark.parametrize("value", [None, 5, "a", []], ids=repr)
def test_a_checkpoint_with_an_entry_that_is_no_tensor_raises_torchs_error(name, value):
    layer = convert(plain(), name)
    for checkpoint in (plain().state_dict(), layer.state_dict()):
        with pytest.raises(RuntimeError, match="running_mean"):
            layer.load_state_dict({**checkpoint, "running_mean": value})


def test_a_batch_without_channels_raises_the_error_of_the_layer():
    with pytest.raises(ValueError, match="expected 4D input"):
        recalibrate(plain(), [torch.zeros(())])
    with pytest.raises(InputError, match="expected 4-D input"):
        recalibrate(Layer(3), [torch.zeros(())])


@pytest.mark.parametrize("build", [Layer, partial(memnorm.TwoWayBatchNorm2d, warmup=0)], ids=["mbn", "two_way"])
def test_a_fraction_is_a_strength(build):
    layer = build(3, strength=Fraction(1, 2))
    assert layer.strength.item() == 0.5
    layer.set_strength(Fraction(1, 4))
    assert layer.strength.item() == 0.25


@pytest.mark.parametrize(
    "wrong",
    [{"last_step": ()}, {"last_step": -1}, {"values": [0.5]}, {"milestones": 3}, {"total_steps": 0}, {3: 4}],
    ids=str,
)
def test_a_wrong_state_leaves_a_schedule_as_it_was(wrong):
    layer = Layer(3)
    schedule = StrengthSchedule(layer, 10)
    for _ in range(4):
        schedule.step()
    before = schedule.state_dict()
    with pytest.raises(MemnormError, match="StrengthSchedule"):
        schedule.load_state_dict({**before, **wrong})
    assert schedule.state_dict() == before
    schedule.step()
    assert (schedule.last_step, layer.strength.item()) == (5, 0.5)


def test_a_factory_may_have_an_option_named_layer():
    assert isinstance(convert(plain(), nn.Identity, layer=1), nn.Identity)


def test_a_failed_conversion_leaves_the_model_as_it_was():
    model = small_net()
    before = list(model)
    with pytest.raises(MemnormError):
        convert(model, lambda c: None)
    assert list(model) == before


NORM = {"name": "mine", "title": "Mine", "paper": "none", "replace": lambda layer: layer}

WRONG_NORMS = {
    "a number": (lambda: 5, "expected a memnorm.norms.Norm, got int"),
    "a dict": (lambda: NORM, "expected a memnorm.norms.Norm, got dict"),
    "name a number": (lambda: memnorm.norms.Norm(**NORM | {"name": 5}), "name must be a word"),
    "name empty": (lambda: memnorm.norms.Norm(**NORM | {"name": ""}), "name must be a word"),
    "replace a number": (lambda: memnorm.norms.Norm(**NORM | {"replace": 5}), "replace must be a function; got 5"),
    "refuse a number": (lambda: memnorm.norms.Norm(**NORM | {"refuse": 5}), "refuse must be a function"),
    "surgery a number": (lambda: memnorm.norms.Norm(**NORM | {"surgery": 5}), "surgery must be a function"),
    "settle a number": (lambda: memnorm.norms.Norm(**NORM | {"settle": 5}), "settle must be a function"),
}


@pytest.mark.parametrize(("norm", "message"), WRONG_NORMS.values(), ids=WRONG_NORMS)
def test_a_wrong_norm_is_not_registered(norm, message, monkeypatch):
    monkeypatch.setattr(memnorm.norms, "_REGISTRY", before := dict(memnorm.norms._REGISTRY))
    with pytest.raises(MemnormError, match=message):
        memnorm.norms.register(norm())
    assert list(memnorm.norms._REGISTRY) == list(before)
    convert(plain())


@pytest.mark.parametrize("returned", [None, 5])
def test_a_registered_norm_must_return_a_module(returned, monkeypatch):
    monkeypatch.setattr(memnorm.norms, "_REGISTRY", dict(memnorm.norms._REGISTRY))
    memnorm.norms.register(memnorm.norms.Norm(**NORM | {"replace": lambda layer: returned}))
    with pytest.raises(MemnormError, match="must return a torch"):
        convert(plain(), "mine")
    with pytest.raises(NothingToConvert):
        convert(nn.Linear(3, 3), "mine")
