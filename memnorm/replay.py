"""The second forward: one more pass of a batch through a model, whose only lasting effect is what its recording layers
remember.

The pass runs in the mode each module is in, without grad, under the random state and the autocast of the training
forward, with every other buffer of the model put back afterwards.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from memnorm.errors import NothingToRecord
from memnorm.layers import Recording
from memnorm.modules import modules_of
from memnorm.recompute import deliberate
from memnorm.stripped import ADVICE


def recorders(model: nn.Module) -> Iterator[Recording]:
    """The layers of `model` that record statistics."""
    return (module for module in modules_of(model) if isinstance(module, Recording))


class Census(NamedTuple):
    """The modules of a model, sorted once for all that a step asks. Not the model itself if it does not record: who
    keeps a census must not keep a model alive.
    """

    recorders: list[Recording]
    others: list[nn.Module]

    @classmethod
    def of(cls, modules: Sequence[nn.Module]) -> Census:
        found = cls([], [])
        for module in modules:
            (found.recorders if isinstance(module, Recording) else found.others).append(module)  # type: ignore[arg-type]
        if found.others and found.others[0] is modules[0]:
            del found.others[0]
        return found

    def without_record(self, model: nn.Module) -> list[nn.Module]:
        """All modules of `model` that do not record."""
        return self.others if isinstance(model, Recording) else [model, *self.others]


def named_recorders(model: nn.Module) -> dict[str, Recording]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Recording)}


@contextmanager
def recording(model: nn.Module, on: bool) -> Iterator[None]:
    """Within the context, the layers of `model` record what they see in training mode (`on=True`) or nothing at all
    (`on=False`). Some norms ("two_way", "mabn") record in backward, too: keep the backward inside the context as well.
    """
    layers = list(recorders(model))
    if not layers:
        raise NothingToRecord(f"recording: {nothing_records(model)}")
    with recorded_by(layers, layers if on else []):
        yield


@contextmanager
def recorded_by(layers: Sequence[Recording], chosen: Iterable[Recording]) -> Iterator[None]:
    """Within the context, the `chosen` ones of the layers record, and no other."""
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
    """Set the layers' `recording`, past `nn.Module.__setattr__`, which takes longer than a small layer's forward."""
    for layer in layers:
        layer.__dict__["recording"] = on


def rerecord(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Send a batch forward once more, after the weights have changed, so that the memory holds its present moments.

        with memnorm.recording(model, False):
            loss = criterion(model(x), target)
        loss.backward()
        optimizer.step()
        memnorm.rerecord(model, x)

    Layers in eval mode stay as they are. Random numbers are drawn from the present state, which is then restored.
    `memnorm.double_forward` does all of this by itself, with the random state of the training forward.
    """
    modules = modules_of(model)
    census = Census.of(modules)
    replay(model, args, kwargs, Surroundings.now(modules), census.recorders, census)


class Surroundings(NamedTuple):
    """What a forward depends on besides weights and inputs: random states and autocast."""

    rng: dict[str, Any]
    autocast: dict[str, tuple[bool, torch.dtype]]

    @classmethod
    def now(cls, modules: Iterable[nn.Module], libraries: bool = True) -> Surroundings:
        """As they are now for a model of these modules; without `libraries`, the random states of Python and numpy,
        which take long, are missing.
        """
        devices = _devices(modules)
        return cls(
            _rng_state(devices, libraries),
            {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices},
        )

    def meets_autocast(self) -> bool:
        """Whether autocast was on or is on now."""
        return any(enabled or torch.is_autocast_enabled(device) for device, (enabled, _) in self.autocast.items())

    def drawn_from(self) -> bool:
        """Whether someone has drawn from the generators of Python or numpy since."""
        now = _rng_state([], True)
        return any(_flat(now[name]) != _flat(self.rng.get(name, ())) for name in ("python", "numpy") if name in now)


