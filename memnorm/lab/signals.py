"""Stop requests: Ctrl-C, and the SIGTERM that job schedulers send before SIGKILL."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
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

    with _handled(handle, signal.SIGINT, signal.SIGTERM):
        yield request


@contextlib.contextmanager
def terminations_interrupt() -> Iterator[None]:
    """Within the context, SIGTERM raises KeyboardInterrupt."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    with _handled(interrupt, signal.SIGTERM):
        yield


@contextlib.contextmanager
def _handled(handler: Callable[[int, Any], None], *numbers: int) -> Iterator[None]:
    """Within the context, the handler gets these signals. Only the main thread may set handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
