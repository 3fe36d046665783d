"""The commit of a source tree. setup.py runs this file, so it imports nothing else of the package."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

RECORD = "memnorm/lab/COMMIT"  # in a wheel: the commit it was built from, or nothing


def commit_of(root: Path) -> str | None:
    """The commit of the clone at `root`, marked if files of the package are changed; None if it is no clone."""

    def git(*words: str) -> str:
        answer = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True, timeout=10)
        return answer.stdout.strip()

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if Path(git("rev-parse", "--show-toplevel")).resolve() == root.resolve():
            changed = git("status", "--porcelain", "--", "memnorm")
            return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    return None
