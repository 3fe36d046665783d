"""Centred gradients and weights for the layers whose output feeds a norm.

After a ReLU inputs are positive, so a change of a filter's mean moves the mean of its channel most of all. Batch norm
takes that out within the batch; a memory of earlier batches goes stale by it. Without the mean of each filter's
gradient, the channel means drift less (Gradient Centralization, Yong et al., ECCV 2020).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, Literal
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.optim.optimizer import register_optimizer_step_post_hook

from memnorm._torch import disable_dynamo
from memnorm.errors import NothingToConvert, OptionError, check_module
from memnorm.kernels import cpu

Mode = Literal["gradients", "weights"]
ATTRIBUTE = "_memnorm_centred"  # of a layer whose gradient is centred
_centred_layers: WeakSet[nn.Module] = WeakSet()


def center(model: nn.Module, mode: Mode = "gradients") -> Centering:
    """Centre the convolutions and linear layers of `model` whose output feeds a norm of any kind.

        memnorm.center(model)

    `"gradients"`: whenever a gradient is accumulated in `weight.grad`, each filter loses its mean there (what
    `torch.autograd.grad` returns is not changed). Weights, outputs and checkpoints stay as they are.

    `"weights"` also subtracts each filter's mean from the weights, once, at the call. Use it for networks trained from
    scratch. With SGD they stay centred; an optimizer that scales each element by itself, as Adam does, lets them drift.

    A norm is fed by the nearest earlier layer, in the order of registration, with as many outputs as the norm has
    channels. Filters that read a single channel (depthwise convolutions, images of one channel) are left alone: their
    mean is all that they see of the channel's level. So are weights that are computed from others (weight norm,
    pruning).

    Copies and pickles of the model keep it, and a weight that is replaced or unfrozen later is centred from its second
    step on. A hook of yours that steps as soon as a gradient is accumulated must be registered after this call.
    `memnorm.convert(model, "two_way")` centres by itself.

    Returns:
        The handle. Its `layers` names the layers that are centred, and `remove()` ends it.
    """
    check_module(model, "center")
    if not isinstance(mode, str) or mode not in ("gradients", "weights"):
        raise OptionError(f"center: mode must be 'gradients' or 'weights'; got {mode!r}")
    found = center_before(model, mode, nn.Module, by_conversion=False)
    if not found:
        raise NothingToConvert(
            f"center: {type(model).__name__} has no convolution or linear layer whose output feeds a norm"
        )
    return Centering(model, found)


def center_before(model: nn.Module, mode: Mode, norm: type, *, by_conversion: bool = True) -> tuple[str, ...]:
    """Centre the layers that feed a norm of this class, and return their names. Frozen weights keep their values."""
    names = []
    for name, layer, fed in feeding(model, _channels_of):
        weight: Any = layer._parameters.get("weight")
        # A weight that is computed from others (weight norm, pruning) cannot be hooked.
        if not isinstance(fed, norm) or not isinstance(weight, nn.Parameter) or _inputs(layer) < 2:
            continue
        names.append(name)
        before = vars(layer).get(ATTRIBUTE)
        asked_for = before is not None and not before.by_conversion  # by a call of `center`, which stays
        _detach(layer)
        if mode == "weights" and weight.requires_grad and not weight.is_meta:
            with torch.no_grad():
                weight.copy_(centred(weight, groups_of(layer)))
        _attach(layer, by_conversion and not asked_for)
    return tuple(names)


class Centering:
    """The handle of `center`."""

    def __init__(self, model: nn.Module, layers: tuple[str, ...]) -> None:
        self._model, self.layers = model, layers

    def remove(self) -> None:
        """Let gradients pass unchanged again. Weights stay as they are."""
        remove(self._model)

    def __repr__(self) -> str:
        return f"{len(self.layers)} layers centred: {', '.join(self.layers)}"


def remove(model: nn.Module) -> None:
    """End the centring of every layer of `model`."""
    for module in model.modules():
        _detach(module)


def settle(model: nn.Module) -> None:
    """End the centring that a conversion has begun; what `center` was called for stays."""
    for module in model.modules():
        centred = vars(module).get(ATTRIBUTE)
        if centred is None or centred.by_conversion:
            _detach(module)


def _detach(layer: nn.Module) -> None:
    _stop_waiting(layer)
    centred = vars(layer).pop(ATTRIBUTE, None)
    if centred is not None:
        centred.detach()


def check_mode(mode: Any) -> None:
    """The option `center` of `memnorm.convert`."""
    if mode is not None and (not isinstance(mode, str) or mode not in ("auto", "gradients", "weights")):
        raise OptionError(f"center must be 'auto', 'gradients', 'weights' or None; got {mode!r}")


class _Centred:
    """The hook on a weight that centres its gradient as soon as it is accumulated, kept as an attribute of the weight's
    layer. Torch drops hooks of parameters when it copies or pickles them; this object goes with the layer and hooks the
    copy.
    """

    layer: ref[nn.Module]

    def __init__(self, weight: Tensor, groups: int, by_conversion: bool) -> None:
        self.weight, self.groups, self.by_conversion = weight, groups, by_conversion
        hook: Any = functools.partial(_center_gradient, groups=groups)
        if not groups and cpu.module() is not None:
            hook = functools.partial(cpu.module().center, hook)
        self.handle = weight.register_post_accumulate_grad_hook(hook) if weight.requires_grad else None

    def follow(self, layer: nn.Module) -> _Centred:
        """Notice when the layer's weight is replaced or unfrozen."""
        self.layer = ref(layer)
        _watch_weights()
        _centred_layers.add(layer)
        return self

    def detach(self) -> None:
        if self.handle is not None:
            self.handle.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Centred:
        made = _Centred(copy.deepcopy(self.weight, memo), self.groups, self.by_conversion)
        return made.follow(copy.deepcopy(self.layer(), memo))  # type: ignore[arg-type]

    def __reduce__(self) -> Any:
        return _Centred, (self.weight, self.groups, self.by_conversion), self.layer()

    __setstate__ = follow


