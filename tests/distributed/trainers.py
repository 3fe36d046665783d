"""The trainers on several ranks with two batches per step; each function returns the trained model."""

from __future__ import annotations

import tempfile
from typing import Any

import accelerate
import lightning.pytorch as pl
import torch
import torch.distributed as dist
import transformers
from helpers.ranks import main, state_of, wrapped
from helpers.trainers import BATCH, STEPS, Scenes, segmenter, sgd
from torch.utils.data import DataLoader

import memnorm
from memnorm.integrations.accelerate import attach
from memnorm.integrations.lightning import MemnormCallback
from memnorm.integrations.transformers import MemnormCallback as HuggingFaceCallback

ACCUMULATE = 2


class Own(Scenes):
    """The scenes of this process."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return super().__getitem__(index * dist.get_world_size() + dist.get_rank())


def scenes() -> DataLoader:
    return DataLoader(Own(BATCH * ACCUMULATE * STEPS), batch_size=BATCH, generator=torch.Generator())


def network() -> Any:
    """A network without dropout, because some trainers change the random state."""
    model = segmenter()
    model.depth[2].p = 0.0
    return model


def by_hand() -> Any:
    model = network()
    learner, optimizer = wrapped(model), sgd(model)
    memnorm.double_forward(learner, optimizer)
    schedule = memnorm.StrengthSchedule(model, STEPS)
    for number, batch in enumerate(scenes(), 1):
        if number % ACCUMULATE:
            with learner.no_sync():
                (learner(**batch)["loss"] / ACCUMULATE).backward()
            continue
        (learner(**batch)["loss"] / ACCUMULATE).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model


def in_accelerate() -> Any:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE, rng_types=[])
    model = network()
    learner, optimizer = accelerator.prepare(model, sgd(model))
    attach(accelerator, learner, optimizer, STEPS)
    for batch in scenes():
        with accelerator.accumulate(learner):
            accelerator.backward(learner(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    return model


class Trainer(transformers.Trainer):
    def get_train_dataloader(self) -> DataLoader:
        return scenes()


def in_hugging_faces_trainer() -> Any:
    model = network()
    optimizer = sgd(model)
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATE,
        max_grad_norm=0.0,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
    )
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _step: 1.0)
    callbacks, data = [HuggingFaceCallback()], Own(BATCH * ACCUMULATE * STEPS)
    Trainer(model, arguments, train_dataset=data, callbacks=callbacks, optimizers=(optimizer, constant)).train()
    return model


class Task(pl.LightningModule):
    def __init__(self, calls_itself: bool) -> None:
        super().__init__()
        self.net, self.calls_itself = network(), calls_itself

    def forward(self, **batch: torch.Tensor) -> Any:
        return self.net(**batch)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> Any:
        return (self if self.calls_itself else self.net)(**batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.net)


def in_lightning(calls_itself: bool = False) -> Any:
    task = Task(calls_itself)
    pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy="ddp",
        max_epochs=1,
        accumulate_grad_batches=ACCUMULATE,
        callbacks=[MemnormCallback("" if calls_itself else "net")],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(task, scenes())
    return task.net


def in_lightning_that_calls_itself() -> Any:
    return in_lightning(calls_itself=True)


def trained() -> dict[str, Any]:
    ways = (by_hand, in_accelerate, in_hugging_faces_trainer, in_lightning, in_lightning_that_calls_itself)
    return {way.__name__: state_of(way()) for way in ways}


if __name__ == "__main__":
    main({"trained": trained})
