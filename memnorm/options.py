"""What a memorized layer's options may be."""

from __future__ import annotations

import math

from memnorm.collective import Some
from memnorm.errors import OptionError, is_number, is_whole


def check_options(memory_size: int | None, decay: float, strength: float, prior_weight: float) -> None:
    if memory_size is not None and (not is_whole(memory_size) or memory_size < 1):
        raise OptionError(
            f"memory_size must be a positive number of batches, or None for all of them; got {memory_size!r}"
        )
    if not is_number(decay) or not 0 < decay <= 1:
        raise OptionError(f"decay must lie in (0, 1]; got {decay!r}")
    check_strength(strength)
    if not is_number(prior_weight) or not 0 <= prior_weight < math.inf:
        raise OptionError(f"prior_weight must be zero or a positive number of batches; got {prior_weight!r}")


def check_shift(shift: object, sync: bool | Some) -> bool:
    if not isinstance(shift, bool):
        raise OptionError(f"shift must be True, or False for the paper's Eq. 4; got {shift!r}")
    if not shift and sync is not False:
        raise OptionError("shift=False is the ablation of a layer in one process: it cannot be had with sync")
    return shift


def check_strength(strength: float) -> float:
    if not is_number(strength) or not 0 <= strength <= 1:
        raise OptionError(f"strength must lie in [0, 1]; got {strength!r}")
    return float(strength)
