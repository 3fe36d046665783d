"""A loop with Accelerate equals the plain loop."""

import pytest
import torch
from helpers.common import assert_same_state
from helpers.optional import library
from helpers.trainers import STEPS, assert_two_way_loop, plain_loop, scenes, segmenter, sgd, two_way_segmenter

accelerate = library("accelerate")
attach = library("memnorm.integrations.accelerate").attach


@pytest.fixture(autouse=True)
def _fresh_accelerator_state():
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def prepared(accumulate=1, precision="no", model=None, **options):
    """A given `model` gets no integration."""
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulate, rng_types=[]
    )
    net = model or segmenter()
    net, optimizer, loader = accelerator.prepare(net, sgd(net), scenes(accumulate))
    handle = None if model else attach(accelerator, net, optimizer, STEPS, **options)
    torch.manual_seed(7)
    return accelerator, net, optimizer, loader, handle


def train(accelerator, model, optimizer, loader, _handle):
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_an_accelerated_training_is_the_plain_loop_bit_for_bit(accumulate, precision):
    model = train(*prepared(accumulate, precision))
    dtype = torch.bfloat16 if precision == "bf16" else None
    assert_same_state(model, plain_loop(accumulate=accumulate, dtype=dtype))
    assert int(model.color[1].num_batches_tracked) == STEPS * accumulate
    assert float(model.color[1].strength) == 0.9


@pytest.mark.parametrize("accumulate", [1, 3])
def test_two_way_memory_needs_no_integration(accumulate):
    assert_two_way_loop(train(*prepared(accumulate, model=two_way_segmenter())), accumulate)


def test_options_reach_double_forward_and_the_schedule():
    schedule = {"milestones": (0.5,), "values": (0.2, 0.7)}
    model = train(*prepared(double_forward={"every": 2, "fraction": 0.5}, schedule=schedule))
    assert_same_state(model, plain_loop(every=2, fraction=0.5, schedule=schedule))


def test_none_leaves_the_strength_alone_and_attaches_nothing_to_the_model():
    _, model, *_, handle = pieces = prepared(double_forward=None, schedule=None)
    assert not model._forward_pre_hooks
    train(*pieces)
    assert float(model.color[1].strength) == 0.5
    assert handle.state_dict() == {}


def test_a_state_saved_by_accelerate_resumes_schedule_and_counter(tmp_path):
    options = {"double_forward": {"every": 2, "fraction": 0.5}}
    straight = train(*prepared(**options))
    accelerator, model, optimizer, loader, handle = prepared(**options)
    first_half = [batch for number, batch in enumerate(loader) if number < 3]
    train(accelerator, model, optimizer, first_half, handle)
    accelerator.save_state(str(tmp_path))
    accelerator, model, optimizer, loader, handle = prepared(**options)
    accelerator.load_state(str(tmp_path))
    assert handle.state_dict()["double_forward"]["steps"] == 3
    train(accelerator, model, optimizer, accelerator.skip_first_batches(loader, 3), handle)
    assert_same_state(model, straight)


def test_several_optimizers_of_a_model_are_one_to_the_second_forward():
    accelerator = accelerate.Accelerator(cpu=True, rng_types=[])
    model = segmenter()
    parts = [model.color, torch.nn.ModuleList([model.depth, model.head])]
    model, one, other, loader = accelerator.prepare(model, *map(sgd, parts), scenes())
    handle = attach(accelerator, model, [one, other], STEPS)
    torch.manual_seed(7)
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        for optimizer in (one, other):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(model, plain_loop())
    assert handle.state_dict()["schedule"]["last_step"] == STEPS


def test_remove_detaches_everything():
    accelerator, model, optimizer, loader, handle = prepared()
    handle.remove()
    train(accelerator, model, optimizer, loader, handle)
    assert not model._forward_pre_hooks
    assert float(model.color[1].strength) == 0.1
    assert handle.state_dict()["schedule"]["last_step"] == 0
