"""Weight normalization: the length of each filter is a separate parameter, and no activation statistics are used.

    w = g v/‖v‖      y = w·x + b

The first training batch sets g and b so that every channel starts with mean 0 and standard deviation 1:

    t = v·x/‖v‖      g ← 1/σ[t]      b ← −μ[t]/σ[t]

Filters use torch's own parametrization. If a convolution directly precedes a norm, its g is fixed at 1, and the layer
that replaces the norm has g and b: weight and bias of the batch norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrizations

from memnorm.functional import batch_moments, count_per_channel
from memnorm.norms.batch_free import BatchFreeNorm, fresh_layers
from memnorm.norms.wiring import NotTraceable, Wiring, every

# The dimension of the output channels in the weight.
OUTPUT_DIMENSION: dict[type[nn.Module], int] = dict.fromkeys((nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d), 0)
OUTPUT_DIMENSION |= dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), 1)


class WeightNormAffine(BatchFreeNorm):
    """g t + b per channel, with g and b set from the first training batch.

    `initialized` is part of the checkpoint. A batch with one value per channel, or one that is not finite, is skipped,
    and the next batch sets g and b.

    Args:
        data_init: set g and b from the first training batch; otherwise they keep the values of the batch norm.
    """

    OPTIONS: ClassVar[dict[str, Any]] = {"data_init": True}

    data_init: bool
    initialized: Tensor
    _ready = False  # True once the buffer is True, so that not every forward reads from the device

    @classmethod
    def replacing(cls, layer: _BatchNorm, /, **options: Any) -> nn.Module:
        new = super().replacing(layer, **options)
        affine: Any = new[0] if isinstance(new, nn.Sequential) else new
        for name, start in (("weight", torch.ones), ("bias", torch.zeros)):
            if getattr(affine, name) is None:
                where = {"device": affine.initialized.device, "dtype": torch.get_default_dtype()}
                affine.register_parameter(name, nn.Parameter(start(layer.num_features, **where)))
        return new

    def _add_state(self, device: Any, dtype: Any) -> None:
        self.register_buffer("initialized", torch.tensor(False, device=device))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.initialized.fill_(not self.data_init)
        self._ready = False

    def _forward(self, x: Tensor) -> Tensor:
        if self.training and not self._ready and not x.is_meta:
            self._ready = bool(self.initialized) or self._initialize(x.detach())
        return self._affine(x)

    @torch.no_grad()
    def _initialize(self, x: Tensor) -> bool:
        if self.weight is None or self.bias is None or count_per_channel(x) < 2:
            return False
        mean, var, _ = batch_moments(x)
        if not bool((mean.isfinite() & var.isfinite()).all()):
            return False
        scale = torch.where(var > 0, var, 1).rsqrt()
        self.weight.copy_(scale)
        self.bias.copy_(-mean * scale)
        self.initialized.fill_(True)
        return True

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._ready = False


def surgery(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Parametrize the weight of every convolution and linear layer."""
    layers = fresh_layers(model, WeightNormAffine)
    fixed = _feeders(model, layers)
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for module in list(model.modules()):
        weight = module._parameters.get("weight")
        dimension = OUTPUT_DIMENSION.get(type(module))
        if weight is None or dimension is None or owners[id(weight)] > 1 or not _has_length(weight, dimension):
            continue
        parametrizations.weight_norm(module, dim=dimension).train(module.training)
        if module in fixed:
            _fix_length(module)


def _feeders(model: nn.Module, layers: list[WeightNormAffine]) -> set[nn.Module]:
    """The convolutions and linear layers whose results are used by `layers` only."""
    try:
        wiring = Wiring(model)
    except NotTraceable:
        return set()
    own = {wiring.before(node) for layer in layers for node in wiring.sites.get(layer, ())}
    return {
        module
        for module, sites in wiring.sites.items()
        if type(module) in OUTPUT_DIMENSION and every(sites, own.__contains__) and _one_group_or_plain(module)
    }


def _one_group_or_plain(module: Any) -> bool:
    """In a transposed convolution with groups, one slice of the weight belongs to several output channels."""
    return OUTPUT_DIMENSION[type(module)] == 0 or module.groups == 1


def _has_length(weight: Tensor, dimension: int) -> bool:
    """Return True if no filter has length zero."""
    others = [d for d in range(weight.dim()) if d != dimension]
    return weight.is_meta or bool((torch.linalg.vector_norm(weight.detach(), dim=others) > 0).all())


def _fix_length(module: Any) -> None:
    """Fix g at 1 and remove the bias, because the following layer has both."""
    length = module.parametrizations.weight.original0
    with torch.no_grad():
        length.fill_(1)
    length.requires_grad_(False)
    module.bias = None


ENTRY: dict[str, Any] = {
    "name": "weight_norm",
    "title": "Weight Normalization",
    "paper": "Salimans and Kingma, Weight Normalization: A Simple Reparameterization to Accelerate Training of Deep "
    "Neural Networks, NIPS 2016",
    "replace": WeightNormAffine.replacing,
    "state": "whether the first batch has been seen",
    "folds": True,
    "learning_rate": "Adam at 0.003 on CIFAR-10",
    "surgery": surgery,
}
