"""Norms that contain the nonlinearity, and the activation that stood behind batch norm.

Which norms should apply theirs? Those that an activation follows; a norm at the end of a residual branch should not.
And the activation itself goes where that is safe: it is a module of the model, carries no hooks, and is called behind
such norms only. One that is called as a function, or also elsewhere, stays and acts on the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from itertools import pairwise

from torch import nn

from memnorm.errors import warn
from memnorm.modules import replace_modules
from memnorm.norms.wiring import Unseen, Wiring, every

Kinds = tuple[type[nn.Module], ...]


def absorb(model: nn.Module, norms: Collection[nn.Module], kinds: Kinds) -> set[nn.Module]:
    """Those of `norms` that an activation of one of `kinds` follows; the activation is removed where that is safe.

    What the trace of the model does not reach is judged by its place in an `nn.Sequential`.
    """
    if model in norms:
        return set(norms)  # nothing is known of what follows a layer by itself
    try:
        wiring = Wiring(model)
    except Unseen as reason:
        followed, spare = _neighbours(model, norms, kinds)
        if len(followed) < len(norms):
            warn(
                f"convert: what follows {len(norms) - len(followed)} of {len(norms)} norms of {type(model).__name__} "
                f"cannot be seen ({reason}); they are used without their nonlinearity, and any activation stays."
            )
    else:
        followed, spare = _traced(wiring, norms, kinds)
        unreached = [norm for norm in norms if norm not in wiring.sites]
        more, also_spare = _neighbours(model, unreached, kinds)
        followed |= more
        spare |= {one for one in also_spare if one not in wiring.sites}
    replace_modules(model, {one: nn.Identity().train(one.training) for one in spare if not _has_hooks(one)})
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
    """Norms with an activation right behind them in a sequence, and the activations that have no other place."""
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
