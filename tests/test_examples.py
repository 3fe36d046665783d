"""Every example runs and is short."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.optional import library

FOLDER = Path(__file__).resolve().parent.parent / "examples"
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if path.name != "digits.py")
NOTEBOOK = FOLDER / "quickstart.ipynb"
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


def test_the_notebook_is_committed_without_outputs():
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)


@pytest.mark.slow
def test_the_notebook_runs_within_five_minutes_and_deploys_what_it_trained(monkeypatch):
    client, formats = library("nbclient"), library("nbformat")
    library("sklearn"), library("matplotlib"), library("ipykernel")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    notebook = formats.read(NOTEBOOK, as_version=4)
    started = time.monotonic()
    client.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(FOLDER)}}).execute()
    assert time.monotonic() - started < 300
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    assert "Batch statistics are noisy" in printed
    assert "two-way memory of 0 values" in printed
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
    (error,) = results("quickstart", printed)
    assert error < 10


def results(name: str, printed: str) -> list[float]:
    """The errors in per cent or Dice coefficients that an example has printed."""
    pattern = {"with_lightning": r"error in % +│ +([\d.]+)", "brain_segmentation": r"^\S+ +(\d\.\d+)  "}
    return [float(number) for number in re.findall(pattern.get(name, r"test error ([\d.]+)"), printed, re.MULTILINE)]
