"""What surrounds the second forward and must be as in the training forward, or as it was before: random numbers, the
model's other state, grad mode, autocast, activation checkpointing.
"""

from __future__ import annotations

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
from helpers.double_forward import accumulate, assert_remembers, batch, sgd, train_step, transparent_net
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint

import memnorm
from memnorm.modules import modules_of
from memnorm.replay import _devices, recorders

# Random numbers


class Jitter(nn.Module):
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
    """Seeds the global random states, which the modules under test draw from; puts them back afterwards."""
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
def test_a_model_that_begins_to_draw_late_is_noticed(seeded, draw):
    seeded()
    jitter = Jitter(lambda: 1.0)
    model = transparent_net(jitter)
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    for step in range(130):
        if step == 20:
            jitter.draw = draw
        train_step(model, optimizer, batch(step))
    training, again = jitter.drawn[-2:]
    assert training == again != 1
    seeded()
    train_step(model, optimizer, batch(0))
    after = draw()
    seeded()
    draw()
    assert after == draw(), "the generator goes on as if there had been one forward"


@pytest.mark.parametrize("draw", [random.random, np.random.rand], ids=["python", "numpy"])
def test_a_run_that_is_resumed_draws_what_an_undisturbed_one_draws(seeded, draw):
    """Even from a generator that nobody has seen the model use: it is looked at in the same forwards."""

    def trained(stop):
        seeded()
        steps, drawn, state = 0, [], None
        while steps < 70:
            jitter = Jitter(lambda: 1.0)
            model = transparent_net(jitter)
            optimizer = sgd(model)
            handle = memnorm.double_forward(model, optimizer)
            if state is not None:
                handle.load_state_dict(state)
            for step in range(steps, 70 if steps else stop):
                jitter.draw = draw if step >= 20 else lambda: 1.0
                train_step(model, optimizer, batch(step))
            steps, drawn, state = step + 1, drawn + jitter.drawn, handle.state_dict()
        return drawn

    assert trained(30) == trained(70)


@each_source
def test_the_second_forward_draws_the_numbers_of_the_training_forward(seeded, draw):
    seeded()
    model = transparent_net(Jitter(draw))
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    for seed in (1, 2):
        accumulate(model, batch(seed))
        draw()
    optimizer.step()
    assert len(set(model[0].drawn[:2])) == 2
    assert model[0].drawn[2:] == model[0].drawn[:2]


@each_source
def test_the_loop_draws_the_numbers_it_would_draw_without_second_forward(seeded, draw):
    after = []
    for attach in (False, True):
        seeded()
        model = transparent_net(Jitter(draw))
        optimizer = sgd(model)
        if attach:
            memnorm.double_forward(model, optimizer)
        train_step(model, optimizer, batch(1))
        after.append([draw() for _ in range(3)])
    assert after[0] == after[1]


@each_source
def test_rerecord_leaves_the_random_state_alone(seeded, draw):
    model = transparent_net(Jitter(draw))
    after = []
    for again in (False, True):
        seeded()
        if again:
            memnorm.rerecord(model, batch(1))
        after.append(draw())
    assert after[0] == after[1]


def test_dropout_drops_the_same_values_again(seeded):
    model = transparent_net(nn.Dropout(0.5))
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    seeded()
    dropped = F.dropout(batch(1), 0.5)
    seeded()
    accumulate(model, batch(1))
    torch.rand(7)
    optimizer.step()
    assert_remembers(model, dropped)


# Other state of the model


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


class Late(nn.Module):
    """Makes the buffer in which it counts when it is first called."""

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
        pytest.param(Late, id="counted in a buffer made in the forward"),
    ],
)
def test_the_second_forward_changes_no_buffer_of_other_modules(seeded, other):
    """With strength 0 the memory has no effect in training: both runs are the same but for what is recorded."""
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


