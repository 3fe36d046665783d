"""The second forward: exceptions, random numbers, buffers, autocast, checkpointing, `recording` and `rerecord`."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.common import assert_same_state, images, labels, small_net
from helpers.double_forward import accumulate, assert_remembers, attached, batch, sgd, train_step, transparent_net
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import memnorm
from memnorm.modules import modules_of
from memnorm.replay import _devices

# Exceptions


class Failing(nn.Module):
    """Raises in one of its calls, the first being number 1; counts the others in a buffer."""

    calls: Tensor

    def __init__(self, call: int, error: type[BaseException] = ZeroDivisionError) -> None:
        super().__init__()
        self.call, self.error, self.started = call, error, 0
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.started += 1
        self.calls += 1
        torch.rand(1)
        if self.started == self.call:
            raise self.error
        return x


def test_after_a_training_forward_that_raised_the_layers_record_when_called_by_others():
    model = transparent_net(Failing(call=1))
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    with pytest.raises(ZeroDivisionError):
        model(batch(1))
    model[1](batch(2))
    assert optimizer.param_groups
    assert_remembers(model, batch(2))


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_after_a_training_forward_that_raised_the_next_step_is_normal(error):
    model = transparent_net(Failing(call=1, error=error))
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    with pytest.raises(error):
        model(batch(1))
    train_step(model, optimizer, batch(2))
    assert_remembers(model, batch(2))


def test_after_an_interrupted_training_forward_the_next_forward_without_grad_records():
    model = transparent_net(Failing(call=1, error=KeyboardInterrupt))
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    with pytest.raises(KeyboardInterrupt):
        model(batch(1))
    with torch.no_grad():
        model(batch(2))
    assert optimizer.param_groups
    assert_remembers(model, batch(2))


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_in_the_second_forward_leaves_everything_as_it_was(error):
    model = transparent_net(Failing(call=2, error=error))
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    accumulate(model, batch(1))
    model[1].recording = False
    modes, buffers = [m.training for m in model.modules()], [b.clone() for b in model.buffers()]
    torch.rand(1)
    random_state = torch.get_rng_state()
    with pytest.raises(error):
        optimizer.step()
    assert model[1].recording is False
    assert [m.training for m in model.modules()] == modes
    torch.testing.assert_close(list(model.buffers()), buffers, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.is_grad_enabled()


def test_after_an_error_in_the_second_forward_the_next_step_is_normal():
    model = transparent_net(Failing(call=2))
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    with pytest.raises(ZeroDivisionError) as caught:
        train_step(model, optimizer, batch(1))
    assert "second forward" in caught.value.__notes__[0]
    train_step(model, optimizer, batch(2))
    assert_remembers(model, batch(2))


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_after_an_error_in_the_second_forward_the_next_step_counts_as_an_update_of_two_way_layers(error):
    model = memnorm.convert(nn.Sequential(Failing(call=2, error=error), nn.BatchNorm1d(3), nn.Linear(3, 1)), "two_way")
    optimizer = sgd(model)
    with memnorm.double_forward(model, optimizer), pytest.raises(error):
        train_step(model, optimizer, batch(1))
    assert model[1].num_updates == 1
    train_step(model, optimizer, batch(2))
    assert model[1].num_updates == 2


# Random numbers


class RandomScale(nn.Module):
    """Multiplies by a random number."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw, self.drawn = draw, []

    def forward(self, x: Tensor) -> Tensor:
        self.drawn.append(self.draw())
        return x * self.drawn[-1]


each_source = pytest.mark.parametrize(
    "draw", [lambda: torch.rand(()).item(), random.random, np.random.rand], ids=["torch", "python", "numpy"]
)


