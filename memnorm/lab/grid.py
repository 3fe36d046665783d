"""Many runs: in this process, in N processes with one thread each, or on a Ray cluster. Finished runs are skipped,
interrupted ones resume, and a run that fails does not stop the others.

A process makes many runs, so that torch is loaded once. One that dies is replaced, and its run is reported as failed.
The pools of concurrent.futures and joblib cannot do this: a worker that dies breaks the pool and ends the other runs.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from memnorm.errors import MemnormError
from memnorm.lab.errors import DataMissing, DeviceMissing, DiskFull, Interrupted, RunHeld, UsageError
from memnorm.lab.listen import Listener, Outcome, Relay, relay
from memnorm.lab.runner import run
from memnorm.lab.signals import terminations_interrupt
from memnorm.lab.spec import Execution, RunSpec
from memnorm.lab.store import Store


def run_all(
    specs: Sequence[RunSpec],
    store: Store,
    *,
    execution: Execution,
    data_root: Path | None = None,
    jobs: int = 0,
    launcher: str = "processes",
    listener: Listener | None = None,
    make: Callable[..., dict[str, Any]] | None = None,
) -> list[Outcome]:
    """Run each of `specs` that is not finished, in the order given.

    Args:
        jobs: processes; 0 runs in this one. With `launcher="ray"`, runs at a time; 0 for as many as the cluster fits.
        make: makes one run, with the arguments of `memnorm.lab.runner.run`, which is the default. Other processes
            import it by name.

    Returns:
        The outcomes, in the order of `specs`.
    """
    if jobs < 0:
        raise UsageError(f"--jobs must not be negative; got {jobs}")
    listener = listener or Listener()
    unique = list({spec.digest: spec for spec in specs}.values())
    context = RunContext(store.root, execution, data_root, make)
    if launcher == "ray" or jobs:
        context = replace(context, execution=replace(execution, threads=1))
        started = _ray_launcher(context, jobs) if launcher == "ray" else _Processes(context, min(jobs, len(unique)))
        with terminations_interrupt():
            outcomes = _supervise(_Queue(unique, listener), started, listener)
    else:
        outcomes = _run_here(_Queue(unique, listener), context, listener)
    by_digest = {outcome.spec.digest: outcome for outcome in outcomes}
    return [by_digest[spec.digest] for spec in specs if spec.digest in by_digest]


@dataclass(frozen=True)
class RunContext:
    """What all runs of a grid share."""

    root: Path
    execution: Execution
    data_root: Path | None
    make: Callable[..., dict[str, Any]] | None = None

    def attempt(self, spec: RunSpec, listener: Listener, wait: bool) -> tuple[str, Any]:
        """Make one run and return its outcome as a message of a launcher. An error of the run is its outcome. An error
        that would also stop the next run (a stop request, missing data, no such device, a full disk) ends all runs.
        """
        try:
            result = (self.make or run)(
                spec,
                Store(self.root),
                execution=self.execution,
                data_root=self.data_root,
                listener=listener,
                wait=wait,
            )
            return "ended", Outcome(spec, result["status"], result=result)
        except RunHeld as error:
            return "held", (spec, str(error))
        except (Interrupted, DataMissing, DeviceMissing, DiskFull) as error:
            return "stop", error
        except MemnormError as error:
            return "ended", Outcome(spec, "failed", str(error))
        except Exception as error:
            listener.message(spec, traceback.format_exc())
            return "ended", Outcome(spec, "failed", f"{type(error).__name__}: {error}")


class _Queue:
    """Runs that have not started, then runs that another process held when their turn came; and the outcomes of runs
    that have ended.
    """

    def __init__(self, specs: Sequence[RunSpec], listener: Listener) -> None:
        self._specs, self._held, self.listener = deque(specs), deque[RunSpec](), listener
        self.outcomes: list[Outcome] = []

    def __bool__(self) -> bool:
        return bool(self._specs or self._held)

    def next(self) -> tuple[RunSpec, bool]:
        """A run, and True if it should wait for the process that holds it."""
        return (self._specs.popleft(), False) if self._specs else (self._held.popleft(), True)

    def note(self, kind: str, payload: Any) -> None:
        """Take the message "ended" or "held" of a run; tell the listener."""
        if kind == "ended":
            self.outcomes.append(payload)
            self.listener.ended(payload)
        else:
            spec, reason = payload
            self._held.append(spec)
            self.listener.message(spec, f"{reason} This run is put last.")


def _run_here(queue: _Queue, context: RunContext, listener: Listener) -> list[Outcome]:
    while queue:
        spec, held_before = queue.next()
        kind, payload = context.attempt(spec, relay(listener), wait=held_before)
        if kind == "stop":
            raise payload
        queue.note(kind, payload)
    return queue.outcomes


class Launcher(Protocol):
    """Makes several runs at a time."""

    def has_room(self) -> bool: ...

    def is_busy(self) -> bool: ...

    def start(self, spec: RunSpec, wait_for_holder: bool) -> None: ...

    def messages(self) -> Iterator[tuple[str, Any]]:
        """Wait for messages of runs: ("ended", outcome), ("held", (spec, reason)), ("stop", error), or the name of a
        listener's method with its arguments.
        """
        ...

    def save_and_stop(self) -> None: ...

    def close(self) -> None:
        """Wait for the runs under way and release all resources."""
        ...


def _supervise(queue: _Queue, launcher: Launcher, listener: Listener) -> list[Outcome]:
    stop: BaseException | None = None
    try:
        while launcher.is_busy() or (queue and stop is None):
            while queue and stop is None and launcher.has_room():
                launcher.start(*queue.next())
            for kind, payload in launcher.messages():
                if kind in ("ended", "held"):
                    queue.note(kind, payload)
                elif kind == "stop":
                    stop = stop or payload
                else:
                    getattr(listener, kind)(*payload)
    except BaseException as error:  # an error of the listener as well: the runs could not be followed any more
        launcher.save_and_stop()
        if not isinstance(error, KeyboardInterrupt):
            raise
        stop = Interrupted("stopped; what was saved is kept, and the same command resumes from there")
    finally:
        launcher.close()
    if stop is not None:
        raise stop
    return queue.outcomes


def _ray_launcher(context: RunContext, jobs: int) -> Launcher:
    from memnorm.lab.launch_ray import RayLauncher  # ray is an optional package

    return RayLauncher(context, jobs)


class _Processes:
    """Processes on this machine."""

    def __init__(self, context: RunContext, jobs: int) -> None:
        self.workers = [_Worker(context) for _ in range(jobs)]

    def has_room(self) -> bool:
        return any(worker.spec is None for worker in self.workers)

    def is_busy(self) -> bool:
        return any(worker.spec for worker in self.workers)

    def start(self, spec: RunSpec, wait_for_holder: bool) -> None:
        next(worker for worker in self.workers if worker.spec is None).start(spec, wait_for_holder)

    def messages(self) -> Iterator[tuple[str, Any]]:
        busy = {worker.pipe: worker for worker in self.workers if worker.spec}
        for pipe in wait(list(busy)):
            yield busy[pipe].receive()  # type: ignore[index]

    def save_and_stop(self) -> None:
        for worker in self.workers:
            worker.save_and_stop()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


class _Worker:
    """A process that makes one run after another."""

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self.spec: RunSpec | None = None  # of the run under way
        self._start_process()

    def _start_process(self) -> None:
        spawn = multiprocessing.get_context("spawn")  # a fork would inherit torch's thread pool without its threads
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_serve, args=(theirs, self.context), daemon=False)
        self.process.start()
        theirs.close()

    def start(self, spec: RunSpec, wait_for_holder: bool) -> None:
        self.spec = spec
        with contextlib.suppress(OSError):  # it died while idle: `receive` reports that
            self.pipe.send((spec, wait_for_holder))

    def receive(self) -> tuple[str, Any]:
        """Its next message; if it died, the outcome of its run."""
        try:
            kind, payload = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            code, spec = self.process.exitcode or 0, self.spec
            self.spec = None
            self._start_process()
            why = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            if code == -signal.SIGKILL:
                why += " (often: out of memory; try fewer --jobs)"
            assert spec is not None
            return "ended", Outcome(spec, "failed", f"its process ended: {why}; the same command resumes it")
        if kind in ("ended", "held", "stop"):
            self.spec = None
        return kind, payload

    def save_and_stop(self) -> None:
        if self.spec is not None and self.process.is_alive():
            os.kill(self.process.pid or 0, signal.SIGTERM)

    def close(self) -> None:
        """Wait for its run, and end it."""
        try:
            self.pipe.send(None)
            while self.spec is not None:
                kind, _ = self.pipe.recv()
                if kind in ("ended", "held", "stop"):
                    self.spec = None
        except (OSError, EOFError):
            pass
        self.process.join()
        self.pipe.close()


def _serve(pipe: Connection, context: RunContext) -> None:
    """The loop of a worker. Ctrl-C reaches it through the terminal as well; a run saves on it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # between runs; a run has its own handler

    def send(kind: str, *arguments: Any) -> None:
        try:
            pipe.send((kind, arguments))
        except OSError:  # the parent was killed
            signal.raise_signal(signal.SIGTERM)  # on which the run saves

    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        if order is None:
            return
        spec, wait_for_holder = order
        answer = context.attempt(spec, Relay(send), wait_for_holder)
        try:
            pipe.send(answer)
        except OSError:
            return
