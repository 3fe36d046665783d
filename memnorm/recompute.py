"""Forwards that autograd runs again inside backward: activation checkpointing.

A checkpointed segment runs its forward twice. The second run must reproduce the first, or the gradients are wrong. A
layer with a memory does not do that by itself, because its memory has changed in between. So a training forward that
may be recomputed keeps a copy of the memory it read, and a forward inside backward uses that copy. It also records
nothing, which keeps the buffers right.

If a layer has kept several readings, the one whose batch moments are nearest to those of the recomputed batch is used
(computed on the device, without a host sync). Among equal batches the order of the autograd nodes decides.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.utils import checkpoint

from memnorm._torch import (
    current_graph_task_id,
    is_fwd_grad_enabled,
    next_sequence_number,
    sequence_number_of_node,
    top_saved_tensors_hooks,
)
from memnorm.errors import MemnormError
from memnorm.functional import Moments

BOUND = 64


def inside_backward() -> bool:
    """Return True if autograd recomputes this forward. A replay after a step inside backward is not a recomputation."""
    return current_graph_task_id() != -1 and not not_recomputed.depth


class _NotRecomputed(threading.local):
    """Context manager in which no forward counts as a recomputation."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *exc_info: object) -> None:
        self.depth -= 1


not_recomputed = _NotRecomputed()


def inside_function() -> bool:
    """Return True inside the forward of a custom `autograd.Function`, as with `checkpoint(use_reentrant=True)`: grad
    mode and forward-mode AD are both off there.
    """
    return not (torch.is_grad_enabled() or is_fwd_grad_enabled() or torch.is_inference_mode_enabled())


class Reading(NamedTuple):
    """The `memory` that one training forward read, and the moments of its batch."""

    sequence: int
    batch: Moments
    memory: Any  # Moments, or another NamedTuple of tensors


class Readings:
    """The readings of one layer that a recomputation may still need.

    `checkpoint(use_reentrant=False)` installs saved-tensor hooks; a reading lives as long as the graph that refers to
    them. `use_reentrant=True` runs the segment inside a custom `autograd.Function`; no object ties a reading to its
    graph, so the last `BOUND` readings are kept. The same holds for the saved-tensor hooks of other programs.
    """

    def __init__(self) -> None:
        self._by_hook: WeakKeyDictionary[Callable[..., Any], deque[Reading]] = WeakKeyDictionary()
        self._without_graph: deque[Reading] = deque()
        self._last_dropped = -1
        self._replay: tuple[int, int] = (-1, -1)
        self._replayed = 0

    def keep(self, batch: Moments, memory: Any) -> None:
        """Keep a reading if the running forward may be recomputed."""
        hooks = top_saved_tensors_hooks(True)
        if inside_function():
            shelf, bounded = self._without_graph, True
        elif hooks is not None:
            shelf = self._by_hook.setdefault(hooks[1], deque())
            bounded = getattr(hooks[1], "__module__", None) != checkpoint.__name__
        else:
            return
        # Copies, because the layer may overwrite what it read.
        copied = (torch.tensor(one, dtype=torch.float64) if isinstance(one, float) else one.clone() for one in memory)
        shelf.append(Reading(next_sequence_number(), batch, type(memory)(*copied)))
        if bounded and len(shelf) > BOUND:
            self._last_dropped = shelf.popleft().sequence

    def recall(self, batch: Moments) -> Any:
        """The memory that the recomputed forward read the first time; None if no reading was kept."""
        candidates = self._candidates()
        if not candidates:
            return None
        if len(candidates) == 1:
            return candidates[0].memory
        means_JC = torch.stack([reading.batch.mean for reading in candidates])
        vars_JC = torch.stack([reading.batch.var for reading in candidates])
        distance_J = (means_JC - batch.mean).abs().sum(1) + (vars_JC - batch.var).abs().sum(1)
        nearest = distance_J.argmin()  # the first of equals, which is the preferred one
        parts = zip(*(reading.memory for reading in candidates), strict=True)
        return type(candidates[0].memory)(*(torch.stack(part)[nearest] for part in parts))

    def _candidates(self) -> list[Reading]:
        """All readings that may belong to this recomputation, beginning with the most likely by the order of autograd
        nodes.
        """
        sequence = sequence_number_of_node()
        self._count_replay(sequence)
        # A reentrant checkpoint's node is older than its segment; a non-reentrant one recomputes for a node of its
        # segment.
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
        """Count the forwards that the current autograd node has recomputed before this one."""
        replay = (current_graph_task_id(), sequence)
        self._replayed = self._replayed + 1 if replay == self._replay else 0
        self._replay = replay
