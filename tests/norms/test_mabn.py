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
from memnorm.errors import OptionError
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
    """The method with every earlier χ² and Ψ kept, in the order of the authors' equations."""

    def __init__(self, *, window=32, max_ratio=5.0, warmup=100, correct_after=1000, momentum=0.02):
        self.window, self.max_ratio, self.momentum = window, max_ratio, momentum
        self.warmup, self.correct_after = warmup, max(warmup, correct_after)
        self.sizes, self.squares, self.products = [], [], []
        self.moving, self.weight = torch.ones(3, dtype=torch.float64), 0.0

    def average(self, history):
        """Over the newest batches that hold at most `window` images together; the newest in any case."""
        images, total = 0, 0.0
        for size, value in zip(reversed(self.sizes), reversed(history), strict=True):
            if images and images + size > self.window:
                break
            images, total = images + size, total + size * value
        return total / images

    def move(self, average):
        """The moving average is a sum of decaying weights divided by the sum of the weights."""
        decayed = (1 - self.momentum) * self.weight
        self.moving = (decayed * self.moving + self.momentum * average) / (decayed + self.momentum)
        self.weight = decayed + self.momentum

    def step(self, x, gamma, beta, grad):
        dims = [0, *range(2, x.dim())]
        before = len(self.sizes)
        self.sizes.append(len(x))
        self.squares.append(x.square().mean(dims))
        chi2 = self.average(self.squares) if before >= self.warmup else self.squares[-1]
        ratio = torch.ones_like(chi2)
        if before >= self.correct_after:
            ratio = ((chi2 + EPS) / (self.moving + EPS)).sqrt().clamp(1 / self.max_ratio, self.max_ratio)
        self.move(chi2)
        y = x / column((chi2 + EPS).sqrt(), x)
        z = column(gamma * ratio, x) * y + column(beta, x)
        grad_y = grad * column(gamma * ratio, x)
        self.products.append((grad_y * y).mean(dims))
        psi = self.average(self.products) if before >= self.warmup else self.products[-1]
        grad_x = (grad_y - y * column(psi, x)) / column((chi2 + EPS).sqrt(), x)
        return z, grad_x, (grad * column(ratio, x) * y).sum(dims), grad.sum(dims)


def assert_step_is_the_references(layer, reference, shape, step):
    x, grad = leaf(shape, seed=step), randn(*shape, seed=5000 + step)
    x.data.mul_(1 + 0.5 * (step % 4))
    y = layer(x)
    ours = [y, *torch.autograd.grad(y, [x, layer.weight, layer.bias], grad)]
    theirs = reference.step(x.detach(), layer.weight.detach(), layer.bias.detach(), grad)
    torch.testing.assert_close(ours, list(theirs), rtol=0, atol=1e-11)
    torch.testing.assert_close(layer.running_var, reference.moving, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 12, "warmup": 3, "correct_after": 9, "momentum": 0.3},
        {"window": 1, "warmup": 0, "correct_after": 0, "momentum": 0.1},
        {"window": 18, "warmup": 0, "correct_after": 1, "momentum": 0.02, "max_ratio": 1.1},
    ],
    ids=str,
)
@pytest.mark.parametrize("rest", [(), (5,), (4, 3), (2, 3, 2)], ids=str)
def test_a_trajectory_is_the_references(rest, options):
    layer, reference = layer_of(**options), Reference(**options)
    for step in range(25):
        assert_step_is_the_references(layer, reference, (1 + (5 * step) % 7, 3, *rest), step)
        remembered = min(step + 1, layer.window - 1)
        for rows, sizes, history in (
            (layer.memory_square, layer.memory_square_images, reference.squares),
            (layer.memory_product, layer.memory_product_images, reference.products),
        ):
            torch.testing.assert_close(list(rows[:remembered]), history[::-1][:remembered], rtol=0, atol=1e-11)
            assert sizes[:remembered].tolist() == reference.sizes[::-1][:remembered]
            assert not rows[remembered:].any()
            assert not sizes[remembered:].any()
    assert layer.running_mean.eq(0).all()


def test_the_default_is_the_reference_past_both_warm_ups():
    layer, reference = layer_of(), Reference()
    for step in range(1010):
        assert_step_is_the_references(layer, reference, (2, 3), step)


