"""Recommendations and significance tests from the errors of a few seeds."""

import random

import pytest

from memnorm.lab.verdict import Cost, cost_ratio, verdict

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


def test_a_clear_winner_is_recommended():
    found = verdict(runs(BN=BAD, MBN_2=GOOD))
    assert found.use == ("MBN-2",)
    (test,) = found.tests
    assert (test.first, test.second, test.difference.lower, test.difference.n) == ("MBN-2", "BN", 3, 3)
    assert test.difference.mean == pytest.approx(-1.5333, abs=1e-4)
    assert test.significant
    assert test.cells[5] == "0.0019"


def test_costs_are_relative_to_batch_norm_else_to_the_first_arm():
    costs = {"MBN-2": {8: Cost(13.0, 210.0)}, "BN": {8: Cost(10.0, 200.0)}}
    (line,) = verdict(runs(MBN_2=GOOD, BN=BAD), costs).details
    assert {"1.30", "1.05"} <= set(line.split())
    assert "0.50" in verdict(runs(GROUP=BAD, A=GOOD), {"GROUP": {8: Cost(10.0)}, "A": {8: Cost(5.0)}}).details[0]


def test_the_cost_over_batch_sizes_is_a_geometric_mean_of_those_measured_for_both():
    costs = {"BN": {2: Cost(1.0), 4: Cost(10.0), 8: Cost(5.0)}, "MBN-2": {2: Cost(2.0), 4: Cost(5.0), 16: Cost(99.0)}}
    assert cost_ratio(costs, "MBN-2", "BN", "step_ms") == pytest.approx(1.0)


def test_noise_is_no_significant_difference_and_has_a_detectable_one():
    found = verdict(runs(BN=NOISE[0], MBN_2=NOISE[1]))
    assert found.use == ()
    assert not found.tests[0].significant
    assert found.tests[0].detectable == pytest.approx(1.7, abs=0.05)


@pytest.mark.parametrize(
    "results",
    [
        runs(BN=[20.0], MBN_2=[5.0]),
        runs(BN=[None], MBN_2=[5.0]),
        sizes(BN={2: [20.0], 4: [19.0], 8: [18.0]}, MBN_2={2: [5.0], 4: [4.0], 8: [3.0]}),
        {"BN": {8: {0: 20.0}}, "MBN-2": {8: {0: 5.0, 1: 5.1, 2: 5.2}}},
        sizes(BN={8: BAD}, MBN_2={16: GOOD}),
        runs(BN=[None, None], MBN_2=[None, float("nan")]),
        {},
        {"BN": {}},
        {"BN": {8: {}}},
    ],
    ids=["seed", "diverged", "sizes", "common seed", "common size", "all diverged", "no arm", "no size", "no run"],
)
def test_too_little_supports_no_claim(results):
    found = verdict(results)
    assert found.use == ()
    assert "no claim" in found.headline
    assert not any(found.by_size.values() if found.by_size else [])


def test_diverged_runs_are_counted():
    found = verdict(runs(BN=[None, None], MBN_2=[1.0, float("nan")]))
    assert [line.split(" seeds")[0] for line in found.details] == ["BN diverged in 2 of 2", "MBN-2 diverged in 1 of 2"]


def test_an_arm_that_diverged_once_is_not_recommended():
    found = verdict(runs(BN=(7.5, 7.9, 7.6, 7.7), GROUP=(2.0, 2.3, 2.1, None)))
    assert found.use == ()
    assert found.tests[0].significant
    assert "no recommendation" in found.headline.lower()


def test_missing_seeds_are_counted():
    found = verdict({"BN": {8: {0: 7.5, 1: 7.9, 2: 7.6}}, "MBN-2": {8: {0: 6.1, 2: 6.0}}})
    assert any("1 of 3 seeds" in line for line in found.details)
    assert found.tests[0].difference.n == 2


def test_arms_without_common_seeds_are_compared_as_samples():
    found = verdict({"BN": {8: {0: 7.5, 1: 7.9, 2: 7.6}}, "MBN-2": {8: {3: 6.1, 4: 6.3, 5: 6.0}}})
    assert found.use == ("MBN-2",)
    assert not found.tests[0].difference.paired
    assert "unpaired, n = 3" in found.tests[0].cells


def test_without_any_spread_three_seeds_are_not_enough():
    found = verdict(runs(BN=[6.0] * 3, MBN_2=[5.0] * 3))
    assert (found.use, found.tests[0].p) == ((), 0.25)


def test_p_values_are_corrected_for_the_number_of_pairs():
    two = verdict(runs(BN=BAD, MBN_2=GOOD)).tests[0]
    three = verdict(runs(BN=BAD, MBN_2=GOOD, GROUP=NOISE[0]))
    same = next(one for one in three.tests if (one.first, one.second) == ("MBN-2", "BN"))
    assert same.p == pytest.approx(3 * two.p)


def test_p_values_of_averages_and_of_single_batch_sizes_are_corrected_for_being_two_families():
    found = verdict(sizes(BN={2: BAD, 8: BAD}, MBN_2={2: GOOD, 8: GOOD}))
    alone = verdict(runs(BN=BAD, MBN_2=GOOD)).tests[0]
    assert found.tests[0].sizes == (2, 8)
    assert found.tests[0].p == pytest.approx(2 * alone.p)


