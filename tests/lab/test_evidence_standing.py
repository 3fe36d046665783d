"""Who is said to be better than the baseline, and what to take."""

import pytest
from evidencekit import BETTER, FIRST, LONG, TINY, WORSE, found, record, study

from memnorm.lab.evidence.standing import choice, standings, told
from memnorm.lab.significance import holm


def arms_of(root, name=FIRST, size=8):
    return [one for one in standings(found(root), study(name)) if one.found.arm.spec.batch_size == size]


def chosen(root, name=FIRST, size=8):
    return choice(arms_of(root, name, size), found(root).arm(name, "BN", size))


def test_every_arm_is_compared_with_the_baseline_and_corrected_for_all_of_them(tmp_path):
    record(tmp_path, FIRST, {**BETTER, "MBN-1": [33.0, 34.0, 33.9, 33.2, 34.4], "GROUP": [38.0, 38.1, 37.5]})
    arms = {one.label: one for one in arms_of(tmp_path)}
    assert list(arms) == ["MBN-1", "MBN-2", "BRN-2", "GROUP", "MABN"]
    tested = [arms[label] for label in ("MBN-1", "MBN-2", "GROUP")]
    assert [one.p for one in tested] == pytest.approx(holm([*(one.gap.p for one in tested), 1.0, 1.0])[:3])
    assert arms["MBN-2"].better
    assert arms["GROUP"].worse
    assert not arms["MBN-1"].told_apart
    assert (arms["MABN"].gap, arms["MABN"].p) == (None, None)


def test_all_batch_sizes_of_a_study_are_one_family_whether_they_are_run_or_not(tmp_path):
    for size in (2, 4):
        record(tmp_path, TINY, {"BN": [40.0, 41.0], "MBN-2": [38.0, 39.01]}, size)
    (two,) = [one for one in arms_of(tmp_path, TINY, 2) if one.gap]
    planned = len(study(TINY).arms) - len(study(TINY).batch_sizes)  # each but the baseline
    assert planned == 9
    assert two.p == pytest.approx(min(1.0, planned * two.gap.p))


def test_the_arms_are_told_by_how_they_stand(tmp_path):
    record(tmp_path, FIRST, {**BETTER, "MBN-1": [34.5], "GROUP": [38.0, 38.1, 37.5], "BRN-2": [None, None]})
    text = told(arms_of(tmp_path), "BN")
    parts = dict(part.split(": ") for part in text.split("; "))
    assert parts["less error than BN"].startswith("MBN-2 (2.98 points, corrected p < 0.001")
    assert parts["more error than BN"].startswith("GROUP (")
    assert parts["too few seeds to say"] == "MBN-1"
    assert parts["every run diverged"] == "BRN-2"
    assert parts["not run yet"] == "MABN"


def test_an_arm_apart_in_its_own_comparison_only_is_said_to_be(tmp_path):
    record(tmp_path, FIRST, {"BN": [34.0, 34.4, 33.8], "BRN-2": [35.5, 36.6, 35.0], "GROUP": [34.2, 33.9, 34.1]})
    alone, level = [one for one in arms_of(tmp_path) if one.gap]
    assert alone.gap.p < 0.05 < alone.p
    assert alone.apart_alone
    assert not level.apart_alone
    parts = dict(part.split(": ") for part in told(arms_of(tmp_path), "BN").split("; "))
    assert parts["not told apart from BN"] == "GROUP"
    assert parts["not told apart from BN once corrected for all comparisons"].startswith(
        "BRN-2 (alone 1.63 points more,"
    )


def test_the_baseline_stays_unless_something_is_found_better(tmp_path):
    record(tmp_path, FIRST, WORSE)
    assert chosen(tmp_path) == "stay with BN: nothing was found to have less error"
    record(tmp_path, FIRST, {"GROUP": [25.0, 36.0, 30.0]})
    assert chosen(tmp_path).endswith("which may be chance: GROUP (by 0.73 points, lower in 2 of 3 seeds)")


