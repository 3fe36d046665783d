"""The second forward: a batch goes through the model again, and only the recording layers keep anything of it.

Each module stays in its mode. Grad mode is off, the random state and autocast are those of the training forward, and
all other buffers of the model are restored afterwards.
"""

from __future__ import annotations

import posixpath
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from memnorm.errors import NothingToRecord, OptionError, check_module
from memnorm.layers import Recording
from memnorm.modules import layers_of, modules_of
from memnorm.recompute import not_recomputed
from memnorm.stripped import ADVICE


def recorders(model: nn.Module) -> Iterator[Recording]:
    """The layers of `model` that record statistics."""
    return (module for module in modules_of(model) if isinstance(module, Recording))


class ModuleLists(NamedTuple):
    """The modules of a model, in two lists. `others` does not contain the model itself, so that a reference to the
    lists does not keep the model alive.
    """

    recorders: list[Recording]
    others: list[nn.Module]

    @classmethod
    def of(cls, modules: Sequence[nn.Module]) -> ModuleLists:
        found = cls([], [])
        for module in modules:
            (found.recorders if isinstance(module, Recording) else found.others).append(module)  # type: ignore[arg-type]
        if found.others and found.others[0] is modules[0]:
            del found.others[0]
        return found

    def not_recording(self, model: nn.Module) -> list[nn.Module]:
        """All modules of `model` that do not record, the model included."""
        return self.others if isinstance(model, Recording) else [model, *self.others]


@contextmanager
def recording(model: nn.Module, on: bool) -> Iterator[None]:
    """Context manager that turns the recording of the layers of `model` on or off.

        with memnorm.recording(model, False):
            model(x)  # normalized as in training, and not remembered

    Layers in eval mode never record. Some norms ("two_way", "mabn") also record in backward: run the backward inside
    the context, too.
    """
    check_module(model, "recording")
    layers = list(recorders(model))
    if not layers:
        raise NothingToRecord(f"recording: {explain_no_recorder(model)}")
    if not isinstance(on, bool):
        raise OptionError(f"recording: on must be True or False; got {on!r}")
    with recorded_by(layers, layers if on else []):
        yield


@contextmanager
def recorded_by(layers: Sequence[Recording], chosen: Iterable[Recording]) -> Iterator[None]:
    """Context manager in which only the `chosen` ones of the layers record."""
    wanted = set(map(id, chosen))
    off = [layer for layer in layers if layer.recording and id(layer) not in wanted]
    on = [layer for layer in layers if not layer.recording and id(layer) in wanted]
    try:
        switch(off, False)
        switch(on, True)
        yield
    finally:
        switch(off, True)
        switch(on, False)


def switch(layers: Iterable[Recording], on: bool) -> None:
    """Set `recording` without `nn.Module.__setattr__`, which takes longer than the forward of a small layer."""
    for layer in layers:
        layer.__dict__["recording"] = on


