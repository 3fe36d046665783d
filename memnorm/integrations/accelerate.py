"""Beside Hugging Face's Accelerate, which leaves the loop to its user.

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
    """Attach Double-Forward and the strength schedule; nothing in the loop changes.

    The schedule moves with each step that the optimizer really makes, and its place is part of
    `accelerator.save_state`.

    Args:
        accelerator: the one that prepared model and optimizer.
        model: what `prepare` returned.
        optimizer: what `prepare` returned; several optimizers of the model as a list.
        total_steps: optimizer steps in the whole training.
        double_forward: options of `memnorm.double_forward`; None for no second forward.
        schedule: options of `memnorm.StrengthSchedule`; None leaves the strength alone.

    Returns:
        A handle with `remove()`.
    """
    several = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    optimizers, scalers = zip(*map(inside, several), strict=True)
    attached = Attachment(
        model, optimizers, total_steps, double_forward=double_forward, schedule=schedule, scaler=scalers[0]
    )
    accelerator.register_for_checkpointing(attached)
    return attached


def inside(optimizer: Optimizer) -> tuple[Optimizer, Any]:
    """The optimizer that really steps and its `GradScaler`, without Accelerate's wrapper."""
    if isinstance(optimizer, AcceleratedOptimizer):
        return optimizer.optimizer, optimizer.scaler
    return optimizer, None
