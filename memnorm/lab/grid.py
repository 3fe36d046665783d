"""Many runs: in this process, in N processes with one thread each, or on a Ray cluster. What is done is skipped, what
was begun goes on, and a run that fails does not stop the others.

Processes live through many runs, so that torch is loaded once. One that dies is replaced, and its run reported.
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
from memnorm.lab.errors import DataMissing, DeviceMissing, DiskFull, Interrupted, LabError, RunHeld, UsageError
from memnorm.lab.listen import GridListener, Listener, Outcome, Relay, relay
from memnorm.lab.signals import terminations_interrupt
from memnorm.lab.spec import Execution, RunSpec
from memnorm.lab.store import Store
from memnorm.lab.train import run

Replan = Callable[[], Sequence[RunSpec]]


def run_all(
    specs: Sequence[RunSpec],
    store: Store,
    *,
    execution: Execution,
    data_root: Path | None = None,
    jobs: int = 0,
    launcher: str = "processes",
    listener: GridListener | None = None,
    replan: Replan | None = None,
) -> list[Outcome]:
    """Run each of `specs` that is not done yet; `jobs` processes, or 0 for this one. In the order given.

    With `launcher="ray"` the runs go to a Ray cluster, at most `jobs` at a time, or 0 for as many as it has room for.

    `replan` is asked for the runs, in order, whenever one has ended: what came out may call for others. What was begun
    is not begun again. The outcomes of runs that were not in `specs` come last.
    """
    if jobs < 0:
        raise UsageError(f"--jobs must not be negative; got {jobs}")
    listener = listener or GridListener()
    unique = list({spec.digest: spec for spec in specs}.values())
    work = Work(store.root, execution, data_root)
    if launcher == "ray" or jobs:
        work = replace(work, execution=replace(execution, threads=1))
        room = jobs if replan else min(jobs, len(unique))
        crew = _on_ray(work, jobs) if launcher == "ray" else _Processes(work, room)
        with terminations_interrupt():
            outcomes = _oversee(_Waiting(unique, replan), crew, listener)
    else:
        outcomes = _here(_Waiting(unique, replan), work, listener)
    by_digest = {outcome.spec.digest: outcome for outcome in outcomes}
    wanted = [by_digest[spec.digest] for spec in specs if spec.digest in by_digest]
    asked_for = {spec.digest for spec in specs}
    return [*wanted, *(outcome for outcome in outcomes if outcome.spec.digest not in asked_for)]


@dataclass(frozen=True)
class Work:
    """What all runs of a grid share."""

    root: Path
    execution: Execution
    data_root: Path | None

    def do(self, spec: RunSpec, listener: Listener, wait: bool) -> Outcome:
        """Run one; what goes wrong with it is its outcome, but what would befall the next one as well (a wish to stop,
        missing data, no such device, a full disk) concerns the grid.
        """
        try:
            result = run(
                spec,
                Store(self.root),
                execution=self.execution,
                data_root=self.data_root,
                listener=listener,
                wait=wait,
            )
            return Outcome(spec, result["status"], result=result)
        except (Interrupted, RunHeld, DataMissing, DeviceMissing, DiskFull):
            raise
        except MemnormError as error:
            return Outcome(spec, "failed", str(error))
        except Exception as error:
            listener.message(traceback.format_exc())
            return Outcome(spec, "failed", f"{type(error).__name__}: {error}")

    def attempt(self, spec: RunSpec, listener: Listener, wait: bool) -> tuple[str, Any]:
        """`do`, with everything that can come of it as one of a crew's messages."""
        try:
            return "ended", self.do(spec, listener, wait)
        except RunHeld as error:
            return "held", (spec, str(error))
        except LabError as error:
            return "stop", error


class _Waiting:
    """The runs that nobody has begun yet, and those that somebody else held when they were."""

    def __init__(self, specs: Sequence[RunSpec], replan: Replan | None) -> None:
        self._specs, self._replan = deque(specs), replan
        self._held: deque[RunSpec] = deque()
        self._begun: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._specs or self._held)

    def next(self) -> tuple[RunSpec, bool]:
        """A run, and whether to wait for who holds it."""
        spec = self._specs.popleft() if self._specs else None
        if spec is None:
            return self._held.popleft(), True
        self._begun.add(spec.digest)
        return spec, False

    def put_last(self, spec: RunSpec) -> None:
        self._held.append(spec)

    def renew(self) -> None:
        if self._replan is not None:
            unique = {spec.digest: spec for spec in self._replan() if spec.digest not in self._begun}
            self._specs = deque(unique.values())


def _here(waiting: _Waiting, work: Work, listener: GridListener) -> list[Outcome]:
    outcomes = []
    while waiting:
        spec, held_before = waiting.next()
        try:
            outcome = work.do(spec, relay(spec, listener), wait=held_before)
        except RunHeld as error:
            listener.message(spec, f"{error} Going on with the others; this one comes last.")
            waiting.put_last(spec)
            continue
        outcomes.append(outcome)
        listener.ended(outcome)
        waiting.renew()
    return outcomes


