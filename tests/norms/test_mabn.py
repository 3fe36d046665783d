"""Moving average batch norm: its equations over whole trajectories, and what makes it batch norm."""

import pickle
from copy import deepcopy

import pytest
import torch
from helpers.common import LAYERS, SHAPES, images, labels, leaf, randn, randomize, small_net
from helpers.window import assert_states_equal, changed, converted, losses, state
from torch import nn
from torch.utils.checkpoint import checkpoint

import memnorm
from memnorm.errors import InputError, OptionError
from memnorm.functional import batch_moments
from memnorm.norms.mabn import ENTRY, MovingAverageBatchNorm

EPS = 1e-5


def layer_of(channels=3, **options):
    layer = MovingAverageBatchNorm(channels, dtype=torch.float64, **options)
    randomize(layer, seed=5)
    return layer


def column(vector, x):
    return vector.view(1, -1, *[1] * (x.dim() - 2))


class Reference:
    """The method with every earlier χ² and Ψ kept, in the order of the paper's equations."""

    def __init__(self, *, window, max_ratio, warmup, momentum):
        self.window, self.max_ratio, self.warmup, self.momentum = window, max_ratio, warmup, momentum
        self.squares, self.products = [], []

    def moving_average(self):
        weights = [self.momentum * (1 - self.momentum) ** age for age in range(len(self.squares))]
        newest_first = reversed(self.squares)
        return sum(w * square for w, square in zip(weights, newest_first, strict=True)) / sum(weights)

    def step(self, x, gamma, beta, grad):
        dims = [0, *range(2, x.dim())]
        settled = len(self.squares) >= self.warmup
        self.squares.append(x.square().mean(dims))
        average = sum(self.squares[-self.window :]) / len(self.squares[-self.window :])
        chi2 = average if settled else self.squares[-1]
        ratio = ((chi2 + EPS) / (self.moving_average() + EPS)).sqrt().clamp(1 / self.max_ratio, self.max_ratio)
        ratio = ratio if settled else torch.ones_like(ratio)
        y = x / column((chi2 + EPS).sqrt(), x)
        z = column(gamma * ratio, x) * y + column(beta, x)
        grad_y = grad * column(gamma * ratio, x)
        self.products.append((grad_y * y).mean(dims))
        recent = self.products[-self.window :]
        psi = sum(recent) / len(recent) if settled else self.products[-1]
        grad_x = (grad_y - y * column(psi, x)) / column((chi2 + EPS).sqrt(), x)
        return z, grad_x, (grad * column(ratio, x) * y).sum(dims), grad.sum(dims)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 4, "warmup": 3, "momentum": 0.3},
        {"window": 1, "warmup": 0, "momentum": 0.1},
        {"window": 6, "warmup": 0, "momentum": 0.02, "max_ratio": 1.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("rest", [(), (5,), (4, 3), (2, 3, 2)], ids=str)
def test_a_trajectory_is_the_papers(rest, options):
    layer = layer_of(**options)
    reference = Reference(**{"max_ratio": 5.0, **options})
    for step in range(25):
        shape = (1 + (5 * step) % 7, 3, *rest)
        x, grad = leaf(shape, seed=step), randn(*shape, seed=1000 + step)
        x.data.mul_(1 + 0.5 * (step % 4))
        y = layer(x)
        ours = [y, *torch.autograd.grad(y, [x, layer.weight, layer.bias], grad)]
        theirs = reference.step(x.detach(), layer.weight.detach(), layer.bias.detach(), grad)
        torch.testing.assert_close(ours, list(theirs), rtol=0, atol=1e-11)
        torch.testing.assert_close(layer.running_var, reference.moving_average(), rtol=0, atol=1e-11)
        for rows, history in ((layer.memory_square, reference.squares), (layer.memory_product, reference.products)):
            newest_first = history[::-1][: layer.window - 1]
            expected = [*newest_first, *[torch.zeros(3)] * (layer.window - 1 - len(newest_first))]
            torch.testing.assert_close(list(rows), [row.double() for row in expected], rtol=0, atol=1e-11)
    assert layer.running_mean.eq(0).all()


def centred_batch(shape, seed):
    x = leaf(shape, seed=seed).detach()
    return (x - x.mean([0, *range(2, x.dim())], keepdim=True)).requires_grad_()


def run(module, x, probe):
    x = x.detach().clone().requires_grad_()
    y = module(x)
    return y, torch.autograd.grad((y * probe).sum(), [x, *module.parameters()])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_on_channels_of_mean_zero_one_iteration_is_batch_norm_up_to_the_mean_of_the_gradient(shape):
    ours = layer_of(window=1, warmup=0, momentum=1.0)
    torchs = LAYERS[len(shape)][1](3, dtype=torch.float64)
    torchs.load_state_dict({name: ours.state_dict()[name] for name in torchs.state_dict()})
    dims = [0, *range(2, len(shape))]
    for seed in range(3):
        x, probe = centred_batch(shape, seed), randn(*shape, seed=50 + seed)
        mine, (grad_mine, *rest_mine) = run(ours, x, probe)
        theirs, (grad_theirs, *rest_theirs) = run(torchs, x, probe)
        torch.testing.assert_close([mine, *rest_mine], [theirs, *rest_theirs], rtol=0, atol=1e-11)
        torch.testing.assert_close(grad_mine - grad_mine.mean(dims, keepdim=True), grad_theirs, rtol=0, atol=1e-11)
        probe = probe - probe.mean(dims, keepdim=True)
        torch.testing.assert_close(run(ours, x, probe)[1][0], run(torchs, x, probe)[1][0], rtol=0, atol=1e-11)


def test_on_the_full_batch_again_and_again_the_averages_change_nothing():
    default, single = layer_of(warmup=2), layer_of(window=1, warmup=0, momentum=1.0)
    x, probe = centred_batch((6, 3, 4), seed=0), randn(6, 3, 4, seed=1)
    for _ in range(20):
        mine, theirs = run(default, x, probe), run(single, x, probe)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


def test_where_the_correction_is_not_clipped_training_computes_what_eval_will():
    layer = layer_of(window=3, warmup=0)
    for seed in range(6):
        x = leaf((4, 3, 2), seed=seed)
        y = layer.train()(x)
        torch.testing.assert_close(y, layer.eval()(x), rtol=0, atol=1e-11)


def test_the_correction_stays_within_its_limits():
    layer = layer_of(window=1, warmup=0, max_ratio=2.0)
    for seed in range(5):
        layer(leaf((4, 3, 2), seed=seed))
    x = 1000 * leaf((4, 3, 2), seed=9).detach()
    plain = x / (x.square().mean((0, 2), keepdim=True) + EPS).sqrt()
    expected = 2.0 * plain * layer.weight.view(1, -1, 1) + layer.bias.view(1, -1, 1)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("steps", "rows", "counter"), [(0, 0, 0), (1, 1, 1), (4, 3, 4), (6, 3, 6), (30, 3, 6)])
