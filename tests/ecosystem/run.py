"""Run the tests of this folder and record which models of other libraries train and return: `make test-ecosystem`."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
LIBRARIES = ("torch", "torchvision", "timm", "segmentation_models_pytorch", "monai", "ultralytics")


class Outcomes:
    """A pytest plugin that keeps what each test has recorded."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        file, test = report.nodeid.rpartition("/")[2].split("::", 1)
        row = {"library": file.removeprefix("test_").removesuffix(".py")}
        row |= {"test": test.partition("[")[2].removesuffix("]") or test, "outcome": report.outcome}
        row |= dict(report.user_properties)
        if report.failed:
            row |= {"outcome": "failed", "error": report.longreprtext.strip().splitlines()[-1]}
        self.rows.append(row)


def output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def main() -> int:
    os.environ["MEMNORM_ECOSYSTEM"] = "1"  # a library that cannot be imported fails instead of skipping
    outcomes, start = Outcomes(), time.monotonic()
    code = pytest.main([str(Path(__file__).parent), "-v", "-rs", "--durations=10"], plugins=[outcomes])
    if not outcomes.rows or code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return int(code)
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": output("git", "rev-parse", "--short", "HEAD")
        + (" and changes" if output("git", "status", "-s") else ""),
        "minutes": round((time.monotonic() - start) / 60, 1),
        "versions": {"Python": platform.python_version(), **{name: version(name) for name in LIBRARIES}},
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }
    rows = ",\n".join("  " + json.dumps(row) for row in outcomes.rows)
    text = json.dumps(record, indent=1).removesuffix("\n}") + f',\n "rows": [\n{rows}\n ]\n}}\n'
    (ROOT / "results/ecosystem.json").write_text(text)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
