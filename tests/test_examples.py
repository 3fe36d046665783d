"""Every example runs and is short."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.optional import library

FOLDER = Path(__file__).resolve().parent.parent / "examples"
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if path.name != "digits.py")
NEEDS = {
    "with_lightning": "lightning.pytorch",
    "with_accelerate": "accelerate",
    "brain_segmentation": "nilearn",
}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_has_fewer_than_a_hundred_lines(path):
    assert len(path.read_text().splitlines()) < 100


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_prints_its_result(path):
    library(NEEDS.get(path.stem, "sklearn"))
    command = [sys.executable, str(path)]
    if path.stem == "brain_segmentation":
        command += ["--steps", "30", "--batch-size", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": ""}  # they import from their own folder
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    assert all(0 <= number <= 100 for number in results(path.stem, result.stdout))
    assert results(path.stem, result.stdout)


def results(name: str, printed: str) -> list[float]:
    """The errors in per cent or Dice coefficients that an example has printed."""
    pattern = {"with_lightning": r"error in % +│ +([\d.]+)", "brain_segmentation": r"^\S+ +(\d\.\d+)  "}
    return [float(number) for number in re.findall(pattern.get(name, r"test error ([\d.]+)"), printed, re.MULTILINE)]
