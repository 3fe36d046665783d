"""`memnorm compare` and `memnorm reproduce`: many runs from the command line."""

import json
import os
import re

import pytest
import yaml
from helpers.common import cpu_seconds
from helpers.lab import result_of

from memnorm import norms
from memnorm.lab import checkpoint
from memnorm.lab.paper import TABLES
from memnorm.lab.training import Training

COMPARE = ["compare", "--batch-sizes", "2,4", "--epochs", "0.02", "--test-images", "50", "--threads", "1"]


def test_compare_prints_a_table_and_a_verdict_and_writes_a_report(call, tmp_path):
    code, out, _ = call(*COMPARE, "--norms", "bn,mbn", "--seeds", "2")
    assert code == 0
    for arm, size in (("BN", 2), ("BN", 4), ("MBN-2", 2), ("MBN-2", 4)):
        assert re.search(rf"^{arm} +{size} .*\(n = 2\)", out, re.MULTILINE)
    assert "batch size" in out.lower()
    assert (tmp_path / "compare/report.html").exists()


def test_compare_gives_every_batch_size_the_same_number_of_images(call, tmp_path):
    rows = result_of(call(*COMPARE, "--norms", "bn", "--seeds", "1", "--json"))["rows"]
    assert [row["batch_size"] for row in rows] == [2, 4]
    specs = [yaml.safe_load(path.read_text()) for path in tmp_path.glob("runs/*/spec.yaml")]
    assert {spec["batch_size"] * spec["iterations"] for spec in specs} == {28}
    assert {spec["train_images"] for spec in specs} == {1296}  # no short last batch


def test_compare_with_one_seed_claims_nothing(call):
    answer = result_of(call(*COMPARE, "--norms", "bn,mbn", "--seeds", "1", "--json"))
    assert answer["verdict"]["use"] == []
    assert "no claim" in answer["verdict"]["headline"]


def test_tuning_looks_at_held_out_training_images_only(call, tmp_path):
    rows = result_of(call(*COMPARE, "--norms", "bn", "--seeds", "2", "--tune", "--rates", "0.1,1e-6", "--json"))["rows"]
    assert all(row["tuned"] for row in rows)
    specs = [yaml.safe_load(path.read_text()) for path in tmp_path.glob("runs/*/spec.yaml")]
    tuning, counted = [s for s in specs if s["seed"] == 1000], [s for s in specs if s["seed"] != 1000]
    assert len(tuning) == 4
    assert all(spec["holdout"] == 129 for spec in tuning)
    assert all(spec["holdout"] == 0 for spec in counted)
    assert {spec["train_images"] for spec in specs} == {1297 - 129}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--norms", "bn,foo"], "there is no norm 'foo'"),
        (["--jobs", "-1"], "--jobs must not be negative"),
        (["--norms", ""], "--norms needs at least one"),
        (["--norms", "group-2"], "Double-Forward needs"),
        (["--batch-sizes", "2,x"], "--batch-sizes needs positive numbers"),
        (["--batch-sizes", "0"], "--batch-sizes needs positive numbers"),
        (["--seeds", "0"], "--seeds needs at least one"),
        (["--tune", "--rates", "fast"], "--rates needs positive numbers"),
    ],
    ids=str,
)
def test_wrong_usage_of_compare_exits_with_2(call, words, message):
    code, _, err = call(*COMPARE, *words)
    assert code == 2
    assert message in err


@pytest.mark.parametrize("kind", ["pipe", "endless device"])
def test_compare_leaves_out_a_run_whose_metrics_are_no_file(call, tmp_path, kind):
    words = [*COMPARE, "--norms", "bn", "--seeds", "2", "--json"]
    result_of(call(*words))
    path = min(tmp_path.glob("runs/*-b2-s1-*/metrics.jsonl"))
    path.unlink()
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    code, out, err = call(*words)
    found = json.loads(out)
    assert code == 1
    assert [(row["n"], row["failed"]) for row in found["rows"]] == [(1, 1), (2, 0)]
    assert "not a regular file" in found["failed"][0]["message"]
    assert "Traceback" not in err


@pytest.fixture
def no_steps(monkeypatch):
    def refuse(*_arguments):
        raise AssertionError("a network was trained")

    monkeypatch.setattr(Training, "__init__", refuse)


