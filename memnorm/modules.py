"""Walking through a model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def modules_of(model: nn.Module) -> Iterator[nn.Module]:
    """`model.modules()` without their names, in a fraction of the time: every step asks for them."""
    seen = set()
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting += [child for child in reversed(module._modules.values()) if child is not None]
            yield module