def rising(step, size):
    """A batch whose χ² is `step`."""
    return torch.full((size, 3, 2), step**0.5, dtype=torch.float64)


@pytest.mark.parametrize(("size", "batches"), [(1, 32), (2, 16), (8, 4), (5, 6), (16, 2), (17, 1), (32, 1), (40, 1)])
def test_the_window_is_32_images(size, batches):
    layer = MovingAverageBatchNorm(3, eps=1e-30, dtype=torch.float64, warmup=0)
    for step in range(1, 41):
        average = step - (min(step, batches) - 1) / 2
        expected = rising(step, size) / average**0.5
        torch.testing.assert_close(layer(rising(step, size)), expected, rtol=0, atol=1e-12)


def test_uneven_batches_count_by_their_images():
    layer = MovingAverageBatchNorm(3, eps=1e-30, dtype=torch.float64, warmup=0)
    for step, size in enumerate((8, 8, 8, 8), start=1):
        layer(rising(step, size))
    average = (1 * 5 + 8 * (4 + 3 + 2)) / 25  # with the first batch there would be 33 images
    torch.testing.assert_close(layer(rising(5, 1)), rising(5, 1) / average**0.5, rtol=0, atol=1e-12)
    average = (16 * 6 + 1 * 5 + 8 * 4) / 25
    torch.testing.assert_close(layer(rising(6, 16)), rising(6, 16) / average**0.5, rtol=0, atol=1e-12)


def test_the_window_begins_after_100_iterations_and_the_correction_after_1000():
    layer = MovingAverageBatchNorm(3, eps=1e-30, dtype=torch.float64)
    for step in range(1, 1011):
        x, moving = rising(step, 2), layer.running_var.clone().view(1, 3, 1)
        y = layer(x)
        square = step if step <= 100 else step - 7.5 if step <= 1000 else moving
        torch.testing.assert_close(y, x / square**0.5, rtol=0, atol=1e-12)


def test_the_correction_does_not_begin_within_the_warm_up():
    layer = MovingAverageBatchNorm(3, eps=1e-30, dtype=torch.float64, warmup=5, correct_after=2)
    for step in range(1, 6):
        torch.testing.assert_close(layer(rising(step, 2)), torch.ones(2, 3, 2).double(), rtol=0, atol=1e-12)


def test_the_moving_average_is_that_of_the_windowed_moment():
    layer = MovingAverageBatchNorm(3, dtype=torch.float64, window=4, warmup=0, momentum=0.25)
    for step in (1, 2, 3):
        layer(rising(step, 2))
    windowed = (1.0, 1.5, 2.5)
    weights = (0.75**2, 0.75, 1.0)
    expected = sum(w * value for w, value in zip(weights, windowed, strict=True)) / sum(weights)
    torch.testing.assert_close(layer.running_var, torch.full((3,), expected, dtype=torch.float64), rtol=0, atol=1e-12)


def centred_batch(shape, seed):
    x = leaf(shape, seed=seed).detach()
    return (x - x.mean([0, *range(2, x.dim())], keepdim=True)).requires_grad_()


def run(module, x, probe):
    x = x.detach().clone().requires_grad_()
    y = module(x)
    return y, torch.autograd.grad((y * probe).sum(), [x, *module.parameters()])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_on_channels_of_mean_zero_one_iteration_is_batch_norm_up_to_the_mean_of_the_gradient(shape):
    ours = layer_of(window=1, max_ratio=1.0, momentum=1.0)
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
    default, single = layer_of(warmup=2, correct_after=3), layer_of(window=1, max_ratio=1.0)
    x, probe = centred_batch((6, 3, 4), seed=0), randn(6, 3, 4, seed=1)
    for _ in range(20):
        mine, theirs = run(default, x, probe), run(single, x, probe)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


def test_where_the_correction_is_not_clipped_training_computes_what_eval_would():
    layer = layer_of(window=12, warmup=0, correct_after=1)
    layer(leaf((4, 3, 2), seed=0))
    for seed in range(1, 6):
        x = leaf((4, 3, 2), seed=seed)
        in_eval = layer.eval()(x)
        torch.testing.assert_close(layer.train()(x), in_eval, rtol=0, atol=1e-11)


