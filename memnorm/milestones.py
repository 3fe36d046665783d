"""Milestones of training as fractions or numbers of steps."""

from __future__ import annotations

import math

from memnorm.errors import OptionError, is_number, is_whole


def in_steps(milestone: float, total_steps: int) -> int:
    """The first step at or after the milestone."""
    if is_whole(milestone) and milestone >= 0:
        return int(milestone)
    if is_number(milestone) and not is_whole(milestone) and 0 <= milestone <= 1:
        return math.ceil(milestone * total_steps - 1e-9 * total_steps)
    raise OptionError(
        "StrengthSchedule: a milestone is a fraction of training in [0, 1] or a whole number of steps; "
        f"got {milestone!r}"
    )