def test_more_arms_do_not_make_a_false_winner_more_likely():
    draw = random.Random(1)
    wrong = 0
    for _ in range(400):
        arms = {f"A{arm}": [draw.gauss(7, 0.3) for _ in range(3)] for arm in range(6)}
        wrong += bool(verdict(runs(**arms)).use)
    assert wrong / 400 < 0.08


def test_a_winner_everywhere_is_recommended_for_all_batch_sizes_and_for_each():
    found = verdict(sizes(BN={2: (9.0, 9.3, 9.1), 8: BAD}, MBN_2={2: (7.0, 7.1, 7.15), 8: GOOD}))
    assert found.use == ("MBN-2",)
    assert found.by_size == {2: ("MBN-2",), 8: ("MBN-2",)}


def test_opposite_winners_depend_on_the_batch_size():
    found = verdict(sizes(BN={2: (9.0, 9.3, 9.1), 8: (5.0, 5.1, 5.3)}, MBN_2={2: (7.0, 7.1, 7.15), 8: (7.0, 7.2, 7.1)}))
    assert found.use == ()
    assert found.by_size == {2: ("MBN-2",), 8: ("BN",)}
    assert "depends on the batch size" in found.headline


def test_an_average_leaves_out_batch_sizes_where_an_arm_diverged():
    found = verdict(sizes(BN={2: BAD, 8: BAD}, MBN_2={2: (6.0, None, 6.1), 8: GOOD}))
    assert found.tests[0].sizes == (8,)
    assert found.use == ()


def test_an_average_is_over_the_same_seeds_at_every_batch_size():
    found = verdict(
        {"BN": {2: {0: 9.0, 1: 9.2}, 8: {0: 5.0, 1: 5.1}}, "MBN-2": {2: {0: 7.0}, 8: {0: 4.0, 1: 4.2}}},
    )
    overall = found.tests[0]
    assert (overall.sizes, overall.difference.n) == ((2, 8), 1)
    more = {"BN": {2: {0: 9.0, 1: 9.2}, 8: {0: 5.0, 1: 5.1, 2: 1.0}}}
    more["MBN-2"] = {2: {0: 7.0, 1: 7.4}, 8: {0: 4.0, 1: 4.2, 2: 9.0}}
    overall = verdict(more).tests[0]
    assert (overall.sizes, overall.difference.n) == ((2, 8), 2)
    assert overall.difference.mean == pytest.approx(-(2.0 + 1.8 + 1.0 + 0.9) / 4)


def test_among_many_arms_beating_the_worst_one_is_not_enough():
    """MIDDLE is behind the best arm, but the correction for fifteen tests hides that."""
    noise = (20.0, 20.3, 20.1, 20.2)
    bad = {f"BAD{shift}": (*noise[shift:], *noise[:shift]) for shift in range(4)}
    found = verdict(runs(BEST=(6.0, 6.1, 6.2, 6.1), MIDDLE=(6.5, 6.9, 6.6, 7.2), **bad))
    hidden = next(one for one in found.tests if (one.first, one.second) == ("BEST", "MIDDLE"))
    assert hidden.difference.p < 0.05 < hidden.p
    assert found.use == ("BEST",)
    assert len(found.tests) == 15
    assert len(found.shown) == 5


def test_among_many_arms_one_that_never_trains_is_not_recommended():
    arms = {f"A{index}": [30.0, 50.0 + index] for index in range(4)}
    found = verdict({arm: {8: dict(enumerate(errors))} for arm, errors in {**arms, "LOST": [None, None]}.items()})
    assert found.use
    assert "LOST" not in found.use


def test_the_shown_tests_are_those_against_the_lowest_error():
    found = verdict(runs(BN=(5.0, 5.1, 5.3), MBN_2=(5.3, 5.2, 5.7), GROUP=(3.0, 9.0, 7.0)))
    assert [(one.first, one.second) for one in found.shown] == [("BN", "MBN-2"), ("BN", "GROUP")]


@pytest.mark.parametrize(
    ("results", "use"),
    [
        (runs(BN=[None, None, None], MBN_2=GOOD), ("MBN-2",)),
        ({"BN": {8: {0: None}}, "MBN-2": {8: dict(enumerate(GOOD))}}, ()),
        (runs(BN=(9.0, 9.2, 9.15), GROUP=(7.5, 7.6, 7.7), MBN_2=(6.1, 6.15, 6.3)), ("MBN-2",)),
        (runs(BN=(7.5, 7.9, 7.6, 7.7), MBN_2=(6.1, 6.4, 6.1, 6.4), GROUP=(2.0, 2.3, 2.1, None)), ("MBN-2",)),
        (runs(BN=BAD, MBN_2=GOOD, GROUP=(3.0, 7.6, 6.4)), ("MBN-2", "GROUP")),
        (runs(BN=BAD, MBN_2=GOOD, GROUP=(5.0, 8.6, 7.4)), ("MBN-2",)),
    ],
    ids=["alone trains", "one diverged run is no proof", "beaten by another", "diverged", "less error", "more error"],
)
def test_the_recommended_arms(results, use):
    assert verdict(results).use == use
