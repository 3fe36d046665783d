"""Stop requests: Ctrl-C, and the SIGTERM that job schedulers send before SIGKILL."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class StopRequest:
    """A flag that a signal handler sets. `threading.Event` has a lock: a second signal during the handler of the first
    would wait for it forever, and a Ctrl-C reaches the processes of a grid twice.
    """

    made = False


@contextlib.contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Turn SIGINT and SIGTERM into a request, so that the run can end its step and save. A second SIGINT interrupts."""
    request = StopRequest()

    def handle(number: int, frame: Any) -> None:
        if request.made and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.made = True

    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def terminations_interrupt() -> Iterator[None]:
    """Within the context, SIGTERM raises KeyboardInterrupt."""

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