def _attach(layer: Any, by_conversion: bool) -> None:
    """Centre the gradient of the layer's weight. Leaving `meta` makes a new weight, so there it waits for the first
    forward.
    """
    if layer.weight.is_meta:
        layer.register_forward_pre_hook(functools.partial(_attach_later, by_conversion=by_conversion))
        return
    vars(layer)[ATTRIBUTE] = _Centred(layer.weight, groups_of(layer), by_conversion).follow(layer)


@functools.cache
def _watch_weights() -> None:
    register_optimizer_step_post_hook(_follow_weights)


@disable_dynamo
def _follow_weights(*_step: Any) -> None:
    """Centre weights that have been replaced, as by `load_state_dict(assign=True)`, or unfrozen."""
    for layer in list(_centred_layers):
        centred, weight = vars(layer).get(ATTRIBUTE), layer._parameters.get("weight")
        if centred is None or weight is None:
            continue
        if weight is not centred.weight or (centred.handle is None and weight.requires_grad):
            centred.detach()
            vars(layer)[ATTRIBUTE] = _Centred(weight, centred.groups, centred.by_conversion).follow(layer)


def _attach_later(layer: nn.Module, _args: Any, by_conversion: bool) -> None:
    _stop_waiting(layer)
    _attach(layer, by_conversion)


def _stop_waiting(layer: nn.Module) -> None:
    for key, hook in list(layer._forward_pre_hooks.items()):
        if getattr(hook, "func", None) is _attach_later:
            del layer._forward_pre_hooks[key]


def _center_gradient(weight: Tensor, groups: int) -> None:
    gradient: Any = weight.grad
    if gradient is None or gradient.layout is not torch.strided:  # cleared by an earlier hook, or of an embedding
        return
    if gradient.requires_grad:  # create_graph: it may be differentiated again
        weight.grad = centred(gradient, groups)
    else:
        gradient.copy_(centred(gradient, groups))


def centred(weight: Tensor, groups: int) -> Tensor:
    """`weight` (or its gradient) without the mean over what each output channel is made of.

    `groups` is 0 where outputs are the first dimension. A transposed convolution has its inputs first, in groups.
    """
    if not groups:
        return weight - weight.mean(list(range(1, weight.dim())), keepdim=True)
    grouped = weight.unflatten(0, (groups, -1))
    return (grouped - grouped.mean([1, *range(3, grouped.dim())], keepdim=True)).flatten(0, 1)


def groups_of(layer: nn.Module) -> int:
    return int(layer.groups) if isinstance(layer, _ConvTransposeNd) else 0


def feeding(model: nn.Module, channels_of: Callable[[nn.Module], int | None]) -> list[tuple[str, Any, nn.Module]]:
    """The convolutions and linear layers that feed a norm: name, layer, norm. `channels_of` returns the channels of a
    norm, None for anything else.
    """
    free: list[tuple[str, Any]] = []
    found = []
    for name, module in model.named_modules():
        if isinstance(module, (_ConvNd, nn.Linear)):
            free.append((name, module))
            continue
        channels = channels_of(module)
        before = [one for one in free if outputs_of(one[1]) == channels]
        if before:
            free.remove(before[-1])
            found.append((*before[-1], module))
    return found


def _channels_of(module: nn.Module) -> int | None:
    if isinstance(module, _NormBase):
        return int(module.num_features)
    if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) == 1:
        return int(module.normalized_shape[0])
    return int(module.num_channels) if isinstance(module, nn.GroupNorm) else None


def outputs_of(layer: Any) -> int:
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)


def _inputs(layer: Any) -> int:
    """Channels that one filter reads."""
    return int(layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels // layer.groups)
