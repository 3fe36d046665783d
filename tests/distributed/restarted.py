"""A training loop that resumes from its last checkpoint; one of its ranks may die."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.ranks import even_part, leave, net, own_part, sgd, state_of, trajectory, wrapped
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import memnorm
from memnorm.distributed import exchange_memory

STEPS = 8
OF_RANK_0 = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)  # else each tensor is any process's


def snapshot(model: Any, optimizer: Any) -> dict[str, Any]:
    """Rank 0 saves what has the same key on all ranks. Memories may differ, so each rank has its own key for them."""
    weights, moments = get_state_dict(model, optimizer)
    memory = {name: buffer.clone() for name, buffer in model.module.named_buffers()}  # not what "model" is loaded into
    return {"model": weights, "optimizer": moments, f"memory of rank {dist.get_rank()}": memory}


def resume(folder: Path, model: Any, optimizer: Any) -> int:
    """Load the last checkpoint that was completed, and return the step after which it was written."""
    newest = max(folder.glob("step-*/.metadata"), default=None)
    if newest is None:
        return 0
    state = snapshot(model, optimizer)
    dcp.load(state, checkpoint_id=newest.parent)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    model.module.load_state_dict(state[f"memory of rank {dist.get_rank()}"], strict=False)
    return int(newest.parent.name.removeprefix("step-"))


def main(folder: Path, mode: str, dies_after: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = wrapped(net(sync=mode == "sync"))
    optimizer = sgd(model)
    done = resume(folder, model, optimizer)
    memnorm.double_forward(model, optimizer)
    if mode == "exchange":
        exchange_memory(model, optimizer)
    part = own_part if mode == "sync" else even_part
    for step in range(done, STEPS):
        trajectory(model, optimizer, lambda _, step=step: part(step), steps=1)
        if dist.get_rank() == 1 and step == dies_after and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        dcp.save(snapshot(model, optimizer), checkpoint_id=folder / f"step-{step + 1:02}", planner=OF_RANK_0)
    saved = snapshot(model, optimizer)["model"]
    saved = {name: torch.zeros_like(value) for name, value in saved.items()}
    dcp.load({"model": saved}, checkpoint_id=folder / f"step-{STEPS:02}")
    torch.save({"state": state_of(model), "saved": saved, "resumed at": done}, folder / f"{dist.get_rank()}.pt")
    leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