@pytest.fixture
def seeded():
    """Seeds the global random states that the modules under test draw from; restores them afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def seed() -> None:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)

    yield seed
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@each_source
def test_the_second_forward_draws_the_numbers_of_the_training_forward(seeded, draw):
    model, optimizer = attached(RandomScale(draw))
    seeded()
    for seed in (1, 2):
        accumulate(model, batch(seed))
        draw()
    optimizer.step()
    assert len(set(model[0].drawn[:2])) == 2
    assert model[0].drawn[2:] == model[0].drawn[:2]
    after = draw()
    seeded()
    assert [draw() for _ in range(5)][4] == after, "the second forward must not advance the generator"


@each_source
def test_rerecord_leaves_the_random_state_alone(seeded, draw):
    model = transparent_net(RandomScale(draw))
    after = []
    for again in (False, True):
        seeded()
        if again:
            memnorm.rerecord(model, batch(1))
        after.append(draw())
    assert after[0] == after[1]


# Other state of the model


def test_eval_mode_between_backward_and_step_records_nothing():
    model, optimizer = attached()
    model(batch(1)).mean().backward()
    model.eval()
    optimizer.step()
    assert_remembers(model)


class Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self, count: Callable[[Any], None]) -> None:
        super().__init__()
        self.count = count
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count(self)
        return x


def by_assignment(module: Any) -> None:
    module.calls = module.calls + 1


class LateBuffer(nn.Module):
    """Registers its counter in its first forward."""

    def forward(self, x: Tensor) -> Tensor:
        if not self._buffers:
            self.register_buffer("calls", torch.zeros(()))
        self.get_buffer("calls").add_(1)
        return x


def instance_norm() -> nn.Module:
    norm = nn.InstanceNorm1d(3, track_running_stats=True)
    return nn.Sequential(nn.Unflatten(1, (3, 1)), nn.ConstantPad1d(1, 0.5), norm, nn.Flatten())


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: nn.BatchNorm1d(3), id="batch norm"),
        pytest.param(instance_norm, id="instance norm"),
        pytest.param(lambda: parametrizations.spectral_norm(nn.Linear(3, 3)), id="spectral norm"),
        pytest.param(lambda: Counting(lambda module: module.calls.add_(1)), id="counted in place"),
        pytest.param(lambda: Counting(by_assignment), id="counted by assignment"),
        pytest.param(lambda: Counting(lambda module: module.calls.data.add_(1)), id="counted in .data"),
        pytest.param(LateBuffer, id="counted in a buffer made in the forward"),
    ],
)
def test_the_second_forward_changes_no_buffer_of_other_modules(seeded, other):
    """With strength 0 the memory has no effect in training, so both runs differ only in what is recorded."""
    runs = []
    for attach in (False, True):
        seeded()
        model = nn.Sequential(transparent_net(strength=0.0), nn.Linear(1, 3), other())
        optimizer = sgd(model)
        if attach:
            memnorm.double_forward(model, optimizer)
        for seed in (1, 2, 3):
            train_step(model, optimizer, batch(seed))
        runs.append(model[2])
    assert list(runs[0].buffers())
    assert_same_state(*runs)


def test_the_second_forward_changes_no_buffer_of_the_model_itself():
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = transparent_net()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.net(x)

    model = Counted()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    for seed in (1, 2, 3):
        train_step(model, optimizer, batch(seed))
    assert model.calls == 3
    assert_remembers(model, batch(3), batch(2), batch(1))


def test_a_shared_module_is_found_once():
    model = nn.Sequential(transparent_net(), nn.Module())
    model[1].register_module("nothing", None)
    for _ in range(40):  # 2⁴⁰ ways to the innermost
        model = nn.Sequential(model, model)
    found = modules_of(model)
    assert found[0] is model
    assert len(found) == len(set(found)) == 40 + 1 + 6 + 1 - 1
    assert set(found) == set(model.modules())


def test_the_devices_of_a_model_are_those_of_its_parameters():
    """With a stand-in for a parameter on a GPU."""
    far = SimpleNamespace(_parameters={"weight": SimpleNamespace(is_cpu=False, device=torch.device("cuda"))})
    here, nowhere = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")
    for order in ((far, here, nowhere), (nowhere, here, far), (here, far, here)):
        assert _devices(order) == ["cpu", "cuda"]
    assert _devices([here, nowhere]) == ["cpu"]


def test_a_second_forward_may_contain_one_of_another_model():
    """With an optimizer that steps inside backward, where other forwards count as recomputations."""
    other = transparent_net()

    class Nesting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                memnorm.rerecord(other, batch(7))
            return x

    model, optimizer = attached(Nesting())
    last = next(model.parameters())  # whose gradient comes last
    last.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    accumulate(model, batch(1))
    assert_remembers(model, batch(1))
    assert_remembers(other, batch(7))


def test_a_graph_that_saved_a_buffer_can_still_run_backward_after_the_step():
    model = nn.Sequential(transparent_net(), nn.BatchNorm1d(1))
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    accumulate(model, batch(1))
    x = batch(2)[:, :1].requires_grad_()
    penalty = (x * model[1].running_var).sum()
    optimizer.step()
    penalty.backward()
    torch.testing.assert_close(x.grad, model[1].running_var.expand(4, 1), rtol=0, atol=0)


def test_layers_in_eval_mode_change_no_bit():
    model: Any = memnorm.convert(small_net())
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    model[4].eval()
    before = copy.deepcopy(dict(model[4].named_buffers()))
    optimizer.zero_grad()
    F.cross_entropy(model(images(4, seed=1)), labels(4, seed=1)).backward()
    optimizer.step()
    torch.testing.assert_close(dict(model[4].named_buffers()), before, rtol=0, atol=0)
    assert model[1].num_batches_tracked == 1
    assert [model[1].training, model[4].training] == [True, False]


def test_a_model_in_eval_mode_trains_on_and_records_nothing():
    model, optimizer = attached()
    model.eval()
    before, weight = [b.clone() for b in model.buffers()], model[1].weight.detach().clone()
    train_step(model, optimizer, batch(1))
    torch.testing.assert_close(list(model.buffers()), before, rtol=0, atol=0)
    assert not torch.equal(model[1].weight, weight)


# Forwards without grad


def test_a_forward_in_training_mode_without_grad_records_immediately_and_is_not_replayed():
    model, optimizer = attached()
    with torch.no_grad():
        model(batch(1))
    assert_remembers(model, batch(1))
    train_step(model, optimizer, batch(2))
    assert_remembers(model, batch(2), batch(1))


# Autocast


class Probe(nn.Module):
    """Keeps the dtypes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.dtype)
        return x


