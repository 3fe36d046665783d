"""Functions on the modules of a model and on its optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from memnorm.errors import DTypeError

Layer = TypeVar("Layer")


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The modules of a model, each once, level by level. Much faster than `model.modules()`; called at every step."""
    found: dict[nn.Module, None] = {}
    level = [model]
    while level:
        found.update(dict.fromkeys(level))
        children = dict.fromkeys(child for one in level if one._modules for child in one._modules.values())
        level = [child for child in children if child is not None and child not in found]
    return list(found)


def layers_of(model: nn.Module, kind: type[Layer]) -> dict[str, Layer]:
    """The modules of this class by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


def version_of(tensor: Any) -> int:
    """The number of in-place changes that autograd has counted; -1 for an inference tensor, which has none."""
    try:
        version: int = tensor._version
    except RuntimeError:
        return -1
    return version


def is_real(tensor: Any) -> bool:
    """Return True if the values can be read: not on meta, not a fake tensor, and its storage was not freed."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:
        return False
    return not tensor.nbytes or tensor.untyped_storage().nbytes() > 0


def trains(optimizer: Optimizer, model: nn.Module) -> bool:
    """Return True if the optimizer has a parameter of the model."""
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])


def check_optimizer(optimizer: object, expected: str) -> None:
    if not hasattr(optimizer, "_optimizer_step_post_hooks"):
        raise DTypeError(
            f"{expected}; got {type(optimizer).__name__}. If this is a wrapper, pass the wrapped optimizer."
        )


def has_skipped(optimizer: Optimizer) -> bool:
    """Return True if the last step was skipped. With a `GradScaler`, fused optimizers skip steps themselves."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


def replace_modules(model: nn.Module, new: dict[nn.Module, nn.Module]) -> nn.Module:
    """Replace each `module` by `new[module]` wherever it is registered."""
    for parent in [*model.modules(), *new.values()]:
        for name, child in parent._modules.items():
            if child in new:
                parent._modules[name] = new[child]
        _replace_in_containers(parent, new)
    for replacement in new.values():
        hooks: Iterable[Any] = replacement._load_state_dict_pre_hooks.values()
        for hook in hooks:
            if getattr(hook, "with_module", False):
                hook.module = weakref.ref(replacement)  # it refers to the replaced layer
    return new.get(model, model)


def _replace_in_containers(parent: nn.Module, new: dict[nn.Module, nn.Module]) -> None:
    """Replace modules in lists, tuples and dictionaries that are attributes of `parent`."""

    def replaced(value: Any) -> Any:
        return new.get(value, value) if isinstance(value, nn.Module) else value

    for name, value in vars(parent).items():
        if name.startswith("_"):
            continue
        if type(value) is list:
            value[:] = map(replaced, value)
        elif type(value) is dict:
            value.update({key: replaced(one) for key, one in value.items()})
        elif type(value) is tuple and any(isinstance(one, nn.Module) for one in value):
            parent.__dict__[name] = tuple(map(replaced, value))
