"""Estimates of a run's time: what is counted, what is calibrated, what is said."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from memnorm.lab import estimate_time
from memnorm.lab.data.registry import DATA_SETS
from memnorm.lab.estimate_time import Speed, Work, count, estimate, human, images_of, measured, same_work
from memnorm.lab.spec import RunSpec
from memnorm.lab.tables import SCALES, select, unique_specs

WORK = Work(calls=10, flops=1000, elements=100, norms=3, norm_elements=40, parameters=500)
WIDE = Work(calls=20, flops=9000, elements=200, norms=4, norm_elements=90, parameters=7000)
SPEED = Speed(
    call=0.01,
    flop=2e-6,
    element=3e-5,
    parameter=1e-6,
    extra={("mbn", "single"): (0.002, 4e-5), ("mbn", "double"): (0.005, 9e-5)},
)
RUN = RunSpec(model="resnet8", data="digits", batch_size=8, iterations=100, evaluations=4)


@pytest.fixture
def priced(monkeypatch):
    """Every model is WORK, and the machine SPEED."""
    monkeypatch.setattr(estimate_time, "_count", lambda *arguments: WORK)
    monkeypatch.setattr(estimate_time, "calibrate", lambda *arguments: SPEED)


def only(estimates):
    (seconds,) = estimates.values()
    return seconds


def stored(spec, step_ms, machine="here", threads=1):
    return SimpleNamespace(
        spec=spec,
        metrics=[{"step_ms": value} for value in step_ms],
        environment={"machine": machine, "threads": threads},
    )


def test_a_forward_is_counted_layer_by_layer():
    with torch.device("meta"):
        network = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
    work = count(network, (3, 8, 8))
    assert work.flops == 2 * (36 * 4 * 27 + 144 * 2)
    assert (work.calls, work.elements) == (4, 144 + 144 + 144 + 2)
    assert (work.norms, work.norm_elements) == (1, 144)
    assert work.parameters == 4 * 27 + 8 + 144 * 2 + 2


def test_counting_leaves_no_hook_behind():
    with torch.device("meta"):
        network = nn.Sequential(nn.Conv2d(3, 4, 3))
    count(network, (3, 8, 8))
    assert not network[0]._forward_hooks


def test_a_step_is_calls_images_parameters_and_the_norm():
    plain = 10 * 0.01 + 8 * (1000 * 2e-6 + 100 * 3e-5) + 500 * 1e-6
    single, double = 3 * 0.002 + 8 * 40 * 4e-5, 3 * 0.005 + 8 * 40 * 9e-5
    forward = (plain - 500 * 1e-6) / 3
    assert SPEED.step(WORK, 8, "bn", "single") == pytest.approx(plain)
    assert SPEED.step(WORK, 8, "mbn", "single") == pytest.approx(plain + single)
    assert SPEED.step(WORK, 8, "mbn", "double") == pytest.approx(plain + forward + double)
    assert SPEED.step(WORK, 8, "mbn", "double", second=0.5) == pytest.approx(
        plain + single + 0.5 * (forward + double - single)
    )


def test_a_run_is_its_steps_and_its_evaluations(priced):
    evaluation = (2 * 10 * 0.01 + 500 * (1000 * 2e-6 + 100 * 3e-5)) / 3
    expected = 100 * SPEED.step(WORK, 8, "bn", "single") + 4 * evaluation
    assert only(estimate([RUN])) == pytest.approx(expected)


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


def times_under(speed):
    arms = [("bn", "single"), ("mbn", "single"), ("mbn", "double")]
    return {(*arm, batch): speed.step(WORK, batch, *arm) for arm in arms for batch in (2, 8)}


def test_calibration_finds_the_prices_behind_the_times():
    times, wide = times_under(SPEED), SPEED.step(WIDE, 8, "bn", "single")
    found = estimate_time._solved(WORK, WIDE, times, wide, SPEED.parameter)
    assert (found.call, found.flop, found.element) == pytest.approx((SPEED.call, SPEED.flop, SPEED.element))
    for arm in SPEED.extra:
        assert found.extra[arm] == pytest.approx(SPEED.extra[arm])


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_no_price_is_negative_however_noisy_the_times(factor):
    times, wide = times_under(SPEED), SPEED.step(WIDE, 8, "bn", "single")
    for noisy in times:
        found = estimate_time._solved(WORK, WIDE, times | {noisy: times[noisy] * factor}, wide * factor, 1e-6)
        prices = [found.call, found.flop, found.element, *(price for pair in found.extra.values() for price in pair)]
        assert min(prices) >= 0
        assert found.step(WORK, 8, "mbn", "double") > 0


def test_calibration_uses_the_wanted_threads_and_restores_them_and_the_random_numbers(monkeypatch):
    before, state, seen = torch.get_num_threads(), torch.get_rng_state(), []

    def step_time(model, norm, scheme, batch, device):
        torch.rand(3)
        seen.append(torch.get_num_threads())
        return {"resnet20": 0.01, "vgg16": 0.04}[model] * (1 + batch)

    monkeypatch.setattr(estimate_time, "_step_time", step_time)
    monkeypatch.setattr(estimate_time, "_update_time", lambda device: 1e-12)
    estimate_time.calibrate.__wrapped__(threads=before + 1)
    assert set(seen) == {before + 1}
    assert torch.get_num_threads() == before
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_calibration_on_this_machine_gives_prices():
    speed = estimate_time.calibrate(threads=1)
    assert min(speed.parameter, speed.flop) > 0
    assert speed.step(WORK, 8, "mbn", "double") > 0


@pytest.mark.parametrize(("norm", "scheme"), [("bn", "single"), ("mbn", "double")])
def test_a_step_of_a_real_network_is_timed(monkeypatch, norm, scheme):
    monkeypatch.setattr(estimate_time, "PATIENCE", 0.0)
    assert 1e-4 < estimate_time._step_time("resnet8", norm, scheme, 2, "cpu") < 60


def test_no_wish_for_threads_leaves_them_alone():
    before = torch.get_num_threads()
    with estimate_time._threads(0):
        assert torch.get_num_threads() == before


def test_the_fastest_time_counts_and_the_first_does_not(monkeypatch):
    clock = iter([0, 1, 10, 14, 20, 23, 30, 35])
    monkeypatch.setattr(estimate_time, "PATIENCE", 100.0)
    monkeypatch.setattr(estimate_time, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert estimate_time._fastest(lambda: None, "cpu") == 3


def test_slow_steps_are_timed_once(monkeypatch):
    clock = iter([0, 9, 10, 14])
    monkeypatch.setattr(estimate_time, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert estimate_time._fastest(lambda: None, "cpu") == 4


def test_every_run_of_the_paper_gets_an_estimate_at_every_scale(monkeypatch):
    monkeypatch.setattr(estimate_time, "calibrate", lambda *arguments: SPEED)
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
