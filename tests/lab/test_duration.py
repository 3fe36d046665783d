"""Estimates of a run's time."""

import math
from types import SimpleNamespace

import pytest
import torch

from memnorm.lab import duration
from memnorm.lab.data.registry import DATA_SETS
from memnorm.lab.duration import estimate, facts_of, human, measured, same_step
from memnorm.lab.spec import RunSpec
from memnorm.lab.tables import SCALES, select, unique_specs

RUN = RunSpec(model="resnet8", data="cifar10", batch_size=8, iterations=100, evaluations=4, test_images=500)
DOUBLE = RUN.but(norm="mbn", scheme="double")


@pytest.fixture
def timed(monkeypatch):
    """A machine on which a micro-batch of n takes 0.1 + 0.01 n seconds; the batch sizes that were timed."""
    seen = []

    def time_step(spec, facts):
        seen.append(spec.batch_size)
        return 0.1 + 0.01 * spec.batch_size

    monkeypatch.setattr(duration, "_LINES", {})
    monkeypatch.setattr(duration, "time_step", time_step)
    return seen


def only(estimates):
    (seconds,) = estimates.values()
    return seconds


def stored(spec, step_ms, machine="here", threads=1):
    return SimpleNamespace(
        spec=spec,
        metrics=[{"step_ms": value} for value in step_ms],
        environment={"machine": machine, "threads": threads},
    )


def test_a_run_is_its_steps_and_its_evaluations(timed):
    assert only(estimate([RUN])) == pytest.approx(100 * 0.18 + 4 * 500 / 8 * 0.18 / 3)
    assert only(estimate([DOUBLE])) == pytest.approx(100 * 0.18 + 4 * 500 / 8 * 0.18 / 4)


def test_steps_of_one_kind_are_timed_once(timed):
    estimate([RUN, RUN.but(seed=1), RUN.but(iterations=7), RUN.but(batch_size=3), RUN.but(accumulate=4)])
    estimate([RUN.but(seed=2)])
    assert timed == [8, 2]


def test_a_large_batch_is_extrapolated_from_two_small_ones(timed):
    run = RUN.but(batch_size=128, evaluations=1, test_images=1, iterations=10_000)
    assert only(estimate([run])) == pytest.approx(10_000 * (0.1 + 1.28), rel=1e-3)
    assert max(timed) == 8


def test_a_noisy_time_makes_no_negative_price(monkeypatch):
    monkeypatch.setattr(duration, "_LINES", {})
    monkeypatch.setattr(duration, "time_step", lambda spec, facts: 1 / spec.batch_size)
    assert only(estimate([RUN.but(batch_size=128)])) > 0


def test_large_images_are_timed_two_at_a_time(timed):
    run = RUN.but(data="imagenet", batch_size=128, evaluations=1, test_images=1, iterations=10_000)
    assert only(estimate([run])) == pytest.approx(10_000 * 64 * 0.12, rel=1e-3)
    assert timed == [2]


def test_accumulated_micro_batches_take_their_time_each(timed):
    assert only(estimate([RUN.but(accumulate=3, evaluations=1, test_images=1)])) == pytest.approx(300 * 0.18, rel=1e-2)


def test_a_run_is_not_evaluated_more_often_than_it_steps(timed):
    run = RUN.but(iterations=2, evaluations=200)
    assert only(estimate([run])) == only(estimate([run.but(evaluations=2)]))


def test_a_known_step_time_is_used_and_nothing_is_timed(monkeypatch):
    monkeypatch.setattr(duration, "time_step", None)
    known = {same_step(RUN): 0.5}
    assert only(estimate([RUN.but(seed=3)], known=known)) == pytest.approx(100 * 0.5 + 4 * 500 / 8 * 0.5 / 3)


def test_a_folder_of_images_is_estimated_from_a_known_step_alone():
    run = RUN.but(data="pictures/of/cats")
    assert estimate([run]) == {}
    assert only(estimate([run], known={same_step(run): 0.5})) == 50


