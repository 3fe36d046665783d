"""Callbacks for Hugging Face's Trainer.

    trainer = Trainer(model, args, train_dataset=data, callbacks=[MemnormCallback()])
    trainer.add_callback(MonitorCallback(trainer.log))

A resumed training needs no additional state, because the Trainer's step number determines the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from memnorm._monitor import Monitor, check_interval, monitor
from memnorm.errors import check_callable
from memnorm.integrations.accelerate import unwrap
from memnorm.integrations.attach import DEFAULTS, Attachment

# A training that raises ends without an event, so the next training of the model removes what was attached.
_last: WeakKeyDictionary[nn.Module, ref[Attachment]] = WeakKeyDictionary()


class MemnormCallback(TrainerCallback):
    """Double-Forward and the strength schedule for a model whose batch norms were converted.

    Args:
        double_forward: options of `memnorm.double_forward`; None for no second forward.
        schedule: options of `memnorm.StrengthSchedule`; None leaves the strength alone.
    """

    def __init__(
        self,
        *,
        double_forward: Mapping[str, Any] | None = DEFAULTS,
        schedule: Mapping[str, Any] | None = DEFAULTS,
    ) -> None:
        self.options: dict[str, Any] = {"double_forward": double_forward, "schedule": schedule}
        self.attached: Attachment | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model, (optimizer, scaler) = kwargs["model"], unwrap(kwargs["optimizer"])
        for left in (self.attached, _last[model]() if model in _last else None):
            if left is not None:
                left.remove()
        self.attached = Attachment(model, [optimizer], state.max_steps, scaler=scaler, **self.options)
        self.attached.skip_to(state.global_step)
        _last[model] = ref(self.attached)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.attached is not None:
            self.attached.remove()
            self.attached = None


class MonitorCallback(TrainerCallback):
    """Log the numbers of `memnorm.monitor`.

        trainer.add_callback(MonitorCallback(trainer.log, every=50))

    Args:
        log: called with a dictionary of floats. `trainer.log` sends it wherever the Trainer reports to.
        every: number of optimizer steps between two readings.
    """

    def __init__(self, log: Callable[[dict[str, float]], Any], every: int = 50) -> None:
        check_callable(log, "MonitorCallback", "log")
        self.log, self.every = log, check_interval(every)
        self._monitor: Monitor | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._remove()  # that of a training that raised
        self._monitor = monitor(kwargs["model"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._monitor is not None and state.global_step % self.every == 0:
            self.log(self._monitor.read(state.global_step))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        if self._monitor is not None:
            self._monitor.remove()
            self._monitor = None
