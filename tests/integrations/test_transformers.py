"""Hugging Face's Trainer with the callback equals the plain loop."""

import copy
import pickle

import pytest
import torch
from helpers.common import assert_same_state
from helpers.optional import library
from helpers.trainers import (
    BATCH,
    STEPS,
    Scenes,
    assert_two_way_loop,
    plain_loop,
    scenes,
    segmenter,
    sgd,
    two_way_segmenter,
)

from memnorm.errors import DTypeError, OptionError

transformers = library("transformers")
integration = library("memnorm.integrations.transformers")
MemnormCallback, MonitorCallback = integration.MemnormCallback, integration.MonitorCallback


class InOrder(transformers.Trainer):
    def get_train_dataloader(self):
        return scenes(self.args.gradient_accumulation_steps)


class Failing(InOrder):
    def training_step(self, *args, **kwargs):
        if self.state.global_step == 2:
            raise ZeroDivisionError
        return super().training_step(*args, **kwargs)


def trainer(folder, callback, *, model=None, kind=InOrder, dropout=0.25, accumulate=1, **options):
    model = model or segmenter()
    model.depth[2].p = dropout
    optimizer = sgd(model)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=accumulate,
        max_grad_norm=0.0,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        **{"save_strategy": "no", "logging_strategy": "no", **options},
    )
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _step: 1.0)
    made = kind(
        model,
        arguments,
        train_dataset=Scenes(BATCH * accumulate * STEPS),
        callbacks=[callback] if callback else [],
        optimizers=(optimizer, constant),
    )
    torch.manual_seed(7)
    return made


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_hugging_face_training_is_the_plain_loop_bit_for_bit(tmp_path, accumulate, bf16):
    made = trainer(tmp_path, MemnormCallback(), accumulate=accumulate, bf16=bf16)
    made.train()
    twin = plain_loop(accumulate=accumulate, dtype=torch.bfloat16 if bf16 else None)
    assert_same_state(made.model, twin)
    assert int(made.model.color[1].num_batches_tracked) == STEPS * accumulate
    assert float(made.model.color[1].strength) == 0.9


@pytest.mark.parametrize("accumulate", [1, 3])
def test_two_way_memory_needs_no_callback(tmp_path, accumulate):
    made = trainer(tmp_path, None, model=two_way_segmenter(), accumulate=accumulate)
    made.train()
    assert_two_way_loop(made.model, accumulate)


def test_options_reach_double_forward_and_the_schedule(tmp_path):
    schedule = {"milestones": (0.5,), "values": (0.2, 0.7)}
    made = trainer(tmp_path, MemnormCallback(double_forward={"every": 2, "fraction": 0.5}, schedule=schedule))
    made.train()
    assert_same_state(made.model, plain_loop(every=2, fraction=0.5, schedule=schedule))


def test_a_training_resumed_from_a_checkpoint_equals_an_uninterrupted_one(tmp_path):
    def made():
        callback = MemnormCallback(double_forward={"every": 2, "fraction": 0.5})
        return trainer(tmp_path, callback, dropout=0.0, save_strategy="steps", save_steps=3)

    straight = made()
    straight.train()
    resumed = made()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same_state(resumed.model, straight.model)
    assert float(resumed.model.color[1].strength) == 0.9


def test_a_training_after_an_exception_equals_the_plain_loop_and_leaves_no_hook(tmp_path):
    callback = MemnormCallback()
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, callback, kind=Failing).train()
    made = trainer(tmp_path, callback)
    made.train()
    assert callback.attached is None
    assert not made.model._forward_pre_hooks
    assert_same_state(made.model, plain_loop())


def test_a_training_that_raised_does_not_disturb_the_next(tmp_path):
    """A new Trainer, with a callback of its own, for the same model."""
    failed = trainer(tmp_path, MemnormCallback(), kind=Failing)
    with pytest.raises(ZeroDivisionError):
        failed.train()
    made = trainer(tmp_path, MemnormCallback(), model=failed.model)
    made.train()
    assert int(made.model.color[1].num_batches_tracked) == 2 + STEPS
    assert not made.model._forward_pre_hooks


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda callback: pickle.loads(pickle.dumps(callback))])
def test_a_callback_can_be_copied(tmp_path, copied):
    """As launchers of processes and searches over options do."""
    made = trainer(tmp_path, copied(MemnormCallback()))
    made.train()
    assert_same_state(made.model, plain_loop())


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_monitor_logs_every_so_many_steps_and_changes_nothing(tmp_path, accumulate):
    made = trainer(tmp_path, MemnormCallback(), accumulate=accumulate)
    made.add_callback(MonitorCallback(made.log, every=2))
    made.train()
    logged = [entry for entry in made.state.log_history if "memnorm/weight" in entry]
    assert [entry["step"] for entry in logged] == [2, 4, 6]
    assert {"memnorm/noise", "memnorm/drift", "memnorm/age", "memnorm/noise/color.1"} <= logged[-1].keys()
    assert_same_state(made.model, plain_loop(accumulate=accumulate))
    assert not made.model.color[1]._forward_pre_hooks


def test_the_next_training_removes_the_monitor_of_one_that_raised(tmp_path):
    made = trainer(tmp_path, MemnormCallback(), kind=Failing)
    callback = MonitorCallback(made.log, every=2)
    made.add_callback(callback)
    with pytest.raises(ZeroDivisionError):
        made.train()
    other = trainer(tmp_path, callback, model=made.model)
    other.train()
    assert not made.model.color[1]._forward_pre_hooks


def test_the_arguments_of_the_monitor_are_checked():
    with pytest.raises(OptionError, match="positive number of steps"):
        MonitorCallback(print, every=0)
    with pytest.raises(DTypeError, match="log must be a function"):
        MonitorCallback(None)
