"""What Double-Forward keeps between forward and step: copied inputs, and hooks that copies of a model do not get."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from memnorm.layers import Recording
from memnorm.replay import Surroundings


class Batch:
    """The inputs of one training forward, copied: the model or the loop may overwrite them before the step."""

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], layers: list[Recording], surroundings: Surroundings
    ) -> None:
        self.args, self.kwargs = tree_map(_copy, (args, kwargs))
        self.layers = layers  # those that would have recorded
        self.surroundings = surroundings
        self.observed = False  # whether a backward through the output would be noticed
        self.reached = False  # whether one was
        self.accumulated = False  # whether it left gradients in the parameters

    def part(self, fraction: float, generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs, or a random part of them along the batch dimension."""
        tensors = [
            leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor) and leaf.dim() > 0
        ]
        if fraction == 1 or not tensors:
            return self.args, self.kwargs
        size = tensors[0].shape[0]
        chosen = torch.randperm(size, generator=generator)[: max(1, round(fraction * size))].sort().values

        def take(leaf: Any) -> Any:
            shares = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == size
            return leaf[chosen.to(leaf.device)] if shares else leaf

        args, kwargs = tree_map(take, (self.args, self.kwargs))
        return args, kwargs


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


class Hook:
    """A module hook that calls a method of a handle. A copy or pickle of the module gets `inert` in its place: no
    handle, no optimizer, no batches.
    """

    def __init__(self, handle: Any, method: str) -> None:
        self.handle, self.method = handle, method

    def __call__(self, *args: Any) -> None:
        getattr(self.handle, self.method)(*args)

    def __deepcopy__(self, _memo: dict[int, Any]) -> Any:
        return inert

    def __reduce__(self) -> Any:
        return _get_inert, ()


def inert(*_args: Any) -> None:
    """A hook that does nothing."""


def _get_inert() -> Any:
    return inert


def drop_inert_hooks(model: nn.Module) -> None:
    """Remove what copying a model with Double-Forward has left behind."""
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook is inert]:
            del hooks[key]
            for registry in (
                "_forward_pre_hooks_with_kwargs",
                "_forward_hooks_with_kwargs",
                "_forward_hooks_always_called",
            ):
                getattr(model, registry).pop(key, None)
