"""The schedule of the strength: when it changes, its effect on the layers, how it resumes, the warning without it."""

import copy
import json

import pytest
import torch
from helpers.common import images, labels, leaf, randn, small_net
from torch import nn

import memnorm
from memnorm import StrengthSchedule
from memnorm.errors import NothingToRecord, OptionError
from memnorm.functional import memorized_batch_norm


def strengths(model):
    """The strengths of the layers, as exact floats."""
    return [m.strength.item() for m in model.modules() if isinstance(m, memnorm.layers.MemorizedBatchNorm)]


def after(schedule, steps):
    for _ in range(steps):
        schedule.step()
    return schedule


def paper(step, total_steps):
    """0.1, 0.5 from 40 % and 0.9 from 60 % of the training on, in integer arithmetic."""
    return 0.1 if 10 * step < 4 * total_steps else 0.5 if 10 * step < 6 * total_steps else 0.9


@pytest.mark.parametrize("total_steps", [100, 10, 7, 5, 3, 2, 1, 78200])
def test_the_value_changes_at_the_first_step_at_or_after_each_milestone(total_steps):
    layer = memnorm.MemorizedBatchNorm1d(2)
    schedule = StrengthSchedule(layer, total_steps)
    seen = [layer.strength.item()]
    for _ in range(total_steps):
        schedule.step()
        seen.append(layer.strength.item())
    assert seen == [paper(step, total_steps) for step in range(total_steps + 1)]


@pytest.mark.parametrize(
    ("fraction", "total_steps", "step"), [(0.55, 100, 55), (0.07, 100, 7), (0.29, 100, 29), (0.1 + 0.2, 10, 3)]
)
def test_a_fraction_with_a_rounding_error_gives_the_intended_step(fraction, total_steps, step):
    schedule = StrengthSchedule(memnorm.MemorizedBatchNorm1d(2), total_steps, milestones=(fraction,), values=(0.2, 0.7))
    assert schedule.milestones == [step]


def test_a_milestone_at_zero_counts_from_the_start():
    layer = memnorm.MemorizedBatchNorm1d(2)
    StrengthSchedule(layer, 10, milestones=(0,), values=(0.2, 0.7))
    assert layer.strength.item() == 0.7


def test_without_milestones_the_strength_is_constant():
    layer = memnorm.MemorizedBatchNorm1d(2)
    after(StrengthSchedule(layer, 10, milestones=(), values=(0.3,)), 10)
    assert layer.strength.item() == 0.3


def test_its_repr_has_milestones_in_steps_and_the_current_strength():
    schedule = after(StrengthSchedule(memnorm.convert(small_net()), 10), 5)
    assert repr(schedule) == (
        "StrengthSchedule(total_steps=10, milestones=[4, 6], values=[0.1, 0.5, 0.9], last_step=5, strength=0.5)"
    )


def test_a_value_set_by_hand_stays_until_the_next_change():
    layer = memnorm.MemorizedBatchNorm1d(2)
    schedule = StrengthSchedule(layer, 10)
    layer.set_strength(0.7)
    after(schedule, 3)
    assert layer.strength.item() == 0.7
    after(schedule, 1)
    assert layer.strength.item() == 0.5


@pytest.mark.parametrize("saved_at", [0, 3, 4, 5, 6, 12])
def test_a_schedule_resumed_from_json_equals_an_uninterrupted_one(saved_at):
    saved = json.dumps(after(StrengthSchedule(memnorm.MemorizedBatchNorm1d(2), 10), saved_at).state_dict())
    layer = memnorm.MemorizedBatchNorm1d(2)
    schedule = StrengthSchedule(layer, 10)
    schedule.load_state_dict(json.loads(saved))
    seen = [layer.strength.item()]
    for _ in range(12):
        schedule.step()
        seen.append(layer.strength.item())
    assert seen == [paper(step, 10) for step in range(saved_at, saved_at + 13)]


