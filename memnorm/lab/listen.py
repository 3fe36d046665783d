"""Progress of runs: a run calls the methods of a `Listener`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memnorm.lab.spec import RunSpec


@dataclass(frozen=True)
class Outcome:
    """How a run ended: finished, diverged or failed."""

    spec: RunSpec
    status: str
    message: str = ""
    result: dict[str, Any] | None = None


class Listener:
    """Receives the progress of runs. This one ignores it."""

    def began(self, spec: RunSpec, iteration: int) -> None: ...

    def stepped(self, spec: RunSpec, iteration: int) -> None: ...

    def evaluated(self, spec: RunSpec, line: dict[str, Any]) -> None: ...

    def message(self, spec: RunSpec, text: str) -> None: ...

    def ended(self, outcome: Outcome) -> None: ...


class Relay(Listener):
    """Forwards each call as `send(name, *arguments)`; steps at most five times a second."""

    def __init__(self, send: Callable[..., object]) -> None:
        self.send = send
        self._sent = 0.0

    def began(self, spec: RunSpec, iteration: int) -> None:
        self.send("began", spec, iteration)

    def stepped(self, spec: RunSpec, iteration: int) -> None:
        now = time.monotonic()
        if now - self._sent > 0.2 or iteration == spec.iterations:
            self._sent = now
            self.send("stepped", spec, iteration)

    def evaluated(self, spec: RunSpec, line: dict[str, Any]) -> None:
        self.send("evaluated", spec, line)

    def message(self, spec: RunSpec, text: str) -> None:
        self.send("message", spec, text)

    def ended(self, outcome: Outcome) -> None:
        self.send("ended", outcome)


def relay(*listeners: Listener) -> Relay:
    """Return a listener that forwards each call to all of these."""
    return Relay(lambda name, *arguments: [getattr(one, name)(*arguments) for one in listeners])
