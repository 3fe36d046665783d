"""Where the runs of our evidence are: worked on in one folder, with checkpoints; kept as compact records in another.

A record is what a run leaves behind without its checkpoints. The result is copied last, so a record with it is whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memnorm.lab.disk import write_text
from memnorm.lab.listen import GridListener, Outcome
from memnorm.lab.spec import RunSpec
from memnorm.lab.store import Store, StoredRun

FILES = ("spec.yaml", "env.json", "metrics.jsonl", "result.json")


class Records(GridListener):
    """The records, and the folder they come from. As a listener, it keeps each run when it ends."""

    def __init__(self, runs: Path | str, records: Path | str) -> None:
        self.work, self.kept = Store(runs), Store(records)

    def result(self, spec: RunSpec) -> dict[str, Any] | None:
        """What came out of a run, wherever it is."""
        return self.kept.run(spec).result() or self.work.run(spec).result()

    def keep(self, spec: RunSpec) -> None:
        """Copy a run that is done; one that is kept already stays as it is."""
        source, target = self.work.run(spec), self.kept.run(spec)
        if target.result() is not None or source.result() is None:
            return
        for name in FILES:
            write_text(target.path / name, (source.path / name).read_text(encoding="utf-8"))

    def runs(self) -> list[StoredRun]:
        """Everything that is stored, done or not."""
        return [*self.kept.runs(), *self.work.runs()]

    def ended(self, outcome: Outcome) -> None:
        if outcome.status != "failed":
            self.keep(outcome.spec)
