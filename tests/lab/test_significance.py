"""Spread, differences and p-values, compared with scipy.stats and with values worked out by hand."""

import math
import random

import pytest
from scipy import stats

from memnorm.lab.significance import (
    Difference,
    Sample,
    difference,
    holm,
    number,
    paired,
    t_quantile,
    t_two_sided,
    welch,
)


def by_seed(*values):
    return dict(enumerate(values))


def test_a_sample_has_the_mean_and_the_deviation_with_n_minus_one():
    sample = Sample([2.0, 4.0, 9.0])
    assert sample.mean == 5.0
    assert sample.sd == pytest.approx(math.sqrt(13.0))
    assert sample.n == 3


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]], ids=["empty", "nan", "inf"])
def test_a_sample_without_finite_values_is_refused(values):
    with pytest.raises(ValueError, match="at least one value, all of them finite"):
        Sample(values)


@pytest.mark.parametrize("df", [0.7, 1, 2, 3, 7.5, 30, 1000])
@pytest.mark.parametrize("t", [0.0, 1e-6, 0.3, 1.0, 4.3, 20.0, 50.0])
def test_the_two_sided_tail_is_scipys_in_all_its_digits(t, df):
    expected = 2 * stats.t.sf(t, df)
    assert t_two_sided(t, df) == pytest.approx(expected, rel=1e-10, abs=0)
    assert t_two_sided(-t, df) == t_two_sided(t, df)


@pytest.mark.parametrize("df", [1, 2, 3, 9.3, 200])
@pytest.mark.parametrize("probability", [0.01, 0.4, 0.5, 0.8, 0.975, 0.9999])
def test_quantiles_are_scipys(probability, df):
    assert t_quantile(probability, df) == pytest.approx(stats.t.ppf(probability, df), rel=1e-9, abs=1e-12)


def test_paired_differences_are_scipys_paired_test():
    first, second = by_seed(7.1, 6.8, 7.4, 7.0), by_seed(7.9, 7.2, 8.0, 7.3)
    found = paired(first, second)
    expected = stats.ttest_rel(list(first.values()), list(second.values()))
    assert found.p == pytest.approx(expected.pvalue)
    assert found.interval() == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert (found.n, found.lower, found.higher, found.df) == (4, 4, 0, 3)


def test_pairs_are_made_by_seed_and_not_by_position():
    found = paired({3: 5.0, 1: 7.0, 8: 1.0}, {1: 6.0, 3: 4.5, 9: 0.0})
    assert found.n == 2
    assert found.mean == pytest.approx(0.75)


def test_one_pair_has_a_mean_and_nothing_else():
    found = paired({0: 1.0}, {0: 3.0})
    assert (found.mean, found.standard_error, found.p, found.interval(), found.detectable()) == (
        -2.0,
        None,
        None,
        None,
        None,
    )


def test_welchs_test_is_scipys():
    first, second = [5.0, 5.4, 4.9], [6.1, 7.5, 6.6, 7.7]
    expected = stats.ttest_ind(first, second, equal_var=False)
    found = welch(first, second)
    assert found.p == pytest.approx(expected.pvalue)
    assert found.df == pytest.approx(expected.df)
    assert found.interval() == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert not found.paired


def test_arms_with_two_common_seeds_are_compared_seed_by_seed():
    first, second = {0: 5.0, 1: 6.0, 2: 9.0}, {0: 5.5, 1: 6.7, 7: 1.0}
    assert difference(first, second) == paired(first, second)


def test_arms_with_less_in_common_are_compared_as_samples():
    first, second = {0: 5.0, 1: 6.0}, {1: 7.0, 2: 7.5}
    assert difference(first, second) == welch([5.0, 6.0], [7.0, 7.5])


def test_equal_arms_are_no_evidence_at_all():
    found = difference(by_seed(5.0, 5.0, 5.0), by_seed(5.0, 5.0, 5.0))
    assert (found.mean, found.p, found.interval()) == (0.0, 1.0, None)


def test_differences_without_spread_are_judged_by_the_spread_between_seeds():
    first, second = by_seed(5.0, 5.4, 4.9), by_seed(6.0, 6.4, 5.9)
    found = difference(first, second)
    expected = stats.ttest_ind(list(first.values()), list(second.values()), equal_var=False)
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.lower, found.n) == (3, 3)


@pytest.mark.parametrize(("n", "p"), [(2, 0.5), (3, 0.25), (6, 0.03125)])
def test_without_any_spread_only_the_sign_counts(n, p):
    found = difference(by_seed(*[5.0] * n), by_seed(*[6.0] * n))
    assert found.p == pytest.approx(p)
    assert found.interval() is None
    assert found.detectable() is None


def test_rounding_is_not_spread():
    found = paired(by_seed(0.3, 1.3, 2.3), by_seed(0.1 + 0.1, 1.2, 2.2))
    assert found.standard_error == 0.0


def test_a_difference_of_the_detectable_size_is_found_four_times_in_five():
    draw = random.Random(0)
    n, found = 4, 0
    typical = Difference(0.0, 1 / math.sqrt(n), n - 1, n).detectable()
    for _ in range(2000):
        values = by_seed(*(draw.gauss(-typical, 1.0) for _ in range(n)))
        found += paired(values, by_seed(*[0.0] * n)).p < 0.05
    assert 0.72 < found / 2000 < 0.92


@pytest.mark.parametrize("df", [1, 2, 4, 9, 200])
@pytest.mark.parametrize("comparisons", [1, 3, 15])
def test_the_detectable_difference_is_that_of_the_noncentral_t(df, comparisons):
    found = Difference(0.0, 1.0, df, df + 1).detectable(comparisons)
    critical = stats.t.ppf(1 - 0.025 / comparisons, df)
    assert stats.nct.sf(critical, df, found) == pytest.approx(0.8, abs=1e-4)


def test_holms_correction_of_a_worked_example():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_numbers_have_a_true_minus_sign_and_no_negative_zero():
    assert (number(-1.234), number(-0.001), number(0.0), number(12.5, 1)) == ("−1.23", "0.00", "0.00", "12.5")