def test_counters_stop_when_there_is_nothing_left_to_count(steps, rows, counter):
    layer = layer_of(window=4, warmup=6)
    for seed in range(steps):
        layer(leaf((4, 3), seed=seed)).sum().backward()
    assert int(layer.memory_steps) == counter
    assert int(layer.memory_backwards) == min(steps, 3)
    assert int(layer.num_batches_tracked) == steps
    assert int((layer.memory_square != 0).all(1).sum()) == rows


def test_a_new_layer_has_mean_zero_and_second_moment_one_and_its_first_batch_replaces_them():
    layer = layer_of()
    assert layer.running_mean.eq(0).all()
    assert layer.running_var.eq(1).all()
    x = leaf((4, 3, 2), seed=0)
    layer(x)
    torch.testing.assert_close(layer.running_var, x.detach().square().mean((0, 2)), rtol=0, atol=1e-12)


def test_in_place_of_a_trained_batch_norm_it_begins_with_its_variance_and_a_warmup_of_its_own():
    plain = nn.BatchNorm1d(3, dtype=torch.float64)
    for seed in range(500):
        plain(leaf((4, 3), seed=seed % 7))
    mean, var = plain.running_mean.clone(), plain.running_var.clone()
    layer = MovingAverageBatchNorm.replacing(plain, window=3, warmup=2)
    assert layer.running_mean.eq(0).all()
    torch.testing.assert_close([plain.running_mean, layer.running_var], [mean, var], rtol=0, atol=0)
    x = leaf((4, 3), seed=9).detach()
    square = x.square().mean(0)
    torch.testing.assert_close(layer(x), x / (square + EPS).sqrt(), rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.running_var, 0.98 * var + 0.02 * square, rtol=0, atol=1e-4)


