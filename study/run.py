"""Run what is missing of a study: `python -m study.run defaults --jobs 2`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from memnorm.lab.console import watching
from memnorm.lab.grid import run_all
from memnorm.lab.listen import GridListener, Outcome, Together
from memnorm.lab.spec import Execution, RunSpec
from memnorm.lab.store import Store
from study.studies import STUDIES

RESULTS = Path(__file__).parent / "results"


def records(name: str) -> list[dict[str, Any]]:
    """The finished runs of a study."""
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Recorder(GridListener):
    """Adds a line to the study's file when a run ends."""

    def __init__(self, name: str, store: Store) -> None:
        self.path, self.store = RESULTS / f"{name}.jsonl", store

    def ended(self, outcome: Outcome) -> None:
        if outcome.result is None:
            return
        result = outcome.result
        record = {
            "digest": outcome.spec.digest,
            "spec": outcome.spec.identity,
            "status": outcome.status,
            **{name: result.get(name) for name in ("final", "best", "diverged_at", "seconds", "digest_of_weights")},
            "curve": self.store.run(outcome.spec).metrics(),
            "environment": result["environment"],
        }
        self.path.parent.mkdir(exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, one thread each")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder for checkpoints")
    parser.add_argument("--data-root", type=Path, default=None)
    arguments = parser.parse_args()
    done = {record["digest"] for record in records(arguments.study)}
    missing: list[RunSpec] = [spec for spec in STUDIES[arguments.study]() if spec.digest not in done]
    print(f"{arguments.study}: {len(done)} runs are done, {len(missing)} are left", flush=True)
    store = Store(arguments.runs)
    with watching(len(missing)) as listener:
        run_all(
            missing,
            store,
            execution=Execution(threads=1, channels_last=True, workers=0),
            data_root=arguments.data_root,
            jobs=arguments.jobs,
            listener=Together(listener, Recorder(arguments.study, store)),
        )


if __name__ == "__main__":
    main()
