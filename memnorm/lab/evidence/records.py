"""Where the runs of our evidence are: worked on in one folder, with checkpoints; kept as compact records in another.

A record is what a run leaves behind without its checkpoints. The result is copied last, so a record with it is whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memnorm.lab.disk import write_text
from memnorm.lab.errors import LabError
from memnorm.lab.listen import GridListener, Outcome
from memnorm.lab.spec import RunSpec
from memnorm.lab.store import Store, StoredRun

FILES = ("spec.yaml", "env.json", "metrics.jsonl", "result.json")


class Records(GridListener):
    """The records, and the folder they come from. As a listener, it keeps each run when it ends."""

    def __init__(self, runs: Path | str, records: Path | str) -> None:
        self.work, self.kept = Store(runs), Store(records)

    def result(self, spec: RunSpec) -> dict[str, Any] | None:
        """What came out of a run, wherever it is. A damaged record counts only if the run's own folder can mend it."""
        kept, source = self.kept.run(spec), self.work.run(spec)
        result = kept.result()
        damage = kept.damage() if result is not None else None
        if damage and source.result() is None:
            raise LabError(f"the record {kept.path} is damaged ({damage}); restore it, or delete it to run it again")
        return result or source.result()

    def keep(self, spec: RunSpec) -> None:
        """Copy a run that is done; one that is kept already, and whole, stays as it is."""
        source, target = self.work.run(spec), self.kept.run(spec)
        if source.result() is None or (target.result() is not None and not target.damage()):
            return
        damage = source.damage()
        if damage:
            raise LabError(f"{source.path} is damaged ({damage}); delete its result.json to run it again")
        for name in FILES:
            write_text(target.path / name, (source.path / name).read_text(encoding="utf-8"))

    def prepare(self) -> None:
        """Fail now, and not when the first run ends, if records cannot be written."""
        trial = self.kept.root / ".writable"
        write_text(trial, "")
        trial.unlink()

    def runs(self) -> list[StoredRun]:
        """Everything that is stored, done or not."""
        return [*self.kept.runs(), *self.work.runs()]

    def ended(self, outcome: Outcome) -> None:
        if outcome.status == "failed":
            return
        try:
            self.keep(outcome.spec)
        except LabError as error:
            safe = f"The run is done and safe in {self.work.run(outcome.spec).path}; the same command copies it later."
            raise LabError(f"{error} {safe}") from error