def test_eval_writes_nothing():
    layer = layer_of(window=3, warmup=1)
    for seed in range(4):
        layer(leaf((4, 3), seed=seed)).sum().backward()
    before = state(layer.eval())
    layer(leaf((4, 3), seed=9)).sum().backward()
    assert not changed(layer, before)


def test_without_recording_neither_direction_is_recorded_and_outside_only_the_backward_is():
    layer = layer_of(window=3, warmup=1)
    for seed in range(4):
        layer(leaf((4, 3), seed=seed)).sum().backward()
    before = state(layer)
    with memnorm.recording(layer, False):
        layer(leaf((4, 3), seed=7)).sum().backward()
        assert not changed(layer, before)
        y = layer(leaf((4, 3), seed=8))
    y.sum().backward()
    assert changed(layer, before) == {"memory_product"}


def test_double_forward_records_every_statistic_once_a_step():
    net = converted(small_net(dtype=torch.float64), ENTRY, window=3, warmup=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with memnorm.double_forward(net, optimizer):
        for step in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images(4, seed=step, dtype=torch.float64)), labels(4, seed=step)).backward()
            optimizer.step()
            assert int(net[1].num_batches_tracked) == step + 1
            assert int(net[1].memory_backwards) == min(step + 1, 2)


def test_buffers_are_written_in_place():
    layer = layer_of(window=3, warmup=1)
    pointers = {name: buffer.data_ptr() for name, buffer in layer.named_buffers()}
    for seed in range(5):
        layer(leaf((4, 3), seed=seed)).sum().backward()
    assert pointers == {name: buffer.data_ptr() for name, buffer in layer.named_buffers()}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_forward_has_the_same_gradients_and_state(reentrant):
    plain = layer_of(window=3, warmup=1)
    other = deepcopy(plain)
    for seed in range(5):
        x, probe = leaf((4, 3, 2), seed=seed), randn(4, 3, 2, seed=70 + seed)
        point = x.detach().clone().requires_grad_()
        (plain(x) * probe).sum().backward()
        (checkpoint(other, point, use_reentrant=reentrant) * probe).sum().backward()
        torch.testing.assert_close(point.grad, x.grad, rtol=0, atol=1e-12)
        assert_states_equal(state(other), state(plain), atol=1e-12)


def test_copies_and_checkpoints_go_on_alike():
    layer = layer_of(window=3, warmup=1)
    for seed in range(4):
        layer(leaf((4, 3), seed=seed)).sum().backward()
    loaded = MovingAverageBatchNorm(3, dtype=torch.float64, window=3, warmup=1)
    loaded.load_state_dict(layer.state_dict())
    copies = [deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded]
    for seed in range(4, 7):
        x = leaf((4, 3), seed=seed)
        y = layer(x)
        y.square().sum().backward()
        for copy in copies:
            again = copy(x.detach())
            again.square().sum().backward()
            torch.testing.assert_close(again, y, rtol=0, atol=0)
    for copy in copies:
        assert_states_equal(state(copy), state(layer))


def test_a_batch_or_gradient_that_is_not_finite_is_not_recorded():
    layer = layer_of(window=3, warmup=0)
    layer(leaf((4, 3), seed=0)).sum().backward()
    before = state(layer)
    bad = leaf((4, 3), seed=1).detach()
    bad[0, 0] = torch.inf
    layer(bad)
    assert not changed(layer, before)
    with memnorm.recording(layer, False):
        y = layer(leaf((4, 3), seed=1))
    y.backward(torch.full_like(y, torch.nan))
    assert not changed(layer, before)


