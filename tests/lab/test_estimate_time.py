"""Estimates of a run's time, and how it is said."""

from types import SimpleNamespace

import pytest

from memnorm.lab import estimate_time
from memnorm.lab.data.registry import DATA_SETS
from memnorm.lab.estimate_time import estimate, human, images_of, measured, same_work
from memnorm.lab.spec import RunSpec
from memnorm.lab.speed import Arm, Extra, Speed, Work
from memnorm.lab.tables import SCALES, select, unique_specs

WORK = Work(calls=10, flops=1000, elements=100, norms=3, norm_elements=40, parameters=500)
SPEED = Speed(call=0.01, flop=2e-6, element=3e-5, parameter=1e-6)
SLOW = Arm(step=Extra(0.002, 4e-5), second=Extra(0.003, 5e-5))
RUN = RunSpec(model="resnet8", data="digits", batch_size=8, iterations=100, evaluations=4)


@pytest.fixture
def priced(monkeypatch):
    """Every model is WORK, the machine SPEED, and MBN slow."""
    monkeypatch.setattr(estimate_time, "work_of", lambda *arguments: WORK)
    monkeypatch.setattr(estimate_time, "calibrate", lambda *arguments: SPEED)
    monkeypatch.setattr(estimate_time, "added", lambda norm, *arguments: SLOW if norm == "mbn" else Arm())


def only(estimates):
    (seconds,) = estimates.values()
    return seconds


def stored(spec, step_ms, machine="here", threads=1):
    return SimpleNamespace(
        spec=spec,
        metrics=[{"step_ms": value} for value in step_ms],
        environment={"machine": machine, "threads": threads},
    )


def test_a_run_is_its_steps_and_its_evaluations(priced):
    evaluation = (2 * 10 * 0.01 + 500 * (1000 * 2e-6 + 100 * 3e-5)) / 3
    assert only(estimate([RUN])) == pytest.approx(100 * SPEED.step(WORK, 8) + 4 * evaluation)
    double = RUN.but(norm="mbn", scheme="double")
    assert only(estimate([double])) == pytest.approx(100 * SPEED.step(WORK, 8, SLOW, second=1.0) + 4 * evaluation)
    single = RUN.but(norm="mbn", scheme="single")
    assert only(estimate([single])) == pytest.approx(100 * SPEED.step(WORK, 8, SLOW) + 4 * evaluation)


def test_a_run_is_not_evaluated_more_often_than_it_steps(priced):
    run = RUN.but(iterations=2, evaluations=200)
    assert only(estimate([run])) == only(estimate([run.but(evaluations=2)]))


def test_double_forward_now_and_then_or_with_part_of_the_batch_costs_that_part(priced):
    double = RUN.but(norm="mbn", scheme="double")
    every, part = only(estimate([double.but(every=4)])), only(estimate([double.but(fraction=0.25)]))
    assert every == part < only(estimate([double]))


def test_a_known_step_time_comes_first_and_needs_no_calibration(monkeypatch):
    monkeypatch.setattr(estimate_time, "calibrate", None)
    known = {same_work(RUN): 0.5}
    assert only(estimate([RUN.but(seed=3)], known=known)) == pytest.approx(100 * 0.5 + 4 * 500 / 8 * 0.5 / 3)


def test_a_folder_of_images_is_judged_by_a_known_step_alone():
    run = RUN.but(data="pictures/of/cats")
    assert estimate([run]) == {}
    assert only(estimate([run], known={same_work(run): 0.5})) == 50


def test_a_model_that_cannot_be_built_is_left_out():
    assert estimate([RUN.but(model="no.such.package:factory")]) == {}


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 5},
        {"iterations": 7},
        {"learning_rate": 0.3},
        {"evaluations": 2},
        {"test_images": 100},
    ],
)
def test_runs_whose_steps_take_equally_long_share_a_key(change):
    assert same_work(RUN.but(**change)) == same_work(RUN)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "resnet14"},
        {"model_options": {"width": 2}},
        {"data": "cifar10"},
        {"batch_size": 9},
        {"norm": "brn"},
        {"norm_options": {"memory_size": 3}},
        {"scheme": "single"},
        {"every": 2},
        {"fraction": 0.5},
        {"precision": "float64"},
    ],
)
def test_runs_whose_steps_do_different_work_do_not(change):
    base = RUN.but(norm="mbn", scheme="double")
    assert same_work(base.but(**change)) != same_work(base)


def test_measured_is_the_median_of_this_machine_with_as_many_threads():
    runs = [
        stored(RUN, [100, 600]),
        stored(RUN.but(seed=1), [200, None]),
        stored(RUN, [1], machine="elsewhere"),
        stored(RUN, [1], threads=2),
        stored(RUN.but(batch_size=9), []),
    ]
    assert measured(runs, threads=1, machine="here") == {same_work(RUN): 0.2}


def test_image_sizes_classes_and_counts_come_from_the_options():
    run = RunSpec(data="synthetic", data_options={"classes": 7, "image_size": 16, "channels": 1, "test": 9})
    assert images_of(run) == estimate_time.Images(7, (1, 16, 16), 9)
    assert images_of(RunSpec(data="imagenet", data_options={"image_size": 64})).shape == (3, 64, 64)
    assert images_of(RunSpec(test_images=77)).test == 77
    assert images_of(RunSpec(holdout=55)).test == 55


def test_every_built_in_data_set_is_known():
    assert set(estimate_time.DATA) == set(DATA_SETS)
    options = DATA_SETS["synthetic"].options
    plain = estimate_time.DATA["synthetic"]
    assert (plain.classes, plain.shape[0], plain.shape[1], plain.test) == tuple(
        options[name] for name in ("classes", "channels", "image_size", "test")
    )


def test_every_run_of_the_paper_gets_an_estimate_at_every_scale(monkeypatch):
    monkeypatch.setattr(estimate_time, "calibrate", lambda *arguments: SPEED)
    monkeypatch.setattr(estimate_time, "added", lambda *arguments: SLOW)
    for scale in SCALES:
        specs = unique_specs(select(["all"]), scale)
        estimates = estimate(specs)
        assert set(estimates) == {spec.digest for spec in specs}
        assert min(estimates.values()) > 0


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.4, "< 1 s"),
        (1, "≈ 1 s"),
        (119.4, "≈ 119 s"),
        (119.6, "≈ 2 min"),
        (119.4 * 60, "≈ 119 min"),
        (2 * 3600 - 1, "≈ 2 h"),
        (200 * 60, "≈ 3 h 20 min"),
        (3 * 3600, "≈ 3 h"),
        (47 * 3600 + 59.4 * 60, "≈ 47 h 59 min"),
        (48 * 3600, "≈ 2 days"),
        (729 * 86_400, "≈ 729 days"),
        (730.5 * 86_400, "≈ 2.0 years"),
    ],
)
def test_a_time_is_said_as_people_say_it(seconds, said):
    assert human(seconds) == said


def test_a_measured_time_goes_without_the_sign():
    assert human(200 * 60, about=False) == "3 h 20 min"
