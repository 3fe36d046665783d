"""What all integrations share: Double-Forward, and a schedule that advances when the optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from memnorm._double_forward import DoubleForward
from memnorm._double_forward import double_forward as attach_double_forward
from memnorm.modules import has_skipped
from memnorm.schedule import StrengthSchedule

DEFAULTS: Mapping[str, Any] = {}


class Attachment:
    """Double-Forward and a `StrengthSchedule`, attached to a model and its optimizers.

    Args:
        model: the module that the training loop calls.
        optimizers: its optimizers; the schedule advances with the first one.
        total_steps: optimizer steps in the whole training.
        double_forward: options of `memnorm.double_forward`; None for no second forward.
        schedule: options of `memnorm.StrengthSchedule`; None leaves the strength alone.
        scaler: the `GradScaler`, if there is one.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        total_steps: int,
        *,
        double_forward: Mapping[str, Any] | None,
        schedule: Mapping[str, Any] | None,
        scaler: Any = None,
    ) -> None:
        self.double_forward: DoubleForward | None = None
        self.schedule = None if schedule is None else StrengthSchedule(model, total_steps, **schedule)
        if double_forward is not None:
            self.double_forward = attach_double_forward(model, list(optimizers), scaler=scaler, **double_forward)
        self._hook = optimizers[0].register_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Optimizer, *_step: Any) -> None:
        if self.schedule is not None and not has_skipped(optimizer):
            self.schedule.step()

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed training needs besides the model."""
        parts = {"double_forward": self.double_forward, "schedule": self.schedule}
        return {name: part.state_dict() for name, part in parts.items() if part is not None}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a `state_dict`."""
        if self.double_forward is not None and "double_forward" in state_dict:
            self.double_forward.load_state_dict(state_dict["double_forward"])
        if self.schedule is not None and "schedule" in state_dict:
            self.schedule.load_state_dict(state_dict["schedule"])

    def skip_to(self, step: int) -> None:
        """Resume after `step` optimizer steps, for a trainer that saves only that number."""
        if self.double_forward is not None:
            self.double_forward.load_state_dict({"steps": step})
        if self.schedule is not None:
            self.schedule.load_state_dict({**self.schedule.state_dict(), "last_step": step})

    def remove(self) -> None:
        """Remove all hooks. The strength does not change."""
        self._hook.remove()
        if self.double_forward is not None:
            self.double_forward.remove()
