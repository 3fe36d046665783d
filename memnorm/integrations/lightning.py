"""Callbacks for Lightning's Trainer.

    Trainer(callbacks=[MemnormCallback(), MonitorCallback()])

The first attaches when training starts, after Lightning has created the optimizers. Lightning's checkpoints include its
state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from memnorm._monitor import Monitor, check_interval, monitor
from memnorm.distributed import keep_local
from memnorm.integrations.attach import DEFAULTS, Attachment
from memnorm.modules import trains


class MemnormCallback(Callback):
    """Double-Forward and the strength schedule for a LightningModule whose batch norms were converted.

    Args:
        module: path of the module that `training_step` calls, such as "net" for `self.net(x)`; empty for `self(x)`.
        total_steps: optimizer steps in the whole training; by default the estimate of the Trainer.
        double_forward: options of `memnorm.double_forward`; None for no second forward.
        schedule: options of `memnorm.StrengthSchedule`; None leaves the strength alone.
    """

    def __init__(
        self,
        module: str = "",
        *,
        total_steps: int | None = None,
        double_forward: Mapping[str, Any] | None = DEFAULTS,
        schedule: Mapping[str, Any] | None = DEFAULTS,
    ) -> None:
        self.module, self.total_steps = module, total_steps
        self.options: dict[str, Any] = {"double_forward": double_forward, "schedule": schedule}
        self.attached: Attachment | None = None
        self._state: dict[str, Any] = {}

    @property
    def state_key(self) -> str:
        return self._generate_state_key(module=self.module)  # there may be one callback per network

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        keep_local(pl_module)  # before Lightning wraps it in DistributedDataParallel

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module = pl_module.get_submodule(self.module)
        self.attached = Attachment(
            module,
            [one for one in trainer.optimizers if trains(one, module)] or trainer.optimizers,
            self.total_steps or trainer.estimated_stepping_batches,
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            **self.options,
        )
        if trainer.global_step > 0:  # resumed
            self.attached.load_state_dict(self._state)

    def state_dict(self) -> dict[str, Any]:
        return self._state if self.attached is None else self.attached.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._detach()

    def _detach(self) -> None:
        if self.attached is not None:
            self._state = self.attached.state_dict()
            self.attached.remove()
            self.attached = None


class MonitorCallback(Callback):
    """Send the numbers of `memnorm.monitor` to the loggers of the Trainer.

        Trainer(callbacks=[MonitorCallback(every=50)])

    Args:
        every: number of optimizer steps between two readings.
    """

    def __init__(self, every: int = 50) -> None:
        self.every = check_interval(every)
        self._monitor: Monitor | None = None
        self._last_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._monitor, self._last_step = monitor(pl_module), trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self._monitor is not None and step - self._last_step >= self.every:
            values, self._last_step = self._monitor.read(step), step
            for logger in trainer.loggers:
                logger.log_metrics(values, step=step)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._remove()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove()

    def _remove(self) -> None:
        if self._monitor is not None:
            self._monitor.remove()
            self._monitor = None
