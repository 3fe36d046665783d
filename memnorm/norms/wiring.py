"""The operations before and after each norm of a model, from its traced graph.

Some norms replace the following activation or change the preceding convolution. The `torch.fx` graph contains both,
also if layers are called from a custom `forward`. A model whose forward depends on the data cannot be traced.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

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

    def behind(self, node: fx.Node, skipping: tuple[type[nn.Module], ...] = (nn.Identity,)) -> fx.Node | None:
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

    def activation(self, node: fx.Node | None, kinds: tuple[type[nn.Module], ...]) -> bool:
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
