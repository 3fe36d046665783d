"""Replace the batch norms of a model (`convert`) and list its norms (`summary`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase
from torch.nn.utils import parametrize

from memnorm import norms, selection
from memnorm.distributed import keep_local, unkeep_local
from memnorm.errors import DTypeError, NothingToConvert, OptionError, check_module, warn
from memnorm.frozen import is_frozen, reason_to_keep
from memnorm.layers import MemorizedBatchNorm, Recording
from memnorm.modules import replace_modules
from memnorm.norms.base import RunningNorm, has_activation, in_place_of
from memnorm.plain import original, refuse_wrapped, undo_surgery
from memnorm.stripped import unwatch_saving, watch_saving
from memnorm.text import table

STOCK_CLASSES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, _BatchNorm)
COSMETIC_METHODS = {"__init__", "__repr__", "__annotate__", "__dict__", "__weakref__"} | {
    "extra_repr",
    "reset_parameters",
    "_check_input_dim",
}
FROZEN = 'frozen; convert(model, frozen="convert") makes it trainable'


def convert(
    model: nn.Module,
    norm: str | Callable[..., nn.Module] = "mbn",
    *,
    include: selection.Rule | Sequence[selection.Rule] | None = None,
    exclude: selection.Rule | Sequence[selection.Rule] | None = None,
    frozen: Literal["keep", "convert"] = "keep",
    **options: Any,
) -> nn.Module:
    """Replace every batch norm of `model` in place and return the model. If `model` is a batch norm, return the new
    layer.

        model = memnorm.convert(model, "two_way")                   # two-way memory: for micro-batches
        model = memnorm.convert(model)                              # memorized batch norm, the paper's defaults
        model = memnorm.convert(model, memory_size=None, decay=0.99)
        model = memnorm.convert(model, include="backbone", exclude=["*.downsample.*", nn.BatchNorm1d])
        model = memnorm.convert(detector, "two_way", frozen="convert")

    Parameters stay the same objects, so an optimizer that was created before the conversion still works. Running
    statistics, mode, device, hooks and sharing are kept, and `convert(model).eval()` computes the same as
    `model.eval()` did, except that "two_way" centres the weights of an untrained model. Norms outside this family may
    add parameters ("frn", "evonorm_s0") or replace those of convolutions ("weight_norm"): create the optimizer after
    such a conversion (see `docs/norms/`).

    timm's BatchNormAct2d keeps its activation. Lazy and parametrized norms and subclasses with their own forward are
    skipped with a warning. Memorized layers get the given options and keep their memory. Layers of another norm are
    replaced as the batch norm that they were converted from.

    Args:
        model: a module that is not yet wrapped for distributed training.
        norm: a name of `memnorm.norms.available()`, or a function `(num_features, **options)` that returns a module.
        include: replace these norms only: a name, a glob pattern, a class, a function `(name, module) -> bool`, or a
            list of these. Names, patterns and classes match a norm or a module that contains it: `"backbone"` stands
            for every norm of the backbone. `memnorm.summary` shows which norms were left out, and by which rule.
        exclude: leave these norms as they are, also where `include` matches.
        frozen: "keep" leaves frozen batch norms (`FrozenBatchNorm2d` of torchvision, detectron2, DETR, …) as they are,
            with a warning. "convert" makes them trainable: their constants become the weight, the bias and the trained
            running statistics, which are the first memory. Create the optimizer afterwards.
        options: for "two_way": `decay`, `strength`, `warmup`, `center`, `sync`; for "mbn": `memory_size`, `decay`,
            `strength`, `prior_weight`, `prior_from_init`, `sync`; for others, see their page in `docs/norms/`.
    """
    entry = _checked_entry(model, norm, frozen)
    found = {
        name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm) or _is_similar(layer)
    }
    left_out = selection.left_out(model, found, include, exclude) if found else {}
    wanted = {name: layer for name, layer in found.items() if name not in left_out}
    reasons = {name: _reason_to_skip(layer, frozen) for name, layer in wanted.items()}
    skipped = {name: reason for name, reason in reasons.items() if reason is not None}
    if len(skipped) == len(wanted):
        raise NothingToConvert(_nothing_to_convert(model, skipped, left_out))
    new = _replacements([layer for name, layer in wanted.items() if name not in skipped], norm, entry, options)
    undo_surgery(model)
    unkeep_local(model)
    if skipped:
        warn(f"convert skipped: {_listing(skipped)}")
    converted = replace_modules(model, new)
    kept = {found[name]: reason for name, reason in left_out.items()}
    selection.mark(converted, kept)
    keep_local(converted)
    unwatch_saving(converted)
    if converted not in new.values() and any(isinstance(layer, Recording) for layer in converted.modules()):
        watch_saving(converted)
    for other in _norms_of(kept):
        if other is not entry and other.settle and other.surgery:
            other.surgery(converted, {})
    if entry and entry.surgery:
        entry.surgery(converted, options)
    return converted


def _checked_entry(model: nn.Module, norm: Any, frozen: Any) -> norms.Norm | None:
    """Check the arguments of `convert`. Return the registry entry of the norm, or None for a factory."""
    check_module(model, "convert")
    refuse_wrapped(model, "convert")
    if not (isinstance(norm, str) or callable(norm)):
        raise OptionError(f"convert: norm must be a name or a function (num_features, **options); got {norm!r}")
    if not isinstance(frozen, str) or frozen not in ("keep", "convert"):
        raise OptionError(f"convert: frozen must be 'keep' or 'convert'; got {frozen!r}")
    entry = norms.get(norm) if isinstance(norm, str) else None
    reason = entry.refuse(model) if entry and entry.refuse else None
    if reason:
        raise OptionError(f"convert: norm {norm!r} cannot be put into {type(model).__name__}: {reason}")
    return entry


def _replacements(
    layers: Sequence[nn.Module], norm: Any, entry: norms.Norm | None, options: dict[str, Any]
) -> dict[nn.Module, nn.Module]:
    """The new layer for each of these."""
    if entry and entry.refuse and any(map(is_frozen, layers)):  # `refuse` has not seen them
        raise OptionError(
            f"convert: norm {norm!r} cannot replace frozen layers directly. Make them batch norms first: "
            f'convert(convert(model, "bn", frozen="convert"), {norm!r})'
        )
    _check_options(norm, entry.replace if entry else norm, options)
    build = entry.replace if entry else _from_factory(norm)
    new = {layer: build(original(layer, norm), **options) for layer in layers}
    for replacement in new.values():
        if not isinstance(replacement, nn.Module):
            raise DTypeError(f"convert: {_described(norm)} must return a torch.nn.Module; it returned {replacement!r}")
    return new


def _norms_of(layers: Iterable[nn.Module]) -> list[norms.Norm]:
    """The entries of the registry that these layers belong to."""
    layers = list(layers)
    names = {layer.norm for layer in layers if isinstance(layer, MemorizedBatchNorm)}
    classes = [type(layer) for layer in layers if isinstance(layer, RunningNorm)]
    entries = map(norms.get, norms.available())
    return [one for one in entries if one.name in names or getattr(one.replace, "__self__", None) in classes]


def _check_options(norm: Any, function: Any, options: dict[str, Any]) -> None:
    """Raise an error if `function` cannot be called with a layer (or its channels) and these options."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(None, **options)
    except TypeError as error:
        known = [one.name for one in [*signature.parameters.values()][1:] if one.kind is not one.VAR_POSITIONAL]
        has = f"its options are {', '.join(known)}" if known else "it has no options"
        raise OptionError(f"convert: {_described(norm)} does not take the options {options}: {error}; {has}") from None