class Crew(Protocol):
    """Those who run, side by side."""

    def has_room(self) -> bool: ...

    def is_busy(self) -> bool: ...

    def begin(self, spec: RunSpec, wait_for_holder: bool) -> None: ...

    def heard(self) -> Iterator[tuple[str, Any]]:
        """Wait until a run says something or ends: ("ended", outcome), ("held", (spec, why)), ("stop", error), or what
        a listener is to hear, with its arguments.
        """
        ...

    def save_and_stop(self) -> None: ...

    def dismiss(self) -> None:
        """Wait for what is being done, and let everybody go."""
        ...


def _oversee(waiting: _Waiting, crew: Crew, listener: GridListener) -> list[Outcome]:
    outcomes: list[Outcome] = []
    stop: BaseException | None = None
    try:
        while crew.is_busy() or (waiting and stop is None):
            while waiting and stop is None and crew.has_room():
                crew.begin(*waiting.next())
            for kind, payload in crew.heard():
                if kind == "ended":
                    outcomes.append(payload)
                    listener.ended(payload)
                    waiting.renew()
                elif kind == "held":
                    listener.message(payload[0], f"{payload[1]} Going on with the others; this one comes last.")
                    waiting.put_last(payload[0])
                elif kind == "stop":
                    stop = stop or payload
                else:
                    getattr(listener, kind)(*payload)
    except BaseException as error:  # of the listener, too: nobody would see how the runs go on
        crew.save_and_stop()
        if not isinstance(error, KeyboardInterrupt):
            raise
        stop = Interrupted("stopped; what was saved is kept, and the same command goes on from there")
    finally:
        crew.dismiss()
    if stop is not None:
        raise stop
    return outcomes


def _on_ray(work: Work, jobs: int) -> Crew:
    from memnorm.lab.launch_ray import Cluster  # here, because ray is there on demand only

    return Cluster(work, jobs)


class _Processes:
    """A crew of processes on this machine."""

    def __init__(self, work: Work, jobs: int) -> None:
        self.workers = [_Worker(work) for _ in range(jobs)]

    def has_room(self) -> bool:
        return any(worker.spec is None for worker in self.workers)

    def is_busy(self) -> bool:
        return any(worker.spec for worker in self.workers)

    def begin(self, spec: RunSpec, wait_for_holder: bool) -> None:
        next(worker for worker in self.workers if worker.spec is None).begin(spec, wait_for_holder)

    def heard(self) -> Iterator[tuple[str, Any]]:
        busy = {worker.pipe: worker for worker in self.workers if worker.spec}
        for pipe in wait(list(busy)):
            yield busy[pipe].receive()  # type: ignore[index]

    def save_and_stop(self) -> None:
        for worker in self.workers:
            worker.save_and_stop()

    def dismiss(self) -> None:
        for worker in self.workers:
            worker.dismiss()


class _Worker:
    """A process that runs what it is given, one after the other."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.spec: RunSpec | None = None
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would inherit torch's thread pool, half alive
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.work), daemon=False)
        self.process.start()
        theirs.close()

    def begin(self, spec: RunSpec, wait_for_holder: bool) -> None:
        self.spec = spec
        with contextlib.suppress(OSError):  # it died with nothing to do: `receive` will tell
            self.pipe.send((spec, wait_for_holder))

    def receive(self) -> tuple[str, Any]:
        """The next thing it says; if it died, that."""
        try:
            kind, payload = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            code, spec = self.process.exitcode or 0, self.spec
            self.spec = None
            self._start()
            why = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            if code == -signal.SIGKILL:
                why += " (often: out of memory; try fewer --jobs)"
            assert spec is not None
            return "ended", Outcome(spec, "failed", f"its process ended: {why}; the same command goes on with it")
        if kind in ("ended", "held", "stop"):
            self.spec = None
        return kind, payload

    def save_and_stop(self) -> None:
        if self.spec is not None and self.process.is_alive():
            os.kill(self.process.pid or 0, signal.SIGTERM)

    def dismiss(self) -> None:
        """Wait for what it is doing, and let it end."""
        try:
            self.pipe.send(None)
            while self.spec is not None:
                self.pipe_drained()
        except (OSError, EOFError):
            pass
        self.process.join()
        self.pipe.close()

    def pipe_drained(self) -> None:
        kind, _ = self.pipe.recv()
        if kind in ("ended", "held", "stop"):
            self.spec = None


def _serve(pipe: Connection, work: Work) -> None:
    """The worker's side. Ctrl-C reaches it through the terminal as well, and `run` saves on it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # between runs; `run` has its own handler

    def send(kind: str, *arguments: Any) -> None:
        try:
            pipe.send((kind, arguments))
        except OSError:  # whoever listened was killed
            signal.raise_signal(signal.SIGTERM)  # on which `run` saves

    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        if order is None:
            return
        spec, wait_for_holder = order
        answer = work.attempt(spec, Relay(spec, send), wait_for_holder)
        try:
            pipe.send(answer)
        except OSError:
            return
