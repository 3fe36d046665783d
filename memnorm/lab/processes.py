"""One run in several processes, started by torchrun.

Every process trains on its share of each batch; DistributedDataParallel averages the gradients. Rank 0 writes the
record and evaluates, and broadcasts its decisions. A single process is a group of one without communication.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from memnorm.lab.data.source import mix
from memnorm.lab.errors import UsageError
from memnorm.lab.spec import RunSpec

TIMEOUT = datetime.timedelta(hours=12)  # for ranks that wait for rank 0; torchrun ends them if it dies


def launched() -> int:
    """The number of processes that torchrun has started for this command; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def is_first() -> bool:
    return launched() == 1 or os.environ["RANK"] == "0"


class ProcessGroup:
    def __init__(self, spec: RunSpec, device: str) -> None:
        self.size = spec.processes
        if self.size != launched():
            raise UsageError(
                f"the run has processes: {self.size}, and there {'is' if launched() == 1 else 'are'} {launched()}. "
                f"Start it with: torchrun --nproc-per-node {self.size} -m memnorm.lab train …"
            )
        if self.size > 1 and device != "cpu":
            raise UsageError(f"several processes train on the CPU only; got device {device}. Pass --device cpu.")
        if self.size > 1 and not dist.is_initialized():
            dist.init_process_group("gloo", timeout=TIMEOUT)
        self.rank = dist.get_rank() if self.size > 1 else 0

    def wrapped(self, model: nn.Module) -> nn.Module:
        """The module to call in training."""
        return DistributedDataParallel(model) if self.size > 1 else model

    def synchronizing(self, model: nn.Module, wanted: bool) -> contextlib.AbstractContextManager[Any]:
        """Within the context, a backward averages the gradients over all processes only if wanted."""
        if wanted or not isinstance(model, DistributedDataParallel):
            return contextlib.nullcontext()
        return model.no_sync()

    def shares(self, plan: Iterator[tuple[Tensor, int | None]]) -> Iterator[tuple[Tensor, int | None]]:
        """This process's part of each batch, with its own seed. If the last batch of an epoch has fewer images than
        there are processes, those without an image get the first one.
        """
        for indices, seed in plan:
            own = indices.tensor_split(self.size)[self.rank]
            yield own if len(own) else indices[:1], None if seed is None else self.seed(seed)

    def seed(self, seed: int) -> int:
        """A seed for random numbers that should differ between processes."""
        return seed if self.rank == 0 else mix(seed, "process", self.rank)

    def sum(self, *values: float) -> list[float]:
        if self.size == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        return list(sums.tolist())

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0, in every process."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes in rank 0; an empty list elsewhere. For several processes."""
        gathered: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, gathered, dst=0)
        return gathered or []
