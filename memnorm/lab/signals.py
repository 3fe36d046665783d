"""Wishes to stop: Ctrl-C, and the termination that job schedulers send before they kill."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C or a termination sets, so that the step can be ended and saved; a second Ctrl-C does not
    wait.
    """
    asked = threading.Event()

    def ask(number: int, frame: Any) -> None:
        if asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
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
