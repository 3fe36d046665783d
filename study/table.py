"""The table of a study from its records: `python -m study.table defaults`."""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict

from memnorm.text import table
from study.run import records
from study.studies import SETTINGS

Errors = dict[str, dict[str, list[float]]]  # by arm and setting


def defaults(recalibrated: bool = False) -> Errors:
    """Errors on the held-out images of the study `defaults`, a value per seed."""
    key = "test_error_recalibrated" if recalibrated else "test_error"
    found: Errors = defaultdict(lambda: defaultdict(list))
    for record in records("defaults"):
        spec = record["spec"]
        size = (spec["batch_size"], spec.get("accumulate", 1))
        options = spec.get("norm_options", {})
        arm = f"decay {options['decay']}, {options['center'] or 'not centred'}" if options else "BN"
        error = record["final"][key] if record["status"] == "finished" else float("nan")
        found[arm][next(name for name, value in SETTINGS.items() if value == size)].append(error)
    return found


def rows(errors: Errors) -> list[list[str]]:
    lines = [["arm", *SETTINGS]]
    for arm, by_setting in errors.items():
        cells = [by_setting.get(name, []) for name in SETTINGS]
        lines.append([arm, *(f"{statistics.mean(cell):.2f} (n = {len(cell)})" if cell else "–" for cell in cells)])
    return lines


if __name__ == "__main__":
    if sys.argv[1:] != ["defaults"]:
        sys.exit(__doc__)
    print(table(rows(defaults())), "\n\nrecalibrated\n")
    print(table(rows(defaults(recalibrated=True))))
