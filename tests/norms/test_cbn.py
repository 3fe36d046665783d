"""Cross-iteration batch norm: its equations over whole trajectories, and what its compensation is exact for."""

from copy import deepcopy

import pytest
import torch
from helpers.cbn import EPS, FEEDERS, column, fed, read_memory, step
from helpers.common import LAYERS, SHAPES, assert_same_output_and_gradients, images, leaf, randn, randomize, small_net
from helpers.window import changed, converted, state
from torch import nn
from torch.nn import functional as F

import memnorm
from memnorm.errors import InputError
from memnorm.norms.cbn import ENTRY, CrossIterationBatchNorm, watch_sources


class Reference(nn.Module):
    """The norm with, of every earlier batch, the moments, their full derivatives by autograd, and the weights."""

    def __init__(self, feeder, norm):
        super().__init__()
        self.feeder = deepcopy(feeder)
        self.affine = nn.ParameterList([norm.weight.detach().clone(), norm.bias.detach().clone()])
        self.window, self.burn_in = norm.window, norm.burn_in
        self.past = []

    def forward(self, x):
        out = self.feeder(x)
        dims = [0, *range(2, out.dim())]
        mu, nu = out.mean(dims), out.square().mean(dims)
        mus, nus = [mu], [nu]
        for old in self.past[: self.window - 1] if len(self.past) >= self.burn_in else ():
            mus.append(old["mu"] + self.change(old, "dmu"))
            nus.append(old["nu"] + self.change(old, "dnu"))
        mean = sum(mus) / len(mus)
        square = sum(torch.maximum(n, m.square()) for n, m in zip(nus, mus, strict=True)) / len(nus)
        self.past.insert(0, self.remembered(mu, nu))
        hat = (out - column(mean, out)) / column((square - mean.square() + EPS).sqrt(), out)
        return column(self.affine[0], out) * hat + column(self.affine[1], out)

    def change(self, old, derivative):
        """Every channel's derivative in all weights of the layer, times how they have moved."""
        total = torch.zeros(4, dtype=torch.float64)
        for c in range(4):
            for now, then, d in zip(self.feeder.parameters(), old["theta"], old[derivative][c], strict=True):
                total[c] += (d * (now.detach() - then)).sum()
        return total

    def remembered(self, mu, nu):
        theta = list(self.feeder.parameters())
        dmu, dnu = ([torch.autograd.grad(m[c], theta, retain_graph=True) for c in range(4)] for m in (mu, nu))
        then = [parameter.detach().clone() for parameter in theta]
        return {"mu": mu.detach(), "nu": nu.detach(), "theta": then, "dmu": dmu, "dnu": dnu}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(
    ("feeder", "options"),
    [*((name, {"window": 4}) for name in FEEDERS), ("2-d grouped, dilated", {"window": 3, "burn_in": 5})],
    ids=str,
)
def test_a_trajectory_equals_the_papers_equations(feeder, options):
    net, shape = fed(feeder, **options)
    reference = Reference(*net)
    plain = CrossIterationBatchNorm(4, window=1, dtype=torch.float64)
    for seed in range(20):
        x = leaf((shape[0] + seed % 3, *shape[1:]), seed=seed)
        plain(net[0](x.detach()))
        ours, theirs = step(net, x, seed), step(reference, x, seed)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
        torch.testing.assert_close(net[1].running_mean, plain.running_mean, rtol=0, atol=1e-9)
        torch.testing.assert_close(net[1].running_var, plain.running_var, rtol=0, atol=1e-9)
        newest_first = reference.past[: net[1].window - 1]
        for age, old in enumerate(newest_first):
            row = (int(net[1].memory_next) - 1 - age) % (net[1].window - 1)
            torch.testing.assert_close(net[1].memory_mean[row], old["mu"], rtol=0, atol=1e-9)
            torch.testing.assert_close(net[1].memory_var[row], old["nu"] - old["mu"].square(), rtol=0, atol=1e-9)
        assert int(net[1].memory_filled) == len(newest_first)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_window_of_one_is_batch_norm(shape):
    ours = CrossIterationBatchNorm(3, window=1, dtype=torch.float64)
    randomize(ours, seed=5)
    torchs = LAYERS[len(shape)][1](3, dtype=torch.float64)
    torchs.load_state_dict({name: ours.state_dict()[name] for name in torchs.state_dict()})
    for seed in range(3):
        assert_same_output_and_gradients(ours, torchs, leaf(shape, seed=seed), atol=1e-12)
        torch.testing.assert_close(ours.running_mean, torchs.running_mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(ours.running_var, torchs.running_var, rtol=0, atol=1e-12)


def test_a_net_with_a_window_of_one_trains_as_batch_norm_does():
    plain = small_net(dtype=torch.float64)
    net = converted(deepcopy(plain), ENTRY, window=1)
    for seed in range(4):
        x = images(4, seed=seed, dtype=torch.float64)
        torch.testing.assert_close(step(net, x, seed), step(plain, x, seed), rtol=0, atol=1e-10)


def moments_of(feeder, x):
    out = feeder(x)
    dims = [0, *range(2, out.dim())]
    return out.mean(dims), out.square().mean(dims)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("feeder", FEEDERS)
def test_after_a_move_of_the_weights_the_mean_is_exact_and_the_second_moment_its_tangent(feeder):
    """μ is linear in the weights. ν is quadratic: what its first-order expansion lacks is mean((Δ·p)²), exactly."""
    net, shape = fed(feeder, window=2)
    x = leaf(shape, seed=0).detach()
    net(x)
    before = net[0](x)
    with torch.no_grad():
        for i, parameter in enumerate(net[0].parameters()):
            parameter.add_(randn(*parameter.shape, seed=60 + i))
    memory = read_memory(net, x)
    mean, square = moments_of(net[0], x)
    torch.testing.assert_close(memory.mean, mean, rtol=0, atol=1e-10)
    moved = net[0](x) - before
    tangent = square - moved.square().mean([0, *range(2, moved.dim())])
    expected = torch.maximum(tangent, mean.square()) - mean.square()
    torch.testing.assert_close(memory.var, expected, rtol=0, atol=1e-9)


def test_for_small_moves_the_error_of_the_compensated_variance_is_quadratic():
    errors = []
    for size in (1e-2, 1e-3):
        net, shape = fed(window=2)
        x = leaf(shape, seed=0).detach()
        net(x)
        with torch.no_grad():
            net[0].weight.add_(size * randn(*net[0].weight.shape, seed=8))
        mean, square = moments_of(net[0], x)
        errors.append((read_memory(net, x).var - (square - mean.square())).abs().max())
    assert 50 < errors[0] / errors[1] < 200


def test_where_nothing_moves_the_batches_count_as_one_large_batch():
    net, shape = fed(window=3)
    batches = [leaf(shape, seed=seed).detach() for seed in range(3)]
    for batch in batches:
        last = net(batch)
    torchs = nn.BatchNorm2d(4, dtype=torch.float64)
    torchs.load_state_dict({name: net[1].state_dict()[name] for name in torchs.state_dict()})
    whole = torchs(net[0](torch.cat(batches)))
    torch.testing.assert_close(last, whole[-len(last) :], rtol=0, atol=1e-10)


def test_a_mean_far_from_zero_costs_no_digits():
    net = nn.Sequential(nn.Conv2d(2, 4, 1), CrossIterationBatchNorm(4, window=4))
    watch_sources(net)
    exact = deepcopy(net).double()
    with torch.no_grad():
        for model in (net, exact):
            model[0].bias.add_(1000)
    for seed in range(6):
        x = randn(8, 2, 4, 4, seed=seed)
        torch.testing.assert_close(net(x.float()).double(), exact(x), rtol=0, atol=2e-2)


@pytest.mark.parametrize(("steps", "filled"), [(0, 0), (1, 1), (3, 3), (4, 3), (9, 3)])
def test_the_memory_fills_and_then_stays_full(steps, filled):
    net, shape = fed(window=4, burn_in=2)
    for seed in range(steps):
        step(net, leaf(shape, seed=seed), seed)
    norm = net[1]
    assert int(norm.memory_filled) == filled
    assert int(norm.memory_steps) == min(steps, 2)
    assert int(norm.num_batches_tracked) == steps
    assert int((norm.memory_var > 0).all(1).sum()) == filled


@pytest.mark.parametrize(
    ("options", "burn_in"),
    [({}, 0), ({"total_steps": 9}, 6), ({"total_steps": 9, "burn_in": 2}, 2), ({"burn_in": 0, "total_steps": 9}, 0)],
)
def test_two_thirds_of_a_training_of_known_length_are_batch_norm(options, burn_in):
    net, shape = fed(**options)
    plain, _ = fed(window=1)
    for seed in range(8):
        x = leaf(shape, seed=seed) + 0.1 * seed
        same = torch.allclose(net(x), plain(x), rtol=0, atol=1e-9)
        assert same == (seed < max(burn_in, 1)), seed


def test_eval_is_batch_norm_and_writes_nothing():
    net, shape = fed(window=4)
    for seed in range(3):
        step(net, leaf(shape, seed=seed), seed)
    net.eval()
    before, x = state(net), leaf(shape, seed=9)
    expected = F.batch_norm(
        net[0](x), net[1].running_mean, net[1].running_var, net[1].weight, net[1].bias, False, 0.0, EPS
    )
    torch.testing.assert_close(net(x), expected, rtol=0, atol=0)
    net.train()
    net[1].eval()
    net(x)
    assert not changed(net, before)


def test_without_recording_nothing_is_written_and_the_memory_is_used():
    net, shape = fed(window=4)
    for seed in range(3):
        step(net, leaf(shape, seed=seed), seed)
    x = leaf(shape, seed=9)
    before = state(net)
    with memnorm.recording(net, False):
        y = net(x)
    assert not changed(net, before)
    torch.testing.assert_close(y, net(x), rtol=0, atol=0)
    assert {"1.memory_mean", "1.memory_slope_mean", "1.memory_slope_var", "1.running_var"} <= changed(net, before)


def test_a_batch_that_is_not_finite_is_not_recorded():
    net, shape = fed(window=4)
    for seed in range(2):
        step(net, leaf(shape, seed=seed), seed)
    before = state(net)
    bad = leaf(shape, seed=3).detach()
    bad[0, 0] = torch.inf
    net(bad)
    assert not changed(net, before)


def test_one_value_per_channel_trains_once_there_is_a_memory():
    net, shape = fed("linear", window=4)
    with pytest.raises(InputError, match="no earlier batch is remembered"):
        net(leaf((1, 5), seed=0))
    net(leaf(shape, seed=1))
    step(net, leaf((1, 5), seed=2), 2)
    assert int(net[1].memory_filled) == 2


def test_resetting_forgets_everything():
    net, shape = fed(window=4)
    step(net, leaf(shape, seed=0), 0)
    net[1].reset_running_stats()
    assert int(net[1].memory_filled) == 0
    assert net[1].running_var.eq(1).all()
    assert net[1].memory_slope_var.eq(0).all()
