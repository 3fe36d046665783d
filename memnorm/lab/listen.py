"""Progress of runs: one run calls a `Listener`, many runs call a `GridListener`. Needs no torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memnorm.lab.spec import RunSpec


class Listener:
    """Receives the progress of a run. This one ignores it."""

    def began(self, spec: RunSpec, iteration: int) -> None: ...

    def stepped(self, iteration: int) -> None: ...

    def evaluated(self, line: dict[str, Any]) -> None: ...

    def message(self, text: str) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """How a run ended: finished, diverged or failed."""

    spec: RunSpec
    status: str
    message: str = ""
    result: dict[str, Any] | None = None


class GridListener:
    """Receives the progress of many runs. This one ignores it."""

    def began(self, spec: RunSpec, iteration: int) -> None: ...

    def stepped(self, spec: RunSpec, iteration: int) -> None: ...

    def evaluated(self, spec: RunSpec, line: dict[str, Any]) -> None: ...

    def message(self, spec: RunSpec, text: str) -> None: ...

    def ended(self, outcome: Outcome) -> None: ...


class Together(GridListener):
    """Several listeners as one."""

    def __init__(self, *listeners: GridListener) -> None:
        self.listeners = listeners

    def began(self, spec: RunSpec, iteration: int) -> None:
        for one in self.listeners:
            one.began(spec, iteration)

    def stepped(self, spec: RunSpec, iteration: int) -> None:
        for one in self.listeners:
            one.stepped(spec, iteration)

    def evaluated(self, spec: RunSpec, line: dict[str, Any]) -> None:
        for one in self.listeners:
            one.evaluated(spec, line)

    def message(self, spec: RunSpec, text: str) -> None:
        for one in self.listeners:
            one.message(spec, text)

    def ended(self, outcome: Outcome) -> None:
        for one in self.listeners:
            one.ended(outcome)


class Relay(Listener):
    """Forwards the calls of one run with its specification; steps at most five times a second."""

    def __init__(self, spec: RunSpec, send: Callable[..., None]) -> None:
        self.spec, self.send = spec, send
        self._sent = 0.0

    def began(self, spec: RunSpec, iteration: int) -> None:
        self.send("began", spec, iteration)

    def stepped(self, iteration: int) -> None:
        now = time.monotonic()
        if now - self._sent > 0.2 or iteration == self.spec.iterations:
            self._sent = now
            self.send("stepped", self.spec, iteration)

    def evaluated(self, line: dict[str, Any]) -> None:
        self.send("evaluated", self.spec, line)

    def message(self, text: str) -> None:
        self.send("message", self.spec, text)


def relay(spec: RunSpec, listener: GridListener) -> Relay:
    return Relay(spec, lambda kind, *arguments: getattr(listener, kind)(*arguments))
