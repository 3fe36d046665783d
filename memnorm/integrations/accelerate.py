"""For Hugging Face's Accelerate, where users write the training loop.

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
attach(accelerator, model, optimizer, total_steps)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim import Optimizer

from memnorm.integrations.attach import DEFAULTS, Attachment


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    total_steps: int,
    *,
    double_forward: Mapping[str, Any] | None = DEFAULTS,
    schedule: Mapping[str, Any] | None = DEFAULTS,
) -> Attachment:
    """Attach Double-Forward and the strength schedule. The training loop does not change.

    The schedule advances with each step that the optimizer does not skip, and `accelerator.save_state` saves its
    position.

    Args:
        accelerator: the `Accelerator` that prepared model and optimizer.
        model: the model that `prepare` returned.
        optimizer: the optimizer that `prepare` returned, or a list of several.
        total_steps: optimizer steps in the whole training.
        double_forward: options of `memnorm.double_forward`; None for no second forward.
        schedule: options of `memnorm.StrengthSchedule`; None leaves the strength alone.

    Returns:
        A handle with `remove()`.
    """
    several = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    optimizers, scalers = zip(*map(unwrap, several), strict=True)
    attached = Attachment(
        model, optimizers, total_steps, double_forward=double_forward, schedule=schedule, scaler=scalers[0]
    )
    accelerator.register_for_checkpointing(attached)
    return attached


def unwrap(optimizer: Optimizer) -> tuple[Optimizer, Any]:
    """The optimizer inside Accelerate's wrapper, and its `GradScaler`."""
    if isinstance(optimizer, AcceleratedOptimizer):
        return optimizer.optimizer, optimizer.scaler
    return optimizer, None
