"""One run in several processes, started by torchrun: who is who, and what they tell each other.

Every process trains on its share of each batch, DistributedDataParallel averages the gradients. The first process keeps
the record and evaluates; the others hear from it what to do. A process alone is a team of one and tells nobody.
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

from memnorm.lab.data.seeds import mix
from memnorm.lab.errors import UsageError
from memnorm.lab.spec import RunSpec

PATIENCE = datetime.timedelta(hours=12)  # of those who wait for the first process; torchrun ends them if it dies


def launched() -> int:
    """Processes that torchrun has started for this command; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def leads() -> bool:
    """Whether this process is the first of them."""
    return launched() == 1 or os.environ["RANK"] == "0"


class Team:
    """The processes of one run."""

    def __init__(self, spec: RunSpec, device: str) -> None:
        self.size = spec.processes
        if self.size != launched():
            raise UsageError(
                f"the run has processes: {self.size}, and there {'is' if launched() == 1 else 'are'} {launched()}. "
                f"Start it with: torchrun --nproc-per-node {self.size} -m memnorm.lab train …"
            )
        if self.size > 1 and device != "cpu":
            raise UsageError(f"several processes train on the processor only; got device {device}. Pass --device cpu.")
        if self.size > 1 and not dist.is_initialized():
            dist.init_process_group("gloo", timeout=PATIENCE)
        self.rank = dist.get_rank() if self.size > 1 else 0

    def wrapped(self, model: nn.Module) -> nn.Module:
        """The model to call in training."""
        return DistributedDataParallel(model) if self.size > 1 else model

    def synchronizing(self, model: nn.Module, wanted: bool) -> contextlib.AbstractContextManager[Any]:
        """Within it, a backward of `model` averages the gradients of all processes if wanted; else they wait."""
        if wanted or not isinstance(model, DistributedDataParallel):
            return contextlib.nullcontext()
        return model.no_sync()

    def shares(self, plan: Iterator[tuple[Tensor, int | None]]) -> Iterator[tuple[Tensor, int | None]]:
        """This process's part of each batch, with a seed of its own. Where an epoch ends in a batch with fewer images
        than processes, those that would have none get the batch's first.
        """
        for indices, seed in plan:
            own = indices.tensor_split(self.size)[self.rank]
            yield own if len(own) else indices[:1], None if seed is None else self.seed(seed)

    def seed(self, seed: int) -> int:
        """Of random numbers that should differ between processes."""
        return seed if self.rank == 0 else mix(seed, "process", self.rank)

    def total(self, *values: float) -> list[float]:
        """The sums over all processes."""
        if self.size == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        return list(sums.tolist())

    def tell(self, value: Any) -> Any:
        """What the first process says, in every process."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def collect(self, value: Any) -> list[Any]:
        """What each process says, in the first; nothing elsewhere."""
        if self.size == 1:
            return [value]
        said: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, said, dst=0)
        return said or []
