"""The state of a training: model, norm, optimizer, schedules, and everything a checkpoint must hold.

The learning rate and the order of the data are functions of the iteration, and every step begins by seeding torch with
(seed, iteration). So a resumed run is bit-identical to an uninterrupted one, and every norm sees the same data,
augmentation and dropout.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import memnorm
from memnorm.lab import check, models, pretrained, tasks
from memnorm.lab import data as data_sets
from memnorm.lab.data import EVALUATION_BATCH, Data, Source, sweep
from memnorm.lab.data.source import mix
from memnorm.lab.errors import UsageError
from memnorm.lab.processes import ProcessGroup
from memnorm.lab.spec import MEMORY_NORMS, Execution, RunSpec
from memnorm.schedule import in_steps

SPLIT_SEED = 20180202  # of the images held out or left out: the same for every run


class Training:
    def __init__(
        self, spec: RunSpec, classes: int, shape: tuple[int, int, int], device: str, channels_last: bool = False
    ) -> None:
        self.spec, self.device, self.group = spec, torch.device(device), ProcessGroup(spec, device)
        self.task = tasks.get(spec.task)
        model, self.note = network(spec, classes, shape)
        self.dtype = torch.float64 if spec.precision == "float64" else torch.float32
        self.layout = torch.channels_last if channels_last else torch.preserve_format
        self.model = with_layout(model.to(self.device, self.dtype).train(), self.layout)
        self.optimizer = optimizer(self.model, spec)
        self.strength = self._strength_schedule()
        self.learner = self.group.wrapped(self.model)  # the module to call in training
        self.second_forward = (
            memnorm.double_forward(self.learner, self.optimizer, every=spec.every, fraction=spec.fraction)
            if spec.scheme == "double"
            else None
        )
        self.tally = self.task.tally()
        self.last_strength: float | None = None  # of the last step

    def _strength_schedule(self) -> memnorm.StrengthSchedule | None:
        if self.spec.norm not in MEMORY_NORMS:
            return None
        milestones = self.spec.milestones if len(self.spec.strength) > 1 else ()
        return memnorm.StrengthSchedule(
            self.model, self.spec.iterations, milestones=milestones, values=self.spec.strength
        )

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.spec.precision == "bfloat16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def place(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        images = images.to(self.device, self.dtype, non_blocking=True, memory_format=self.layout)
        return images, labels.to(self.device, non_blocking=True)

    def step(self, iteration: int, images: Tensor, labels: Tensor) -> bool:
        """One step of the optimizer. Return False if the loss is not finite; then the weights are unchanged."""
        torch.manual_seed(self.group.seed(mix(self.spec.seed, "step", iteration)))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.spec, iteration)
        images, labels = self.place(images, labels)
        self.optimizer.zero_grad()
        (images_of_all,) = self.group.sum(len(labels))
        parts = max(1, int(images_of_all) // self.spec.batch_size)
        micro_batches = list(zip(images.tensor_split(parts), labels.tensor_split(parts), strict=True))
        for number, micro_batch in enumerate(micro_batches, 1):
            with self.group.synchronizing(self.learner, number == parts):
                if not self._accumulate(*micro_batch, images_of_all):
                    return False
        self.optimizer.step()
        if self.strength is not None:
            self.last_strength = self.strength.get_last_strength()
            self.strength.step()
        return True

    def _accumulate(self, images: Tensor, labels: Tensor, images_of_all: float) -> bool:
        """Add the gradient of a micro-batch, weighted so that the step is that of all its images together. Return False
        if the loss is not finite.
        """
        with self.autocast():
            scores = self.learner(images)
            loss = self.task.loss(scores, labels)
        (loss_of_all,) = self.group.sum(loss.item())
        if not math.isfinite(loss_of_all):
            return False
        (loss * (len(labels) * self.group.size / images_of_all)).backward()
        self.tally.add(loss.detach() * len(labels), scores.detach(), labels)
        return True

    @torch.no_grad()
    def evaluate(self, source: Source, workers: int, model: nn.Module | None = None) -> dict[str, Any]:
        """Loss and error on all images of `source`, in eval mode. It does not affect the training."""
        model, tally = self.model if model is None else model, self.task.tally()
        model.eval()
        try:
            for images, labels in self.swept(source, workers):
                with self.autocast():
                    scores = model(images)
                    loss = self.task.loss(scores, labels, reduction="sum")
                tally.add(loss, scores, labels)
        finally:
            model.train()
        return tally.summary("test")

    def evaluate_recalibrated(self, measured: Source, source: Source, workers: int) -> dict[str, Any]:
        """`evaluate` on a copy of the model whose running statistics are those of the images of `measured`."""
        model = copy.deepcopy(self.model)

        def call(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
            with self.autocast():
                model(batch[0])

        memnorm.recalibrate(model, self.swept(measured, workers), forward=call)
        found = self.evaluate(source, workers, model)
        return {f"{name}_recalibrated": found[name] for name in ("test_error", "test_loss")}

    def swept(self, source: Source, workers: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All images of `source`, not augmented, on the model's device."""
        for images, labels in source.batches(sweep(len(source), EVALUATION_BATCH), workers=workers):
            yield self.place(images, labels)

    def state(self) -> dict[str, Any]:
        differing = {"buffers": dict(self.model.named_buffers()), "tally": self.tally.state()}  # between processes
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "strength": self.strength.state_dict() if self.strength else None,
            "second_forward": self.second_forward.state_dict() if self.second_forward else None,
            "tally": self.tally.state(),
            **({"processes": self.group.gather(differing)} if self.group.size > 1 else {}),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        own = state["processes"][self.group.rank] if self.group.size > 1 else {"buffers": {}, "tally": state["tally"]}
        statistics = {name: value for name, value in own["buffers"].items() if name in state["model"]}
        self.model.load_state_dict({**state["model"], **statistics})
        self.optimizer.load_state_dict(state["optimizer"])
        if self.strength:
            self.strength.load_state_dict(state["strength"])
        if self.second_forward:
            self.second_forward.load_state_dict(state["second_forward"])
        self.tally.load_state(own["tally"])

    def digest(self) -> str:
        """A hash of every weight and statistic: equal for bit-identical runs."""
        digest = hashlib.sha256()
        for name, value in self.model.state_dict().items():
            digest.update(name.encode())
            if isinstance(value, Tensor):
                digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]
            else:  # a module's extra state
                digest.update(repr(value).encode())
        return digest.hexdigest()[:32]


