"""The store of runs: a folder for each, readable without this program.

    spec.yaml       specification
    env.json        environment, one entry for each start
    metrics.jsonl   one line per evaluation
    checkpoint-*    to resume from, until there is a result
    result.json     written last, atomically: a run with it is finished

One process at a time works on a run. The operating system releases its lock if it is killed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from memnorm.lab.disk import append_line, explained, write_text
from memnorm.lab.errors import LabError, RunHeld, UsageError
from memnorm.lab.spec import LARGEST_INT, RunSpec

STATUSES = ("finished", "diverged")
NOT_JSON = (ValueError, RecursionError)  # what _parse_json raises; the second on deep nesting


@dataclass(frozen=True)
class StoredRun:
    path: Path
    spec: RunSpec
    metrics: list[dict[str, Any]]
    result: dict[str, Any] | None
    sessions: Sequence[dict[str, Any]] = ()  # one for each process that worked on it

    @property
    def environment(self) -> dict[str, Any]:
        return self.sessions[-1] if self.sessions else {}

    @property
    def status(self) -> str:
        return self.result["status"] if self.result else "unfinished"


class Store:
    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.problems: list[str] = []
        if self.root.exists() and not self.root.is_dir():
            raise UsageError(f"{self.root} is a file; runs are kept in a folder")

    def run(self, spec: RunSpec) -> RunFolder:
        return RunFolder(self.root / spec.name, spec)

    def runs(self) -> list[StoredRun]:
        """Every run that can be read, by name; others are listed in `problems`."""
        self.problems = []
        paths = sorted(self.root.iterdir()) if self.root.is_dir() else []
        return [run for path in paths if (run := self._read(path))]

    def _read(self, path: Path) -> StoredRun | None:
        try:
            if (path / "spec.yaml").is_file():
                return read_run(path)
            if (path / "result.json").exists():
                self.problems.append(f"{path.name}: a result without spec.yaml")
        except (LabError, OSError, UnicodeDecodeError) as error:
            self.problems.append(f"{path.name}: {error}")
        return None


def read_run(path: Path) -> StoredRun:
    spec = RunSpec.from_yaml(_read_text(path / "spec.yaml"))
    if spec.name != path.name:
        raise LabError(f"spec.yaml describes {spec.name}: the file was changed, or the folder renamed")
    folder = RunFolder(path, spec)
    return StoredRun(path, spec, folder.metrics(), folder.result(), folder.sessions())


class RunFolder:
    """The folder of one run. In processes of rank 1 and up it is silent: it writes nothing."""

    def __init__(self, path: Path, spec: RunSpec, silent: bool = False) -> None:
        self.path, self.spec, self.silent = path, spec, silent

    @contextlib.contextmanager
    def held(self, wait: bool = False) -> Iterator[None]:
        """Hold the lock of the run; if another process has it, wait for it or raise RunHeld."""
        if self.path.is_symlink():
            raise LabError(
                f"{self.path} is a symbolic link. A run writes and deletes files in its folder, so it must be a real "
                "one: remove the link, or link the whole folder of runs."
            )
        with explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(self.path / "lock")
        with explained(self.path):
            try:
                lock.acquire(timeout=-1 if wait else 0)
            except filelock.Timeout:
                raise RunHeld(
                    f"the run {self.path.name} is being worked on by {self._holder()}. Wait for it to end, or stop it; "
                    "the same command then resumes from its last checkpoint."
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
        try:
            with filelock.FileLock(self.path / "lock", timeout=0):
                return False
        except filelock.Timeout:
            return True
        except OSError:  # there is no folder yet
            return False

    def _holder(self) -> str:
        try:
            holder = _parse_json(_read_text(self.path / "holder.json"))
            return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
        except (OSError, *NOT_JSON, KeyError, TypeError):
            return "another process"

    def begin(self, session: dict[str, Any]) -> None:
        if self.silent:
            return
        for leftover in self.path.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        write_text(self.path / "spec.yaml", self.spec.as_yaml())  # again, in case it is damaged
        sessions = [*self.sessions(), session]
        write_text(self.path / "env.json", json.dumps({"sessions": sessions}, indent=1) + "\n")

    def sessions(self) -> list[dict[str, Any]]:
        try:
            sessions = _parse_json(_read_text(self.path / "env.json"))["sessions"]
        except (OSError, *NOT_JSON, KeyError, TypeError):
            return []
        return [one for one in sessions if isinstance(one, dict)] if isinstance(sessions, list) else []

    def metrics(self) -> list[dict[str, Any]]:
        """The lines written so far, without a line that was cut short."""
        try:
            text = _read_text(self.path / "metrics.jsonl", errors="replace")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise LabError(f"its metrics cannot be read ({error}); delete its folder to run again") from error
        lines = []
        for line in text.splitlines():
            with contextlib.suppress(*NOT_JSON):
                value = _parse_json(line)
                if isinstance(value, dict) and type(value.get("iteration")) is int:
                    lines.append(value)
        return lines

    def add_metrics(self, line: dict[str, Any]) -> None:
        if not self.silent:
            append_line(self.path / "metrics.jsonl", json.dumps(finite(line)))

    def write_metrics(self, lines: Sequence[dict[str, Any]]) -> None:
        if not self.silent:
            write_text(self.path / "metrics.jsonl", "".join(json.dumps(finite(line)) + "\n" for line in lines))

    def result(self) -> dict[str, Any] | None:
        path = self.path / "result.json"
        try:
            result = _parse_json(_read_text(path))
        except FileNotFoundError:
            return None
        except (OSError, *NOT_JSON) as error:
            raise LabError(f"{path} is damaged ({error}); delete it to run again") from error
        problem = _objection(result, self.spec)
        if problem:
            raise LabError(f"{path} is not a result of this run: {problem}; delete it to run again")
        return result

    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        if self.silent:
            return result
        result = finite(result)
        write_text(self.path / "result.json", json.dumps(result, indent=1) + "\n")
        for checkpoint in self.path.glob("checkpoint-*.pt"):
            checkpoint.unlink(missing_ok=True)
        return result


def _read_text(path: Path, errors: str = "strict") -> str:
    """The text of a regular file: a pipe would wait for a writer, and a device may never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path} is not a regular file")
    return path.read_text(encoding="utf-8", errors=errors)


def _parse_json(text: str) -> Any:
    return json.loads(text, parse_int=_whole_number)


def _whole_number(digits: str) -> int:
    """An int that arithmetic with floats can use."""
    value = int(digits)
    if abs(value) > LARGEST_INT:
        raise ValueError(f"a number of {len(digits)} digits is no measurement")
    return value


def _objection(result: Any, spec: RunSpec) -> str | None:
    if not isinstance(result, dict) or result.get("status") not in STATUSES:
        return "it does not say how the run ended"
    if result.get("name") != spec.name:
        return f"it belongs to {result.get('name')}"
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
    """Replace values that are not finite by None: JSON has no infinity."""
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
