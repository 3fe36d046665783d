"""What may be said about arms after a few seeds, and what may not."""

import random

import pytest

from memnorm.lab.report.verdict import Cost, verdict

GOOD, BAD = (6.1, 6.3, 6.0), (7.5, 7.9, 7.6)
NOISE = ((7.0, 7.6, 7.1), (7.4, 7.1, 7.5))


def runs(**arms):
    """arm -> errors at batch size 8, by seed."""
    return {name.replace("_", "-"): {8: dict(enumerate(errors))} for name, errors in arms.items()}


def sizes(**arms):
    """arm -> {batch size: errors}."""
    return {
        name.replace("_", "-"): {size: dict(enumerate(errors)) for size, errors in found.items()}
        for name, found in arms.items()
    }


def test_a_clear_winner_is_recommended_with_interval_p_value_and_seeds():
    found = verdict(runs(BN=BAD, MBN_2=GOOD))
    assert found.use == ("MBN-2",)
    assert found.headline.startswith("Use MBN-2: its error is 1.53 points below BN's (95 % interval 1.25 to 1.82, p = ")
    assert "lower in 3 of 3 seeds" in found.headline


def test_the_winner_may_be_batch_norm():
    assert verdict(runs(BN=GOOD, MBN_2=BAD)).use == ("BN",)


def test_the_order_of_the_arms_does_not_decide():
    assert verdict(runs(MBN_2=GOOD, BN=BAD)).use == verdict(runs(BN=BAD, MBN_2=GOOD)).use


def test_the_cost_is_told_relative_to_batch_norm():
    costs = {"MBN-2": {8: Cost(13.0, 210.0)}, "BN": {8: Cost(10.0, 200.0)}}
    found = verdict(runs(MBN_2=GOOD, BN=BAD), costs)
    assert found.headline.endswith("MBN-2 takes 1.30 times the time per step and 1.05 times the memory of BN.")


def test_the_cost_over_batch_sizes_is_a_geometric_mean_of_those_measured_for_both():
    costs = {"BN": {2: Cost(1.0), 4: Cost(10.0), 8: Cost(5.0)}, "MBN-2": {2: Cost(2.0), 4: Cost(5.0), 16: Cost(99.0)}}
    found = verdict(sizes(BN={2: BAD, 4: BAD}, MBN_2={2: GOOD, 4: GOOD}), costs)
    assert "MBN-2 takes 1.00 times the time per step of BN." in found.text


def test_without_batch_norm_the_first_arm_is_the_measure():
    costs = {"GROUP": {8: Cost(10.0)}, "MBN-2": {8: Cost(5.0)}}
    assert "MBN-2 takes 0.50 times the time per step of GROUP" in verdict(runs(GROUP=BAD, MBN_2=GOOD), costs).text


def test_another_baseline_can_be_named():
    costs = {"BN": {8: Cost(10.0)}, "MBN-2": {8: Cost(5.0)}}
    found = verdict(runs(BN=GOOD, MBN_2=BAD), costs, baseline="MBN-2")
    assert "BN takes 2.00 times the time per step of MBN-2" in found.headline


def test_unmeasured_costs_are_not_made_up():
    found = verdict(runs(BN=BAD, MBN_2=GOOD), {"BN": {8: Cost(None, None)}, "MBN-2": {8: Cost(1.0, 2.0)}})
    assert "times" not in found.text


def test_noise_is_no_difference_and_says_what_could_have_been_found():
    found = verdict(runs(BN=NOISE[0], MBN_2=NOISE[1]))
    assert found.use == ()
    assert found.headline.startswith("No difference found between BN and MBN-2: BN's error 0.10 points below MBN-2's (")
    assert "a difference below about 1.7 points would not have been seen reliably" in found.headline


def test_without_a_difference_the_fastest_is_named():
    costs = {"BN": {8: Cost(10.0)}, "MBN-2": {8: Cost(13.0)}}
    assert "The fastest of them is BN." in verdict(runs(BN=NOISE[0], MBN_2=NOISE[1]), costs).details


def test_one_seed_supports_no_claim():
    found = verdict(runs(BN=[20.0], MBN_2=[5.0]))
    assert found.use == ()
    assert found.headline == "One seed: no claim (BN 20.00 (n = 1), MBN-2 5.00 (n = 1))."


def test_one_seed_at_many_batch_sizes_supports_no_claim_either():
    found = verdict(sizes(BN={2: [20.0], 4: [19.0], 8: [18.0]}, MBN_2={2: [5.0], 4: [4.0], 8: [3.0]}))
    assert found.use == ()
    assert found.headline.startswith("One seed: no claim")
    assert all("use" not in line for line in found.details)


def test_one_seed_that_diverged_supports_no_claim_for_the_other():
    found = verdict(runs(BN=[None], MBN_2=[5.0]))
    assert found.use == ()
    assert "BN diverged in 1 of 1 seeds at batch size 8." in found.details


def test_one_common_seed_is_not_enough():
    found = verdict({"BN": {8: {0: 20.0}}, "MBN-2": {8: {0: 5.0, 1: 5.1, 2: 5.2}}})
    assert found.use == ()
    assert found.headline.startswith("Too few runs with the same batch size and seeds: no claim")