def network(spec: RunSpec, classes: int, shape: tuple[int, int, int]) -> tuple[nn.Module, str]:
    """The network of a run before its first step, and what the user should know about it, if anything."""
    torch.manual_seed(mix(spec.seed, "weights"))
    outputs = tasks.get(spec.task).outputs(classes, shape)
    model = models.build(spec.model, classes=classes, image_shape=shape, outputs=outputs, **spec.model_options)
    note = pretrained.load(model, spec, classes)
    return with_norm(model, spec), note


def optimizer(model: nn.Module, spec: RunSpec) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": spec.base_learning_rate, "weight_decay": spec.weight_decay}
    if spec.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), **options)
    return torch.optim.SGD(model.parameters(), momentum=spec.momentum, **options)


def with_norm(model: nn.Module, spec: RunSpec) -> nn.Module:
    """The model with the norm of the run. Norms whose settings change over the run get its length."""
    options = dict(spec.norm_options)
    if spec.norm == "bn" and spec.scheme == "single" and not options:
        return model  # as it is
    if memnorm.norms.get(spec.norm).scales_with_run:
        options.setdefault("total_steps", spec.iterations)
    return memnorm.convert(model, spec.norm, **options)


def with_layout(model: nn.Module, layout: torch.memory_format) -> nn.Module:
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.to(memory_format=layout)
    return model


def learning_rate(spec: RunSpec, iteration: int) -> float:
    rate = spec.base_learning_rate
    if iteration < spec.warmup:
        return rate * (iteration + 1) / (spec.warmup + 1)
    if spec.schedule == "step":
        milestones = [in_steps(one, spec.iterations) for one in spec.milestones]
        return rate * 0.1 ** bisect_right(milestones, iteration)
    if spec.schedule == "cosine":
        done = (iteration - spec.warmup) / (spec.iterations - spec.warmup)
        return rate * 0.5 * (1 + math.cos(math.pi * done))
    return rate


def sources(spec: RunSpec, data: Data) -> tuple[Source, Source]:
    """The images to train and to evaluate on. Held-out and left-out images are the same for all seeds and norms."""
    order = split_order(data)
    wanted = len(data.train) - spec.holdout if spec.train_images is None else spec.train_images
    if wanted < 1 or spec.holdout + wanted > len(data.train):
        raise UsageError(
            f"{data.name} has {len(data.train):,} training images; cannot train on {max(wanted, 1):,} with "
            f"{spec.holdout:,} held out"
        )
    train = data.train if wanted == len(data.train) else data.train.subset(order[spec.holdout :][:wanted].sort().values)
    test = data.train.subset(order[: spec.holdout].sort().values) if spec.holdout else data.test
    if spec.test_images is not None:
        if spec.test_images > len(test):
            raise UsageError(f"there are {len(test):,} images to evaluate on; cannot take {spec.test_images:,}")
        chosen = torch.randperm(len(test), generator=torch.Generator().manual_seed(SPLIT_SEED))
        test = test.subset(chosen[: spec.test_images].sort().values)
    return train, test


def drawn(spec: RunSpec, labels: Tensor, start: int = 0) -> Iterator[tuple[Tensor, int | None]]:
    """Indices and augmentation seed of each batch of the run, from the iteration `start` on."""
    return data_sets.order(
        labels,
        sampler=spec.sampler,
        batch_size=spec.images_per_step,
        iterations=spec.iterations,
        seed=spec.seed,
        start=start,
        classes_per_batch=spec.classes_per_batch,
        augment=spec.augment,
    )


def recalibration_source(spec: RunSpec, data: Data) -> Source | None:
    """The images for recalibration: the first training images in the random order of the split, the same for all seeds
    and norms.
    """
    if not spec.recalibrate:
        return None
    trained_on = split_order(data)[spec.holdout :][: spec.train_images]
    if spec.recalibrate > len(trained_on):
        raise UsageError(f"recalibrate: there are {len(trained_on):,} training images; got {spec.recalibrate:,}")
    return data.train.subset(trained_on[: spec.recalibrate])


def split_order(data: Data) -> Tensor:
    """The order in which training images are held out, trained on or left out."""
    return torch.randperm(len(data.train), generator=torch.Generator().manual_seed(SPLIT_SEED))


def choose_device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return str(check.require(wanted))


def set_threads(execution: Execution) -> int:
    if execution.threads:
        torch.set_num_threads(execution.threads)
    return torch.get_num_threads()


def load_data(spec: RunSpec, root: Any) -> Data:
    return tasks.get(spec.task).load(spec.data, root, **spec.data_options)
