"""The program of test_compiled.py."""

from __future__ import annotations

from typing import Any

import torch
from helpers.ranks import even_part, main, net, sgd, state_of

from memnorm.distributed import exchange_memory


def compiled() -> dict[str, list[Any]]:
    """Sync and exchange, compiled with graph breaks and not."""
    found: dict[str, list[Any]] = {"eager": [], "compiled": []}
    for mode in ("sync", "exchange"):
        for name, states in found.items():
            model = net(sync=mode == "sync")
            optimizer = sgd(model)
            if mode == "exchange":
                exchange_memory(model, optimizer)
            called = torch.compile(model, backend="aot_eager") if name == "compiled" else model
            for step in range(6):
                optimizer.zero_grad()
                called(even_part(step)[0]).square().sum().backward()
                optimizer.step()
            states.append(state_of(model))
    return found


if __name__ == "__main__":
    main({"compiled": compiled})