def _described(norm: Any) -> str:
    return f"norm {norm!r}" if isinstance(norm, str) else f"{getattr(norm, '__qualname__', norm)}(num_features)"


def _reason_to_skip(layer: nn.Module, frozen: str = "keep") -> str | None:
    """The reason not to replace a norm, or None if its replacement can do everything that it does."""
    if isinstance(layer, (MemorizedBatchNorm, RunningNorm)) or (
        has_activation(layer) and "forward" not in layer.__dict__
    ):
        return None
    if isinstance(layer, torch.jit.ScriptModule):
        return "scripted; convert before torch.jit.script"
    if is_frozen(layer):
        return reason_to_keep(layer) or (FROZEN if frozen == "keep" else None)
    if not isinstance(layer, _BatchNorm):
        return f"{type(layer).__name__} is not torch's batch norm: frozen statistics, or its own forward"
    if isinstance(layer, _LazyNormBase):
        return "lazy; run one batch through the model first"
    if parametrize.is_parametrized(layer):
        return "parametrized"
    own = sorted(_additions(layer))
    return f"has its own {', '.join(own)}" if own else None


def _additions(layer: _BatchNorm) -> set[str]:
    """The methods that a subclass or an instance overrides, such as forward or train."""
    mro = type(layer).__mro__
    added = mro[: min(mro.index(stock) for stock in STOCK_CLASSES if stock in mro)]
    members = {name for cls in added for name, member in vars(cls).items() if hasattr(member, "__get__")}
    return (members - COSMETIC_METHODS) | ({"forward"} & layer.__dict__.keys())


