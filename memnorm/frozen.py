"""Frozen batch norm: statistics and affine map of a trained batch norm as constants.

    y = weight · (x − running_mean)/√(running_var + eps) + bias

Detectors use it (torchvision, detectron2, DETR and what grew out of them). Every library has a class of its own, so it
is recognised by its buffers and by what it computes.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from memnorm.errors import is_number
from memnorm.modules import is_real
from memnorm.norms.base import takes_over

TENSORS = ("weight", "bias", "running_mean", "running_var")
EPS = 1e-5  # of a class that does not store it; also replaces 0, with which no batch norm trains
ORIGINAL_EPS = "_memnorm_frozen_eps"  # attribute of a layer that was frozen


def is_frozen(layer: nn.Module) -> bool:
    constants = all(isinstance(layer._buffers.get(name), Tensor) for name in TENSORS)
    return constants and not isinstance(layer, _BatchNorm)


def reason_to_keep(layer: nn.Module) -> str | None:
    """The reason why a batch norm cannot replace a frozen one, or None."""
    if "forward" in vars(layer):
        return "has its own forward"
    if any(type(child) is not nn.Identity for child in layer.children()) or not _computes_batch_norm(layer):
        return f"{type(layer).__name__} does more than batch norm; its own library may be able to unfreeze it"
    return None


@torch.no_grad()
def _computes_batch_norm(layer: Any) -> bool:
    """Compare the forward in training mode with batch norm's in eval mode, on two values per channel, far below and far
    above its mean.
    """
    weight, bias, mean, var = (layer._buffers[name] for name in TENSORS)
    eps = getattr(layer, "eps", EPS)
    if not is_number(eps) or eps < 0:
        return False
    if not is_real(mean):
        return True
    distance = 100 * (var + eps).sqrt()
    rank = {nn.BatchNorm1d: 2, nn.BatchNorm2d: 4, nn.BatchNorm3d: 5}[_plain_class(layer)]
    x = torch.stack([mean - distance, mean + distance]).reshape(2, -1, *[1] * (rank - 2))
    try:
        twin = copy.copy(layer)  # because an unknown layer may record what it sees
        buffers = {name: None if one is None else one.clone() for name, one in layer._buffers.items()}
        vars(twin).update(_buffers=buffers, training=True)
        found = type(layer).forward(twin, x)
    except Exception:  # of code that we do not know
        return False
    tolerance = 1e-4 if x.dtype in (torch.float32, torch.float64) else 2e-2
    expected = F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)
    same = isinstance(found, Tensor) and found.shape == expected.shape
    return same and torch.allclose(found.to(x.dtype), expected, tolerance, tolerance, equal_nan=True)


def thawed(layer: Any) -> _BatchNorm:
    """The batch norm that computes the same as a frozen one in eval mode, with trainable parameters.

    Torchvision's detectors with weights from COCO have eps = 0. Their weights are rescaled for `EPS`.
    """
    eps = float(getattr(layer, "eps", EPS))
    new: Any = takes_over(layer, _plain_class(layer))
    weight, bias, mean, var = (layer._buffers[name].detach().clone() for name in TENSORS)
    new.num_features, new.eps, new.momentum = mean.numel(), eps or EPS, 0.1
    new.affine = new.track_running_stats = True
    for name, value in (("weight", rescaled(weight, var, eps, new.eps)), ("bias", bias)):
        del new._buffers[name]
        new.register_parameter(name, nn.Parameter(value))
    counter = torch.zeros((), dtype=torch.long, device=mean.device)
    new._buffers.update(running_mean=mean, running_var=var, num_batches_tracked=counter)
    new._non_persistent_buffers_set -= {*TENSORS, "num_batches_tracked"}
    vars(new)[ORIGINAL_EPS] = eps
    return new


def rescaled(weight: Tensor, var: Tensor, eps: float, new_eps: float) -> Tensor:
    """The weight with which `new_eps` gives the same scale as `weight` with `eps`."""
    if eps == new_eps:
        return weight
    factor = ((var + new_eps) / (var + eps)).sqrt()
    return torch.where(factor.isfinite() & (factor > 0), weight * factor, weight).to(weight.dtype)


def _plain_class(layer: nn.Module) -> type[_BatchNorm]:
    return {"1d": nn.BatchNorm1d, "3d": nn.BatchNorm3d}.get(type(layer).__name__[-2:], nn.BatchNorm2d)
