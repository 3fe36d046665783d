"""Which stored runs are compared with each other, and the comparison that `memnorm compare` makes."""

import random

import pytest
from helpers.reports import comparison, fabricate

from memnorm.lab.cli.compare import Experiment, run_experiment
from memnorm.lab.comparison import arm_labels, comparisons
from memnorm.lab.listen import Outcome
from memnorm.lab.report import collect
from memnorm.lab.spec import RunSpec
from memnorm.lab.store import Store
from memnorm.lab.verdict import Cost

BASE = RunSpec(model="small", data="digits", iterations=100, evaluations=4)
MBN = BASE.but(norm="mbn", scheme="double")
ERROR = {"bn": 9.0, "mbn": 7.0, "group": 9.1}
NOISE = {(0, 2): 0.1, (0, 4): -0.1, (0, 8): 0.05, (1, 2): -0.12, (1, 4): 0.02, (1, 8): 0.1, (2, 2): 0.03}


def comparisons_of(root, *specs, **options):
    for spec in specs:
        noise = NOISE.get((spec.seed, spec.batch_size), 0.0) * (1 if spec.norm == "bn" else -1)
        fabricate(root, spec, error=ERROR.get(spec.norm, 8.0) + noise, **options)
    return collect([root], title="A title").comparisons


def test_runs_of_one_experiment_are_one_comparison_with_a_verdict(tmp_path):
    (found,) = comparisons_of(tmp_path, *comparison())
    assert found.arms == ["BN", "GROUP", "MBN-2"]
    assert len(found.groups) == 9
    assert found.verdict.use == ("MBN-2",)


def test_the_cost_in_the_verdict_is_measured(tmp_path):
    (found,) = comparisons_of(tmp_path, *comparison())
    assert any(line.startswith("MBN-2:") and "1.43" in line and "1.00" in line for line in found.verdict.details)


def test_costs_are_medians_over_seeds(tmp_path):
    for seed, step_ms in enumerate((10.0, 20.0, 90.0)):
        spec = BASE.but(evaluations=1, seed=seed)
        fabricate(tmp_path, spec, step_ms=step_ms, peak_memory_mb=10 * step_ms)
    (found,) = collect([tmp_path]).comparisons
    assert found.groups[0][1].cost == Cost(20.0, 200.0)


def test_times_of_different_machines_are_not_compared(tmp_path):
    fabricate(tmp_path, BASE, environment={"machine": "another"})
    (found,) = comparisons_of(tmp_path, *(spec for spec in comparison() if spec.seed or spec.norm != "bn"), MBN)
    assert not any("time per step" in line for line in found.verdict.details)


BOTH = ["BN", "MBN-2"]
TUNED, SIZES = MBN.but(learning_rate=0.03), (3, 8, 64)
SCALED = {"learning_rate": 0.1, "scaling": "linear", "base_batch_size": 32}
UNUSUAL = BASE.but(sampler="few-classes", augment=False, data_options={"image_size": 8})


