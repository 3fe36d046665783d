"""The options `include` and `exclude` of `memnorm.convert`: which norms of a model are replaced.

A rule is a name, a glob pattern, a class or a function `(name, module) -> bool`. Names, patterns and classes match the
norm itself or a module that contains it, so `"backbone"` stands for every norm of the backbone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from memnorm.errors import OptionError
from memnorm.text import suggestion

Rule = str | type | Callable[[str, nn.Module], bool]
LEFT_OUT = "_memnorm_left_out"  # attribute of a norm that the rules left out: the reason


def left_out(
    model: nn.Module,
    norms: Mapping[str, nn.Module],
    include: Rule | Sequence[Rule] | None,
    exclude: Rule | Sequence[Rule] | None,
) -> dict[str, str]:
    """The norms that the rules leave out, with the reason. `norms` are the norms of `model` by name."""
    reasons: dict[str, str] = {}
    if include is not None:
        rules = _rules("include", include)
        included = _matched("include", model, norms, rules)
        because = f"not in include={', '.join(map(_described, rules)) or []}"
        reasons |= {name: because for name in norms if name not in included}
    if exclude is not None:
        excluded = _matched("exclude", model, norms, _rules("exclude", exclude))
        reasons |= {name: f"exclude={_described(rule)}" for name, rule in excluded.items()}
    return reasons


def mark(model: nn.Module, reasons: Mapping[nn.Module, str]) -> None:
    """Let these modules carry the reason why they were left out, for `memnorm.summary`, and no others."""
    for module in model.modules():
        vars(module).pop(LEFT_OUT, None)
        if module in reasons:
            vars(module)[LEFT_OUT] = reasons[module]


def _rules(option: str, given: Any) -> list[Rule]:
    rules = list(given) if isinstance(given, (list, tuple, set, frozenset)) else [given]
    for rule in rules:
        if not (isinstance(rule, str) or callable(rule)):
            raise OptionError(
                f"convert: {option} must be a name, a glob pattern, a class, a function (name, module) -> bool, or a "
                f"list of these; got {rule!r}"
            )
    return rules


def _matched(option: str, model: nn.Module, norms: Mapping[str, nn.Module], rules: list[Rule]) -> dict[str, Rule]:
    """The norms that match, each with its last rule. A name, pattern or class that matches none is an error."""
    around, found = _around(model, norms), {}
    for rule in rules:
        names = [name for name, layer in norms.items() if _matches(rule, name, layer, around[name])]
        if not names and (isinstance(rule, (str, type)) or option == "include"):
            raise OptionError(_no_match(option, rule, model, norms, around))
        found.update(dict.fromkeys(names, rule))
    return found


def _around(model: nn.Module, norms: Mapping[str, nn.Module]) -> dict[str, dict[str, nn.Module]]:
    """For each norm, itself and the modules that contain it, except the model, by every name that they have."""
    by_name = dict(model.named_modules(remove_duplicate=False))
    first = {layer: name for name, layer in norms.items()}
    around: dict[str, dict[str, nn.Module]] = {name: {} for name in norms}
    for path, module in by_name.items():
        if module in first:
            parts = path.split(".")
            outer = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
            around[first[module]].update({name: by_name[name] for name in outer})
    return around


def _matches(rule: Rule, name: str, layer: nn.Module, around: Mapping[str, nn.Module]) -> bool:
    if isinstance(rule, str):
        return any(one == rule or fnmatchcase(one, rule) for one in around)
    if isinstance(rule, type):
        return any(isinstance(module, rule) for module in around.values())
    return bool(rule(name, layer))


def _no_match(option: str, rule: Rule, model: nn.Module, norms: Mapping[str, nn.Module], around: Any) -> str:
    if isinstance(rule, str):
        names = dict.fromkeys(name for places in around.values() for name in places)
        hint = suggestion([repr(one) for one in get_close_matches(rule.strip(".*?"), names, cutoff=0.5)])
    else:
        hint = f" Its norms are {', '.join(sorted({type(layer).__name__ for layer in norms.values()}))}."
    return (
        f"convert: {option}={_described(rule)} matches no batch norm of {type(model).__name__}.{hint} "
        "print(memnorm.summary(model)) lists the names and classes."
    )


def _described(rule: Rule) -> str:
    return repr(rule) if isinstance(rule, str) else getattr(rule, "__qualname__", repr(rule))
