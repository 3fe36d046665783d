"""What Double-Forward keeps between forward and step: copied inputs, and hooks that copies of a model do not get."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from memnorm.errors import OptionError
from memnorm.layers import Recording
from memnorm.replay import Census, Surroundings


class Batch:
    """The inputs of one training forward, copied: the model or the loop may overwrite them before the step."""

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        layers: list[Recording],
        census: Census,
        surroundings: Surroundings,
    ) -> None:
        if not kwargs and all(type(one) is Tensor for one in args):  # as it is almost always
            self.args, self.kwargs = tuple(_copy(one) for one in args), {}
        else:
            self.args, self.kwargs = tree_map(_copy, (args, kwargs))
        self.layers = layers  # those that would have recorded
        self.census = census  # of the model's modules
        self.surroundings = surroundings
        self.observed = False  # whether a backward through the output would be noticed
        self.reached = False  # whether one was
        self.differentiated = False  # whether its gradient can be differentiated again, as in a gradient penalty
        self.accumulated = False  # whether its gradient is in the parameters
        self.used = False  # whether an optimizer has stepped with it

    def part(self, fraction: float, generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A random part of the inputs along the batch dimension."""
        size = self._batch_size()
        kept = max(min(2, size), round(fraction * size))  # two, for a variance
        chosen = torch.randperm(size, generator=generator)[:kept].sort().values

        def take(leaf: Any) -> Any:
            shares = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == size
            return leaf[chosen.to(leaf.device)] if shares else leaf

        args, kwargs = tree_map(take, (self.args, self.kwargs))
        return args, kwargs

    def _batch_size(self) -> int:
        """Of the first tensor that is an argument, or an entry of a dictionary that is one. A list may be anything."""
        arguments = [*self.args, *self.kwargs.values()]
        flat = [value for one in arguments for value in (one.values() if isinstance(one, Mapping) else [one])]
        sizes = [value.shape[0] for value in flat if isinstance(value, Tensor) and value.dim() > 0]
        if not sizes:
            raise OptionError(
                "double_forward: fraction needs a tensor with a batch dimension among the model's arguments; "
                f"got {', '.join(type(one).__name__ for one in arguments) or 'none'}. Leave fraction at 1."
            )
        return sizes[0]


class Backward:
    """A backward pass: the batches whose outputs it has reached, and the gradients there were before it, if any."""

    def __init__(self, gradients: list[Tensor | None]) -> None:
        self.batches: list[Batch] = []
        self._gradients = gradients
        self._versions = [None if gradient is None else gradient._version for gradient in gradients]

    def changed(self, gradients: Iterable[Tensor | None]) -> bool:
        """Whether any of the parameters has another gradient now."""
        triples = zip(gradients, self._gradients, self._versions, strict=False)
        return any(
            now is not before or (now is not None and now._version != version) for now, before, version in triples
        )


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
