"""What is said of the records is what they say, whichever way they point."""

import re

import pytest
from helpers.evidence import BETTER, EQUAL, FIRST, LONG, TINY, WORSE, found, record

from memnorm.lab.evidence.findings import apart, compared, gap_text

ALONE = r", as a comparison by itself \(95 % interval 2\.\d\d to 3\.\d\d, p < 0\.001, n = 5\)"


def told(root) -> str:
    findings = found(root)
    ours, base = (findings.arm(FIRST, label) for label in ("MBN-2", "BN"))
    return compared("MBN-2", "BN", apart(ours, base))


@pytest.mark.parametrize(
    ("errors", "wanted"),
    [
        (BETTER, rf"MBN-2's error is 2\.98 points below BN's{ALONE}"),
        (WORSE, rf"MBN-2's error is 2\.98 points above BN's{ALONE}"),
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


@pytest.mark.parametrize(("label", "shown"), [("BRN-2", [1]), ("MABN", [1]), ("MBN-2", [0, 1])])
def test_what_was_recalibrated_with_a_fault_is_left_out_and_nothing_else(tmp_path, label, shown):
    record(tmp_path, FIRST, {label: [37.0, 38.0]}, test_error_recalibrated=41.0)
    (env,) = tmp_path.glob("*-s0-*/env.json")
    env.write_text(env.read_text().replace("0123456789ab", "f988411c379c"))
    one = found(tmp_path).arm(FIRST, label)
    assert list(one.errors("test_error_recalibrated")) == shown
    assert list(one.errors()) == [0, 1]
    assert len(one.badly_recalibrated) == 2 - len(shown)


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


def test_a_run_at_chance_counts_in_the_mean_and_is_told(tmp_path):
    record(tmp_path, FIRST, {"BN": [34.0, 90.0, None, 79.9]})
    one = found(tmp_path).arm(FIRST, "BN")
    assert [run.spec.seed for run in one.stuck] == [1]
    assert one.errors() == {0: 34.0, 1: 90.0, 3: 79.9}


def test_a_study_has_its_own_seeds_whatever_another_study_has_run(tmp_path):
    """The small study asks for two seeds of what the other one runs three times."""
    record(tmp_path, "cheaper-second-forward", {"MBN-2": [30.0, 31.0, 30.5], "BN": [29.0, 29.5, 29.2]})
    findings = found(tmp_path)
    one = findings.arm(TINY, "MBN-2", 8)
    assert one.errors() == {0: 30.0, 1: 31.0}
    assert one.missing == 0
    same = [ours for ours, _ in findings.pairs("MBN-2", "BN") if ours.runs]
    assert [ours.study.name for ours in same] == ["cheaper-second-forward"]  # it has more of the same runs


def test_a_pair_is_where_both_arms_are_planned_at_one_batch_size(tmp_path):
    places = [one.place for one, _ in found(tmp_path).pairs("MBN-2", "BN")]
    assert places == [
        "ResNet-20 at batch size 8, 20,000 iterations",
        "ResNet-20 at batch size 8, 20,000 iterations, chosen learning rate",
        "ResNet-56 at batch size 8, 78,200 iterations",
        "ResNet-8 at batch size 8, 78,200 iterations",
        "ResNet-8 at batch size 2, 80,000 iterations",
        "ResNet-8 at batch size 4, 40,000 iterations",
        "ResNet-8 at batch size 8, 20,000 iterations",
    ]
    assert found(tmp_path).pairs("MBN-2", "nobody") == []


def test_one_common_seed_is_one_pair_whatever_other_seeds_there_are(tmp_path):
    record(tmp_path, FIRST, {"BN": [34.0, None, 33.0], "MBN-2": [31.0, 31.5, None]})
    findings = found(tmp_path)
    gap = apart(findings.arm(FIRST, "MBN-2"), findings.arm(FIRST, "BN"))
    assert (gap.mean, gap.n, gap.p) == (-3.0, 1, None)


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
