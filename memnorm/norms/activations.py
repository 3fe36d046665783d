"""Conversion to norms that include an activation.

Only norms that are followed by an activation apply their own; a norm at the end of a residual branch does not. The
activation itself is removed if that is safe: if it is a module of the model without hooks that is called after such
norms only. An activation that is called as a function, or also elsewhere, stays and is applied to the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from itertools import pairwise

from torch import nn

from memnorm.errors import warn
from memnorm.modules import replace_modules
from memnorm.norms.wiring import NotTraceable, Wiring, every

Kinds = tuple[type[nn.Module], ...]


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
