"""Processes to be killed: runs and grids in children of a process that has loaded torch once."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from helpers.lab import PLAIN, end, python, tiny

from memnorm.lab import environment, grid
from memnorm.lab.errors import LabError
from memnorm.lab.listen import Listener, Outcome
from memnorm.lab.runner import run
from memnorm.lab.spec import RunSpec
from memnorm.lab.store import Store
from memnorm.lab.training import Training, load_data


class ForkServer:
    """A process that has loaded torch once and forks a child per order: a run in a process of its own, in no time.

    Each child leads a session, so that all that it starts can be found. Children say what they hear, a line each;
    `ended` says how they ended.
    """

    def __init__(self) -> None:
        self.process = python("from helpers.fork_server import serve; serve()")
        self.child = 0

    def begin(self, spec: RunSpec, root: Path, **options: Any) -> int:
        """Start a run; see `run_in_a_child`."""
        return self.call("run_in_a_child", spec=spec.as_dict(), root=str(root), **options)

    def begin_all(self, specs: Iterable[RunSpec], root: Path, **options: Any) -> int:
        """Start a grid; see `grid_in_a_child`."""
        return self.call("grid_in_a_child", specs=[spec.as_dict() for spec in specs], root=str(root), **options)

    def call(self, function: str, **arguments: Any) -> int:
        self.process.stdin.write(json.dumps([function, arguments]) + "\n")
        self.process.stdin.flush()
        word, number = self._line().split()
        assert word == "born"
        self.child = int(number)
        return self.child

    def _line(self) -> str:
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        return line.rstrip("\n")

    def hears(self, wanted: str) -> bool:
        """Wait until the child says something that begins like that; False if it ended before."""
        while not f"{(line := self._line())} ".startswith(f"{wanted} "):
            if line.startswith("dead "):
                self.child = 0
                return False
        return True

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.child:
            os.kill(self.child, number)

    def ended(self) -> tuple[int, list[str]]:
        """Its exit code, negative for the signal that killed it, and what it said until then."""
        heard = []
        while not (line := self._line()).startswith("dead "):
            heard.append(line)
        self.child = 0
        return int(line.split()[1]), heard

    def close(self) -> None:
        self.kill()
        end(self.process)


@functools.cache
def shared_fork_server() -> ForkServer:
    fork_server = ForkServer()
    atexit.register(fork_server.close)
    return fork_server


def say(*words: Any) -> None:
    """Print a line in one piece. With PYTHONUNBUFFERED, `print` writes the end of the line apart, and a child that is
    killed in between would leave half a line, for whose end the test would wait for ever.
    """
    os.write(1, f"{' '.join(map(str, words))}\n".encode())


def serve() -> None:
    """The fork server's side."""
    torch.set_num_threads(1)
    environment.commit = lambda: None
    importlib.import_module("torch._dynamo")  # the optimizer would load it in every child
    data = load_data(tiny(), None)
    Training(tiny(norm="mbn"), data.classes, data.shape, "cpu").evaluate(data.test, workers=0)
    for line in sys.stdin:
        function, arguments = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setsid()
            say("born", os.getpid())
            os._exit(_exit_code(functools.partial(globals()[function], **arguments)))
        say("dead", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _exit_code(work: Callable[[], object]) -> int:
    try:
        work()
    except LabError as error:
        say(type(error).__name__, error)
        return error.exit_code
    except KeyboardInterrupt:
        return 131
    return 0


def run_in_a_child(spec: dict[str, Any], root: str, pause: float = 0, die_at: int = 0, **execution: Any) -> None:
    """A run with `pause` seconds after each step, that ends by its own hand at the file operation `die_at`."""

    class Voice(Listener):
        def stepped(self, spec: RunSpec, iteration: int) -> None:
            say("stepped", iteration)
            time.sleep(pause)

    if die_at:
        die_at_file_operation(die_at)
    run(RunSpec.from_dict(spec), Store(root), execution=replace(PLAIN, **execution), listener=Voice())


def grid_in_a_child(
    specs: list[dict[str, Any]],
    root: str,
    jobs: int,
    spawn: bool = False,
    at: dict[str, str] | None = None,
    **execution: Any,
) -> None:
    """A grid that says what it hears, with quickly forked workers unless `spawn`; for `at` see `GridEar`."""
    if not spawn:
        grid.multiprocessing = Forks()
    listener = GridEar(at or {})
    outcomes = grid.run_all(
        [RunSpec.from_dict(spec) for spec in specs],
        Store(root),
        execution=replace(PLAIN, **execution),
        jobs=jobs,
        listener=listener,
    )
    for outcome in outcomes:
        say("outcome", outcome.spec.name, outcome.status, outcome.message.splitlines() or "")


class GridEar(Listener):
    """Says and remembers what it hears; `at` names things to be done on hearing something for the first time."""

    def __init__(self, at: dict[str, str] | None = None) -> None:
        self.at = dict(at or {})
        self.heard: list[str] = []

    def _hear(self, *words: object) -> None:
        self.heard.append(" ".join(str(word).replace("\n", "|") for word in words))
        say(self.heard[-1])
        action = self.at.pop(str(words[0]), None)
        if action == "fail":
            raise RuntimeError("this listener fails")
        if action == "kill the workers":
            for worker in session_of(os.getsid(0)):
                os.kill(worker, signal.SIGKILL)
            eventually(lambda: not session_of(os.getsid(0)))
        if action == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)

    def began(self, spec: RunSpec, iteration: int) -> None:
        self._hear("began", spec.name, iteration)

    def stepped(self, spec: RunSpec, iteration: int) -> None:
        self._hear("stepped", spec.name, iteration)

    def evaluated(self, spec: RunSpec, line: dict[str, Any]) -> None:
        self._hear("evaluated", spec.name, line["iteration"])

    def message(self, spec: RunSpec, text: str) -> None:
        self._hear("message", spec.name, text)

    def ended(self, outcome: Outcome) -> None:
        self._hear("ended", outcome.spec.name, outcome.status, outcome.message)


class Forks:
    """Stands in for multiprocessing in a process that has no threads yet: workers that need not load torch again.

    As with spawned ones, nothing of the parent's side stays open in them.
    """

    def __init__(self) -> None:
        self._fork = multiprocessing.get_context("fork")
        self._parents: list[Any] = []

    def get_context(self, _kind: str) -> Forks:
        return self

    def Pipe(self) -> tuple[Any, Any]:  # noqa: N802
        ours, theirs = self._fork.Pipe()
        self._parents.append(ours)
        return ours, theirs

    def Process(self, target: Any, args: Any, daemon: bool) -> Any:  # noqa: N802
        return self._fork.Process(target=self._begin, args=(target, args), daemon=daemon)

    def _begin(self, target: Any, args: Any) -> None:
        for pipe in self._parents:
            pipe.close()
        target(*args)


def session_of(leader: int) -> list[int]:
    """The living processes of a session, without its leader."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            number, _, rest = path.read_text().partition(" ")
            state, _, _, session = rest.rpartition(")")[2].split()[:4]
            if int(session) == leader != int(number) and state != "Z":
                found.append(int(number))
    return sorted(found)


def eventually(claim: Callable[[], bool], seconds: float = 10) -> bool:
    """Return True if the claim becomes true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if claim():
            return True
        time.sleep(0.02)
    return False


def die_at_file_operation(number: int) -> None:
    """Let this process kill itself before its n-th change of a file."""
    left = number

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        changes = event in ("os.rename", "os.remove", "os.mkdir", "os.chmod")
        if changes or (event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
