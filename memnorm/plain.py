"""The way back to torch's batch norm: for a model (`to_batchnorm`), or for its checkpoint (`plain_state_dict`)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from memnorm import centering, frozen, norms, selection
from memnorm._double_forward import detach
from memnorm.distributed import stop_exchange, unkeep_local
from memnorm.errors import NothingToConvert, OptionError, WrappedModelError, check_module
from memnorm.layers import MemorizedBatchNorm
from memnorm.modules import replace_modules
from memnorm.norms.base import RunningNorm, restored
from memnorm.norms.batch_free import BatchFreeNorm
from memnorm.norms.mabn import is_centred
from memnorm.norms.mbn import plain
from memnorm.stripped import unwatch_saving

WRAPPERS = (DistributedDataParallel, DataParallel, AveragedModel)  # they keep the model in `module`
INNER_NAMES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # torch's names in other wrappers


def to_batchnorm(model: nn.Module) -> nn.Module:
    """Replace every memorized layer of `model` in place by the batch norm that computes the same in eval mode, and
    return the model. The same holds for other norms that are batch norm in eval mode, such as "brn" or "ghost".

        deploy = memnorm.to_batchnorm(model).eval()

    The result has torch's own classes (or timm's) and does not need memnorm. In a half-precision model the statistics
    are rounded to its dtype, as those of batch norm are. To continue training the original, convert a copy:
    `to_batchnorm(deepcopy(model))`, or save what `plain_state_dict` returns. Double-Forward and `memnorm.center` are
    removed. Layers that were frozen become ordinary batch norms.
    """
    check_module(model, "to_batchnorm")
    refuse_wrapped(model, "to_batchnorm")
    layers = _converted_layers(model, "to_batchnorm")
    detach(model)
    stop_exchange(model)
    unkeep_local(model)
    unwatch_saving(model)
    undo_surgery(model)
    centering.remove(model)
    new = {layer: original(layer, None) for layer in layers.values()}
    for module in (*model.modules(), *new.values()):
        for name in (selection.LEFT_OUT, frozen.ORIGINAL_EPS):
            vars(module).pop(name, None)
    return replace_modules(model, new)


@torch.no_grad()
def plain_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of the model as it was before `memnorm.convert`, with the present values. A plain model loads it
    with `strict=True` and computes what `model` computes in eval mode.

        torch.save(memnorm.plain_state_dict(model), "plain.pt")
        Net().load_state_dict(torch.load("plain.pt"))  # a program without memnorm

    The training model is not changed and not copied. As in `state_dict()`, tensors share their memory with the model:
    clone those that must not change with further training.

    The keys are those of the model inside `DistributedDataParallel`, `DataParallel`, `AveragedModel`, `torch.compile`
    and activation checkpointing, without `module.` or `_orig_mod.`. Layers that were frozen have the entries of frozen
    batch norm, which plain batch norm loads as well.

    Norms that are something else than batch norm in eval mode ("frn", "weight_norm", "online", …) raise an error.
    """
    check_module(model, "plain_state_dict")
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        if isinstance(module, BatchFreeNorm):
            raise OptionError(
                f"plain_state_dict: {name or 'the model'} is {type(module).__name__}, which batch norm cannot replace"
            )
    layers = _converted_layers(model, "plain_state_dict")
    state, shortened = _without_wrappers(model.state_dict(), modules)
    converted = set(layers.values())
    for name, module in modules.items():
        prefix = shortened(f"{name}." if name else "")
        if module in converted:
            _make_plain(state, prefix, module)
        elif is_centred(module):
            for key in [key for key in state if key.startswith(f"{prefix}parametrizations.weight.")]:
                del state[key]
            state[f"{prefix}weight"] = module.weight.detach()
    return state


def _make_plain(state: Any, prefix: str, layer: Any) -> None:
    """Change the entries of a converted layer to those of the layer that it replaced."""
    for name in layer.own_buffers if isinstance(layer, MemorizedBatchNorm) else layer._added:
        state.pop(prefix + name, None)
    if isinstance(layer, MemorizedBatchNorm) and layer.running_mean is not None:
        for name in ("running_mean", "running_var"):
            state[prefix + name] = state[prefix + name].to(layer._plain_dtype)
    eps = vars(layer).get(frozen.ORIGINAL_EPS)
    if eps is not None:
        weight = state[f"{prefix}weight"]
        state[f"{prefix}weight"] = frozen.rescaled(weight, layer.running_var, layer.eps, eps)
        state.pop(f"{prefix}num_batches_tracked", None)
        state._metadata.pop(prefix[:-1], None)  # without a version, batch norm does not ask for that counter


def _without_wrappers(state: Any, modules: dict[str, nn.Module]) -> tuple[Any, Callable[[str], str]]:
    """The state dict with the keys of the model inside its wrappers, and the function that shortens a key."""
    inner: dict[str, str] = {}
    own: set[str] = set()
    for name, module in modules.items():
        prefix, wraps = f"{name}." if name else "", isinstance(module, WRAPPERS)
        within = "module" if wraps else next((one for one in INNER_NAMES if one in module._modules), None)
        if within is not None:
            inner[prefix] = f"{prefix}{within}."
            own |= {prefix + buffer for buffer in module._buffers}

    def shortened(key: str) -> str:
        for prefix, longer in reversed(inner.items()):  # inner wrappers come after outer ones
            if key.startswith(longer):
                key = prefix + key.removeprefix(longer)
        return key

    new: Any = OrderedDict((shortened(key), value) for key, value in state.items() if key not in own)
    metadata = getattr(state, "_metadata", {})
    new._metadata = OrderedDict((shortened(f"{key}.")[:-1], value) for key, value in metadata.items())
    return new, shortened


def _converted_layers(model: nn.Module, caller: str) -> dict[str, Any]:
    """The layers that batch norm can replace. A converted layer that it cannot replace is an error."""
    layers = {
        name: layer for name, layer in model.named_modules() if isinstance(layer, (MemorizedBatchNorm, RunningNorm))
    }
    if not layers:
        raise NothingToConvert(
            f"{caller}: {type(model).__name__} has no memorized layer, so there is nothing to make plain"
        )
    for layer in layers.values():
        if isinstance(layer, RunningNorm) and not layer.evaluates_as_batchnorm:
            raise OptionError(
                f"{caller}: {type(layer).__name__} computes something else than batch norm in eval mode, so batch "
                f"norm cannot replace it ({layer.extra_repr()})"
            )
    return layers


def undo_surgery(model: nn.Module) -> None:
    """Undo the changes of an earlier conversion besides the replaced norms."""
    for norm in map(norms.get, norms.available()):
        if norm.settle is not None:
            norm.settle(model)


def original(layer: Any, norm: Any) -> Any:
    """The layer that `norm` replaces: for a converted layer, the batch norm that computes the same in eval mode. A
    layer of this norm itself is returned unchanged, because it keeps its memory.
    """
    if isinstance(layer, MemorizedBatchNorm):
        return layer if layer.norm == norm else plain(layer)
    if frozen.is_frozen(layer):
        return frozen.thawed(layer)
    return restored(layer) if isinstance(layer, RunningNorm) else layer


def refuse_wrapped(model: nn.Module, caller: str) -> None:
    for module in model.modules():
        name = type(module).__name__
        if isinstance(module, DistributedDataParallel) or name == "FullyShardedDataParallel":
            raise WrappedModelError(
                f"{caller}: the model is wrapped in {name}, which has already registered its layers. Call "
                f"memnorm.{caller} on the unwrapped model and wrap the result: {name}(memnorm.{caller}(model))."
            )
