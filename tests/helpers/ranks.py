"""Programs for several ranks, started by torchrun, and the trainings that they compare."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.common import images, labels, small_net
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import memnorm

STEPS, MEMORY = 9, 4  # more steps than the memory is long
PARTS = {  # images of each process in step 0, 1, …, and again from the start
    2: [(3, 5), (4, 4), (0, 6), (7, 1)],
    4: [(3, 0, 1, 4), (2, 2, 2, 2), (0, 0, 5, 3), (1, 6, 0, 2)],
}
TESTS = Path(__file__).resolve().parents[1]
RESTARTABLE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else processes started again look for the dead ones


def torchrun(*program: str, processes: int, flags: tuple[str, ...] = ()) -> None:
    """Run a program in several processes. An error in one of them fails the test."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *flags]
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **RESTARTABLE, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [*launcher, *program], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]


def wrapped(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model)


def net(**options: Any) -> nn.Module:
    return memnorm.convert(small_net(dtype=torch.float64), **{"memory_size": MEMORY, "decay": 0.8, **options})


def two_way_net(**options: Any) -> nn.Module:
    return memnorm.convert(small_net(dtype=torch.float64), "two_way", warmup=0, **{"decay": 0.8, **options})


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def joint_batch(step: int, ranks: int) -> tuple[Tensor, Tensor]:
    count = sum(PARTS[ranks][step % 4])
    return images(count, seed=step, dtype=torch.float64), labels(count, seed=step)


def part_of(step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    x, y = joint_batch(step, ranks)
    sizes = PARTS[ranks][step % 4]
    return x.split(sizes)[rank], y.split(sizes)[rank]


def loss(scores: Tensor, y: Tensor, *, share: float) -> Tensor:
    """The sum over these images, times `share`. DDP averages gradients over processes, so with ranks/count it is the
    mean over the joint batch.
    """
    return nn.functional.cross_entropy(scores, y, reduction="sum") * share


def state_of(model: nn.Module) -> dict[str, Tensor]:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: value.clone() for name, value in inner.state_dict().items()}


def trajectory(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[int], tuple[Tensor, Tensor, float]],
    steps: int = STEPS,
) -> list[dict[str, Any]]:
    """Output, gradients and state of every step; `batch` gives images, labels and the share of an image in the loss."""
    seen = []
    for step in range(steps):
        x, y, share = batch(step)
        optimizer.zero_grad()
        scores = model(x)
        loss(scores, y, share=share).backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        seen.append({"output": scores.detach(), "gradients": gradients, "state": state_of(model)})
    return seen


def own_part(step: int) -> tuple[Tensor, Tensor, float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, y = part_of(step, rank, ranks)
    return x, y, ranks / sum(PARTS[ranks][step % 4])


def even_part(step: int) -> tuple[Tensor, Tensor, float]:
    """The same number of images for every rank, with a mean that depends on the rank."""
    rank = dist.get_rank()
    x = images(4, seed=100 * rank + step, dtype=torch.float64) + rank
    return x, torch.arange(4) % 5, 1 / 4


def everything(ranks: int) -> Callable[[int], tuple[Tensor, Tensor, float]]:
    def batch(step: int) -> tuple[Tensor, Tensor, float]:
        x, y = joint_batch(step, ranks)
        return x, y, 1 / len(y)

    return batch


def collectives_of(work: Callable[[], None]) -> dict[str, int]:
    """The number of collectives during `work`, by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    names = [event.name for event in profile.events() if event.name.startswith("gloo:")]
    return {name: names.count(name) for name in sorted(set(names))}


def main(programs: dict[str, Callable[..., Any]]) -> None:
    """Run the programs one after the other and keep what they return in a folder, a file per process."""
    (folder,) = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {name: program() for name, program in programs.items()}
    torch.save(found, f"{folder}/{dist.get_rank()}.pt")
    leave()


def leave() -> None:
    """End the process group. Torch holds the GIL while it waits for gloo's thread, which needs the GIL to free the
    tensors of the last collective. So give it time to do that first.
    """
    time.sleep(0.3)
    dist.destroy_process_group()


def results(folder: Path, ranks: int) -> list[Any]:
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(ranks)]