def test_modules_are_found_once_each_however_often_they_are_shared():
    model = nn.Sequential(transparent_net(), nn.Module())
    model[1].register_module("nothing", None)
    for _ in range(40):  # 2⁴⁰ ways to the innermost
        model = nn.Sequential(model, model)
    found = modules_of(model)
    assert found[0] is model
    assert len(found) == len(set(found)) == 40 + 1 + 6 + 1 - 1
    assert set(found) == set(model.modules())


def test_every_device_with_a_parameter_counts():
    """With something in the place of a parameter on a GPU."""
    far = SimpleNamespace(_parameters={"weight": SimpleNamespace(is_cpu=False, device=torch.device("cuda"))})
    here, nowhere = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")
    for order in ((far, here, nowhere), (nowhere, here, far), (here, far, here)):
        assert _devices(order) == ["cpu", "cuda"]
    assert _devices([here, nowhere]) == ["cpu"]


def test_a_second_forward_may_contain_one_of_another_model():
    """In an optimizer that steps inside backward, where forwards are else taken for recomputed ones."""
    other = transparent_net()

    class Nesting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.is_grad_enabled():
                memnorm.rerecord(other, batch(7))
            return x

    model = transparent_net(Nesting())
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
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
    model = transparent_net()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    model.eval()
    before, weight = [b.clone() for b in model.buffers()], model[1].weight.detach().clone()
    train_step(model, optimizer, batch(1))
    torch.testing.assert_close(list(model.buffers()), before, rtol=0, atol=0)
    assert not torch.equal(model[1].weight, weight)


# Forwards without grad


def test_a_forward_in_training_mode_without_grad_records_at_once_and_is_not_replayed():
    model = transparent_net()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    with torch.no_grad():
        model(batch(1))
    assert_remembers(model, batch(1))
    train_step(model, optimizer, batch(2))
    assert_remembers(model, batch(2), batch(1))


def test_update_bn_does_what_it_does_without_double_forward():
    plain, model = transparent_net(), transparent_net()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    for one in (plain, model):
        swa_utils.update_bn([batch(seed) for seed in range(3)], one)
    assert optimizer.param_groups
    assert plain[0].num_batches_tracked == 3
    assert_same_state(model, plain)


# Autocast


class Probe(nn.Module):
    """Notes the dtype of what comes by."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.dtype)
        return x


@pytest.mark.parametrize("enabled", [True, False])
def test_the_second_forward_runs_in_the_autocast_of_the_training_forward(enabled):
    model = transparent_net(nn.Linear(3, 3), Probe())
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
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


class Checkpointed(nn.Module):
    """Calls a part of the net, or all of it, through torch.utils.checkpoint."""

    def __init__(self, first: int, last: int, **options: Any) -> None:
        super().__init__()
        self.net = memnorm.convert(small_net())
        self.first, self.last, self.options = first, last, options

    def forward(self, x: Tensor) -> Tensor:
        x = self.net[: self.first](x)
        segment = self.net[self.first : self.last]
        x = checkpoint(segment, x, **self.options) if self.options else segment(x)
        return self.net[self.last :](x)


def trained_with(call: Callable[[nn.Module, Tensor], Tensor], model: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    memnorm.double_forward(model, optimizer)
    for seed in range(5):
        optimizer.zero_grad()
        x = images(4, seed=seed).requires_grad_()  # without it, use_reentrant=True gives no gradients
        F.cross_entropy(call(model, x), labels(4, seed=seed)).backward()
        optimizer.step()
    return model


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_a_checkpointed_segment_changes_nothing(use_reentrant):
    plain = trained_with(nn.Module.__call__, Checkpointed(1, 6))
    assert_same_state(trained_with(nn.Module.__call__, Checkpointed(1, 6, use_reentrant=use_reentrant)), plain)
    assert [layer.num_batches_tracked for layer in recorders(plain)] == [5, 5]  # type: ignore[attr-defined]


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointing_the_whole_model_changes_nothing(use_reentrant):
    plain = trained_with(nn.Module.__call__, memnorm.convert(small_net()))
    call = functools.partial(checkpoint, use_reentrant=use_reentrant)
    assert_same_state(trained_with(call, memnorm.convert(small_net())), plain)