def _is_similar(layer: nn.Module) -> bool:
    """Return True for a norm with running statistics that is not torch's batch norm, such as FrozenBatchNorm2d or
    in-place ABN.
    """
    if isinstance(layer, torch.jit.ScriptModule):
        return str(getattr(layer, "original_name", "")).endswith(("BatchNorm1d", "BatchNorm2d", "BatchNorm3d"))
    tensors = layer._buffers.keys() | layer._parameters.keys()
    known = isinstance(layer, (_BatchNorm, nn.modules.instancenorm._InstanceNorm))
    return not known and {"running_mean", "running_var"} <= tensors


def _from_factory(factory: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def build(layer: Any, /, **options: Any) -> nn.Module:
        new = factory(layer.num_features, **options)
        if not isinstance(new, nn.Module):
            return new  # `convert` raises an error
        replacement = in_place_of(layer, new)
        for name in ("weight", "bias"):
            own, theirs = getattr(new, name, None), getattr(layer, name)
            if isinstance(own, nn.Parameter) and theirs is not None and own.shape == theirs.shape:
                setattr(new, name, theirs)
        with torch.no_grad():
            for name, buffer in layer.named_buffers(recurse=False):
                own = new._buffers.get(name)
                if own is not None and own.shape == buffer.shape:
                    own.copy_(buffer)
        return replacement

    return build


def _nothing_to_convert(model: nn.Module, skipped: dict[str, str], left_out: dict[str, str]) -> str:
    name = type(model).__name__
    if left_out:
        others = f"; skipped: {_listing(skipped)}" if skipped else ""
        return f"convert: include and exclude leave no batch norm of {name} to replace: {_listing(left_out)}{others}"
    if skipped:
        return f"convert: {name} has no batch norm that can be replaced; skipped: {_listing(skipped)}"
    kinds = sorted({type(module).__name__ for module in model.modules() if "Norm" in type(module).__name__})
    found = f"its norms are {', '.join(kinds)}" if kinds else "it has no norm"
    return f"convert: {name} has no batch norm; {found}. memnorm replaces torch.nn.BatchNorm1d/2d/3d and SyncBatchNorm."


def _listing(reasons: dict[str, str], limit: int = 8) -> str:
    frozen = [name or "the model itself" for name, reason in reasons.items() if reason == FROZEN]
    lines = [f"{name or 'the model itself'} ({reason})" for name, reason in reasons.items() if reason != FROZEN]
    more = f" and {len(lines) - limit} more (memnorm.summary lists them)" if len(lines) > limit else ""
    lines = lines[:limit]
    if frozen:
        several = len(frozen) > 1
        layers = f"{len(frozen)} frozen layers, such as" if several else "1 frozen layer,"
        them = "them" if several else "it"
        lines.insert(0, f'{layers} {frozen[0]} (convert(model, frozen="convert") makes {them} trainable)')
    return "; ".join(lines) + more


@dataclass(frozen=True)
class NormLayer:
    """One row of a `Summary`."""

    name: str
    kind: str
    channels: int | None
    mode: str
    note: str


@dataclass(frozen=True)
class Summary:
    """The norm layers of a model; `str()` is a table."""

    layers: tuple[NormLayer, ...]

    def __str__(self) -> str:
        header = ("layer", "kind", "channels", "mode", "")
        rows = [
            (row.name or "(the model)", row.kind, str(row.channels or "?"), row.mode, row.note) for row in self.layers
        ]
        return table([header, *rows]) if rows else "no norm layer"


def summary(model: nn.Module) -> Summary:
    """List the norm layers of `model` with class, channels, mode and memory, or the reason why `convert` has left them
    out or skips them.

        print(memnorm.summary(memnorm.convert(model, exclude="head")))
    """
    check_module(model, "summary")
    rows = []
    for name, module in model.named_modules():
        is_norm = isinstance(module, _BatchNorm) or _is_similar(module) or "Norm" in type(module).__name__
        if is_norm:
            mode = "train" if module.training else "eval"
            rows.append(NormLayer(name, type(module).__name__, _channels(module), mode, _note(module)))
    return Summary(tuple(rows))


def _channels(module: nn.Module) -> int | None:
    if is_frozen(module):
        return len(module.get_buffer("running_mean"))
    named = (getattr(module, name, None) for name in ("num_features", "num_channels"))
    return next((one for one in named if isinstance(one, int)), None)


def _note(layer: nn.Module) -> str:
    if isinstance(layer, (MemorizedBatchNorm, RunningNorm)):
        return layer.note()
    if isinstance(layer, _BatchNorm) or _is_similar(layer):
        if selection.LEFT_OUT in vars(layer):
            return f"left out: {vars(layer)[selection.LEFT_OUT]}"
        reason = _reason_to_skip(layer)
        return "plain, can be converted" if reason is None else f"skipped: {reason}"
    return "not a batch norm"
