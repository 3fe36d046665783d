"""Walking through a model, and what an optimizer does to it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


def modules_of(model: nn.Module) -> list[nn.Module]:
    """`model.modules()` without their names, level by level, in a fraction of the time: every step asks for them."""
    found: dict[nn.Module, None] = {}
    level = [model]
    while level:
        found.update(dict.fromkeys(level))
        children = dict.fromkeys(child for one in level if one._modules for child in one._modules.values())
        level = [child for child in children if child is not None and child not in found]
    return list(found)


def version_of(tensor: Any) -> int:
    """The number of in-place changes that autograd has counted; -1 for an inference tensor, which has none."""
    try:
        version: int = tensor._version
    except RuntimeError:
        return -1
    return version


def is_real(tensor: Any) -> bool:
    """Return True if the values can be read: not on meta, not a fake tensor."""
    return type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta


def trains(optimizer: Optimizer, model: nn.Module) -> bool:
    """Whether the optimizer holds a parameter of the model."""
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])


def has_skipped(optimizer: Optimizer) -> bool:
    """Whether the step that is now over moved nothing: a `GradScaler` leaves it to fused optimizers to skip."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)
