"""What Double-Forward keeps between a forward and the optimizer step: copies of the inputs, and hooks that copies of
the model do not inherit.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from memnorm._torch import tree_map
from memnorm.errors import OptionError
from memnorm.layers import Recording
from memnorm.replay import ForwardContext, ModuleLists


class Status(enum.IntEnum):
    """How far a batch has come on its way from the training forward to the optimizer step. It never goes back."""

    UNOBSERVED = 0  # no hook on the output: a backward would not be noticed
    OBSERVED = 1  # the output has a hook
    REACHED = 2  # a backward has reached the output
    DIFFERENTIABLE = 3  # with create_graph: a later backward may go through the gradient, as in a gradient penalty
    ACCUMULATED = 4  # its gradient is in the parameters
    STEPPED = 5  # an optimizer has stepped with it


class Batch:
    """Copied inputs of one training forward; the model or the loop may overwrite the originals before the step."""

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        layers: list[Recording],
        modules: ModuleLists,
        context: ForwardContext,
    ) -> None:
        if not kwargs and all(type(one) is Tensor for one in args):  # the common case, without tree_map
            self.args, self.kwargs = tuple(_copy(one) for one in args), {}
        else:
            self.args, self.kwargs = tree_map(_copy, (args, kwargs))
        self.layers = layers  # the layers that would have recorded
        self.modules = modules
        self.context = context
        self.status = Status.UNOBSERVED

    def advance(self, status: Status) -> None:
        """Set the status, unless the batch is further already."""
        self.status = max(self.status, status)

    def part(self, fraction: float, generator: torch.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A random part of the inputs along the batch dimension."""
        size = self._batch_size()
        kept = max(min(2, size), round(fraction * size))  # a variance needs two
        chosen = torch.randperm(size, generator=generator)[:kept].sort().values

        def take(leaf: Any) -> Any:
            is_batched = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == size
            return leaf[chosen.to(leaf.device)] if is_batched else leaf

        args, kwargs = tree_map(take, (self.args, self.kwargs))
        return args, kwargs

    def _batch_size(self) -> int:
        """The batch size of the first tensor among the arguments and the values of dictionaries among them. Lists are
        not searched.
        """
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
    """One backward pass: the batches whose outputs it has reached, and the gradients that existed before it."""

    def __init__(self, gradients: list[Tensor | None]) -> None:
        self.batches: list[Batch] = []
        self._gradients = gradients
        self._versions = [None if gradient is None else gradient._version for gradient in gradients]

    def has_changed(self, gradients: Iterable[Tensor | None]) -> bool:
        """Return True if any of these gradients is new or was written to since."""
        triples = zip(gradients, self._gradients, self._versions, strict=False)
        return any(
            now is not before or (now is not None and now._version != version) for now, before, version in triples
        )


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


class Hook:
    """A module hook that calls a method of a handle. Copies and pickles of the module get `inert` instead, so that they
    hold no handle, optimizer or batch.
    """

    def __init__(self, handle: Any, method: str) -> None:
        self.handle, self.method = handle, method

    def __call__(self, *args: Any) -> None:
        getattr(self.handle, self.method)(*args)

    def __reduce__(self) -> Any:
        return _get_inert, ()


def inert(*_args: Any) -> None:
    """A hook that does nothing."""


def _get_inert() -> Any:
    return inert


def drop_inert_hooks(model: nn.Module) -> None:
    """Remove the inert hooks that a copy of a model with Double-Forward has."""
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook is inert]:
            del hooks[key]
            for registry in (
                "_forward_pre_hooks_with_kwargs",
                "_forward_hooks_with_kwargs",
                "_forward_hooks_always_called",
            ):
                getattr(model, registry).pop(key, None)
