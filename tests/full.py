"""Run tests and record the result: every one, including the slow ones (`make test-full`), or with the argument "core"
the quick ones of the layers, for a version of torch (`make test-torch`).
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def main(core: bool) -> int:
    start = time.monotonic()
    pytest, environment = [str(Path(sys.executable).parent / "pytest"), "-n", "2"], dict(os.environ)
    if core:
        pytest += ["tests", "--ignore=tests/lab", "--ignore=tests/study"]
    else:
        pytest += ["-m", "slow or not slow"]
        environment["MEMNORM_ALL_LIBRARIES"] = "1"  # a library that is missing fails instead of skipping
    with subprocess.Popen(pytest, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode:
        return process.returncode
    import torch

    counts = re.search(r"\d+ passed.* in", lines[-1])
    assert counts is not None, lines[-1]
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": output("git", "rev-parse", "--short", "HEAD")
        + (" and changes" if output("git", "status", "-s") else ""),
        "result": counts.group().removesuffix(" in"),
        "minutes": round((time.monotonic() - start) / 60, 1),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }
    path = ROOT / "results" / ("test-torch.json" if core else "test-full.json")
    if core:
        record = {**json.loads(path.read_text()), torch.__version__.partition("+")[0]: record}
    path.write_text(json.dumps(record, indent=1) + "\n")
    return subprocess.run([sys.executable, "-m", "study.pages"], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(core=sys.argv[1:] == ["core"]))