def test_the_correction_stays_within_its_limits():
    layer = layer_of(window=1, warmup=0, correct_after=0, max_ratio=2.0)
    for seed in range(5):
        layer(leaf((4, 3, 2), seed=seed))
    x = 1000 * leaf((4, 3, 2), seed=9).detach()
    plain = x / (x.square().mean((0, 2), keepdim=True) + EPS).sqrt()
    expected = 2.0 * plain * layer.weight.view(1, -1, 1) + layer.bias.view(1, -1, 1)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("steps", "rows", "counter"), [(0, 0, 0), (1, 1, 1), (4, 3, 4), (6, 3, 6), (30, 3, 6)])
@pytest.mark.parametrize("limits", [{"warmup": 6, "correct_after": 2}, {"warmup": 2, "correct_after": 6}], ids=str)
def test_counters_stop_when_there_is_nothing_left_to_count(limits, steps, rows, counter):
    layer = layer_of(window=4, **limits)
    for seed in range(steps):
        layer(leaf((4, 3), seed=seed)).sum().backward()
    assert int(layer.memory_steps) == counter
    assert int(layer.num_batches_tracked) == steps
    for name in ("memory_square", "memory_product"):
        assert int((layer.get_buffer(name) != 0).all(1).sum()) == rows
        assert layer.get_buffer(f"{name}_images").tolist() == [4] * rows + [0] * (3 - rows)


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
    layer = MovingAverageBatchNorm.replacing(plain, window=12, warmup=2)
    assert layer.running_mean.eq(0).all()
    torch.testing.assert_close([plain.running_mean, layer.running_var], [mean, var], rtol=0, atol=0)
    x = leaf((4, 3), seed=9).detach()
    square = x.square().mean(0)
    torch.testing.assert_close(layer(x), x / (square + EPS).sqrt(), rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.running_var, 0.98 * var + 0.02 * square, rtol=0, atol=1e-4)


def test_eval_writes_nothing():
    layer = layer_of(window=12, warmup=1, correct_after=2)
    for seed in range(4):
        layer(leaf((4, 3), seed=seed)).sum().backward()
    before = state(layer.eval())
    layer(leaf((4, 3), seed=9)).sum().backward()
    assert not changed(layer, before)


def test_without_recording_neither_direction_is_recorded_and_outside_only_the_backward_is():
    layer = layer_of(window=12, warmup=1, correct_after=2)
    for seed in range(4):
        layer(leaf((4, 3), seed=seed)).sum().backward()
    before = state(layer)
    with memnorm.recording(layer, False):
        layer(leaf((4, 3), seed=7)).sum().backward()
        assert not changed(layer, before)
        y = layer(leaf((4, 3), seed=8))
    y.sum().backward()
    assert changed(layer, before) == {"memory_product", "memory_product_images"}


def test_double_forward_records_every_statistic_once_a_step():
    net = converted(small_net(dtype=torch.float64), ENTRY, window=12, warmup=1, correct_after=2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with memnorm.double_forward(net, optimizer):
        for step in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images(4, seed=step, dtype=torch.float64)), labels(4, seed=step)).backward()
            optimizer.step()
            assert int(net[1].num_batches_tracked) == step + 1
            assert int(net[1].memory_product_images.count_nonzero()) == min(step + 1, 11)


def test_buffers_are_written_in_place():
    layer = layer_of(window=12, warmup=1, correct_after=2)
    pointers = {name: buffer.data_ptr() for name, buffer in layer.named_buffers()}
    for seed in range(5):
        layer(leaf((4, 3), seed=seed)).sum().backward()
    assert pointers == {name: buffer.data_ptr() for name, buffer in layer.named_buffers()}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_forward_has_the_same_gradients_and_state(reentrant):
    plain = layer_of(window=12, warmup=1, correct_after=2)
    other = deepcopy(plain)
    for seed in range(5):
        x, probe = leaf((4, 3, 2), seed=seed), randn(4, 3, 2, seed=70 + seed)
        point = x.detach().clone().requires_grad_()
        (plain(x) * probe).sum().backward()
        (checkpoint(other, point, use_reentrant=reentrant) * probe).sum().backward()
        torch.testing.assert_close(point.grad, x.grad, rtol=0, atol=1e-12)
        assert_states_equal(state(other), state(plain), atol=1e-12)


