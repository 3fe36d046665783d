"""The operations before and after each norm of a model, from its traced graph.

Some norms replace the following activation or change the preceding convolution. The `torch.fx` graph contains both,
also if layers are called from a custom `forward`. A model whose forward depends on the data cannot be traced.

Norms that include an activation (`absorb`) apply it only where one followed the batch norm; a norm at the end of a
residual branch does not. The activation itself is removed if that is safe: if it is a module of the model without hooks
that is called after such norms only. An activation that is called as a function, or also elsewhere, stays and is
applied to the result.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from memnorm.errors import warn
from memnorm.modules import replace_modules

Kinds = tuple[type[nn.Module], ...]
ACTIVATIONS: dict[type[nn.Module], tuple[Any, ...]] = {
    nn.ReLU: (F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_"),
    nn.SiLU: (F.silu,),
}
SIZES = ("size", "dim", "ndimension", "numel")  # tensor methods that do not return a tensor


class NotTraceable(Exception):
    """The model cannot be traced; the message says why."""


class _Tracer(fx.Tracer):
    """A tracer in which norms are single nodes."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        own = type(m).__module__.startswith(("memnorm.norms.", "memnorm.layers"))
        return own or isinstance(m, _BatchNorm) or super().is_leaf_module(m, module_qualified_name)


class Wiring:
    """The graph of `model`, in which norms are single nodes. Raises `NotTraceable`."""

    def __init__(self, model: nn.Module) -> None:
        parameters = inspect.signature(model.forward).parameters.values()
        defaults = {one.name: one.default for one in parameters if one.default is not one.empty}
        try:
            with torch.random.fork_rng(devices=[]):
                self.graph = _Tracer().trace(model, concrete_args=defaults or None)
        except Exception as error:
            raise NotTraceable(f"{type(error).__name__}: {error}".split("\n")[0]) from error
        self._model = model
        self.sites: dict[nn.Module, list[fx.Node]] = {}
        for node in self.graph.nodes:
            if node.op == "call_module":
                self.sites.setdefault(self.module(node), []).append(node)

    def module(self, node: fx.Node) -> nn.Module:
        """The module that a node calls; an empty module for other nodes."""
        return self._model.get_submodule(str(node.target)) if node.op == "call_module" else nn.Module()

    def name(self, node: fx.Node) -> str:
        """For messages: `features.3 (ReLU)`, or the name of a function."""
        if node.op == "call_module":
            return f"{node.target} ({type(self.module(node)).__name__})"
        return "the output" if node.op == "output" else str(getattr(node.target, "__name__", node.target))

    def behind(self, node: fx.Node, skipping: Kinds = (nn.Identity,)) -> fx.Node | None:
        """The only node that uses the result of `node`, skipping the given modules; None if there are several."""
        while len(node.users) == 1:
            (node,) = node.users
            if not isinstance(self.module(node), skipping):
                return node
        return None

    def before(self, node: fx.Node) -> fx.Node | None:
        """The only input of `node`, skipping identities; None if there are several or others use it, too."""
        while True:
            sources = self.tensors(node)
            if len(sources) != 1 or len(sources[0].users) != 1:
                return None
            (node,) = sources
            if not isinstance(self.module(node), nn.Identity):
                return node

    def tensors(self, node: fx.Node) -> list[fx.Node]:
        """The input nodes of `node` that are tensors, without parameters and sizes."""
        return [one for one in node.all_input_nodes if one.op != "get_attr" and not _is_size(one)]

    def activation(self, node: fx.Node | None, kinds: Kinds) -> bool:
        """Return True if `node` is one of these activations, as a module or as a function."""
        if node is None:
            return False
        if node.op == "call_module":
            return type(self.module(node)) in kinds
        return any(node.target in ACTIVATIONS[kind] for kind in kinds)


def _is_size(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in SIZES
    if node.op == "call_function" and getattr(node.target, "__name__", "") in ("getattr", "getitem"):
        named = node.args[1] in ("shape", "ndim", "dtype", "device") if len(node.args) > 1 else False
        return named or any(_is_size(one) for one in node.all_input_nodes)
    return node.op == "call_function" and bool(node.all_input_nodes) and all(map(_is_size, node.all_input_nodes))


def every(nodes: Iterable[fx.Node], condition: Callable[[fx.Node], bool]) -> bool:
    """Return True if there are nodes and the condition holds for all of them."""
    nodes = list(nodes)
    return bool(nodes) and all(map(condition, nodes))


def absorb(model: nn.Module, norms: Collection[nn.Module], kinds: Kinds) -> set[nn.Module]:
    """Return the `norms` that are followed by an activation of one of `kinds`. Remove the activation where that is
    safe.

    For norms that are not in the traced graph, the order in an `nn.Sequential` decides.
    """
    if model in norms:
        return set(norms)  # what follows a single layer is unknown
    try:
        wiring = Wiring(model)
    except NotTraceable as reason:
        followed, removable = _neighbours(model, norms, kinds)
        if len(followed) < len(norms):
            warn(
                f"convert: what follows {len(norms) - len(followed)} of {len(norms)} norms of {type(model).__name__} "
                f"is unknown ({reason}); they are used without their nonlinearity, and any activation stays."
            )
    else:
        followed, removable = _traced(wiring, norms, kinds)
        unreached = [norm for norm in norms if norm not in wiring.sites]
        more, also_removable = _neighbours(model, unreached, kinds)
        followed |= more
        removable |= {one for one in also_removable if one not in wiring.sites}
    replace_modules(model, {one: nn.Identity().train(one.training) for one in removable if not _has_hooks(one)})
    return followed


def _traced(wiring: Wiring, norms: Collection[nn.Module], kinds: Kinds) -> tuple[set[nn.Module], set[nn.Module]]:
    followed = {
        norm
        for norm in norms
        if every(wiring.sites.get(norm, ()), lambda node: wiring.activation(wiring.behind(node), kinds))
    }
    own = {wiring.behind(node) for norm in followed for node in wiring.sites[norm]}
    return followed, {module for module, sites in wiring.sites.items() if every(sites, own.__contains__)}


def _neighbours(model: nn.Module, norms: Collection[nn.Module], kinds: Kinds) -> tuple[set[nn.Module], set[nn.Module]]:
    """Norms that are directly followed by an activation in a sequence, and the activations used only there."""
    pairs = [(first, second) for first, second in _pairs(model) if first in norms and type(second) in kinds]
    places = Counter(child for parent in model.modules() for child in parent._modules.values() if child is not None)
    followed = {norm for norm, _ in pairs if places[norm] == 1}
    return followed, {activation for norm, activation in pairs if norm in followed and places[activation] == 1}


def _pairs(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    for parent in model.modules():
        if type(parent) is nn.Sequential:
            layers = [layer for layer in parent if not isinstance(layer, nn.Identity)]
            yield from pairwise(layers)


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