def rerecord(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Send a batch forward again after the weights have changed, and record its new moments.

        with memnorm.recording(model, False):
            loss = criterion(model(x), target)
        loss.backward()
        optimizer.step()
        memnorm.rerecord(model, x)

    Layers in eval mode record nothing. The random state is restored afterwards. `memnorm.double_forward` does all of
    this automatically, with the random state of the training forward.
    """
    check_module(model, "rerecord")
    found = modules_of(model)
    modules = ModuleLists.of(found)
    replay(model, args, kwargs, ForwardContext.capture(found), modules.recorders, modules)


class ForwardContext(NamedTuple):
    """The state that a forward depends on besides weights and inputs: random states and autocast."""

    rng: dict[str, Any]
    autocast: dict[str, tuple[bool, torch.dtype]]

    @classmethod
    def capture(cls, modules: Iterable[nn.Module]) -> ForwardContext:
        """The current context of a model with these modules."""
        devices = _devices(modules)
        return cls(
            _rng_state(devices), {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices}
        )

    def involves_autocast(self) -> bool:
        """Return True if autocast was on or is on now."""
        return any(enabled or torch.is_autocast_enabled(device) for device, (enabled, _) in self.autocast.items())


def _devices(modules: Iterable[nn.Module]) -> list[str]:
    """The device types of the parameters, and always the CPU."""
    parameters = (one for module in modules for one in module._parameters.values() if one is not None)
    others = {one.device.type for one in parameters if not one.is_cpu} - {"meta"}
    return ["cpu", *sorted(others)]


def _rng_state(devices: Iterable[str]) -> dict[str, Any]:
    """Random states of all devices of the given types, of Python, and of numpy if it is loaded."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    for device in set(devices) - {"cpu", "python", "numpy"}:
        state[device] = torch.get_device_module(device).get_rng_state_all()
    return state


def _set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    random.setstate(state["python"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
    for device in state.keys() - {"python", "cpu", "numpy"}:
        torch.get_device_module(device).set_rng_state_all(state[device])


def replay(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: ForwardContext,
    layers: Iterable[Recording],
    modules: ModuleLists,
) -> None:
    """Run one forward of `model` in `context`. `layers` record it; nothing else changes."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    if not any(layer.training for layer in modules.recorders):
        raise NothingToRecord(f"rerecord: {explain_no_recorder(model)}")
    with (
        torch.no_grad(),
        not_recomputed,
        recorded_by(modules.recorders, layers),
        buffers_restored(modules.not_recording(model)),
        _rng(context.rng),
        _autocast(context.autocast) if context.involves_autocast() else nullcontext(),
    ):
        inner(*args, **kwargs)


@contextmanager
def _autocast(states: dict[str, tuple[bool, torch.dtype]]) -> Iterator[None]:
    with ExitStack() as stack:
        for device, (enabled, dtype) in states.items():
            # With the cache, a nested autocast would return the weights from before the step.
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))
        yield


@contextmanager
def _rng(state: dict[str, Any]) -> Iterator[None]:
    before = _rng_state(state)
    try:
        _set_rng_state(state)
        yield
    finally:
        _set_rng_state(before)


@contextmanager
def buffers_restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context manager that restores every buffer of `modules`: running statistics, power iterations, counters."""
    kept: list[tuple[nn.Module, str, Tensor, Tensor]] = []
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and not is_lazy(buffer):
                kept.append((module, name, buffer, buffer.clone()))
    try:
        yield
    finally:
        for module, name, buffer, value in kept:
            module._buffers[name] = buffer
            # Autograd does not count writes through .data, so a graph that saved the buffer stays valid.
            buffer.data.copy_(value)


def explain_no_recorder(model: nn.Module) -> str:
    """Say why a forward of `model` would record nothing, and what to do."""
    name = type(model).__name__
    if any(recorders(model)):
        return f"every memorized layer of {name} is in eval mode and records nothing. Call model.train() first."
    kinds = sorted({type(module).__name__ for module in model.modules() if "Norm" in type(module).__name__})
    if "SyncBatchNorm" in kinds:
        return f"{name} has no layer that records statistics; its norms are {', '.join(kinds)}. {ADVICE}"
    found = f"its norms are {', '.join(kinds)}" if kinds else "it has no norm"
    return f"{name} has no layer that records statistics; {found}. Call memnorm.convert(model) first."


def batches_recorded(model: nn.Module) -> dict[str, int]:
    """The number of recorded batches by layer name, including those not yet exchanged between processes."""
    found = {}
    for name, layer in layers_of(model, Recording).items():
        count = getattr(layer, "num_batches_tracked", None)
        if count is not None and not count.is_meta:
            found[name] = int(count) + len(getattr(layer, "_outgoing", None) or ())
    return found


def explain_no_forward(model: nn.Module, recorded_before: dict[str, int]) -> str:
    """Say why there was no forward of `model` before the first step, and which module to pass instead."""
    name = type(model).__name__
    direct = [layer for layer, count in batches_recorded(model).items() if count > recorded_before.get(layer, 0)]
    called = _common_parent(direct)
    if called:
        return (
            f"double_forward: the optimizer stepped, but {name} itself was never called; layers inside its {called!r} "
            f"were. Pass the module that the loop calls: double_forward(model.{called}, optimizer)."
        )
    reached = "its layers ran without it" if direct else "none of its layers ran in training mode"
    return (
        f"double_forward: the optimizer stepped, but {name} itself was never called ({reached}). Pass the module that "
        "the loop calls; if the model is compiled by torch.compile or wrapped in DistributedDataParallel, that is the "
        "wrapper."
    )


def _common_parent(names: list[str]) -> str:
    """The path of the innermost module that contains all named modules: a.b for a.b.x and a.b.y."""
    parents = [name.rpartition(".")[0].replace(".", "/") for name in names]
    return posixpath.commonpath(parents).replace("/", ".") if parents else ""