def test_copies_and_checkpoints_go_on_alike():
    layer = layer_of(window=12, warmup=1, correct_after=2)
    for seed in range(4):
        layer(leaf((4, 3), seed=seed)).sum().backward()
    loaded = MovingAverageBatchNorm(3, dtype=torch.float64, window=12, warmup=1, correct_after=2)
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


@pytest.mark.parametrize(("steps", "resumed"), [(40, 40), (100, 1000)])
def test_a_checkpoint_whose_window_counted_batches_loads_without_its_window(steps, resumed):
    layer = layer_of()
    layer(leaf((4, 3), seed=0)).sum().backward()
    old = {name: value for name, value in layer.state_dict().items() if not name.startswith("memory")}
    old |= {name: torch.ones(15, 3, dtype=torch.float64) for name in ("memory_square", "memory_product")}
    old |= {"memory_steps": torch.tensor(steps), "memory_backwards": torch.tensor(15)}
    loaded = layer_of()
    loaded(leaf((4, 3), seed=1)).sum().backward()
    loaded.load_state_dict(old)
    assert int(loaded.memory_steps) == resumed
    assert not any(loaded.get_buffer(name).any() for name in loaded.MEMORY if name != "memory_steps")
    torch.testing.assert_close(loaded.running_var, layer.running_var, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")  # of torch about itself
def test_compiled_with_batches_and_images_of_any_size_it_trains_as_eagerly():
    eager = layer_of(window=12, warmup=1, correct_after=2)
    other = deepcopy(eager)
    compiled = torch.compile(other, backend="aot_eager", dynamic=True, fullgraph=True)
    for seed, shape in enumerate([(4, 3, 5), (2, 3, 5), (7, 3, 4), (13, 3, 6), (3, 3, 6)]):
        x = leaf(shape, seed=seed)
        point = x.detach().clone().requires_grad_()
        eager(x).square().sum().backward()
        compiled(point).square().sum().backward()
        torch.testing.assert_close(point.grad, x.grad, rtol=0, atol=1e-12)
        assert_states_equal(state(other), state(eager), atol=1e-12)


def test_a_batch_or_gradient_that_is_not_finite_is_not_recorded():
    layer = layer_of(window=12, warmup=0, correct_after=1)
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
    layer = layer_of(window=12, warmup=0, correct_after=1)
    for size in (4, 1, 7, 1, 2):
        x = leaf((size, 3), seed=size)
        layer(x).sum().backward()
        assert x.grad.isfinite().all()


def test_momentum_none_averages_all_batches_each_normalised_on_its_own():
    layer = layer_of(window=12, warmup=0, correct_after=1)
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
    layer = layer_of(window=12, warmup=1, correct_after=2)
    fresh = state(layer)
    for seed in range(4):
        layer(leaf((4, 3), seed=seed)).sum().backward()
    layer.reset_running_stats()
    assert not changed(layer, fresh)


def test_autocast_and_channels_last_agree_with_plain():
    layer = MovingAverageBatchNorm(3, window=12, warmup=0, correct_after=1)
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
    layer = MovingAverageBatchNorm(3, window=12).half()
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
        ({"correct_after": 0.5}, "correct_after must be a whole number, at least 0"),
        ({"max_ratio": 0.5}, "max_ratio must be a number, at least 1; got 0.5"),
        ({"momentum": 0}, "momentum, the weight of the new batch, must be positive"),
        ({"batch_size": 4}, "unknown option batch_size; its options are window, max_ratio, warmup, correct_after"),
    ],
)
def test_wrong_options_are_refused_in_words(options, message):
    with pytest.raises(OptionError, match=message):
        MovingAverageBatchNorm(3, **options)


@pytest.mark.parametrize("size", [2, 16])
def test_the_loss_falls(size):
    net = converted(small_net(), ENTRY, window=4 * size, warmup=5, correct_after=10)
    first, last = losses(net, size)
    assert last < first