def as_long(spec, images):
    """The run with several batch sizes, as many images at each."""
    return [spec.but(batch_size=size, iterations=-(-images // size)) for size in SIZES]


@pytest.mark.parametrize(
    ("specs", "arms", "about"),
    [
        ([BASE, MBN.but(augment=False)], [["BN"], ["MBN-2"]], "augment off"),
        ([BASE, TUNED], [BOTH], "learning rate 0.03 to 0.1"),
        ([BASE, MBN, BASE.but(learning_rate=0.03), TUNED], [BOTH, BOTH], "learning rate 0.03."),
        ([*as_long(BASE, 1000), *as_long(MBN, 1000)], [BOTH], "16 to 334 iterations"),
        (
            [one for spec in (BASE, TUNED) for images in (1000, 2000) for one in as_long(spec, images)],
            [BOTH, BOTH],
            "334",
        ),
        ([BASE, MBN.but(iterations=900)], [["BN"], ["MBN-2"]], "900 iterations"),
        ([BASE.but(batch_size=size, **SCALED) for size in (3, 8)], [["BN"]], "0.009375 to 0.025 after scaling; "),
        ([UNUSUAL], [["BN"]], "rate 0.1; augment off; data options image_size=8; sampler few-classes."),
    ],
    ids=["another setting", "tuned", "two rates", "length by size", "two lengths", "lengths", "scaled rate", "unusual"],
)
def test_runs_are_compared_that_differ_in_the_norm_its_rate_and_the_length_by_batch_size(tmp_path, specs, arms, about):
    found = comparisons_of(tmp_path, *specs)
    assert [one.arms for one in found] == arms
    assert sum(len(one.groups) for one in found) == len(specs)
    assert any(about in one.about for one in found)
    assert all((one.verdict is None) == (len(one.arms) < 2) for one in found)


def test_arms_that_differ_in_an_option_have_it_in_their_label(tmp_path):
    (found,) = comparisons_of(
        tmp_path, BASE, *(MBN.but(norm_options={"memory_size": size}) for size in (5, 40)), MBN.but(strength=(0.5,))
    )
    assert found.arms == [
        "BN",
        "MBN-2 memory_size=40 λ=0.1–0.5–0.9",
        "MBN-2 memory_size=5 λ=0.1–0.5–0.9",
        "MBN-2 λ=0.5",
    ]


def test_settings_that_all_arms_share_are_not_in_the_label():
    specs = [BASE, *(MBN.but(norm_options={"decay": decay}, strength=(0.5,), every=2) for decay in (0.5, 0.9))]
    assert list(arm_labels(specs).values()) == ["BN", "MBN-2 decay=0.5", "MBN-2 decay=0.9"]


def test_the_options_of_a_norm_are_in_its_label():
    specs = [BASE, MBN.but(norm_options={"memory_size": 5})]
    assert list(arm_labels(specs).values()) == ["BN", "MBN-2 memory_size=5"]


def test_arms_that_differ_in_an_option_are_tuned_apart(tmp_path):
    arms = tuple({"norm": "two_way", "norm_options": {"decay": decay}} for decay in (0.75, 0.9))
    experiment = Experiment(BASE, arms, (2,), seeds=1, images=40, rates=(0.1, 0.01), holdout=10)
    best = {0.75: 0.1, 0.9: 0.01}

    def run_all(specs):
        for spec in specs:
            chosen = spec.learning_rate == best[spec.norm_options["decay"]]
            fabricate(tmp_path, spec, error=5.0 if chosen else 9.0)
        return [Outcome(spec, "finished", result=Store(tmp_path).run(spec).result()) for spec in specs]

    made, rates = run_experiment(experiment, run_all, Store(tmp_path))
    assert {group.spec.norm_options["decay"]: group.spec.learning_rate for _, group in made.groups} == best
    assert len(rates) == 2


def test_runs_that_served_to_choose_a_setting_get_no_verdict(tmp_path):
    found = comparisons_of(tmp_path, *(one.but(holdout=100, seed=seed) for one in (BASE, MBN) for seed in range(3)))
    assert [one.verdict for one in found] == [None]
    assert "held-out training images, not on the test set" in found[0].about


def test_a_diverged_run_counts_as_a_failure_in_the_verdict(tmp_path):
    fabricate(tmp_path, BASE.but(seed=1), status="diverged", stop_at=0.5)
    (found,) = comparisons_of(tmp_path, BASE, BASE.but(seed=2), *(MBN.but(seed=seed) for seed in range(3)))
    assert "BN diverged in 1 of 3 seeds at batch size 128." in found.verdict.details


def test_an_unfinished_run_is_a_missing_seed(tmp_path):
    fabricate(tmp_path, BASE.but(seed=1), status="unfinished", stop_at=0.5)
    (found,) = comparisons_of(tmp_path, BASE, *(MBN.but(seed=seed) for seed in range(2)))
    assert "BN has no result for 1 of 2 seeds at batch size 128." in found.verdict.details


def test_comparisons_do_not_depend_on_the_order_of_the_runs(tmp_path):
    found = comparisons_of(tmp_path, *comparison(), BASE.but(augment=False), BASE.but(sampler="sorted"))
    groups = [group for one in found for _, group in one.groups]
    random.Random(0).shuffle(groups)
    assert comparisons(groups) == found


def outcomes_of(root, specs, failing=()):
    """Fabricated runs as a grid returns them; `failing` seeds leave an unfinished folder or none."""
    found = []
    for spec in specs:
        if spec.seed in failing:
            found.append(Outcome(spec, "failed", "out of luck"))
            continue
        fabricate(root, spec, error=ERROR[spec.norm] + spec.seed / 10 + NOISE.get((spec.seed, spec.batch_size), 0.0))
        found.append(Outcome(spec, "finished", result=Store(root).run(spec).result()))
    return found


EXPERIMENT = Experiment(BASE, ({"norm": "bn"}, {"norm": "mbn", "scheme": "double"}), (2, 4), 3, images=400)


def test_a_run_experiment_is_the_comparison_that_a_report_finds(tmp_path):
    made, _ = run_experiment(EXPERIMENT, lambda specs: outcomes_of(tmp_path, specs), Store(tmp_path))
    (found,) = collect([tmp_path]).comparisons
    assert made == found
    assert made.verdict.tests == found.verdict.tests


def test_failed_runs_are_in_the_comparison_and_not_in_its_numbers(tmp_path):
    made, _ = run_experiment(EXPERIMENT, lambda specs: outcomes_of(tmp_path, specs, failing=[1]), Store(tmp_path))
    assert [message for _, message in made.failures] == ["out of luck"] * 4
    assert all((len(group.runs), group.sample().n) == (3, 2) for _, group in made.groups)
    assert len(collect(made=[made]).groups) == 4
