"""Run what is missing of a study: `python -m study.run defaults --jobs 2`."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from memnorm.lab.console import watching
from memnorm.lab.disk import append_line
from memnorm.lab.errors import UsageError
from memnorm.lab.grid import run_all
from memnorm.lab.listen import Listener, Outcome, relay
from memnorm.lab.spec import Execution, RunSpec
from memnorm.lab.store import Store
from study.networks import RUNS
from study.studies import STUDIES

RESULTS = Path(__file__).parent / "results"
KEPT = ("final", "best", "diverged_at", "parameters", "seconds", "digest_of_weights")


def load(name: str = "*") -> dict[str, dict[str, Any]]:
    """The finished runs by digest, of one file or of all. Studies may share runs."""
    return {record["digest"]: record for path in sorted(RESULTS.glob(f"{name}.jsonl")) for record in _read(path)}


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        damaged = [one["digest"] for one in records if RunSpec.from_dict(one["spec"]).digest != one["digest"]]
    except (ValueError, TypeError, KeyError, UsageError) as error:
        raise SystemExit(f"{path} has a line that is not a record ({error!r}); restore it") from error
    if damaged:
        raise SystemExit(f"{path}: the settings of {', '.join(damaged)} were changed; restore them")
    return records


class Recorder(Listener):
    """Adds a line to the study's file when a run ends."""

    def __init__(self, name: str, store: Store) -> None:
        self.path, self.store = RESULTS / f"{name}.jsonl", store

    def ended(self, outcome: Outcome) -> None:
        if outcome.result is None:
            return
        result, folder = outcome.result, self.store.run(outcome.spec)
        record = {
            "digest": outcome.spec.digest,
            "spec": outcome.spec.identity,
            "status": outcome.status,
            **{name: result.get(name) for name in KEPT},
            "curve": folder.metrics(),
            "environment": result["environment"],
            "earlier_sessions": folder.sessions()[:-1],
        }
        self.path.parent.mkdir(exist_ok=True)
        append_line(self.path, json.dumps(record, ensure_ascii=False))


def missing(name: str, failed: Collection[str] = ()) -> list[RunSpec]:
    """The runs of a study that can be made now, have no record and have not `failed` (digests)."""
    records = load()
    specs = STUDIES[name].specs(records, failed)
    return [spec for spec in specs if spec.digest not in records and spec.digest not in failed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, one thread each")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder for checkpoints")
    parser.add_argument("--data-root", type=Path, default=None)
    arguments = parser.parse_args()
    study, store, tried = STUDIES[arguments.study], Store(arguments.runs), set[str]()
    os.environ[RUNS] = str(arguments.runs.resolve())
    while specs := missing(arguments.study, tried):  # trials first, then runs
        print(f"{arguments.study}: {len(specs)} runs can be made now", flush=True)
        with watching(len(specs)) as listener:
            run_all(
                specs,
                store,
                execution=Execution(threads=1, channels_last=True, workers=0, keep_weights=bool(study.before)),
                data_root=arguments.data_root,
                jobs=arguments.jobs,
                listener=relay(listener, Recorder(arguments.study, store)),
                make=study.make,
            )
        tried |= {spec.digest for spec in specs}
    left = len(missing(arguments.study))
    print(f"{arguments.study}: {'complete' if not left else f'{left} runs failed'}", flush=True)


if __name__ == "__main__":
    main()
