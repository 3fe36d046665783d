"""Many runs on a Ray cluster: a task per run, with a processor each.

The folders of runs and of data must lie where every machine of the cluster sees them under the same path: what a run
writes is looked for there by the command that asked for it.

Runs that have begun are asked to stop, not cancelled: Ray repeats a cancellation, so that it may fall into the saving,
or meet the next run of the same process.
"""

from __future__ import annotations

import _thread
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from memnorm.lab.data import default_root
from memnorm.lab.errors import Interrupted, UsageError
from memnorm.lab.grid import Work
from memnorm.lab.listen import Outcome, Relay
from memnorm.lab.spec import RunSpec
from memnorm.lab.store import Store

try:
    import ray
except ImportError as error:
    raise UsageError("--launcher ray needs the package ray: pip install 'memnorm[ray]'") from error

PATIENCE = 0.5  # seconds between two looks at what runs say


class Board:
    """An actor that runs write to and the command reads; who writes is told whether to stop."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, Any]] = []
        self.begun: set[str] = set()
        self.closed = False

    def admits(self, digest: str) -> bool:
        """Whether a run may begin, or go on waiting for who holds it."""
        if not self.closed:
            self.begun.add(digest)
        return not self.closed

    def write(self, kind: str, arguments: tuple[Any, ...]) -> bool:
        self.lines.append((kind, arguments))
        return self.closed

    def take(self) -> list[tuple[str, Any]]:
        lines, self.lines = self.lines, []
        return lines

    def close(self) -> set[str]:
        """From now on everybody is told to stop; returns who has begun."""
        self.closed = True
        return self.begun


class Cluster:
    """A crew on the cluster that `ray.init` finds (RAY_ADDRESS, or `ray start` on this machine), else on a local one
    that lives as long as this.
    """

    def __init__(self, work: Work, jobs: int) -> None:
        self.jobs, self.running = jobs, dict[Any, RunSpec]()
        self.is_ours = not ray.is_initialized()
        if self.is_ours:
            ray.init(logging_level="warning", log_to_driver=False)
        self.store = Store(work.root.resolve())
        data_root = (work.data_root or default_root()).resolve()
        self.work = replace(work, root=self.store.root, data_root=data_root)
        self.board: Any = ray.remote(num_cpus=0)(Board).remote()
        gpus = int(work.execution.device.startswith("cuda"))
        self.task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_attempt)

    def has_room(self) -> bool:
        return not self.jobs or len(self.running) < self.jobs

    def is_busy(self) -> bool:
        return bool(self.running)

    def begin(self, spec: RunSpec, wait_for_holder: bool) -> None:
        self.running[self.task.remote(self.work, spec, wait_for_holder, self.board)] = spec

    def heard(self) -> Iterator[tuple[str, Any]]:
        done, _ = ray.wait(list(self.running), timeout=PATIENCE)
        yield from ray.get(self.board.take.remote())  # before the end of the run that said it
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
            return "ended", Outcome(spec, "failed", f"its task ended: {why}; the same command goes on with it")
        if kind == "ended" and payload.result is not None and self.store.run(spec).result() is None:
            why = f"its result is not in {self.store.root}: --runs must be a folder that all machines share"
            return "ended", Outcome(spec, "failed", why)
        return kind, payload

    def save_and_stop(self) -> None:
        begun = ray.get(self.board.close.remote())
        for reference, spec in self.running.items():
            if spec.digest not in begun:  # there may never be room for it
                ray.cancel(reference)

    def dismiss(self) -> None:
        try:
            if self.running:
                ray.wait(list(self.running), num_returns=len(self.running))
        finally:
            ray.kill(self.board)
            if self.is_ours:
                ray.shutdown()


def _attempt(work: Work, spec: RunSpec, wait_for_holder: bool, board: Any) -> tuple[str, Any]:
    """The cluster's side of a run."""
    asked, folder = False, Store(work.root).run(spec)

    def send(kind: str, *arguments: Any) -> None:
        nonlocal asked
        if _told(board.write.remote(kind, arguments)) and not asked:
            asked = True
            _thread.interrupt_main()  # as Ctrl-C: a run that has begun saves. Ray blocks true signals.

    try:
        while _told(board.admits.remote(spec.digest)):
            if wait_for_holder and folder.is_held():
                time.sleep(1)
                continue
            answer = work.attempt(spec, Relay(spec, send), wait=False)
            if answer[0] != "held" or not wait_for_holder:
                return answer
    except KeyboardInterrupt:  # before its first step
        pass
    return "stop", _stopped()


def _stopped() -> Interrupted:
    return Interrupted("stopped on the cluster; the same command goes on from what was saved")


def _told(reference: Any) -> Any:
    """What a run is told. While a task waits in `ray.get`, Ray gives its processor to another."""
    return reference.future().result()
