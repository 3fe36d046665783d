"""Two arms along the run: read off the evaluations before each milestone, over the seeds that both have."""

import json
from dataclasses import replace

import pytest
from helpers.evidence import FIRST, LONG, found, record

from memnorm.lab.evidence.phases import phases


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


def test_arms_are_compared_at_the_last_evaluation_before_each_milestone(runs):
    parts = along(runs)
    assert [(one.iteration, one.strength) for one in parts] == [(8_000, 0.1), (12_000, 0.5), (20_000, 0.9)]
    assert [one.training.mean for one in parts] == pytest.approx([-3, -2, -1])
    assert [one.test.mean for one in parts] == pytest.approx([1, 2, 3])
    assert [one.excess.mean for one in parts] == pytest.approx([4, 4, 4])
    assert {gap.n for one in parts for gap in one[2:]} == {2}


def test_a_seed_counts_where_both_arms_have_numbers_at_the_same_iteration(runs):
    set_errors(runs, "MBN-2", 1, {8_000: (57.0, 51.0), 12_000: (None, 42.0), 20_000: (39.0, 34.0)})
    assert [one.test.n for one in along(runs)] == [2, 1, 2]
    keep(runs, "BN", 0, lambda iteration: iteration != 20_000)
    assert [(one.iteration, one.test.n) for one in along(runs)] == [(8_000, 2), (12_000, 1), (20_000, 1)]
    keep(runs, "BN", 0, lambda iteration: iteration > 8_000)
    keep(runs, "BN", 1, lambda iteration: iteration > 8_000)
    assert [one.iteration for one in along(runs)] == [12_000, 20_000]


def keep(root, label, seed, wanted) -> None:
    """Evaluations of a run; the others are lost."""
    (run,) = [one for one in found(root).arm(FIRST, label).runs if one.spec.seed == seed]
    lines = [line for line in run.metrics if wanted(line["iteration"])]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_runs_that_diverged_or_are_divided_otherwise_are_not_compared(runs, tmp_path_factory):
    diverged = tmp_path_factory.mktemp("diverged")
    record(diverged, FIRST, {"BN": [30.0], "MBN-2": [None]})
    assert along(diverged) == []
    ours, base = (found(runs).arm(FIRST, label) for label in ("MBN-2", "BN"))
    other = replace(base, arm=replace(base.arm, spec=base.arm.spec.but(milestones=(0.4, 0.7))))
    assert phases(ours, other) == []


def test_a_constant_strength_has_the_parts_of_the_others(tmp_path):
    record(tmp_path, LONG, {"BN": [30.0], "MBN-2 λ=0.5": [31.0]})
    ours, base = (found(tmp_path).arm(LONG, label) for label in ("MBN-2 λ=0.5", "BN"))
    assert [one.iteration for one in phases(ours, base)] == [31_280, 46_920, 78_200]
    assert phases(base, ours)[0].strength is None
