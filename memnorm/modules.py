"""Walking through a model."""

from __future__ import annotations

from torch import nn


def modules_of(model: nn.Module) -> list[nn.Module]:
    """`model.modules()` without their names, in a fraction of the time: every step asks for them."""
    found: dict[nn.Module, None] = {}
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and module not in found:
            found[module] = None
            if module._modules:
                waiting.extend(reversed(module._modules.values()))
    return list(found)
