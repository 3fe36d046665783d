"""What is said of the records is what they say, whichever way they point."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from evidencekit import BENCH, found, record, study

from memnorm.lab.evidence import STUDIES
from memnorm.lab.evidence.claims import JUDGES, Judgement, Material, judge
from memnorm.lab.evidence.findings import Findings, apart, compared, gap_text
from memnorm.lab.store import Store
from memnorm.lab.tables import CLAIMS

FIRST, LONG, TINY = "small-batch-resnet20", "ablation-resnet8", "tiny-batch-resnet8"
ROOT = Path(__file__).resolve().parents[2]
BETTER = {"BN": [34.0, 34.4, 33.8, 34.1, 34.2], "MBN-2": [31.0, 31.5, 30.7, 31.3, 31.1]}
WORSE = {"BN": BETTER["MBN-2"], "MBN-2": BETTER["BN"]}
EQUAL = {"BN": [34.0, 33.0, 34.5, 33.5, 34.0], "MBN-2": [33.6, 33.5, 34.0, 34.0, 33.8]}


def claim(name, root) -> Judgement:
    return claims(root)[name]


def claims(root) -> dict[str, Judgement]:
    material = Material(found(root), BENCH)
    return {one.name: judge(one, material) for one in CLAIMS}


def told(root) -> str:
    findings = found(root)
    ours, base = (findings.arm(FIRST, label) for label in ("MBN-2", "BN"))
    return compared("MBN-2", "BN", apart(ours, base))


@pytest.mark.parametrize(
    ("errors", "wanted"),
    [
        (BETTER, r"MBN-2's error is 2\.98 points below BN's \(95 % interval −3\.\d\d to −2\.\d\d, p < 0\.001, n = 5\)"),
        (WORSE, r"MBN-2's error is 2\.98 points above BN's \(95 % interval 2\.\d\d to 3\.\d\d, p < 0\.001, n = 5\)"),
        (
            EQUAL,
            r"MBN-2's error is 0\.02 points below BN's, which may be chance \(95 % interval −0\.\d\d to 0\.\d\d, .*",
        ),
        ({"BN": [34.0], "MBN-2": [31.0]}, r"one seed, no claim: MBN-2's error is 3\.00 points below BN's"),
        ({"BN": [34.0], "MBN-2": [None]}, "MBN-2 and BN: not run yet"),
        ({}, "MBN-2 and BN: not run yet"),
    ],
    ids=["better", "worse", "equal", "one seed", "diverged", "missing"],
)
def test_two_arms_are_compared_in_words(tmp_path, errors, wanted):
    record(tmp_path, FIRST, errors)
    assert re.fullmatch(wanted, told(tmp_path)), told(tmp_path)


def test_differences_are_paired_by_seed(tmp_path):
    record(tmp_path, FIRST, {"BN": [30.0, 40.0, 50.0], "MBN-2": [29.0, 39.1, 48.9]})
    findings = found(tmp_path)
    gap = apart(findings.arm(FIRST, "MBN-2"), findings.arm(FIRST, "BN"))
    assert (gap.n, gap.lower) == (3, 3)
    assert gap.mean == pytest.approx(-1.0)
    assert gap_text(gap) == "−1.00 (−1.25 to −0.75, p = 0.0033)"


def test_an_arm_counts_what_diverged_and_what_is_missing(tmp_path):
    record(tmp_path, FIRST, {"BN": [34.0, None, 33.0]})
    one = found(tmp_path).arm(FIRST, "BN")
    assert one.errors() == {0: 34.0, 2: 33.0}
    assert (len(one.diverged), one.missing) == (1, 2)
    assert one.sample().text == "33.50 ± 0.71 (n = 2)"


def test_a_seed_that_another_study_has_run_counts_as_well(tmp_path):
    """The small study asks for two seeds of what the other one runs three times."""
    record(tmp_path, "cheaper-second-forward", {"MBN-2": [30.0, 31.0, 30.5]})
    one = found(tmp_path).arm("tiny-batch-resnet8", "MBN-2", 8)
    assert one.arm.seeds == 2
    assert one.errors() == {0: 30.0, 1: 31.0, 2: 30.5}
    assert one.missing == 0


def test_a_study_whose_rates_are_not_chosen_has_no_runs(tmp_path):
    record(tmp_path, FIRST, BETTER)
    one = found(tmp_path).arm("small-batch-resnet20-tuned", "BN")
    assert (one.rate, one.runs, one.missing) == (None, (), 5)
    record(tmp_path, "small-batch-resnet20-tuned", {"BN": []})
    again = found(tmp_path).arm("small-batch-resnet20-tuned", "BN")
    assert again.rate == 0.1
    assert again.errors() == found(tmp_path).arm(FIRST, "BN").errors()


def test_the_runs_of_a_study_are_known_trials_included(tmp_path):
    record(tmp_path, FIRST, {"BN": [34.0]})
    record(tmp_path, "small-batch-resnet20-tuned", {"GROUP": [30.0]})
    record(tmp_path, LONG, {})
    assert sorted((spec.norm, spec.seed) for spec in found(tmp_path).specs()) == [
        ("bn", 0),
        ("group", 0),
        *[("group", 1000)] * 3,
    ]


@pytest.mark.parametrize(("errors", "wanted"), [(BETTER, "held"), (WORSE, "not held"), (EQUAL, "undecided")])
def test_a_claim_is_judged_by_where_the_interval_lies(tmp_path, errors, wanted):
    record(tmp_path, FIRST, errors)
    judged = claim("small-batches", tmp_path)
    assert judged.standing == wanted
    assert "MBN-2 − BN (small-batch-resnet20): " in judged.found
    assert "95 % interval" in judged.found


def test_evidence_on_both_sides_does_not_hold_a_claim(tmp_path):
    record(tmp_path, FIRST, BETTER)
    record(tmp_path, LONG, {label: values[:3] for label, values in WORSE.items()})
    assert claim("small-batches", tmp_path).standing == "not held"


def test_one_seed_decides_nothing(tmp_path):
    record(tmp_path, LONG, {"MBN-2": [20.0, 20.1, 20.2], "MBN-2, no shift": [25.0]})
    judged = claim("correction-term", tmp_path)
    assert judged.standing == "undecided"
    assert "−5.00 points, n = 1" in judged.found


def test_what_has_not_been_run_is_not_tested(tmp_path):
    judged = claims(tmp_path)
    exact = {name for name in JUDGES if judged[name].standing == "held"}
    assert {name for name, one in judged.items() if one.standing != "not tested"} - exact == {"double-forward-and-bn"}
    assert exact >= {"restore-input", "zero-strength-is-bn", "thirty-percent", "same-cost"}
    assert "small-batches" not in exact


@pytest.mark.parametrize(
    ("errors", "wanted"), [([None], "held"), ([89.9], "held"), ([30.0], "not held"), ([], "not tested")]
)
def test_moving_averages_alone_converge_or_not(tmp_path, errors, wanted):
    record(tmp_path, LONG, {"MOVING-BN": errors})
    assert claim("moving-averages-alone", tmp_path).standing == wanted


@pytest.mark.parametrize(
    ("others", "wanted"),
    [([34.1, 34.3, 33.9], "held"), ([31.0, 31.4, 30.9], "not held"), ([30.0, 37.4, 33.9], "undecided")],
)
def test_close_is_a_small_interval(tmp_path, others, wanted):
    record(tmp_path, FIRST, {"BN": BETTER["BN"], "BRN-2": others})
    assert claim("brn-close-to-bn", tmp_path).standing == wanted


def test_the_second_drop_is_that_behind_the_last_milestone(tmp_path):
    from memnorm.lab.evidence.claims import _drop

    record(tmp_path, FIRST, {"BN": [34.0]})
    (run,) = found(tmp_path).arm(FIRST, "BN").runs
    errors = {line["iteration"]: line["test_error"] for line in run.metrics}
    assert _drop(run) == errors[12_000] - errors[14_000]


@pytest.mark.parametrize(("ratio", "wanted"), [(1.3, "held"), (1.45, "not held")])
def test_costs_are_judged_by_the_bench(tmp_path, ratio, wanted, monkeypatch):
    (arm,) = [one for one in BENCH["step"]["networks"][0]["arms"] if one["name"] == "MBN-2"]
    monkeypatch.setitem(arm, "ratio", ratio)
    assert claim("thirty-percent", tmp_path).standing == wanted


def test_every_judge_has_its_claim_and_every_test_that_is_named_exists(tmp_path):
    assert JUDGES.keys() <= {one.name for one in CLAIMS}
    named = [name for one in claims(tmp_path).values() for name in re.findall(r"`(tests/\S+?)`", one.test)]
    assert len(named) >= 5
    for name in named:
        path, _, function = name.partition("::")
        assert f"def {function}(" in (ROOT / path).read_text(), name


def test_every_arm_that_a_judge_asks_for_exists(tmp_path):
    """A label that is spelled otherwise would never be tested."""
    for name in (FIRST, LONG):
        record(tmp_path, name, {arm.label: [20.0, 21.0][: arm.seeds] for arm in study(name).arms})
    for size in (2, 4):
        record(tmp_path, TINY, {arm.label: [20.0, 21.0] for arm in study(TINY).at(size)}, size)
    expected = {"small-batches": 2, "single-forward-memory": 3, "fixed-strength": 3, "very-small-batches": 2}
    judged = claims(tmp_path)
    for name, count in expected.items():
        assert judged[name].found.count(" points, ") == count, name
    for name in JUDGES:
        assert judged[name].standing != "not tested", name


@pytest.mark.parametrize(
    ("others", "wanted"),
    [([20.1], "undecided"), ([], "undecided"), ([20.1, 20.9, 20.6], "held"), ([25.0, 26.2, 25.4], "not held")],
)
def test_that_bn_trains_alike_with_two_forwards_is_exact_and_its_test_error_is_measured(tmp_path, others, wanted):
    record(tmp_path, LONG, {"BN": [20.0, 21.0, 20.5], "BN-2": others})
    studies = [replace(one, arms=tuple(replace(arm, seeds=3) for arm in one.arms)) for one in STUDIES]
    findings = Findings(studies, Store(tmp_path).runs())
    judged = JUDGES["double-forward-and-bn"](Material(findings, BENCH))
    assert judged.standing == wanted
    assert ("BN-2 − BN" in judged.found) == bool(others)


def test_every_claim_has_its_lines():
    assert all(one.lines and all(40 < line < 460 for line in one.lines) for one in CLAIMS)
