"""The speed of this machine: what is counted, what is timed, and the prices that follow."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from memnorm.errors import NothingToConvert
from memnorm.lab import speed
from memnorm.lab.errors import LabError
from memnorm.lab.spec import RunSpec
from memnorm.lab.speed import LARGE, SMALL, Arm, Extra, Speed, Work, count

WORK = Work(calls=10, flops=1000, elements=100, norms=3, norm_elements=40, parameters=500)
WIDE = Work(calls=20, flops=9000, elements=200, norms=4, norm_elements=90, parameters=7000)
SPEED = Speed(call=0.01, flop=2e-6, element=3e-5, parameter=1e-6)
SLOW = Arm(step=Extra(0.002, 4e-5), second=Extra(0.003, 5e-5))
BATCHES = (SMALL, LARGE)


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
    once, again = 3 * 0.002 + 8 * 40 * 4e-5, (plain - 500 * 1e-6) / 3 + 3 * 0.003 + 8 * 40 * 5e-5
    assert SPEED.step(WORK, 8) == pytest.approx(plain)
    assert SPEED.step(WORK, 8, SLOW) == pytest.approx(plain + once)
    assert SPEED.step(WORK, 8, SLOW, second=1.0) == pytest.approx(plain + once + again)
    assert SPEED.step(WORK, 8, SLOW, second=0.5) == pytest.approx(plain + once + 0.5 * again)


def test_calibration_finds_the_prices_behind_the_times():
    times = [SPEED.step(WORK, batch) for batch in BATCHES]
    found = speed._solved(WORK, WIDE, times, SPEED.step(WIDE, LARGE), SPEED.parameter)
    assert (found.call, found.flop, found.element) == pytest.approx((SPEED.call, SPEED.flop, SPEED.element))


@pytest.mark.parametrize("factor", [0.01, 100.0])
@pytest.mark.parametrize("noisy", [0, 1])
def test_no_price_is_negative_however_noisy_the_times(noisy, factor):
    times = [SPEED.step(WORK, batch) for batch in BATCHES]
    times[noisy] *= factor
    found = speed._solved(WORK, WIDE, times, factor * SPEED.step(WIDE, LARGE), 1e-6)
    assert min(found.call, found.flop, found.element) >= 0
    assert found.step(WORK, 8) > 0


@pytest.fixture
def timed(monkeypatch):
    """A machine on which a step takes exactly what SPEED and SLOW say; the runs that were timed."""
    seen = []

    def step_time(spec, device):
        if spec.norm == "normprop":
            raise NothingToConvert("such a network cannot be trained")
        seen.append((spec.norm, spec.norm_options, spec.scheme, spec.batch_size))
        arm = Arm() if spec.norm == "bn" else SLOW
        return SPEED.step(WORK, spec.batch_size, arm, second=float(spec.scheme == "double"))

    monkeypatch.setattr(speed, "work_of", lambda *arguments: WORK)
    monkeypatch.setattr(speed, "calibrate", lambda *arguments: SPEED)
    monkeypatch.setattr(speed, "_step_time", step_time)
    return seen


def numbers(arm):
    return [*arm.step, *arm.second]


def test_what_a_norm_adds_is_found_behind_its_times(timed):
    once = speed.added.__wrapped__("mabn", '{"memory_size": 4}', "single")
    assert numbers(once) == pytest.approx([*SLOW.step, 0, 0])
    assert timed == [("mabn", {"memory_size": 4}, "single", batch) for batch in BATCHES]
    assert numbers(speed.added.__wrapped__("mbn", "{}", "double")) == pytest.approx(numbers(SLOW))


def test_batch_norm_with_one_forward_is_the_measure_and_not_timed_again(timed):
    assert speed.added.__wrapped__("bn", "{}", "single") == Arm()
    assert not timed
    assert numbers(speed.added.__wrapped__("bn", "{}", "double")) == pytest.approx([0, 0, 0, 0], abs=1e-12)


def test_a_norm_that_cannot_be_timed_adds_nothing(timed):
    assert speed.added.__wrapped__("normprop", "{}", "single") == Arm()


def test_calibration_uses_the_wanted_threads_and_restores_them_and_the_random_numbers(monkeypatch):
    before, state, seen = torch.get_num_threads(), torch.get_rng_state(), []

    def step_time(spec, device):
        torch.rand(3)
        seen.append(torch.get_num_threads())
        return {"resnet20": 0.01, "vgg16": 0.04}[spec.model] * (1 + spec.batch_size)

    monkeypatch.setattr(speed, "_step_time", step_time)
    monkeypatch.setattr(speed, "_update_time", lambda device: 1e-12)
    speed.calibrate.__wrapped__(threads=before + 1)
    assert set(seen) == {before + 1}
    assert torch.get_num_threads() == before
    assert torch.equal(torch.get_rng_state(), state)


def test_a_fault_is_not_taken_for_a_norm_that_cannot_be_timed(timed, monkeypatch):
    monkeypatch.setattr(speed, "_step_time", None)
    with pytest.raises(TypeError):
        speed.added.__wrapped__("mbn", "{}", "single")


@pytest.mark.slow
def test_calibration_on_this_machine_gives_prices(monkeypatch):
    found, timed, step_time = speed.calibrate(1, "cpu"), [], speed._step_time  # called as `added` calls it: cached
    assert min(found.parameter, found.flop) > 0
    monkeypatch.setattr(speed, "_step_time", lambda *arguments: timed.append(step_time(*arguments)) or timed[-1])
    speed.added.__wrapped__("mbn", "{}", "double", 1)
    assert len(timed) == 4
    assert min(timed) > 1e-4


@pytest.mark.parametrize(("norm", "scheme"), [("bn", "single"), ("mbn", "double"), ("mabn", "single")])
def test_a_step_of_a_real_network_is_timed(monkeypatch, norm, scheme):
    monkeypatch.setattr(speed, "PATIENCE", 0.0)
    run = RunSpec(model="resnet8", norm=norm, scheme=scheme, batch_size=2)
    assert 1e-4 < speed._step_time(run, "cpu") < 60


def test_what_diverges_at_once_is_not_timed(monkeypatch):
    monkeypatch.setattr("memnorm.lab.training.Training.step", lambda *_: False)
    with pytest.raises(LabError, match="MABN diverges at once"):
        speed._step_time(RunSpec(model="resnet8", norm="mabn", batch_size=2), "cpu")


def test_no_wish_for_threads_leaves_them_alone():
    before = torch.get_num_threads()
    with speed._threads(0):
        assert torch.get_num_threads() == before


def test_the_fastest_time_counts_and_the_first_does_not(monkeypatch):
    clock = iter([0, 1, 10, 14, 20, 23, 30, 35])
    monkeypatch.setattr(speed, "PATIENCE", 100.0)
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert speed._fastest(lambda: None, "cpu") == 3


def test_slow_steps_are_timed_once(monkeypatch):
    clock = iter([0, 9, 10, 14])
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert speed._fastest(lambda: None, "cpu") == 4