@pytest.mark.parametrize("enabled", [True, False])
def test_the_second_forward_runs_in_the_autocast_of_the_training_forward(enabled):
    model, optimizer = attached(nn.Linear(3, 3), Probe())
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        loss = model(batch(1)).float().mean()
    loss.backward()
    with torch.autocast("cpu", torch.bfloat16, enabled=not enabled):
        optimizer.step()
    assert model[1].seen == [torch.bfloat16 if enabled else torch.float32] * 2


@pytest.mark.parametrize("attach", [True, False], ids=["double_forward", "rerecord"])
def test_inside_an_autocast_that_has_cached_the_old_weights_the_second_forward_sees_the_new_ones(attach):
    model = transparent_net(nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if attach:
        memnorm.double_forward(model, optimizer)
    with torch.autocast("cpu", torch.bfloat16):
        with memnorm.recording(model, attach):
            loss = model(batch(1)).float().square().mean()
        loss.backward()
        optimizer.step()
        if not attach:
            memnorm.rerecord(model, batch(1))
    with torch.autocast("cpu", torch.bfloat16):
        fresh = model[0](batch(1)).float()
    assert_remembers(model, fresh)


# Activation checkpointing


def trained_with(call: Callable[[nn.Module, Tensor], Tensor], model: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    memnorm.double_forward(model, optimizer)
    for seed in range(5):
        optimizer.zero_grad()
        x = images(4, seed=seed).requires_grad_()  # without it, use_reentrant=True gives no gradients
        F.cross_entropy(call(model, x), labels(4, seed=seed)).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointing_the_whole_model_changes_nothing(use_reentrant):
    plain = trained_with(nn.Module.__call__, memnorm.convert(small_net()))
    call = functools.partial(checkpoint, use_reentrant=use_reentrant)
    assert_same_state(trained_with(call, memnorm.convert(small_net())), plain)


# The primitives


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_recording_restores_the_switch_of_each_layer(on, error):
    model: Any = memnorm.convert(small_net())
    model[1].recording = False
    with contextlib.suppress(ZeroDivisionError), memnorm.recording(model, on):
        assert [model[1].recording, model[4].recording] == [on, on]
        if error:
            raise error
    assert [model[1].recording, model[4].recording] == [False, True]


def test_rerecord_leaves_modes_and_gradients_alone():
    model: Any = memnorm.convert(small_net())
    model[4].eval()
    model[3].weight.requires_grad_(False)
    F.cross_entropy(model(images(4, seed=1)), labels(4, seed=1)).backward()
    modes = [module.training for module in model.modules()]
    grads = [parameter.grad for parameter in model.parameters()]
    values = [None if grad is None else grad.clone() for grad in grads]
    memnorm.rerecord(model, images(4, seed=2))
    assert [module.training for module in model.modules()] == modes
    for parameter, grad, value in zip(model.parameters(), grads, values, strict=True):
        assert parameter.grad is grad
        torch.testing.assert_close(grad, value, rtol=0, atol=0)
