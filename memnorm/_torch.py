"""The private functions of torch that memnorm calls, each with what replaces it in a torch that has none.

Where nothing public says what the private function said, the replacement assumes the case that is slower and right. The
CPU kernels need all of `KERNELS`; without one of them, torch operations compute the layers.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import checkpoint

missing: list[str] = []


def _private(path: str, replacement: Any) -> Any:
    """What torch has at `path`, or the replacement."""
    found: Any = torch
    with contextlib.suppress(ImportError):
        for part in path.split("."):
            found = getattr(found, part, None)
        if found is not None:
            return found
    missing.append(path)
    return replacement


# What is active


def no() -> bool:
    return False


def _checkpoint_runs(*functions: str) -> bool:
    """Return True if one of these functions of `torch.utils.checkpoint` is on the stack."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__ and frame.f_code.co_name in functions:
            return True
        frame = frame.f_back
    return False


functorch_active: Callable[[], bool] = _private("_C._are_functorch_transforms_active", no)
dispatch_modes: Callable[[], int] = _private("_C._len_torch_dispatch_stack", no)
is_tracing: Callable[[], bool] = _private("_C._is_tracing", torch.jit.is_tracing)
is_fwd_grad_enabled: Callable[[], bool] = _private("_C._is_fwd_grad_enabled", lambda: not _checkpoint_runs("forward"))
is_legacy_batchedtensor: Callable[[Tensor], bool] = _private("_C._functorch.is_legacy_batchedtensor", lambda _: False)
is_zerotensor: Callable[[Tensor], bool] = _private("Tensor._is_zerotensor", lambda _: False)


def forward_level() -> int:
    """The level of forward-mode AD; -1 if it is not active, or not known."""
    level: int = getattr(forward_ad, "_current_level", -1)
    return level


# Backward


def _unknown_hook(value: Any) -> Any:
    return value


current_graph_task_id: Callable[[], int] = _private(
    "_C._current_graph_task_id", lambda: 0 if _checkpoint_runs("unpack_hook", "backward") else -1
)
top_saved_tensors_hooks: Callable[[bool], Any] = _private(
    "_C._autograd._top_saved_tensors_default_hooks", lambda _: (_unknown_hook, _unknown_hook)
)
next_sequence_number: Callable[[], int] = _private("_C._autograd._get_sequence_nr", itertools.count().__next__)
_current_node: Callable[[], Any] = _private("_C._current_autograd_node", no)
queue_callback: Callable[[Callable[[], None]], None] | None = _private(
    "autograd.Variable._execution_engine.queue_callback", None
)


def sequence_number_of_node() -> int:
    """The number of the autograd node that runs, which is comparable with `next_sequence_number`; -1 for none."""
    node = None if "_C._autograd._get_sequence_nr" in missing else _current_node()
    return node._sequence_nr() if node else -1


def loss_scale(scaler: torch.amp.GradScaler) -> Tensor:
    """A copy of the factor of the loss, if possible without waiting for the device."""
    scale = getattr(scaler, "_scale", None)
    return torch.as_tensor(scaler.get_scale() if scale is None else scale).detach().clone()


# A class, a decorator, operations on lists


SingleLevelFunction: Any = _private("autograd.function._SingleLevelFunction", torch.autograd.Function)
disable_dynamo: Any = _private("_compile._disable_dynamo", torch.compiler.disable)
increment_version: Any = _private("_C._increment_version", torch.autograd.graph.increment_version)


def _copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _multiply_each(targets: Sequence[Tensor], factors: Sequence[float] | Tensor) -> None:
    for index, target in enumerate(targets):
        target.mul_(factors if isinstance(factors, Tensor) else factors[index])


foreach_copy_: Any = _private("_foreach_copy_", _copy_each)
foreach_mul_: Any = _private("_foreach_mul_", _multiply_each)


def _dense_format(x: Tensor) -> Any:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(x.dim())
    return wanted if wanted and x.is_contiguous(memory_format=wanted) else torch.contiguous_format


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (list, tuple)):
        for one in tree:
            yield from _leaves(one)
    elif isinstance(tree, dict):
        yield from _leaves(list(tree.values()))
    elif tree is not None:
        yield tree


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map(function, one) for one in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map(function, one) for one in tree)
    if isinstance(tree, dict):
        return type(tree)((key, _map(function, one)) for key, one in tree.items())
    return function(tree)


suggest_memory_format: Any = _private("_prims_common.suggest_memory_format", _dense_format)
tree_leaves: Callable[[Any], Any] = _private("utils._pytree.tree_leaves", lambda tree: list(_leaves(tree)))
tree_map: Callable[[Callable[[Any], Any], Any], Any] = _private("utils._pytree.tree_map", _map)

KERNELS = (
    "_C._are_functorch_transforms_active",
    "_C._len_torch_dispatch_stack",
    "_C._is_fwd_grad_enabled",
    "_C._current_graph_task_id",
    "_C._autograd._top_saved_tensors_default_hooks",
)


def lacks_for_kernels() -> list[str]:
    """The missing functions without which the kernels cannot know who observes them."""
    unknown = [] if hasattr(forward_ad, "_current_level") else ["autograd.forward_ad._current_level"]
    return [path for path in KERNELS if path in missing] + unknown
