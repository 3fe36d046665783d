"""A schedule of the strength λ: small while the weights change fast, large towards the end of training."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from memnorm._torch import disable_dynamo
from memnorm.errors import DTypeError, NothingToRecord, OptionError, check_module, is_number, is_whole, warn
from memnorm.layers import MemorizedBatchNorm, check_strength, unchecked
from memnorm.modules import has_skipped, layers_of, modules_of
from memnorm.stripped import ADVICE, check_kept

PAPER_VALUES = (0.1, 0.5, 0.9)

_scheduled: WeakSet[MemorizedBatchNorm] = WeakSet()


class StrengthSchedule:
    """Set the strength of every memorized layer of `model` by milestones; use it like a learning-rate scheduler of
    torch, with `last_step` in place of `last_epoch`.

        schedule = StrengthSchedule(model, total_steps)
        for batch in batches:
            ...
            optimizer.step()
            schedule.step()

    The default is the paper's: 0.1, then 0.5 from 40 % and 0.9 from 60 % of the training on. `step()` can also be
    called once per epoch, with `total_steps` in epochs.

    Args:
        model: has at least one memorized layer; layers converted later are included from the next change on.
        total_steps: number of `step()` calls in the whole training.
        milestones: where the value changes; a float is a fraction of `total_steps`, an int a number of steps. The
            attribute holds steps.
        values: the strengths; one more than there are milestones.
    """

    def __init__(
        self,
        model: nn.Module,
        total_steps: int,
        *,
        milestones: Sequence[float] = (0.4, 0.6),
        values: Sequence[float] = PAPER_VALUES,
    ) -> None:
        check_module(model, "StrengthSchedule")
        self._model = model
        self._set(total_steps, milestones, values, last_step=0)
        self._apply()

    def _set(self, total_steps: int, milestones: Sequence[float], values: Sequence[float], last_step: int) -> None:
        """Set everything, or raise an error and set nothing."""
        if not is_whole(total_steps) or total_steps < 1:
            raise OptionError(
                f"StrengthSchedule: total_steps must be a positive number of steps; got {total_steps!r} "
                "(the limit is 2**63 - 1)"
            )
        if not is_whole(last_step) or last_step < 0:
            raise OptionError(f"StrengthSchedule: last_step must be a number of steps; got {last_step!r}")
        strengths = [check_strength(value) for value in _as_list(values, "values")]
        steps = [in_steps(milestone, total_steps) for milestone in _as_list(milestones, "milestones")]
        if len(strengths) != len(steps) + 1:
            raise OptionError(
                f"StrengthSchedule: {len(steps)} milestones need {len(steps) + 1} values, one before each "
                f"and one after the last; got {len(strengths)} values"
            )
        if sorted(steps) != steps:
            raise OptionError(f"StrengthSchedule: milestones must increase; got {list(milestones)}")
        self.total_steps, self.milestones, self.values, self.last_step = int(total_steps), steps, strengths, last_step

    def __repr__(self) -> str:
        return (
            f"StrengthSchedule(total_steps={self.total_steps}, milestones={self.milestones}, values={self.values}, "
            f"last_step={self.last_step}, strength={self.get_last_strength():g})"
        )

    def get_last_strength(self) -> float:
        """The current strength."""
        return self.values[bisect_right(self.milestones, self.last_step)]

    def step(self) -> None:
        """Count one step, and set the strength of the layers if it changes."""
        check_kept(self._model, self._names, "StrengthSchedule", modules_of(self._model))
        before = self.get_last_strength()
        self.last_step += 1
        if self.get_last_strength() != before:
            self._apply()

    def state_dict(self) -> dict[str, Any]:
        """Position, milestones and values: numbers and lists of them."""
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a `state_dict` and set the strength of the layers."""
        if not isinstance(state_dict, Mapping):
            raise DTypeError(f"StrengthSchedule: expected a state_dict(), got {type(state_dict).__name__}")
        missing = sorted(map(str, self.state_dict().keys() ^ state_dict.keys()))
        if missing:
            raise OptionError(f"StrengthSchedule: not a state of this schedule; missing or unknown: {missing}")
        self._set(**state_dict)
        self._apply()

    def _apply(self) -> None:
        layers = layers_of(self._model, MemorizedBatchNorm)
        if not layers:
            stripped = any(isinstance(layer, nn.SyncBatchNorm) for layer in self._model.modules())
            raise NothingToRecord(
                f"StrengthSchedule: {type(self._model).__name__} has no memorized layer. "
                f"{ADVICE if stripped else 'Call memnorm.convert(model) first.'}"
            )
        self._names = list(layers)
        for layer in layers.values():
            layer.set_strength(self.get_last_strength())
            _scheduled.add(layer)


@disable_dynamo
def _after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Check the layers that this optimizer trains and that have recorded their first batches: warn if their strength is
    constant, which means no schedule and more than the strength that the schedule starts with. A model with trained
    statistics gets no warning.
    """
    if not unchecked or has_skipped(optimizer):
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained_here = [one for one in unchecked if any(id(parameter) in held for parameter in one._parameters.values())]
    layers = [layer for layer in trained_here if int(layer.num_batches_tracked) > unchecked[layer][1]]
    trained = [unchecked.pop(layer)[0] for layer in layers]
    constant = [float(one.strength) for one in layers if one not in _scheduled]
    if any(trained) or max(constant, default=0.0) <= PAPER_VALUES[0]:
        return
    warn(
        f"the strength of the memory is constant ({max(constant):g}) in a model that was not pretrained. In our runs a "
        "constant 0.5 had far more error than a strength that starts small. Add schedule = "
        "memnorm.StrengthSchedule(model, total_steps), and schedule.step() after optimizer.step(); or convert with "
        f"strength={PAPER_VALUES[0]}."
    )


register_optimizer_step_post_hook(_after_step)


def _as_list(values: Any, name: str) -> list[Any]:
    try:
        return list(values)
    except TypeError:
        raise DTypeError(f"StrengthSchedule: {name} must be a list of numbers; got {values!r}") from None


def in_steps(milestone: float, total_steps: int) -> int:
    """The first step at or after the milestone, a fraction of training or a number of steps."""
    if is_whole(milestone) and milestone >= 0:
        return int(milestone)
    if is_number(milestone) and not is_whole(milestone) and 0 <= milestone <= 1:
        return math.ceil(milestone * total_steps - 1e-9 * total_steps)
    raise OptionError(
        "StrengthSchedule: a milestone is a fraction of training in [0, 1] or a whole number of steps; "
        f"got {milestone!r}"
    )