@pytest.mark.parametrize("wrong", [{}, {"last_epoch": 3, "_step_count": 4}], ids=["empty", "of an LR scheduler"])
def test_a_state_of_another_object_is_an_error(wrong):
    schedule = StrengthSchedule(memnorm.MemorizedBatchNorm1d(2), 10)
    with pytest.raises(OptionError, match=r"not a state of this schedule; missing or unknown: .*last_"):
        schedule.load_state_dict(wrong)


def test_layers_converted_later_are_included_at_the_next_change():
    model = nn.Sequential(memnorm.MemorizedBatchNorm1d(2), nn.BatchNorm1d(2))
    schedule = after(StrengthSchedule(model, 10), 1)
    memnorm.convert(model)
    assert strengths(model) == [0.1, 0.5]  # not yet
    after(schedule, 3)
    assert strengths(model) == [0.5, 0.5]
    after(schedule, 2)
    assert strengths(model) == [0.9, 0.9]


def test_the_training_forward_uses_the_changed_strength():
    layer = memnorm.MemorizedBatchNorm2d(3, dtype=torch.float64)
    schedule = StrengthSchedule(layer, 10)
    for seed in range(3):
        layer(leaf((4, 3, 2, 2), seed=seed))
    x = leaf((4, 3, 2, 2), seed=9)
    outputs = []
    for value, steps in ((0.1, 0), (0.5, 4), (0.9, 2)):
        after(schedule, steps)
        memory = (layer.running_mean, layer.running_var, value * layer.running_weight)
        expected = memorized_batch_norm(x, layer.weight, layer.bias, *memory, layer.eps)
        with memnorm.recording(layer, False):
            outputs.append(layer(x))
        torch.testing.assert_close(outputs[-1], expected, rtol=0, atol=1e-12)
    assert (outputs[0] - outputs[2]).abs().max() > 1e-3


def test_a_layer_without_statistics_is_skipped():
    model = nn.Sequential(memnorm.MemorizedBatchNorm1d(2, track_running_stats=False), memnorm.MemorizedBatchNorm1d(2))
    StrengthSchedule(model, 10)
    assert model[0].strength is None
    assert model[1].strength.item() == 0.1
    assert model(randn(4, 2, seed=0, dtype=torch.float32)).shape == (4, 2)


def test_a_model_without_memorized_layers_is_an_error_that_says_what_to_do():
    with pytest.raises(NothingToRecord, match=r"Sequential has no memorized layer\. .*memnorm\.convert\(model\) first"):
        StrengthSchedule(small_net(), 10)


@pytest.mark.parametrize(
    ("total_steps", "options", "words"),
    [
        (0, {}, "total_steps must be a positive number of steps; got 0"),
        (-3, {}, "total_steps must be a positive number of steps; got -3"),
        (2.5, {}, r"total_steps must be a positive number of steps; got 2\.5"),
        (True, {}, "total_steps must be a positive number of steps; got True"),
        (10, {"values": (0.1, 0.5)}, "2 milestones need 3 values, .* got 2 values"),
        (10, {"milestones": ()}, "0 milestones need 1 values, .* got 3 values"),
        (10, {"milestones": (0.6, 0.4)}, r"milestones must increase; got \[0\.6, 0\.4\]"),
        (10, {"milestones": (5, 0.4)}, r"milestones must increase; got \[5, 0\.4\]"),
        (10, {"milestones": (-1, 0.4)}, r"in \[0, 1\] or a whole number of steps; got -1"),
        (10, {"milestones": (0.4, 1.5)}, r"in \[0, 1\] or a whole number of steps; got 1\.5"),
        (10, {"milestones": (0.4, float("nan"))}, r"in \[0, 1\] or a whole number of steps; got nan"),
        (10, {"milestones": (False, True)}, r"in \[0, 1\] or a whole number of steps; got False"),
        (10, {"milestones": (0.4, "60 %")}, r"in \[0, 1\] or a whole number of steps; got '60 %'"),
        (10, {"values": (-0.1, 0.5, 0.9)}, r"strength must lie in \[0, 1\]; got -0\.1"),
        (10, {"values": (1.5, 0.5, 0.9)}, r"strength must lie in \[0, 1\]; got 1\.5"),
    ],
)
def test_arguments_out_of_range_are_errors(total_steps, options, words):
    with pytest.raises(OptionError, match=words):
        StrengthSchedule(memnorm.MemorizedBatchNorm1d(2), total_steps, **options)