@pytest.mark.parametrize(
    "run", [RUN.but(model="no.such.package:factory"), RUN.but(norm="normprop")], ids=["model", "norm"]
)
def test_a_run_that_cannot_be_trained_is_left_out(run):
    assert estimate([run]) == {}


@pytest.mark.parametrize(("norm", "scheme"), [("bn", "single"), ("mbn", "double"), ("mabn", "single")])
def test_a_step_of_a_real_network_is_timed(monkeypatch, norm, scheme):
    monkeypatch.setattr(duration, "LONGEST", 0.0)
    run = RUN.but(norm=norm, scheme=scheme, batch_size=2)
    assert 1e-4 < duration.time_step(run, facts_of(run)) < 60


def test_a_run_that_diverges_in_its_first_step_is_left_out(monkeypatch):
    monkeypatch.setattr(duration, "_LINES", {})
    monkeypatch.setattr("memnorm.lab.training.Training.step", lambda *_: False)
    assert estimate([RUN]) == {}


def test_timing_uses_the_wanted_threads_and_restores_them_and_the_random_state(monkeypatch):
    before, state, seen = torch.get_num_threads(), torch.get_rng_state(), []

    def time_step(spec, facts):
        torch.rand(3)
        seen.append(torch.get_num_threads())
        return 1.0

    monkeypatch.setattr(duration, "_LINES", {})
    monkeypatch.setattr(duration, "time_step", time_step)
    estimate([RUN], threads=before + 1)
    assert set(seen) == {before + 1}
    assert torch.get_num_threads() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_the_fastest_step_counts_and_the_first_does_not(monkeypatch):
    clock = iter([0, 1, 10, 14, 20, 23])
    monkeypatch.setattr(duration, "LONGEST", 100.0)
    monkeypatch.setattr(duration, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert duration.time_step(RUN, facts_of(RUN)) == 3


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
    assert same_step(RUN.but(**change)) == same_step(RUN)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "resnet14"},
        {"model_options": {"width": 2}},
        {"data": "digits"},
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
    base = DOUBLE
    assert same_step(base.but(**change)) != same_step(base)


def test_measured_is_the_median_of_this_machine_with_as_many_threads():
    runs = [
        stored(RUN, [100, 600]),
        stored(RUN.but(seed=1), [200, None]),
        stored(RUN, [1], machine="elsewhere"),
        stored(RUN, [1], threads=2),
        stored(RUN.but(batch_size=9), []),
    ]
    assert measured(runs, threads=1, machine="here") == {same_step(RUN): 0.2}


def test_image_sizes_classes_and_counts_come_from_the_options():
    run = RunSpec(data="synthetic", data_options={"classes": 7, "image_size": 16, "channels": 1, "test": 9})
    assert facts_of(run) == duration.ImageFacts(7, (1, 16, 16), 9)
    assert facts_of(RunSpec(data="imagenet", data_options={"image_size": 64})).shape == (3, 64, 64)
    assert facts_of(RunSpec(test_images=77)).test == 77
    assert facts_of(RunSpec(holdout=55)).test == 55


def test_every_built_in_data_set_is_known():
    assert set(duration.DATA) == set(DATA_SETS)
    options = DATA_SETS["synthetic"].options
    plain = duration.DATA["synthetic"]
    assert (plain.classes, plain.shape[0], plain.shape[1], plain.test) == tuple(
        options[name] for name in ("classes", "channels", "image_size", "test")
    )


def test_every_run_of_the_paper_gets_an_estimate_at_every_scale(timed):
    for scale in SCALES:
        specs = unique_specs(select(["all"]), scale)
        estimates = estimate(specs)
        assert set(estimates) == {spec.digest for spec in specs}
        assert 0 < min(estimates.values()) < max(estimates.values()) < math.inf


@pytest.mark.parametrize(
    ("seconds", "text"),
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
def test_a_time_is_given_in_fitting_units(seconds, text):
    assert human(seconds) == text
