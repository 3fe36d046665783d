"""Fixtures of the lab's tests."""

import sys
from pathlib import Path

import pytest

from memnorm.lab.cli import main
from memnorm.lab.store import Store

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # tests of the literal training loop


@pytest.fixture
def no_git(monkeypatch):
    """Asking for the commit takes longer than a small run."""
    monkeypatch.setattr("memnorm.lab.environment.commit", lambda: None)


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path / "runs")


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Run the command in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMNORM_DATA", str(tmp_path / "data"))

    def run(*words):
        try:
            code = main([str(word) for word in words])
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
