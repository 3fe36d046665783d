"""Many runs: in this process, or in N processes with one thread each. What is done is skipped, what was begun goes on,
and a run that fails does not stop the others.

The workers live through many runs, so that torch is loaded once. A worker that dies is replaced, and its run reported.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from memnorm.errors import MemnormError
from memnorm.lab.errors import DataMissing, Interrupted, LabError, RunHeld, UsageError
from memnorm.lab.listen import GridListener, Listener, Outcome, Relay, relay
from memnorm.lab.signals import terminations_interrupt
from memnorm.lab.spec import Execution, RunSpec
from memnorm.lab.store import Store
from memnorm.lab.train import run


def run_all(
    specs: Sequence[RunSpec],
    store: Store,
    *,
    execution: Execution,
    data_root: Path | None = None,
    jobs: int = 0,
    listener: GridListener | None = None,
) -> list[Outcome]:
    """Run each of `specs` that is not done yet; `jobs` processes, or 0 for this one. In the order given."""
    if jobs < 0:
        raise UsageError(f"--jobs must not be negative; got {jobs}")
    listener = listener or GridListener()
    unique = list({spec.digest: spec for spec in specs}.values())
    work = _Work(store.root, execution, data_root)
    if jobs:
        work = replace(work, execution=replace(execution, threads=1))
        with terminations_interrupt():
            outcomes = _in_processes(unique, work, min(jobs, len(unique)), listener)
    else:
        outcomes = _here(unique, work, listener)
    by_digest = {outcome.spec.digest: outcome for outcome in outcomes}
    return [by_digest[spec.digest] for spec in specs]


@dataclass(frozen=True)
class _Work:
    """What all runs of a grid share."""

    root: Path
    execution: Execution
    data_root: Path | None

    def do(self, spec: RunSpec, listener: Listener, wait: bool) -> Outcome:
        """Run one; what goes wrong with it is its outcome, but a wish to stop and missing data concern the grid."""
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
        except (Interrupted, RunHeld, DataMissing):
            raise
        except MemnormError as error:
            return Outcome(spec, "failed", str(error))
        except Exception as error:
            listener.message(traceback.format_exc())
            return Outcome(spec, "failed", f"{type(error).__name__}: {error}")


def _here(specs: Sequence[RunSpec], work: _Work, listener: GridListener) -> list[Outcome]:
    outcomes = []
    waiting = deque((spec, False) for spec in specs)
    while waiting:
        spec, held_before = waiting.popleft()
        try:
            outcome = work.do(spec, relay(spec, listener), wait=held_before)
        except RunHeld as error:
            listener.message(spec, f"{error} Going on with the others; this one comes last.")
            waiting.append((spec, True))
            continue
        outcomes.append(outcome)
        listener.ended(outcome)
    return outcomes


def _in_processes(specs: Sequence[RunSpec], work: _Work, jobs: int, listener: GridListener) -> list[Outcome]:
    waiting = deque((spec, False) for spec in specs)
    outcomes: list[Outcome] = []
    workers = [_Worker(work) for _ in range(jobs)]
    stop: BaseException | None = None
    try:
        while waiting or any(worker.spec for worker in workers):
            for worker in workers:
                if waiting and worker.spec is None and stop is None:
                    worker.begin(*waiting.popleft())
            busy = {worker.pipe: worker for worker in workers if worker.spec}
            if not busy:
                break
            for pipe in wait(list(busy)):
                worker = busy[pipe]  # type: ignore[index]
                kind, payload = worker.receive()
                if kind == "ended":
                    outcomes.append(payload)
                    listener.ended(payload)
                elif kind == "held":
                    listener.message(payload[0], f"{payload[1]} Going on with the others; this one comes last.")
                    waiting.append((payload[0], True))
                elif kind == "stop":
                    stop = stop or payload
                else:
                    getattr(listener, kind)(*payload)
    except BaseException as error:  # of the listener, too: nobody would see how the runs go on
        for worker in workers:
            worker.save_and_stop()
        if not isinstance(error, KeyboardInterrupt):
            raise
        stop = Interrupted("stopped; what was saved is kept, and the same command goes on from there")
    finally:
        for worker in workers:
            worker.dismiss()
    if stop is not None:
        raise stop
    return outcomes


class _Worker:
    """A process that runs what it is given, one after the other."""

    def __init__(self, work: _Work) -> None:
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


def _serve(pipe: Connection, work: _Work) -> None:
    """The worker's side. Ctrl-C reaches it through the terminal as well, and `run` saves on it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # between runs; `run` has its own handler

    def send(kind: str, *arguments: Any) -> None:
        pipe.send((kind, arguments))

    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        if order is None:
            return
        spec, wait_for_holder = order
        try:
            answer: tuple[str, Any] = ("ended", work.do(spec, Relay(spec, send), wait_for_holder))
        except RunHeld as error:
            answer = ("held", (spec, str(error)))
        except LabError as error:
            answer = ("stop", error)
        try:
            pipe.send(answer)
        except OSError:
            return