def test_the_batch_size_is_free_down_to_one_value_per_channel():
    layer = layer_of(window=3, warmup=0)
    for size in (4, 1, 7, 1, 2):
        x = leaf((size, 3), seed=size)
        layer(x).sum().backward()
        assert x.grad.isfinite().all()


def test_momentum_none_averages_all_batches_each_normalised_on_its_own():
    layer = layer_of(window=3, warmup=0)
    layer.momentum = None
    layer.reset_running_stats()
    batches = [leaf((4, 3), seed=seed).detach() for seed in range(5)]
    outputs = [layer(batch) for batch in batches]
    torch.testing.assert_close(layer.running_var, torch.cat(batches).square().mean(0), rtol=0, atol=1e-12)
    own = batches[-1] / (batches[-1].square().mean(0) + EPS).sqrt()
    torch.testing.assert_close(outputs[-1], own * layer.weight + layer.bias, rtol=0, atol=1e-12)


def test_the_statistics_of_a_population_are_its_second_moment():
    x = leaf((20, 3), seed=0).detach()
    running = layer_of().running_from(batch_moments(x))
    assert running.mean.eq(0).all()
    torch.testing.assert_close(running.var, x.square().mean(0), rtol=0, atol=1e-12)


def test_resetting_forgets_everything():
    layer = layer_of(window=3, warmup=1)
    fresh = state(layer)
    for seed in range(4):
        layer(leaf((4, 3), seed=seed)).sum().backward()
    layer.reset_running_stats()
    assert not changed(layer, fresh)


def test_autocast_and_channels_last_agree_with_plain():
    layer = MovingAverageBatchNorm(3, window=3, warmup=0)
    other, narrow = deepcopy(layer), deepcopy(layer)
    for seed in range(4):
        x = leaf((4, 3, 4, 4), seed=seed, dtype=torch.float32)
        y = layer(x)
        last = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
        z = other(last)
        assert z.is_contiguous(memory_format=torch.channels_last)
        half = x.detach().bfloat16().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            w = narrow(half)
        assert w.dtype == torch.bfloat16
        for out in (y, z, w):
            out.float().pow(2).sum().backward()
        torch.testing.assert_close(z, y, rtol=0, atol=1e-5)
        torch.testing.assert_close(last.grad, x.grad, rtol=0, atol=1e-5)
        torch.testing.assert_close(w.float(), y, rtol=0.02, atol=0.02)
        torch.testing.assert_close(half.grad.float(), x.grad, rtol=0.05, atol=0.05)
    assert narrow.running_var.dtype == torch.float32


def test_half_precision_leaves_what_is_remembered_wide():
    layer = MovingAverageBatchNorm(3, window=3).half()
    y = layer(leaf((4, 3, 5), seed=0, dtype=torch.float16))
    y.sum().backward()
    assert y.dtype == torch.float16
    assert layer.memory_square.dtype == torch.float32
    assert layer.double().memory_square.dtype == torch.float64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be a whole number, at least 1; got 0"),
        ({"window": 2.5}, "window must be a whole number"),
        ({"warmup": -1}, "warmup must be a whole number, at least 0"),
        ({"max_ratio": 0.5}, "max_ratio must be a number, at least 1; got 0.5"),
        ({"momentum": 0}, "momentum, the weight of the new batch, must be positive"),
        ({"batch_size": 4}, "unknown option batch_size; its options are window, max_ratio, warmup"),
    ],
)
def test_wrong_options_are_refused_in_words(options, message):
    with pytest.raises(OptionError, match=message):
        MovingAverageBatchNorm(3, **options)


def test_an_empty_batch_is_refused():
    with pytest.raises(InputError, match="empty"):
        layer_of()(torch.empty(0, 3, dtype=torch.float64))


@pytest.mark.parametrize("size", [2, 16])
def test_the_loss_falls(size):
    net = converted(small_net(), ENTRY, window=4, warmup=5)
    first, last = losses(net, size)
    assert last < first
