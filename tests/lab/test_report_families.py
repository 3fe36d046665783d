"""Runs outside the paper's tables: what is compared with what."""

import random

from helpers.reports import comparison, fabricate

from memnorm.lab.report.collect import collect
from memnorm.lab.report.families import arm_labels, families
from memnorm.lab.spec import RunSpec

BASE = RunSpec(model="small", data="digits", iterations=100, evaluations=4)
MBN = BASE.but(norm="mbn", scheme="double")
ERROR = {"bn": 9.0, "mbn": 7.0, "group": 9.1}
NOISE = {(0, 2): 0.1, (0, 4): -0.1, (0, 8): 0.05, (1, 2): -0.12, (1, 4): 0.02, (1, 8): 0.1, (2, 2): 0.03}


def families_of(root, *specs, **options):
    for spec in specs:
        noise = NOISE.get((spec.seed, spec.batch_size), 0.0) * (1 if spec.norm == "bn" else -1)
        fabricate(root, spec, error=ERROR.get(spec.norm, 8.0) + noise, **options)
    return collect([root], title="A title").families


def test_a_comparison_is_one_family_with_a_verdict(tmp_path):
    (family,) = families_of(tmp_path, *comparison())
    assert family.arms == ["BN", "GROUP", "MBN-2"]
    assert len(family.groups) == 9
    assert family.verdict.use == ("MBN-2",)


def test_the_cost_in_the_verdict_is_measured(tmp_path):
    (family,) = families_of(tmp_path, *comparison())
    assert "MBN-2 takes 1.43 times the time per step and 1.00 times the memory of BN" in family.verdict.text


def test_times_of_different_machines_are_not_compared(tmp_path):
    fabricate(tmp_path, BASE, environment={"machine": "another"})
    (family,) = families_of(tmp_path, *(spec for spec in comparison() if spec.seed or spec.norm != "bn"), MBN)
    assert "times the time" not in family.verdict.text


def test_runs_that_differ_in_anything_else_are_not_compared(tmp_path):
    found = families_of(tmp_path, BASE, MBN.but(augment=False))
    assert [len(family.groups) for family in found] == [1, 1]
    assert all(family.verdict is None for family in found)


def test_learning_rates_tuned_for_each_norm_stay_in_one_family(tmp_path):
    (family,) = families_of(tmp_path, BASE, MBN.but(learning_rate=0.03))
    assert family.arms == ["BN", "MBN-2"]
    assert "learning rate 0.03 to 0.1" in family.about


def test_two_learning_rates_of_one_arm_are_two_families(tmp_path):
    found = families_of(tmp_path, BASE, MBN, BASE.but(learning_rate=0.03), MBN.but(learning_rate=0.03))
    assert [family.arms for family in found] == [["BN", "MBN-2"]] * 2


def test_the_length_may_follow_the_batch_size(tmp_path):
    specs = [one.but(batch_size=size, iterations=-(-1000 // size)) for one in (BASE, MBN) for size in (3, 8, 64)]
    (family,) = families_of(tmp_path, *specs)
    assert len(family.groups) == 6
    assert "16 to 334 iterations" in family.about


def test_tuned_comparisons_of_two_lengths_are_two_families(tmp_path):
    specs = [
        one.but(batch_size=size, iterations=-(-images // size))
        for one in (BASE, MBN.but(learning_rate=0.03))
        for size in (3, 8, 64)
        for images in (1000, 2000)
    ]
    found = families_of(tmp_path, *specs)
    assert [len(family.groups) for family in found] == [6, 6]


def test_runs_of_different_length_are_not_compared_at_one_batch_size(tmp_path):
    found = families_of(tmp_path, BASE, MBN.but(iterations=900))
    assert [family.arms for family in found] == [["BN"], ["MBN-2"]]


def test_arms_that_differ_in_an_option_are_told_apart_by_it(tmp_path):
    (family,) = families_of(
        tmp_path, BASE, *(MBN.but(norm_options={"memory_size": size}) for size in (5, 40)), MBN.but(strength=(0.5,))
    )
    assert family.arms == [
        "BN",
        "MBN-2 memory_size=40 λ=0.1–0.5–0.9",
        "MBN-2 memory_size=5 λ=0.1–0.5–0.9",
        "MBN-2 λ=0.5",
    ]


def test_options_that_all_arms_share_are_not_in_the_label():
    specs = [BASE, MBN.but(norm_options={"memory_size": 5})]
    assert list(arm_labels(specs).values()) == ["BN", "MBN-2"]


def test_runs_that_served_to_choose_a_setting_get_no_verdict(tmp_path):
    found = families_of(tmp_path, *(one.but(holdout=100, seed=seed) for one in (BASE, MBN) for seed in range(3)))
    assert [family.verdict for family in found] == [None]
    assert "held-out training images, not on the test set" in found[0].about


def test_a_diverged_run_counts_as_a_failure_in_the_verdict(tmp_path):
    fabricate(tmp_path, BASE.but(seed=1), status="diverged", stop_at=0.5)
    (family,) = families_of(tmp_path, BASE, BASE.but(seed=2), *(MBN.but(seed=seed) for seed in range(3)))
    assert "BN diverged in 1 of 3 seeds at batch size 128." in family.verdict.details


def test_an_unfinished_run_is_a_missing_seed(tmp_path):
    fabricate(tmp_path, BASE.but(seed=1), status="unfinished", stop_at=0.5)
    (family,) = families_of(tmp_path, BASE, *(MBN.but(seed=seed) for seed in range(2)))
    assert "BN has no result for 1 of 2 seeds at batch size 128." in family.verdict.details


def test_families_do_not_depend_on_the_order_of_the_runs(tmp_path):
    found = families_of(tmp_path, *comparison(), BASE.but(augment=False), BASE.but(sampler="sorted"))
    groups = [group for family in found for _, group in family.groups]
    random.Random(0).shuffle(groups)
    assert families(groups) == list(found)


def test_what_is_unusual_about_a_family_is_told(tmp_path):
    found = families_of(tmp_path, BASE.but(sampler="few-classes", augment=False, data_options={"image_size": 8}))
    assert found[0].about == (
        "100 iterations; learning rate 0.1; augment off; data options image_size=8; sampler few-classes."
    )
