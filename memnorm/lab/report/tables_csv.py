"""CSV files: one for each table, two for each comparison (errors and tests), one with every run.

Printed numbers are in the files at paper scale only. A text that a spreadsheet would take for a formula gets an
apostrophe in front.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

from memnorm.lab.comparison import RECALIBRATED, Comparison, best, final, measured, memory_mb, progress, step_ms
from memnorm.lab.report.collect import CellView, Page, TableView
from memnorm.lab.significance import Sample
from memnorm.lab.store import StoredRun
from memnorm.lab.verdict import PairTest

FORMULA = ("=", "+", "-", "@", "\t", "\r")
RUN_MEASURES = ("train_loss", "train_error", "test_loss", "test_error", "test_error_top5")
ENVIRONMENT = [
    "started",
    "memnorm",
    "commit",
    "torch",
    "python",
    "device",
    "threads",
    "channels_last",
    "kernels",
    "machine",
]


def files(page: Page) -> Iterator[tuple[str, str]]:
    for view in page.tables:
        yield f"{view.name}.csv", written([_cell(view, one) for one in view.cells])
    for comparison in page.comparisons:
        yield f"{comparison.name}.csv", written(_comparison(comparison))
        if comparison.verdict and comparison.verdict.tests:
            yield f"{comparison.name}-tests.csv", written([_test(one) for one in comparison.verdict.tests])
    runs = [run for group in page.groups for run in group.runs]
    yield "runs.csv", written([_run(run) for run in sorted(runs, key=lambda run: run.spec.name)])


def written(rows: Sequence[dict[str, Any]]) -> str:
    target = io.StringIO()
    writer = csv.DictWriter(target, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _safe(value) for name, value in row.items()} for row in rows)
    return target.getvalue()


def _safe(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(FORMULA):
        return f"'{value}"
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False, sort_keys=True)
    return value


def _cell(view: TableView, one: CellView) -> dict[str, Any]:
    printed = view.beside_print and one.cell.printed is not None and not one.apart
    return {
        "table": view.table.name,
        "scale": view.scale,
        "row": one.cell.row,
        "column": one.cell.column,
        "printed": one.cell.printed if printed else None,
        "printed_in": one.cell.source if printed else None,
        "metric": one.cell.metric,
        **_sample(one.ours),
        "status": one.status or "finished",
        **_runs(one.group.runs if one.group else ()),
        "note": one.cell.note if view.beside_print or one.spec is None else None,
    }


def _comparison(comparison: Comparison) -> list[dict[str, Any]]:
    return [
        {
            "norm": label,
            "batch_size": group.spec.batch_size,
            "learning_rate": group.spec.base_learning_rate,
            "iterations": group.spec.iterations,
            **_sample(group.sample()),
            "status": group.trouble or "finished",
            **{f"recalibrated_{name}": _sample(group.sample(RECALIBRATED))[name] for name in ("mean", "sd")},
            "step_ms": group.cost.step_ms,
            "peak_memory_mb": group.cost.memory_mb,
            **_runs(group.runs),
        }
        for label, group in comparison.groups
    ]


def _test(test: PairTest) -> dict[str, Any]:
    low, high = test.difference.interval() or (None, None)
    return {
        "batch_sizes": " ".join(map(str, test.sizes)),
        "first": test.first,
        "second": test.second,
        "difference": test.difference.mean,
        "interval_low": low,
        "interval_high": high,
        "p_holm": test.p,
        "pairs_lower": test.difference.lower,
        "n": test.difference.n,
        "detectable": test.detectable,
    }


def _runs(runs: Sequence[StoredRun]) -> dict[str, str]:
    return {
        "seeds": " ".join(str(run.spec.seed) for run in runs),
        "runs": " ".join(run.spec.name for run in runs),
    }


def _sample(sample: Sample | None) -> dict[str, float | None]:
    if sample is None:
        return {"mean": None, "sd": None, "n": 0}
    return {"mean": sample.mean, "sd": sample.sd, "n": sample.n}


def _run(run: StoredRun) -> dict[str, Any]:
    lowest = best(run)
    last = run.result.get("final") if run.result else run.metrics[-1] if run.metrics else None
    return {
        "run": run.spec.name,
        "status": run.status,
        "iteration": progress(run),
        **{f"last_{name}": measured(last, name) for name in RUN_MEASURES},
        "headline_test_error": final(run),
        "best_test_error": lowest[0] if lowest else None,
        "best_iteration": lowest[1] if lowest else None,
        "seconds": measured(run.result, "seconds") or measured(last, "seconds"),
        "step_ms": step_ms(run),
        "peak_memory_mb": memory_mb(run),
        "parameters": run.result.get("parameters") if run.result else None,
        **run.spec.as_dict(),
        **{f"environment_{name}": run.environment.get(name) for name in ENVIRONMENT},
    }
