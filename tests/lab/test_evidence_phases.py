"""Two arms along the run: read off the evaluations before each milestone, over the seeds that both have."""

import json

import pytest
from evidencekit import FIRST, found, record

from memnorm.lab.evidence.phases import last_evaluations, phases


def set_errors(root, label, seed, errors) -> None:
    """Of the evaluations of a run, by iteration: training and test error."""
    (run,) = [one for one in found(root).arm(FIRST, label).runs if one.spec.seed == seed]
    for line in run.metrics:
        line["train_error"], line["test_error"] = errors.get(line["iteration"], (99.0, 99.0))
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in run.metrics))


@pytest.fixture
def runs(tmp_path):
    record(tmp_path, FIRST, {"BN": [30.0, 30.0, 30.0], "MBN-2": [31.0, 31.0]})
    for seed in (0, 1):
        set_errors(tmp_path, "BN", seed, {8_000: (60.0, 50.0), 12_000: (50.0, 40.0), 20_000: (40.0, 30.0 + seed)})
        set_errors(tmp_path, "MBN-2", seed, {8_000: (57.0, 51.0), 12_000: (48.0, 42.0), 20_000: (39.0, 33.0 + seed)})
    return tmp_path


def along(root):
    findings = found(root)
    return phases(*(findings.arm(FIRST, label) for label in ("MBN-2", "BN")))


def test_arms_are_compared_at_the_last_evaluation_with_each_strength(runs):
    parts = along(runs)
    assert [one.strength for one in parts] == [0.1, 0.5, 0.9]
    assert [one.training.mean for one in parts] == pytest.approx([-3, -2, -1])
    assert [one.test.mean for one in parts] == pytest.approx([1, 2, 3])
    assert [one.first_rise.mean for one in parts] == pytest.approx([-6, -6, -5.5])
    assert [one.second_rise.mean for one in parts] == pytest.approx([-10, -10, -9.5])
    assert {one.test.n for one in parts} == {one.second_rise.n for one in parts} == {2}


def test_a_seed_without_the_other_arm_or_without_a_number_counts_nowhere(runs):
    set_errors(runs, "MBN-2", 1, {8_000: (57.0, 51.0), 12_000: (None, 42.0), 20_000: (39.0, 34.0)})
    assert [one.test.n for one in along(runs)] == [2, 1, 2]
    assert along(runs)[1].second_rise.n == 1


def test_parts_without_an_evaluation_or_a_run_say_nothing(runs, tmp_path_factory):
    (run,) = [one for one in found(runs).arm(FIRST, "BN").runs if one.spec.seed == 0]
    assert [line["iteration"] for line in last_evaluations(run)] == [8_000, 12_000, 20_000]
    del run.metrics[4:6]
    assert last_evaluations(run) == []
    diverged = tmp_path_factory.mktemp("diverged")
    record(diverged, FIRST, {"BN": [30.0], "MBN-2": [None]})
    assert along(diverged) == []
