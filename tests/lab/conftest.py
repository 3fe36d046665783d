"""Fixtures of the lab's tests."""

import pytest

from memnorm.lab.store import Store


@pytest.fixture
def no_git(monkeypatch):
    """Asking for the commit takes longer than a small run."""
    monkeypatch.setattr("memnorm.lab.environment.commit", lambda: None)


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path / "runs")
