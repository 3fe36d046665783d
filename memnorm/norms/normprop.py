"""Normalization Propagation: the data are normalized once, and every layer preserves the normalization.

    u = γ (w·x)/(1.21 ‖w‖) + β         o = (max(u, 0) − √(1/2π))/√(½(1 − 1/π))

If x has mean 0, variance 1 and uncorrelated entries, (w·x)/‖w‖ is nearly Gaussian with mean 0 and variance 1; the two
constants are the exact mean and standard deviation of such a variable after ReLU. Max pooling is normalized by the
moments of the largest of n independent values after ReLU, for a window of n; average pooling by 1/√n. The expected
singular value of the Jacobian of a layer is √(1/2)/√(½(1 − 1/π)) = 1.21; the division by it preserves the size of
gradients. No statistic is estimated. For sums and concatenations of branches there are no such constants.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from memnorm.errors import OptionError, is_number
from memnorm.modules import replace_modules
from memnorm.norms.base import as_leaf, has_activation, takes_over
from memnorm.norms.batch_free import BatchFreeNorm, fresh_layers
from memnorm.norms.wiring import NotTraceable, Wiring

RELU_MEAN = math.sqrt(1 / (2 * math.pi))
RELU_STD = math.sqrt((1 - 1 / math.pi) / 2)
RATIO = 1.21

MAX_POOLS: dict[type[nn.Module], int] = {nn.MaxPool1d: 1, nn.MaxPool2d: 2, nn.MaxPool3d: 3}
AVERAGE_POOLS: dict[type[nn.Module], int] = {nn.AvgPool1d: 1, nn.AvgPool2d: 2, nn.AvgPool3d: 3}
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
POOLING_FUNCTIONS = (F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)


class NormProp(BatchFreeNorm):
    """γ x/ratio + β, after a layer with filters of unit length.

    Args:
        ratio: 1.21 preserves the size of gradients, 1 that of activations.
    """

    OPTIONS: ClassVar[dict[str, Any]] = {"ratio": RATIO}

    ratio: float

    def _add_state(self, device: Any, dtype: Any) -> None:
        if not is_number(self.ratio) or not 0 < self.ratio < math.inf:
            raise OptionError(f"NormProp: ratio must be a positive number; got {self.ratio!r}")

    def _forward(self, x: Tensor) -> Tensor:
        return self._affine(x, 1 / self.ratio)


class Standardize(nn.Module):
    """(x − mean)/std with two constants."""

    def __init__(self, mean: float, std: float) -> None:
        super().__init__()
        self.mean, self.std = mean, std

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std

    def extra_repr(self) -> str:
        return f"mean={self.mean:.4f}, std={self.std:.4f}"


def unit(weight: Tensor) -> Tensor:
    """Each filter divided by its length."""
    dims = list(range(1, weight.dim()))
    return weight / torch.linalg.vector_norm(weight, dim=dims, keepdim=True).clamp_min(1e-12)


class _UnitConv:
    """A convolution with its filters scaled to unit length."""

    weight: Tensor
    bias: Tensor | None
    _conv_forward: Any

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy):
            return as_leaf(self, input)
        return self._conv_forward(input, unit(self.weight), self.bias)


class UnitConv1d(_UnitConv, nn.Conv1d):
    pass


class UnitConv2d(_UnitConv, nn.Conv2d):
    pass


class UnitConv3d(_UnitConv, nn.Conv3d):
    pass


class UnitLinear(nn.Linear):
    """A linear layer with its rows scaled to unit length."""

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, fx.Proxy):
            return as_leaf(self, input)
        return F.linear(input, unit(self.weight), self.bias)


UNIT: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: UnitConv1d,
    nn.Conv2d: UnitConv2d,
    nn.Conv3d: UnitConv3d,
    nn.Linear: UnitLinear,
}


@cache
def largest_of(count: int) -> tuple[float, float]:
    """Mean and standard deviation of max(0, z₁, …, zₙ) for n independent standard Gaussians.

    The largest has the distribution Φⁿ, so E[max] = ∫₀ (1 − Φⁿ) dz and E[max²] = ∫₀ 2z (1 − Φⁿ) dz.
    """
    z = torch.linspace(0, 12, 20001, dtype=torch.float64)
    tail = -torch.expm1(count * torch.log(torch.special.ndtr(z)))
    mean = float(torch.trapezoid(tail, z))
    square = float(torch.trapezoid(2 * z * tail, z))
    return mean, math.sqrt(square - mean**2)


def after_pooling(pool: nn.Module) -> Standardize:
    """The normalization after pooling of normalized ReLUs, for independent values in the window."""
    dims = MAX_POOLS.get(type(pool)) or AVERAGE_POOLS[type(pool)]
    size: Any = pool.kernel_size
    count = size**dims if isinstance(size, int) else math.prod(size)
    if type(pool) in AVERAGE_POOLS:
        return Standardize(0.0, 1 / math.sqrt(count))
    mean, std = largest_of(count)
    return Standardize((mean - RELU_MEAN) / RELU_STD, std / RELU_STD)


class Refusal(Exception):
    """NormProp does not support the model; the message says why."""


def refuse(model: nn.Module) -> str | None:
    """The reason why `model` cannot be converted to NormProp, or None."""
    norms = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    inner = {type(layer.act) for layer in norms if has_activation(layer)} - {nn.ReLU, nn.Identity}
    if inner:
        return f"its norms include {inner.pop().__name__}; normprop supports ReLU only"
    try:
        plan(model, norms)
    except Refusal as reason:
        return str(reason)
    return None


def plan(model: nn.Module, norms: list[Any]) -> tuple[set[nn.Module], ...]:
    """The modules to change besides the norms: those before them, the ReLUs and the poolings."""
    if not norms:
        return set(), set(), set()
    if model in norms:
        raise Refusal("a single norm has no filters; convert the model that contains it")
    try:
        wiring = Wiring(model)
    except NotTraceable as error:
        raise Refusal(f"normprop needs the graph of the model, which cannot be traced ({error})") from None
    for node in wiring.graph.nodes:
        if len(wiring.tensors(node)) > 1 and node.op != "output":
            raise Refusal(
                f"its branches are joined ({wiring.name(node)}), as in a residual network; the moments of the sum or "
                "concatenation are unknown. normprop supports chains of convolution, norm, ReLU and pooling only"
            )
    feeding, activating, pooling = set(), set(), set()
    for norm in norms:
        for node in wiring.sites.get(norm, ()):
            feeding.add(_feeder(wiring, node))
            behind = wiring.behind(node)
            if behind is not None and wiring.activation(behind, (nn.ReLU,)):
                activating.add(behind)
                pooling |= _pooling(wiring, behind)
            else:
                _check_behind(wiring, node, behind)
    return tuple(_modules(wiring, nodes) for nodes in (feeding, activating, pooling))


def _feeder(wiring: Wiring, node: fx.Node) -> fx.Node:
    feeder = wiring.before(node)
    if feeder is None or type(wiring.module(feeder)) not in UNIT:
        found = "a result that is also used elsewhere" if feeder is None else wiring.name(feeder)
        raise Refusal(
            f"{wiring.name(node)} is fed by {found}; normprop needs a convolution or a linear layer directly before "
            "each norm"
        )
    return feeder


def _check_behind(wiring: Wiring, node: fx.Node, behind: fx.Node | None) -> None:
    """A norm may be followed by the next layer, dropout, flattening or the output instead of ReLU."""
    allowed = (*UNIT, *DROPOUTS, nn.Flatten)
    if behind is not None and (behind.op == "output" or type(wiring.module(behind)) in allowed):
        return
    found = "several operations" if behind is None else wiring.name(behind)
    raise Refusal(f"{wiring.name(node)} is followed by {found}; normprop supports ReLU only")


def _pooling(wiring: Wiring, node: fx.Node) -> set[fx.Node]:
    """The pooling after a ReLU, if there is one. A global average is not normalized, because it ends the network."""
    behind = wiring.behind(node, (nn.Identity, *DROPOUTS))
    if behind is None:
        return set()
    pool: Any = wiring.module(behind)
    if behind.target in POOLING_FUNCTIONS or getattr(pool, "return_indices", False):
        raise Refusal(f"{wiring.name(behind)} is a pooling that cannot be normalized; use nn.MaxPool or nn.AvgPool")
    return {behind} if type(pool) in MAX_POOLS or type(pool) in AVERAGE_POOLS else set()


def _modules(wiring: Wiring, nodes: set[Any]) -> set[nn.Module]:
    """The modules that `nodes` call, and that no other node may call."""
    for node in nodes:
        if node.op != "call_module":
            raise Refusal(f"{wiring.name(node)} is called as a function; normprop needs the module, such as nn.ReLU()")
        others = [wiring.name(site) for site in wiring.sites[wiring.module(node)] if site not in nodes]
        if others:
            raise Refusal(f"{wiring.name(node)} is also used without a norm before it; use a separate module there")
    return {wiring.module(node) for node in nodes}


def surgery(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Use filters of unit length before the norms, and normalize after ReLU and pooling."""
    feeders, relus, pools = plan(model, fresh_layers(model, NormProp))
    new: dict[nn.Module, nn.Module] = {}
    for feeder in feeders:
        new[feeder] = takes_over(feeder, UNIT[type(feeder)])
        new[feeder].register_parameter("bias", None)  # β is the bias
    for relu in relus:
        new[relu] = _followed(relu, Standardize(RELU_MEAN, RELU_STD))
    for pool in pools:
        new[pool] = _followed(pool, after_pooling(pool))
    replace_modules(model, new)


def _followed(module: nn.Module, by: Standardize) -> nn.Module:
    """A copy of `module`, followed by `by`. It is a copy, because the original is being replaced."""
    return nn.Sequential(takes_over(module, type(module)), by).train(module.training)


ENTRY: dict[str, Any] = {
    "name": "normprop",
    "title": "Normalization Propagation",
    "paper": "Arpit, Zhou, Kota and Govindaraju, Normalization Propagation: A Parametric Technique for Removing "
    "Internal Covariate Shift in Deep Networks, ICML 2016",
    "replace": NormProp.replacing,
    "folds": True,
    "learning_rate": "lower than for BN",
    "refuse": refuse,
    "surgery": surgery,
}
