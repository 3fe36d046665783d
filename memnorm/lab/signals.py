"""Wishes to stop: Ctrl-C, and the termination that job schedulers send before they kill."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class Wish:
    """Whether to stop. No `threading.Event`, which has a lock: a second signal that came while the handler of the first
    held it would wait for it forever, and a Ctrl-C reaches the processes of a grid twice.
    """

    asked = False


@contextlib.contextmanager
def stop_signals() -> Iterator[Wish]:
    """Ctrl-C or a termination asks, so that the step can be ended and saved; a second Ctrl-C does not wait."""
    wish = Wish()

    def ask(number: int, frame: Any) -> None:
        if wish.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        wish.asked = True

    if threading.current_thread() is not threading.main_thread():
        yield wish
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def terminations_interrupt() -> Iterator[None]:
    """Within the context, a termination is a KeyboardInterrupt."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
