"""Where runs are kept: a folder each, readable without this program.

    spec.yaml       what the run is
    env.json        where it was computed, one entry per start
    metrics.jsonl   one line per evaluation
    checkpoint-*    to go on from, until there is a result
    result.json     written last, in one step: a run with it is done

A run is worked on by one process at a time; the operating system frees its lock however that process ends.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from memnorm.lab.disk import append_line, explained, write_text
from memnorm.lab.errors import LabError, RunHeld, UsageError
from memnorm.lab.spec import RunSpec

STATUSES = ("finished", "diverged")
NOT_JSON = (ValueError, RecursionError)  # what json.loads raises; the second on deep nesting


@dataclass(frozen=True)
class StoredRun:
    """A run as read from the store."""

    path: Path
    spec: RunSpec
    metrics: list[dict[str, Any]]
    result: dict[str, Any] | None
    sessions: Sequence[dict[str, Any]] = ()  # one for each time that a process worked on it: when, where, which commit

    @property
    def environment(self) -> dict[str, Any]:
        """Of the last session."""
        return self.sessions[-1] if self.sessions else {}

    @property
    def status(self) -> str:
        return self.result["status"] if self.result else "unfinished"


class Store:
    """A folder of runs."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.problems: list[str] = []

    def run(self, spec: RunSpec) -> RunFolder:
        return RunFolder(self.root / spec.name, spec)

    def runs(self) -> list[StoredRun]:
        """Every run that can be read, by name; what cannot is said in `problems`."""
        self.problems = []
        found = []
        for path in sorted(self.root.iterdir()) if self.root.is_dir() else []:
            if (path / "spec.yaml").is_file():
                try:
                    found.append(read_run(path))
                except (LabError, OSError, UnicodeDecodeError) as error:
                    self.problems.append(f"{path.name}: {error}")
            elif (path / "result.json").exists():
                self.problems.append(f"{path.name}: a result without spec.yaml")
        return found


def read_run(path: Path) -> StoredRun:
    spec = RunSpec.from_yaml((path / "spec.yaml").read_text(encoding="utf-8"))
    if spec.name != path.name:
        raise LabError(f"spec.yaml describes {spec.name}: the file was changed, or the folder renamed")
    folder = RunFolder(path, spec)
    return StoredRun(path, spec, folder.metrics(), folder.result(), folder.sessions())


class RunFolder:
    """The folder of one run, to write to and read from."""

    def __init__(self, path: Path, spec: RunSpec) -> None:
        self.path, self.spec = path, spec

    @contextlib.contextmanager
    def held(self, wait: bool = False) -> Iterator[None]:
        """Keep other processes out; if one is in, wait for it or say who it is."""
        with explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(self.path / "lock")
        with explained(self.path):
            try:
                lock.acquire(timeout=-1 if wait else 0)
            except filelock.Timeout:
                raise RunHeld(
                    f"the run {self.path.name} is being worked on by {self._holder()}. Wait for it to end, or stop it; "
                    "the same command then goes on from its last checkpoint."
                ) from None
        try:
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            write_text(
                self.path / "holder.json", json.dumps({"pid": os.getpid(), "host": platform.node(), "since": since})
            )
            yield
        finally:
            (self.path / "holder.json").unlink(missing_ok=True)
            lock.release()

    def is_held(self) -> bool:
        """Whether a process is in."""
        try:
            with filelock.FileLock(self.path / "lock", timeout=0):
                return False
        except filelock.Timeout:
            return True
        except OSError:  # there is no folder yet
            return False

    def _holder(self) -> str:
        try:
            holder = json.loads((self.path / "holder.json").read_text())
            return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
        except (OSError, *NOT_JSON, KeyError, TypeError):
            return "another process"

    def begin(self, session: dict[str, Any]) -> None:
        """Note that a process starts to work on the run."""
        for leftover in self.path.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        write_text(self.path / "spec.yaml", self.spec.as_yaml())  # again, should it be damaged
        sessions = [*self.sessions(), session]
        write_text(self.path / "env.json", json.dumps({"sessions": sessions}, indent=1) + "\n")

    def sessions(self) -> list[dict[str, Any]]:
        try:
            sessions = json.loads((self.path / "env.json").read_text(encoding="utf-8"))["sessions"]
        except (OSError, *NOT_JSON, KeyError, TypeError):
            return []
        return [one for one in sessions if isinstance(one, dict)] if isinstance(sessions, list) else []

    def metrics(self) -> list[dict[str, Any]]:
        """The lines written so far; a line that was cut short is none."""
        try:
            text = (self.path / "metrics.jsonl").read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return []
        lines = []
        for line in text.splitlines():
            with contextlib.suppress(*NOT_JSON):
                value = json.loads(line)
                if isinstance(value, dict) and type(value.get("iteration")) is int:
                    lines.append(value)
        return lines

    def add_metrics(self, line: dict[str, Any]) -> None:
        append_line(self.path / "metrics.jsonl", json.dumps(finite(line)))

    def write_metrics(self, lines: Sequence[dict[str, Any]]) -> None:
        """These lines and no others."""
        write_text(self.path / "metrics.jsonl", "".join(json.dumps(finite(line)) + "\n" for line in lines))

    def result(self) -> dict[str, Any] | None:
        """What came out, or None if the run is not done."""
        path = self.path / "result.json"
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, *NOT_JSON) as error:
            raise LabError(f"{path} is damaged ({error}); delete it to run again") from error
        problem = _objection(result, self.spec)
        if problem:
            raise LabError(f"{path} is not a result of this run: {problem}; delete it to run again")
        return result

    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        """Write the result; from then on the run is done and its checkpoints are superfluous."""
        result = finite(result)
        write_text(self.path / "result.json", json.dumps(result, indent=1) + "\n")
        for checkpoint in self.path.glob("checkpoint-*.pt"):
            checkpoint.unlink(missing_ok=True)
        return result


class Onlooker(RunFolder):
    """The folder for a process that works on the run and leaves the record to another."""

    def begin(self, session: dict[str, Any]) -> None:
        pass

    def add_metrics(self, line: dict[str, Any]) -> None:
        pass

    def write_metrics(self, lines: Sequence[dict[str, Any]]) -> None:
        pass

    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        return result


def _objection(result: Any, spec: RunSpec) -> str | None:
    """Why this cannot be what came out of the run."""
    if not isinstance(result, dict) or result.get("status") not in STATUSES:
        return "it does not say how the run ended"
    if result.get("name") != spec.name:
        return f"it is of {result.get('name')}"
    if result["status"] == "diverged":
        return None
    final = result.get("final")
    final = final if isinstance(final, dict) else {}
    error = final.get("test_error")
    if not isinstance(error, (int, float)) or isinstance(error, bool) or not 0 <= error <= 100:
        return f"its test error is {error!r}"
    if final.get("iteration") != spec.iterations:
        return f"it ends at iteration {final.get('iteration')}, not {spec.iterations}"
    return None


def finite(value: Any) -> Any:
    """JSON has no infinity: what is not finite is null."""
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def check_root(root: Path) -> Path:
    """A folder that can hold runs."""
    if root.exists() and not root.is_dir():
        raise UsageError(f"{root} is a file; runs are kept in a folder")
    return root