def test_reproduce_list_shows_cells_with_the_paper_s_number_and_runs_nothing(call, tmp_path, no_steps):
    code, out, _ = call("reproduce", "small-batch", "cifar10", "--list")
    assert code == 0
    assert re.search(r"small-batch +8/MBN +15\.37 +7,820 +to do", out)
    assert re.search(r"cifar10 +BRN/ResNet-20 +8\.18 +7,820 +to do", out)
    assert re.search(r"cifar10 +NormProp/ResNet-20 .*does not apply", out)
    assert not (tmp_path / "runs").exists()


def test_reproduce_dry_run_shows_the_queue_and_runs_nothing(call, tmp_path, no_steps):
    code, out, _ = call("reproduce", "memory-size", "--scale", "smoke", "--dry-run")
    assert code == 0
    assert "3 runs to do" in out
    assert not (tmp_path / "runs").exists()


def test_reproduce_dry_run_shows_how_far_a_run_came(call, tmp_path, no_steps):
    words = ["reproduce", "memory-size", "--scale", "smoke", "--only", "10/*", "--dry-run", "--json"]
    (whole,) = json.loads(call(*words)[1])
    folder = tmp_path / "runs" / whole["run"]
    folder.mkdir(parents=True)
    checkpoint.save(folder, 1, {})
    assert json.loads(call(*words)[1]) == [{**whole, "iterations": 2, "done": 1}]


def test_reproduce_runs_the_chosen_cells_skips_them_the_second_time_and_reports(call, tmp_path):
    words = ["reproduce", "memory-size", "--scale", "smoke", "--only", "1*/*", "--threads", "1"]
    code, _, err = call(*words)
    assert code == 0
    assert len(list(tmp_path.glob("runs/*/result.json"))) == 1
    assert "begins" in err
    assert "smoke" in (tmp_path / "report/report.html").read_text()
    assert "begins" not in call(*words)[2]
    listing = call("reproduce", "memory-size", "--scale", "smoke", "--list", "--threads", "1")[1]
    assert re.search(r"10/ResNet-20 .*done", listing)
    assert re.search(r"40/ResNet-20 .*to do", listing)


def test_cells_whose_norm_is_not_registered_are_listed_as_such(call, monkeypatch):
    monkeypatch.delitem(norms._REGISTRY, "brn")
    out = call("reproduce", "cifar10", "--scale", "smoke", "--only", "B*/ResNet-20", "--list", "--threads", "1")[1]
    assert re.search(r"cifar10 +BRN/ResNet-20 +8\.18 .*'brn' is not registered", out)
    assert re.search(r"cifar10 +BN/ResNet-20 +8\.41 .*to do", out)


@pytest.mark.slow
def test_every_cell_of_the_paper_runs_at_smoke_scale_within_90_seconds(call, tmp_path):
    before = cpu_seconds()
    code, out, err = call("reproduce", "all", "--scale", "smoke", "--jobs", "2")
    assert code == 0, err
    assert cpu_seconds() - before < 2 * 90  # in two processes
    assert "to do" not in out
    assert "FAILED" not in err
    page = (tmp_path / "report/report.html").read_text()
    done = len(list(tmp_path.glob("runs/*/result.json")))
    assert done == 61
    smoke = page[page.index("smoke scale") :]
    for table in TABLES.values():
        assert all(row in smoke and column in smoke for row in table.rows for column in table.columns)


def test_smoke_numbers_are_never_next_to_printed_ones(call):
    out = call("reproduce", "memory-size", "--scale", "smoke", "--only", "10/*", "--threads", "1")[1]
    assert "7.87" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["reproduce", "table9"], "no table or figure 'table9'"),
        (["reproduce", "memory-size", "--only", "11/*"], "matches nothing"),
        (["reproduce", "memory-size", "--scale", "huge"], "scale"),
        (["reproduce", "memory-size", "--seeds", "0"], "--seeds"),
        (["reproduce", "cifar10", "--only", "NormProp/ResNet-*", "--scale", "smoke"], "none of these cells can be run"),
        (["reproduce"], "NAME"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_usage_of_reproduce_exits_with_2(call, words, message):
    code, _, err = call(*words)
    assert code == 2
    assert message in err


def test_reproduce_on_real_data_that_are_missing_exits_with_3(call):
    code, _, err = call("reproduce", "memory-size", "--scale", "reduced")
    assert code == 3
    assert "memnorm data get cifar10" in err