def test_two_seeds_are_too_few_to_advise_against_an_arm_with_a_lower_mean(tmp_path):
    record(tmp_path, TINY, {"BN": [40.0, 44.0], "MBN-2": [44.0, 42.0], "MABN": [36.0, 36.7]}, 2)
    assert chosen(tmp_path, TINY, 2) == (
        "no advice: too few seeds to tell MABN from BN. "
        "Lower than BN over the seeds that both have, which may be chance: MABN (by 5.65 points, lower in 2 of 2 seeds)"
    )
    record(tmp_path, TINY, {"BN": [40.0, 44.0], "MBN-2": [44.0, 42.0], "MABN": [46.0, 44.7]}, 4)
    assert chosen(tmp_path, TINY, 4) == "stay with BN: nothing was found to have less error"


def test_seeds_that_the_baseline_lacks_do_not_make_them_enough(tmp_path):
    record(tmp_path, FIRST, {"BN": [40.0, 44.0], "MABN": [36.0, 36.7, 36.2]})
    assert chosen(tmp_path).startswith("no advice: too few seeds to tell MABN from BN. ")


def test_of_those_found_better_the_one_with_the_least_error_is_taken(tmp_path):
    record(tmp_path, FIRST, {**BETTER, "MBN-1": [30.0, 30.5, 29.7, 30.3, 30.1]})
    assert chosen(tmp_path) == "take MBN-1"


def test_an_arm_that_diverged_now_and_then_is_not_recommended(tmp_path):
    record(tmp_path, FIRST, {"BN": BETTER["BN"], "MBN-2": [*BETTER["MBN-2"][:4], None]})
    assert chosen(tmp_path).startswith("stay with BN: nothing that trains in every seed was found to have less error")
    assert "MBN-2 has less error (" in chosen(tmp_path)


def test_an_arm_with_less_error_that_did_not_train_in_a_seed_is_named_and_not_recommended(tmp_path):
    record(tmp_path, FIRST, {"BN": [97.0, 97.1, 97.2, 97.1, 97.0], "MBN-2": [81.0, 79.1, 79.2, 79.1, 79.0]})
    assert chosen(tmp_path).startswith("no advice: BN failed in 5 of 5 seeds, and nothing that never did")
    assert "MBN-2 has less error (17.60 points, corrected p < 0.001) but failed in 1 of 5 seeds" in chosen(tmp_path)
    assert "may be chance" not in chosen(tmp_path)


def test_where_the_baseline_does_not_train_an_arm_that_does_is_taken(tmp_path):
    record(tmp_path, FIRST, {"BN": [90.0, 90.0, 90.1, 89.9, 90.0], "MBN-2": [40.0, 41.0, 39.0, 42.0, 41.0]})
    assert chosen(tmp_path) == "take MBN-2"


@pytest.mark.parametrize(
    ("errors", "wanted"),
    [
        ({"MBN-2": [31.0, 31.1]}, "no claim: BN is not run yet"),
        ({"BN": [None], "MBN-2": [31.0]}, "no claim: BN diverged"),
        ({"BN": [34.0], "MBN-2": [31.0]}, "no claim: too few seeds beside BN"),
    ],
)
def test_without_seeds_of_both_there_is_no_claim(tmp_path, errors, wanted):
    record(tmp_path, FIRST, errors)
    assert chosen(tmp_path) == wanted


def test_arms_that_are_planned_with_one_seed_are_no_comparisons_to_correct_for(tmp_path):
    errors = {"BN": [20.0, 21.0, 20.5], "MBN-2": [22.0, 22.8, 22.6], "MBN-1": [20.1, 20.8, 20.9], "BN-2": [25.0]}
    record(tmp_path, LONG, errors)
    by_label = {one.label: one for one in arms_of(tmp_path, LONG)}
    assert by_label["MBN-2"].p == pytest.approx(2 * by_label["MBN-2"].gap.p)
    assert by_label["BN-2"].p is None


def test_who_is_lower_is_told_over_the_seeds_that_both_have(tmp_path):
    """Over all seeds the mean of GROUP is below BN's, over the common ones above."""
    record(tmp_path, FIRST, {"BN": [30.0, 30.2, 30.4, 38.0, 39.0], "MBN-2": [40.0, 41.0], "GROUP": [30.5, 30.1, 31.0]})
    assert chosen(tmp_path) == "stay with BN: nothing was found to have less error"
