"""Forwards that autograd runs again inside backward: activation checkpointing.

A checkpointed segment runs its forward twice, and the second run must reproduce the first or the gradients are those of
another function. For a layer with a memory that is not automatic: the memory has moved on in between. So a training
forward that may be recomputed keeps the memory it read, and a forward that runs inside backward asks for it back. Not
writing a second time is the other half, and alone is not enough: it leaves the buffers right and the gradients wrong.

Which of several kept readings is the right one? The recomputed batch has the moments of the original one, so the
reading with the nearest moments is taken (on the device, without a host sync). Equal batches are told apart by the
order of the autograd nodes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.utils import checkpoint

from memnorm.errors import MemnormError
from memnorm.functional import Moments

BOUND = 64


def inside_backward() -> bool:
    """Whether autograd runs this forward again, unless it is a forward of our own for an optimizer inside backward."""
    return torch._C._current_graph_task_id() != -1 and not deliberate.depth


class _Deliberate(threading.local):
    """A context within which forwards are no recomputations wherever they run."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *exc_info: object) -> None:
        self.depth -= 1


deliberate = _Deliberate()


def inside_function() -> bool:
    """Whether a custom `autograd.Function` runs its forward, as `checkpoint(use_reentrant=True)` does: grad mode and
    forward-mode AD are both off.
    """
    return not (torch.is_grad_enabled() or torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())


def may_be_recomputed() -> bool:
    """Whether the running forward may run again inside backward."""
    return inside_function() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class Reading(NamedTuple):
    """What one training forward read (`memory`), and the batch it read it for."""

    sequence: int
    batch: Moments
    memory: Moments


class Readings:
    """The readings of one layer that a backward may still ask for.

    `checkpoint(use_reentrant=False)` shows itself by the saved-tensor hooks it installs; the readings live as long as
    the graph that refers to them. `use_reentrant=True` runs the segment inside a custom `autograd.Function`; nothing
    ties a reading to its graph, so a bounded number is kept. So it is for hooks of others, which may hide a checkpoint.
    """

    def __init__(self) -> None:
        self._by_hook: WeakKeyDictionary[Callable[..., Any], deque[Reading]] = WeakKeyDictionary()
        self._without_graph: deque[Reading] = deque()
        self._last_dropped = -1
        self._replay: tuple[int, int] = (-1, -1)
        self._replayed = 0

    def keep(self, batch: Moments, memory: Moments) -> None:
        """Keep a reading if the running forward may be recomputed, else do nothing."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if inside_function():
            shelf, bounded = self._without_graph, True
        elif hooks is not None:
            shelf = self._by_hook.setdefault(hooks[1], deque())
            bounded = getattr(hooks[1], "__module__", None) != checkpoint.__name__
        else:
            return
        # The layer may be about to overwrite what it read.
        mean, var, weight = memory
        kept = torch.tensor(weight, dtype=torch.float64) if isinstance(weight, float) else weight.clone()
        copied = Moments(mean.clone(), var.clone(), kept)
        shelf.append(Reading(torch._C._autograd._get_sequence_nr(), batch, copied))
        if bounded and len(shelf) > BOUND:
            self._last_dropped = shelf.popleft().sequence

    def recall(self, batch: Moments) -> Moments | None:
        """The memory that the forward now recomputed read the first time; None if no forward kept one."""
        candidates = self._candidates()
        if not candidates:
            return None
        if len(candidates) == 1:
            return candidates[0].memory
        means_JC = torch.stack([reading.batch.mean for reading in candidates])
        vars_JC = torch.stack([reading.batch.var for reading in candidates])
        distance_J = (means_JC - batch.mean).abs().sum(1) + (vars_JC - batch.var).abs().sum(1)
        nearest = distance_J.argmin()  # the first of equals, hence the preferred one
        parts = zip(*(reading.memory for reading in candidates), strict=True)
        return Moments(*(torch.stack(part)[nearest] for part in parts))

    def _candidates(self) -> list[Reading]:
        """The readings that may be meant, the one expected by the order of autograd's nodes first."""
        node = torch._C._current_autograd_node()
        sequence = -1 if node is None else node._sequence_nr()
        self._count_replay(sequence)
        # A reentrant checkpoint's node is older than what it ran; another checkpoint is set off by a node of its own.
        reentrant = [reading for reading in self._without_graph if reading.sequence > sequence]
        segments = [shelf for shelf in self._by_hook.values() if shelf[0].sequence <= sequence]
        segment = max(segments, key=lambda shelf: shelf[0].sequence, default=())
        if not segment and self._last_dropped > sequence:
            raise MemnormError(
                f"a checkpointed layer ran more than {BOUND} times before its backward, and the first of these runs "
                "can no longer be reproduced; use torch.utils.checkpoint with use_reentrant=False, which has no limit"
            )
        expected = segment or reentrant
        others = [*(reentrant or self._without_graph), *(one for shelf in self._by_hook.values() for one in shelf)]
        if not expected:
            return others
        first = expected[min(self._replayed, len(expected) - 1)]
        return [first, *(reading for reading in others if reading is not first)]

    def _count_replay(self, sequence: int) -> None:
        """How many forwards the node that is now running backward has recomputed before this one."""
        replay = (torch._C._current_graph_task_id(), sequence)
        self._replayed = self._replayed + 1 if replay == self._replay else 0
        self._replay = replay