def train(model, *, twice, before_steps=lambda model: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if twice:
        memnorm.double_forward(model, optimizer)
    before_steps(model)
    for seed in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images(4, seed=seed)), labels(4, seed=seed)).backward()
        optimizer.step()


def pretrained_net():
    model = small_net()
    model(images(4, seed=9))
    return model


def load_trained_statistics(model):
    checkpoint = pretrained_net().state_dict()
    for name in ("1.num_batches_tracked", "4.num_batches_tracked"):
        checkpoint[name].fill_(1000)
    model.load_state_dict(checkpoint)


each_scheme = pytest.mark.parametrize("twice", [False, True], ids=["MBN-1", "MBN-2"])


@each_scheme
def test_a_constant_strength_warns_once_at_the_first_step(twice):
    with pytest.warns(memnorm.MemnormWarning, match=r"constant \(0\.5\).*StrengthSchedule\(model, total_st") as seen:
        train(memnorm.convert(small_net()), twice=twice)
    assert len(seen) == 1


@each_scheme
def test_a_constant_strength_warns_in_layers_that_were_not_converted(twice):
    with pytest.warns(memnorm.MemnormWarning, match=r"constant \(0\.4\)") as seen:
        train(small_net(lambda channels: memnorm.MemorizedBatchNorm2d(channels, strength=0.4)), twice=twice)
    assert len(seen) == 1


def test_double_forward_warns_of_a_constant_strength_in_a_copy():
    with pytest.warns(memnorm.MemnormWarning, match=r"constant \(0\.5\)"):
        train(copy.deepcopy(memnorm.convert(small_net())), twice=True)


def test_a_constant_strength_warns_after_many_micro_batches():
    model = memnorm.convert(small_net())
    for seed in range(100):
        model(images(2, seed=seed))
    with pytest.warns(memnorm.MemnormWarning, match=r"constant \(0\.5\)"):
        train(model, twice=False)


def load_few_batches(model):
    checkpoint = pretrained_net().state_dict()
    checkpoint |= {name: torch.tensor(1) for name in checkpoint if name.endswith("num_batches_tracked")}
    model.load_state_dict(checkpoint)


SILENT = {
    "schedule": (lambda: memnorm.convert(small_net()), lambda model: StrengthSchedule(model, 3)),
    "constant schedule": (
        lambda: memnorm.convert(small_net()),
        lambda model: StrengthSchedule(model, 3, milestones=(), values=(0.5,)),
    ),
    "small": (lambda: memnorm.convert(small_net(), strength=0.1), lambda model: None),
    "pretrained": (lambda: memnorm.convert(pretrained_net()), lambda model: None),
    "loaded": (lambda: memnorm.convert(small_net()), load_trained_statistics),
    "built, then loaded": (lambda: small_net(memnorm.MemorizedBatchNorm2d), load_few_batches),
    "new layer in a pretrained model": (lambda: memnorm.convert(partly_pretrained()), lambda model: None),
    "two-way memory": (lambda: memnorm.convert(small_net(), "two_way", warmup=0), lambda model: None),
    "batch norm": (lambda: memnorm.convert(small_net(), "bn"), lambda model: None),
}


def partly_pretrained():
    model = pretrained_net()
    model[4] = nn.BatchNorm2d(4)
    return model


@pytest.mark.filterwarnings("error::memnorm.MemnormWarning")
@each_scheme
@pytest.mark.parametrize(("build", "before_steps"), SILENT.values(), ids=SILENT)
def test_no_warning_of_a_constant_strength(build, before_steps, twice):
    train(build(), twice=twice, before_steps=before_steps)


@pytest.mark.filterwarnings("error::memnorm.MemnormWarning")
def test_steps_of_another_model_give_no_warning():
    converted = memnorm.convert(small_net())
    converted(images(4, seed=9))
    train(small_net(), twice=False)
    with pytest.raises(memnorm.MemnormWarning, match="constant"):
        train(converted, twice=False)
