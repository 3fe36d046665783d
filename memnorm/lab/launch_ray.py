"""Many runs on a Ray cluster: a task with one CPU for each run.

Every machine of the cluster must see the folders of runs and of data under the same path: the command reads there what
a run writes.

Runs under way are asked to stop, not cancelled. Ray repeats a cancellation, which could interrupt the saving or hit the
next run of the same process.
"""

from __future__ import annotations

import _thread
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from memnorm.lab.data import default_root
from memnorm.lab.errors import Interrupted, UsageError
from memnorm.lab.grid import RunContext
from memnorm.lab.listen import Outcome, Relay
from memnorm.lab.spec import RunSpec
from memnorm.lab.store import Store

try:
    import ray
except ImportError as error:
    raise UsageError("--launcher ray needs the package ray: pip install ray") from error

POLL_SECONDS = 0.5  # between two readings of the messages


class MessageBoard:
    """An actor that collects messages of runs for the command, and passes its stop request to the runs."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, Any]] = []
        self.started: set[str] = set()
        self.closed = False

    def admits(self, digest: str) -> bool:
        """Return True if a run may start, or continue to wait for the process that holds it."""
        if not self.closed:
            self.started.add(digest)
        return not self.closed

    def write(self, kind: str, arguments: tuple[Any, ...]) -> bool:
        """Add a message; return True if the run should stop."""
        self.lines.append((kind, arguments))
        return self.closed

    def take(self) -> list[tuple[str, Any]]:
        lines, self.lines = self.lines, []
        return lines

    def close(self) -> set[str]:
        """Ask all runs to stop; returns the digests of those that have started."""
        self.closed = True
        return self.started


class RayLauncher:
    """Runs on the cluster that `ray.init` finds (RAY_ADDRESS, or `ray start` on this machine), else on a local one that
    ends with this object.
    """

    def __init__(self, context: RunContext, jobs: int) -> None:
        self.jobs, self.running = jobs, dict[Any, RunSpec]()
        self.is_ours = not ray.is_initialized()
        if self.is_ours:
            ray.init(logging_level="warning", log_to_driver=False)
        self.store = Store(context.root.resolve())
        data_root = (context.data_root or default_root()).resolve()
        self.context = replace(context, root=self.store.root, data_root=data_root)
        self.board: Any = ray.remote(num_cpus=0)(MessageBoard).remote()
        gpus = int(context.execution.device.startswith("cuda"))
        self.task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_attempt)

    def has_room(self) -> bool:
        return not self.jobs or len(self.running) < self.jobs

    def is_busy(self) -> bool:
        return bool(self.running)

    def start(self, spec: RunSpec, wait_for_holder: bool) -> None:
        self.running[self.task.remote(self.context, spec, wait_for_holder, self.board)] = spec

    def messages(self) -> Iterator[tuple[str, Any]]:
        done, _ = ray.wait(list(self.running), timeout=POLL_SECONDS)
        yield from ray.get(self.board.take.remote())  # before the end of the run that wrote them
        for reference in done:
            kind, payload = self._answer(reference)
            if kind == "stop":
                self.save_and_stop()
            yield kind, payload

    def _answer(self, reference: Any) -> tuple[str, Any]:
        spec = self.running.pop(reference)
        try:
            kind, payload = ray.get(reference)
        except ray.exceptions.TaskCancelledError:
            return "stop", _stopped()
        except ray.exceptions.RayError as error:
            why = str(error).strip().splitlines()[0]
            return "ended", Outcome(spec, "failed", f"its task ended: {why}; the same command resumes it")
        if kind == "ended" and payload.result is not None and self.store.run(spec).result() is None:
            why = f"its result is not in {self.store.root}: --runs must be a folder that all machines share"
            return "ended", Outcome(spec, "failed", why)
        return kind, payload

    def save_and_stop(self) -> None:
        started = ray.get(self.board.close.remote())
        for reference, spec in self.running.items():
            if spec.digest not in started:  # the cluster may never have room for it
                ray.cancel(reference)

    def close(self) -> None:
        try:
            if self.running:
                ray.wait(list(self.running), num_returns=len(self.running))
        finally:
            ray.kill(self.board)
            if self.is_ours:
                ray.shutdown()


def _attempt(context: RunContext, spec: RunSpec, wait_for_holder: bool, board: Any) -> tuple[str, Any]:
    """The Ray task of a run."""
    stopping, folder = False, Store(context.root).run(spec)

    def send(kind: str, *arguments: Any) -> None:
        nonlocal stopping
        if _result_of(board.write.remote(kind, arguments)) and not stopping:
            stopping = True
            _thread.interrupt_main()  # like Ctrl-C, on which a run saves; Ray blocks real signals

    try:
        while _result_of(board.admits.remote(spec.digest)):
            if wait_for_holder and folder.is_held():
                time.sleep(1)
                continue
            answer = context.attempt(spec, Relay(send), wait=False)
            if answer[0] != "held" or not wait_for_holder:
                return answer
    except KeyboardInterrupt:  # before its first step
        pass
    return "stop", _stopped()


def _stopped() -> Interrupted:
    return Interrupted("stopped on the cluster; the same command resumes from what was saved")


def _result_of(reference: Any) -> Any:
    """Wait for a remote call. While a task waits in `ray.get`, Ray gives its CPU to another."""
    return reference.future().result()