def test_arms_at_different_batch_sizes_are_not_compared():
    found = verdict(sizes(BN={8: BAD}, MBN_2={16: GOOD}))
    assert found.use == ()
    assert "no claim" in found.headline


def test_one_arm_is_told_and_not_compared():
    found = verdict(runs(BN=[7.0, 7.2]))
    assert found.headline == "One arm only, nothing to compare it with: BN 7.10 ± 0.14 (n = 2)."


@pytest.mark.parametrize("results", [{}, {"BN": {}}, {"BN": {8: {}}}], ids=["none", "no sizes", "no seeds"])
def test_nothing_supports_nothing(results):
    assert verdict(results).headline == "No runs: no claim."


def test_when_everything_diverged_that_is_said():
    found = verdict(runs(BN=[None, None], MBN_2=[None, float("nan")]))
    assert found.headline == "Every run diverged: no claim."
    assert found.details == (
        "BN diverged in 2 of 2 seeds at batch size 8.",
        "MBN-2 diverged in 2 of 2 seeds at batch size 8.",
    )


def test_the_arm_that_alone_trains_is_recommended_for_that():
    found = verdict(runs(BN=[None, None, None], MBN_2=GOOD))
    assert found.use == ("MBN-2",)
    assert found.headline == "Use MBN-2: every run of BN diverged."


def test_one_diverged_run_is_no_proof_against_an_arm():
    found = verdict({"BN": {8: {0: None}}, "MBN-2": {8: dict(enumerate(GOOD))}})
    assert found.use == ()


def test_one_finished_run_is_no_proof_for_an_arm():
    found = verdict({"BN": {8: {0: None, 1: None}}, "MBN-2": {8: {0: 6.0}}})
    assert found.use == ()


def test_an_arm_that_beats_one_and_is_beaten_by_another_is_not_recommended():
    found = verdict(runs(BN=(9.0, 9.2, 9.15), GROUP=(7.5, 7.6, 7.7), MBN_2=(6.1, 6.15, 6.3)))
    assert found.use == ("MBN-2",)


def test_an_arm_that_diverged_once_is_named_and_not_recommended():
    found = verdict(runs(BN=(7.5, 7.9, 7.6, 7.7), GROUP=(2.0, 2.3, 2.1, None)))
    assert found.use == ()
    assert found.headline.startswith("No recommendation: GROUP's error is 5.53 points below BN's (")
    assert found.headline.endswith("but GROUP did not finish every run.")
    assert "GROUP diverged in 1 of 4 seeds at batch size 8." in found.details


def test_an_arm_that_diverged_does_not_stand_in_the_way_of_another():
    found = verdict(runs(BN=(7.5, 7.9, 7.6, 7.7), MBN_2=(6.1, 6.4, 6.1, 6.4), GROUP=(2.0, 2.3, 2.1, None)))
    assert found.use == ("MBN-2",)


def test_missing_seeds_are_counted():
    found = verdict({"BN": {8: {0: 7.5, 1: 7.9, 2: 7.6}}, "MBN-2": {8: {0: 6.1, 2: 6.0}}})
    assert "MBN-2 has no result for 1 of 3 seeds at batch size 8." in found.details
    assert found.comparisons[0].difference.n == 2


def test_arms_without_common_seeds_are_compared_as_samples():
    found = verdict({"BN": {8: {0: 7.5, 1: 7.9, 2: 7.6}}, "MBN-2": {8: {3: 6.1, 4: 6.3, 5: 6.0}}})
    assert found.use == ("MBN-2",)
    assert "no common seeds, n = 3" in found.headline


def test_equal_results_are_no_difference():
    found = verdict(runs(BN=[5.0, 5.0, 5.0], MBN_2=[5.0, 5.0, 5.0]))
    assert found.headline == "No difference found between BN and MBN-2: every seed gave them the same error."


def test_without_any_spread_three_seeds_are_not_enough():
    found = verdict(runs(BN=[6.0] * 3, MBN_2=[5.0] * 3))
    assert found.use == ()
    assert "(p = 0.25, lower in 3 of 3 seeds), may be chance" in found.headline


def test_two_winners_are_both_named_with_what_is_open_between_them():
    found = verdict(runs(BN=(9.0, 9.2, 9.1), MBN_2=(6.1, 6.3, 6.0), GROUP=(6.2, 6.1, 6.15)))
    assert found.use == ("MBN-2", "GROUP")
    assert found.headline.startswith("Use MBN-2 or GROUP: MBN-2's error is ")
    assert "between MBN-2 and GROUP no difference was found" in found.headline


def test_p_values_are_corrected_for_the_number_of_pairs():
    two = verdict(runs(BN=BAD, MBN_2=GOOD)).comparisons[0]
    three = verdict(runs(BN=BAD, MBN_2=GOOD, GROUP=NOISE[0]))
    same = next(one for one in three.comparisons if (one.first, one.second) == ("MBN-2", "BN"))
    assert same.p == pytest.approx(3 * two.p)
    assert any("corrected for 3 comparisons (Holm)" in line for line in three.details)


