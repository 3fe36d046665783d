"""The training with everything written out, and the benchmark in which trained networks continue with it."""

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.lab import PLAIN, tiny
from literal import LiteralTraining

from memnorm.lab.errors import UsageError
from memnorm.lab.runner import run
from memnorm.lab.store import Store

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MEMORY = {"norm": "mbn", "scheme": "double", "norm_options": {"memory_size": 2}}


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module("late_and_literal")
    sys.modules.pop("late_and_literal")


def trained(folder, **changes):
    """A run that is done and has kept its weights."""
    spec = tiny(**MEMORY | changes)
    store = Store(folder)
    run(spec, store, execution=replace(PLAIN, keep_weights=True))
    (found,) = [one for one in store.runs() if one.spec == spec]
    return found


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"norm": "group", "scheme": "single"}, "the norm group, single forward"),
        ({"norm": "bn"}, "the norm bn, double forward"),
        ({"norm_options": {"decay": 0.5}}, "norm options {'decay': 0.5}"),
        ({"every": 2}, "every=2, fraction=1"),
        ({"fraction": 0.5}, "every=1, fraction=0.5"),
        ({"optimizer": "adamw"}, "the optimizer adamw"),
        ({"pretrained": "weights.pt", "pretrained_sha256": "1f"}, "pretrained weights"),
        ({"processes": 2}, "2 processes"),
        ({"model_options": {"dropout": 0.5}}, "dropout"),
    ],
    ids=str,
)
def test_what_is_not_implemented_is_refused(changes, told):
    with pytest.raises(UsageError, match=f"cannot be trained literally: {told}$"):
        LiteralTraining(tiny(**MEMORY | {"norm_options": {}} | changes), 4, (1, 8, 8))


def test_errors_are_counted_as_the_lab_counts_them():
    literal = LiteralTraining(tiny(**MEMORY), 4, (1, 8, 8))
    for count in (164, 7):
        literal.wrong, literal.losses = [True] * count + [False] * (1000 - count), [1.0]
        assert literal.training_error()["train_error"] == 100 * count / 1000


def test_a_trained_network_continues_literally(benchmark, tmp_path):
    found = benchmark.compared(trained(tmp_path), None, steps=4, test_images=20)
    assert found["apart"] < 1e-11
    assert found["lab"] == pytest.approx(found["literal"], rel=1e-11)
    assert found["strength"] == 0.9


@pytest.mark.parametrize("change", ["strength", "learning_rate"])
def test_another_strength_or_learning_rate_is_seen(benchmark, tmp_path, monkeypatch, change):
    step = LiteralTraining.step
    monkeypatch.setattr(LiteralTraining, "step", lambda *a, **told: step(*a, **told | {change: 0.99 * told[change]}))
    assert benchmark.compared(trained(tmp_path), None, steps=4, test_images=20)["apart"] > 1e-4


def test_a_weight_that_is_no_number_is_not_overlooked(benchmark, tmp_path, monkeypatch):
    test_error = LiteralTraining.test_error

    def spoil(literal, *images):
        list(literal.network.parameters())[2].data.fill_(torch.nan)
        return test_error(literal, *images)

    monkeypatch.setattr(LiteralTraining, "test_error", spoil)
    found = benchmark.compared(trained(tmp_path), None, steps=4, test_images=20)
    with pytest.raises(ValueError, match="JSON"):
        json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("changes", [{"schedule": "cosine"}, {"warmup": 2}, {"milestones": (0.4, 0.9)}], ids=str)
def test_a_run_whose_end_has_another_learning_rate_is_refused(benchmark, tmp_path, changes):
    with pytest.raises(UsageError, match="not all behind the last milestone"):
        benchmark.compared(trained(tmp_path, **changes), None, steps=4, test_images=20)


def test_runs_that_cannot_be_compared_are_reported_and_the_others_written(benchmark, tmp_path, monkeypatch, capsys):
    kept = [trained(tmp_path / "runs"), trained(tmp_path / "runs", every=2)]
    for name, value in {"OUT": tmp_path / "out.json", "STEPS": 4, "TEST_IMAGES": 20}.items():
        monkeypatch.setattr(benchmark, name, value)
    threads = torch.get_num_threads()
    try:
        benchmark.main(str(tmp_path / "runs"), str(tmp_path))
    finally:
        torch.set_num_threads(threads)
    record = json.loads((tmp_path / "out.json").read_text())
    assert [one["run"] for one in record["runs"]] == [kept[0].spec.name]
    assert (record["steps"], record["test_images"]) == (4, 20)
    assert "every=2" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="keep-weights"):
        benchmark.main(str(tmp_path / "none"), str(tmp_path))
