"""Progress on stderr: bars with the time left on a terminal, a few lines in a log. Results go to stdout."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from memnorm.lab.listen import Listener, Outcome
from memnorm.lab.spec import RunSpec
from memnorm.text import visible

QUIET_SECONDS = 30.0


def stderr() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


SETTINGS = ("strength", "every", "fraction", "learning_rate", "holdout")


def title(spec: RunSpec) -> str:
    """The run for a bar or a log line, with the settings that differ from the defaults."""
    changed = {**spec.norm_options, **{name: spec.identity[name] for name in SETTINGS if name in spec.identity}}
    own = "".join(f" {name}={value}" for name, value in changed.items())
    return f"{spec.arm}{own} {spec.model} {spec.data} batch {spec.batch} seed {spec.seed}"


def _plain(text: str) -> str:
    """The text without markup of rich and without control characters."""
    return escape(visible(text))


@contextlib.contextmanager
def watching(runs: int) -> Iterator[Listener]:
    console = stderr()
    if not console.is_terminal:
        yield LogLines(console, runs)
        return
    error = TextColumn("{task.fields[error]}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), error)
    with Progress(*columns, console=console, transient=True) as progress:
        yield ProgressBars(progress, runs)


class LogLines(Listener):
    """A line when a run begins or ends, and every half minute between."""

    def __init__(self, console: Console, runs: int) -> None:
        self.console, self.runs, self.count = console, runs, 0
        self.printed_at: dict[str, float] = {}

    def print(self, text: str) -> None:
        self.console.print(_plain(text))

    def began(self, spec: RunSpec, iteration: int) -> None:
        self.printed_at[spec.digest] = time.monotonic()
        start = f"resumes at iteration {iteration:,}" if iteration else "begins"
        self.print(f"{title(spec)} {start}, {spec.iterations:,} iterations")

    def evaluated(self, spec: RunSpec, line: dict[str, Any]) -> None:
        if time.monotonic() - self.printed_at[spec.digest] < QUIET_SECONDS or line["iteration"] == spec.iterations:
            return
        self.printed_at[spec.digest] = time.monotonic()
        left = (spec.iterations - line["iteration"]) * line["step_ms"] / 1000
        self.print(
            f"{title(spec)} {line['iteration']:,}/{spec.iterations:,}: test error {line['test_error']:.2f} %, "
            f"about {left / 60:.0f} min left"
        )

    def message(self, spec: RunSpec, text: str) -> None:
        self.print(f"{title(spec)}: {text}")

    def ended(self, outcome: Outcome) -> None:
        self.count += 1
        self.print(f"[{self.count}/{self.runs}] {ending(outcome)}")


class ProgressBars(LogLines):
    """A bar for each run under way and one for all, above which messages scroll."""

    def __init__(self, progress: Progress, runs: int) -> None:
        super().__init__(progress.console, runs)
        self.progress = progress
        self.tasks = {"": progress.add_task("all runs", total=runs, error="", visible=runs > 1)}

    def began(self, spec: RunSpec, iteration: int) -> None:
        task = self.progress.add_task(_plain(title(spec)), total=spec.iterations, completed=iteration, error="")
        self.tasks[spec.digest] = task

    def stepped(self, spec: RunSpec, iteration: int) -> None:
        self.progress.update(self.tasks[spec.digest], completed=iteration)

    def evaluated(self, spec: RunSpec, line: dict[str, Any]) -> None:
        self.progress.update(self.tasks[spec.digest], error=f"test error {line['test_error']:.2f} %")

    def ended(self, outcome: Outcome) -> None:
        if outcome.spec.digest in self.tasks:  # it began
            self.progress.remove_task(self.tasks.pop(outcome.spec.digest))
        self.progress.advance(self.tasks[""])
        if self.runs > 1 or outcome.status != "finished":
            self.print(ending(outcome))


def ending(outcome: Outcome) -> str:
    name, result = title(outcome.spec), outcome.result or {}
    if outcome.status == "failed":
        return f"{name} FAILED: {outcome.message}"
    if outcome.status == "diverged":
        return f"{name} diverged at iteration {result.get('diverged_at', 0):,}"
    return f"{name}: test error {result['final']['test_error']:.2f} %"


@contextlib.contextmanager
def downloading(name: str) -> Iterator[Callable[[str, int, int | None], None]]:
    """Progress of a download, a function of the file, the bytes so far and the total: bars on a terminal, else a line
    for each file.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr(), disable=not stderr().is_terminal) as progress:
        tasks = {}

        def show(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = progress.add_task(_plain(file), total=total)
                if progress.disable:
                    progress.console.print(
                        _plain(f"{name}: getting {file}{f', {total / 1e6:.0f} MB' if total else ''}")
                    )
            progress.update(tasks[file], completed=done, total=total)

        yield show