def test_more_arms_do_not_make_a_false_winner_more_likely():
    draw = random.Random(1)
    wrong = 0
    for _ in range(400):
        arms = {f"A{arm}": [draw.gauss(7, 0.3) for _ in range(3)] for arm in range(6)}
        wrong += bool(verdict(runs(**arms)).use)
    assert wrong / 400 < 0.08


def test_a_winner_everywhere_is_told_for_all_batch_sizes_and_for_each():
    found = verdict(sizes(BN={2: (9.0, 9.3, 9.1), 8: BAD}, MBN_2={2: (7.0, 7.1, 7.15), 8: GOOD}))
    assert found.use == ("MBN-2",)
    assert found.headline.startswith("Averaged over batch sizes 2 and 8, use MBN-2: ")
    assert found.by_size == {2: ("MBN-2",), 8: ("MBN-2",)}
    assert any(line.startswith("At batch size 2: use MBN-2: ") for line in found.details)


def test_opposite_winners_depend_on_the_batch_size():
    found = verdict(sizes(BN={2: (9.0, 9.3, 9.1), 8: (5.0, 5.1, 5.3)}, MBN_2={2: (7.0, 7.1, 7.15), 8: (7.0, 7.2, 7.1)}))
    assert found.use == ()
    assert found.headline == "It depends on the batch size: use MBN-2 at 2; use BN at 8."
    assert found.by_size == {2: ("MBN-2",), 8: ("BN",)}


def test_an_average_leaves_out_batch_sizes_where_an_arm_diverged():
    found = verdict(sizes(BN={2: BAD, 8: BAD}, MBN_2={2: (6.0, None, 6.1), 8: GOOD}))
    overall = found.comparisons[0]
    assert overall.sizes == (8,)
    assert "MBN-2 diverged in 1 of 3 seeds at batch size 2." in found.details
    assert found.use == ()


def test_an_average_is_over_the_same_seeds_at_every_batch_size():
    found = verdict(
        {"BN": {2: {0: 9.0, 1: 9.2}, 8: {0: 5.0, 1: 5.1}}, "MBN-2": {2: {0: 7.0}, 8: {0: 4.0, 1: 4.2}}},
    )
    overall = found.comparisons[0]
    assert (overall.sizes, overall.difference.n) == ((2, 8), 1)
    more = {"BN": {2: {0: 9.0, 1: 9.2}, 8: {0: 5.0, 1: 5.1, 2: 1.0}}}
    more["MBN-2"] = {2: {0: 7.0, 1: 7.4}, 8: {0: 4.0, 1: 4.2, 2: 9.0}}
    overall = verdict(more).comparisons[0]
    assert (overall.sizes, overall.difference.n) == ((2, 8), 2)
    assert overall.difference.mean == pytest.approx(-(2.0 + 1.8 + 1.0 + 0.9) / 4)


def test_the_text_is_the_headline_and_the_details():
    found = verdict(runs(BN=[None, None], MBN_2=GOOD))
    assert found.text.splitlines() == [found.headline, *found.details]


def test_among_many_arms_the_verdict_is_short_and_beating_the_worst_is_no_merit():
    """The sixth arm is far behind the best one, but the correction for fifteen comparisons hides that."""
    good = {f"GOOD{index}": [4.0 + 0.1 * index + 0.3 * seed for seed in range(5)] for index in range(4)}
    arms = {**good, "MIDDLE": [30.0, 50.0, 44.0, 61.0, 38.0], "WORST": [89.0, 90.1, 88.7, 90.3, 89.2]}
    found = verdict({arm: {4: dict(enumerate(errors))} for arm, errors in arms.items()})
    assert "MIDDLE" not in found.use
    assert "WORST" in found.headline
    assert set(found.use) <= set(good)
    assert len(found.headline) < 400


def test_among_many_arms_one_that_diverged_is_told_and_nothing_else_need_be_found():
    arms = {f"A{index}": [30.0, 50.0 + index] for index in range(4)}
    found = verdict({arm: {8: dict(enumerate(errors))} for arm, errors in {**arms, "LOST": [None, None]}.items()})
    assert "every run of LOST diverged" in found.headline
    assert "LOST" not in found.use


def test_an_arm_with_less_error_than_a_winner_is_no_worse_a_choice_though_it_beats_nobody():
    found = verdict(runs(BN=BAD, MBN_2=GOOD, GROUP=(3.0, 7.6, 6.4)))
    assert found.use == ("MBN-2", "GROUP")
    assert "or GROUP and MBN-2 no difference was found" in found.headline
    assert verdict(runs(BN=BAD, MBN_2=GOOD, GROUP=(5.0, 8.6, 7.4))).use == ("MBN-2",)


def test_of_several_differences_that_may_be_chance_the_clearest_is_told():
    found = verdict(runs(BN=(5.0, 5.1, 5.3), MBN_2=(5.3, 5.2, 5.7), GROUP=(3.0, 9.0, 7.0)))
    assert found.headline.startswith(
        "No difference found between BN, MBN-2 and GROUP: the clearest, BN's error 0.27 points"
    )