def _devices(modules: Iterable[nn.Module]) -> list[str]:
    """The types of devices on which parameters are, the processor always among them."""
    parameters = (one for module in modules for one in module._parameters.values() if one is not None)
    others = {one.device.type for one in parameters if not one.is_cpu} - {"meta"}
    return ["cpu", *sorted(others)]


def _rng_state(devices: Iterable[str], libraries: bool) -> dict[str, Any]:
    """Random states of every device of the given types, of Python, and of numpy if in use."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if libraries:
        state["python"] = random.getstate()
        if "numpy" in sys.modules:
            state["numpy"] = sys.modules["numpy"].random.get_state()
    for device in set(devices) - {"cpu", "python", "numpy"}:
        state[device] = torch.get_device_module(device).get_rng_state_all()
    return state


def _flat(state: Iterable[Any]) -> list[Any]:
    """A state of Python's or numpy's generator with its array, if any, as a list."""
    return [part.tolist() if hasattr(part, "tolist") else part for part in state]


def _set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
    for device in state.keys() - {"python", "cpu", "numpy"}:
        torch.get_device_module(device).set_rng_state_all(state[device])


def replay(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    surroundings: Surroundings,
    layers: Iterable[Recording],
    census: Census,
) -> None:
    """One forward of `model` under `surroundings` that `layers` record, leaving nothing else behind."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    if not any(layer.training for layer in census.recorders):
        raise NothingToRecord(f"rerecord: {nothing_records(model)}")
    with (
        torch.no_grad(),
        deliberate,
        recorded_by(census.recorders, layers),
        buffers_restored(census.without_record(model)),
        _rng(surroundings.rng),
        _autocast(surroundings.autocast) if surroundings.meets_autocast() else nullcontext(),
    ):
        inner(*args, **kwargs)


@contextmanager
def _autocast(states: dict[str, tuple[bool, torch.dtype]]) -> Iterator[None]:
    with ExitStack() as stack:
        for device, (enabled, dtype) in states.items():
            # With the cache on, a nested autocast would hand out the weights of before the step.
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False))
        yield


@contextmanager
def _rng(state: dict[str, Any]) -> Iterator[None]:
    before = _rng_state(state, "python" in state)
    try:
        _set_rng_state(state)
        yield
    finally:
        _set_rng_state(before)


@contextmanager
def buffers_restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put back every buffer of `modules` that changes: running statistics, power iterations, counters, code books."""
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
            # Through .data, whose writes autograd does not count: for a graph that saved the buffer, nothing changed.
            buffer.data.copy_(value)


def nothing_records(model: nn.Module) -> str:
    """Why a forward of `model` would record nothing, and what to do."""
    name = type(model).__name__
    if any(recorders(model)):
        return f"every memorized layer of {name} is in eval mode and records nothing. Call model.train() first."
    kinds = sorted({type(module).__name__ for module in model.modules() if "Norm" in type(module).__name__})
    if "SyncBatchNorm" in kinds:
        return f"{name} has no layer that records statistics; its norms are {', '.join(kinds)}. {ADVICE}"
    found = f"its norms are {', '.join(kinds)}" if kinds else "it has no norm at all"
    return f"{name} has no layer that records statistics; {found}. Call memnorm.convert(model) first."


def batches_recorded(model: nn.Module) -> dict[str, int]:
    """By name; what waits to be exchanged between processes is recorded, too."""
    found = {}
    for name, layer in named_recorders(model).items():
        count = getattr(layer, "num_batches_tracked", None)
        if count is not None and not count.is_meta:
            found[name] = int(count) + len(getattr(layer, "_outgoing", None) or ())
    return found


def never_called(model: nn.Module, recorded_before: dict[str, int]) -> str:
    """Why the handle saw no forward before the first step, and which module to pass instead."""
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
        "the loop calls; of a model compiled by torch.compile or wrapped by DistributedDataParallel, that is the "
        "wrapper."
    )


def _common_parent(names: list[str]) -> str:
    """The path of the innermost module that contains all the named ones: of a.b.x and a.b.y, a.b."""
    parents = [name.split(".")[:-1] for name in names]
    shared = []
    for parts in zip(*parents, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)
