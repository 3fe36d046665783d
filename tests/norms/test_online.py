"""Online normalization: its forward and backward equations over whole trajectories, and when it writes its state."""

import pickle
from copy import deepcopy

import pytest
import torch
from helpers.common import images, labels, leaf, randn, randomize, small_net
from helpers.window import assert_states_equal, changed, converted, state
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memnorm
from memnorm.errors import OptionError
from memnorm.functional import batch_moments
from memnorm.norms.online import ENTRY, OnlineNorm

EPS = 1e-5


def layer_of(channels=3, **options):
    layer = OnlineNorm(channels, dtype=torch.float64, **options)
    randomize(layer, seed=5)
    return layer


class Reference:
    """One sample and one channel at a time, in the order of the paper's equations."""

    def __init__(self, channels, *, momentum=0.001, backward_decay=0.99, compensation="layer_scaling", clamp=5.0):
        self.forward_decay, self.backward_decay = 1 - momentum, backward_decay
        self.compensation, self.limit = compensation, clamp
        self.mu, self.var = torch.zeros(channels).double(), torch.ones(channels).double()
        self.u, self.v = torch.zeros(channels).double(), torch.zeros(channels).double()

    def step(self, x, gamma, beta, grad):
        outputs, kept = zip(*[self.forward(sample, gamma, beta) for sample in x], strict=True)
        grads = [self.backward(g, gamma, saved) for g, saved in zip(grad, kept, strict=True)]
        grad_x, grad_gamma, grad_beta = zip(*grads, strict=True)
        return torch.stack(outputs), torch.stack(grad_x), sum(grad_gamma), sum(grad_beta)

    def forward(self, sample, gamma, beta):
        a = self.forward_decay
        y, scales = torch.empty_like(sample), torch.empty_like(self.mu)
        for c, values in enumerate(sample):
            scales[c] = (self.var[c] + EPS).sqrt()
            y[c] = (values - self.mu[c]) / scales[c]
            mean = values.mean()
            spread = (values - mean).square().mean()
            self.var[c] = a * self.var[c] + (1 - a) * spread + a * (1 - a) * (mean - self.mu[c]) ** 2
            self.mu[c] = a * self.mu[c] + (1 - a) * mean
        affine = torch.stack([gamma[c] * y[c] + beta[c] for c in range(len(y))])
        root = (affine.square().mean() + EPS).sqrt()
        z = {"layer_scaling": affine / root, "clamp": affine.clamp(-self.limit, self.limit), None: affine}
        return z[self.compensation], (y, scales, affine, root)

    def backward(self, grad, gamma, saved):
        y, scales, affine, root = saved
        b = self.backward_decay
        if self.compensation == "layer_scaling":
            z = affine / root
            grad = (grad - z * (grad * z).mean()) / root
        elif self.compensation == "clamp":
            grad = grad * (affine.abs() <= self.limit)
        grad_x = torch.empty_like(y)
        for c in range(len(y)):
            arrived = grad[c] * gamma[c]
            orthogonal = arrived - (1 - b) * self.v[c] * y[c]
            self.v[c] += (orthogonal * y[c]).mean()
            grad_x[c] = orthogonal / scales[c] - (1 - b) * self.u[c]
            self.u[c] += grad_x[c].mean()
        per_channel = [(grad[c] * y[c]).sum() for c in range(len(y))], [grad[c].sum() for c in range(len(y))]
        return grad_x, torch.stack(per_channel[0]), torch.stack(per_channel[1])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.1, "backward_decay": 0.8},
        {"momentum": 0.05, "compensation": "clamp", "clamp": 1.5},
        {"momentum": 0.2, "backward_decay": 0.9, "compensation": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("rest", [(), (5,), (3, 2), (2, 1, 2)], ids=str)
def test_a_trajectory_equals_the_papers_equations(rest, options):
    layer, reference = layer_of(**options), Reference(3, **options)
    for step in range(20):
        shape = (1 + (5 * step) % 4, 3, *rest)
        x, grad = leaf(shape, seed=step), randn(*shape, seed=1000 + step)
        y = layer(x)
        ours = [y, *torch.autograd.grad(y, [x, layer.weight, layer.bias], grad)]
        theirs = reference.step(x.detach(), layer.weight.detach(), layer.bias.detach(), grad)
        torch.testing.assert_close(ours, list(theirs), rtol=0, atol=1e-10)
        mine = [layer.running_mean, layer.running_var, layer.control_mean, layer.control_scale]
        torch.testing.assert_close(mine, [reference.mu, reference.var, reference.u, reference.v], rtol=0, atol=1e-10)


def test_how_a_stream_is_cut_into_batches_changes_nothing():
    x, probe = leaf((12, 3, 4), seed=0).detach(), randn(12, 3, 4, seed=1)
    results = []
    for sizes in ([12], [1] * 12, [5, 1, 6]):
        layer = layer_of(momentum=0.1)
        outputs, grads = [], []
        for part, part_probe in zip(x.split(sizes), probe.split(sizes), strict=True):
            point = part.clone().requires_grad_()
            y = layer(point)
            (y * part_probe).sum().backward()
            outputs.append(y)
            grads.append(point.grad)
        states = [layer.running_mean, layer.running_var, layer.control_mean, layer.control_scale]
        results.append([torch.cat(outputs), torch.cat(grads), *states, layer.weight.grad])
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=1e-11)


def test_the_statistics_are_those_of_all_values_weighted_by_age():
    layer = layer_of(momentum=0.05)
    layer.running_var.zero_()
    x = leaf((80, 3, 4), seed=0).detach()
    layer(x)
    weights = 0.05 * 0.95 ** torch.arange(79, -1, -1, dtype=torch.float64)
    mean = torch.einsum("n,ncp->c", weights / 4, x)
    square = torch.einsum("n,ncp->c", weights / 4, x.square())
    torch.testing.assert_close(layer.running_mean, mean, rtol=0, atol=1e-11)
    torch.testing.assert_close(layer.running_var, square - mean.square(), rtol=0, atol=1e-11)


def mean_gradients(backward_decay):
    """The mean of the gradient, and of its product with y, at the end of a long stream."""
    layer = layer_of(momentum=0.01, backward_decay=backward_decay, compensation=None)
    sums = []
    for step in range(60):
        x = leaf((8, 3, 2), seed=step)
        y = layer(x)
        y.backward(randn(8, 3, 2, seed=500 + step) + 1 + x.detach())
        hat = (y.detach() - layer.bias.detach().view(1, -1, 1)) / layer.weight.detach().view(1, -1, 1)
        sums.append(torch.stack([x.grad.mean((0, 2)), (x.grad * hat).mean((0, 2))]))
    return torch.stack(sums[30:]).mean(0).abs()


def test_on_a_long_stream_the_gradient_becomes_orthogonal_as_batch_norms_is():
    assert (mean_gradients(0.95) < 0.1 * mean_gradients(1.0)).all()


def test_layer_scaling_gives_every_sample_a_mean_square_of_one():
    y = layer_of()(leaf((4, 3, 5), seed=0))
    torch.testing.assert_close(y.square().mean((1, 2)), torch.ones(4).double(), rtol=0, atol=1e-4)


def test_clamping_limits_the_output():
    y = layer_of(compensation="clamp", clamp=0.5)(leaf((4, 3, 5), seed=0))
    assert y.abs().max() == 0.5


def test_a_new_layer_has_mean_zero_variance_one_and_no_error():
    layer = layer_of()
    assert layer.running_mean.eq(0).all()
    assert layer.running_var.eq(1).all()
    assert layer.control_mean.eq(0).all()
    assert layer.control_scale.eq(0).all()


def test_eval_is_batch_norm_with_the_compensation_and_writes_nothing():
    layer = layer_of(momentum=0.1)
    for seed in range(4):
        layer(leaf((4, 3, 2), seed=seed)).sum().backward()
    before = state(layer.eval())
    x = leaf((4, 3, 2), seed=9)
    y = layer(x)
    y.pow(3).sum().backward()
    plain = F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias, False, 0.0, EPS)
    expected = plain / (plain.square().mean((1, 2), keepdim=True) + EPS).sqrt()
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    assert not changed(layer, before)


def test_without_recording_neither_direction_is_recorded_and_outside_only_the_backward_is():
    layer = layer_of(momentum=0.1)
    layer(leaf((4, 3), seed=0)).pow(3).sum().backward()
    before, twin = state(layer), deepcopy(layer)
    with memnorm.recording(layer, False):
        x = leaf((4, 3), seed=7)
        y = layer(x)
        torch.testing.assert_close(y, twin(x), rtol=0, atol=0)
        y.pow(3).sum().backward()
        assert not changed(layer, before)
        y = layer(leaf((4, 3), seed=8))
    y.pow(3).sum().backward()
    assert changed(layer, before) == {"control_mean", "control_scale"}


def test_double_forward_records_every_statistic_once_a_step():
    net = converted(small_net(dtype=torch.float64), ENTRY)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with memnorm.double_forward(net, optimizer):
        for step in range(3):
            before = state(net)
            optimizer.zero_grad()
            x = images(4, seed=step, dtype=torch.float64)
            F.cross_entropy(net(x), labels(4, seed=step)).backward()
            controls = changed(net, before)
            assert controls == {f"{index}.control_{name}" for index in (1, 4) for name in ("mean", "scale")}
            optimizer.step()
            assert int(net[1].num_batches_tracked) == step + 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_forward_has_the_same_gradients_and_state(reentrant):
    plain = layer_of(momentum=0.1)
    other = deepcopy(plain)
    for seed in range(5):
        x, probe = leaf((4, 3, 2), seed=seed), randn(4, 3, 2, seed=70 + seed)
        point = x.detach().clone().requires_grad_()
        (plain(x) * probe).sum().backward()
        (checkpoint(other, point, use_reentrant=reentrant) * probe).sum().backward()
        torch.testing.assert_close(point.grad, x.grad, rtol=0, atol=1e-12)
        assert_states_equal(state(other), state(plain), atol=1e-12)


def test_the_moments_by_which_a_recomputed_batch_is_recognised_are_the_batchs():
    x = leaf((4, 3, 2), seed=0).detach()
    layer = layer_of()
    torch.testing.assert_close(
        tuple(layer._normalize(x, layer._read())[1]), tuple(batch_moments(x)), rtol=0, atol=1e-12
    )


def test_copies_and_loaded_checkpoints_train_alike():
    layer = layer_of(momentum=0.1)
    for seed in range(4):
        layer(leaf((4, 3), seed=seed)).pow(3).sum().backward()
    loaded = OnlineNorm(3, momentum=0.1, dtype=torch.float64)
    loaded.load_state_dict(layer.state_dict())
    copies = [deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded]
    for seed in range(4, 7):
        x = leaf((4, 3), seed=seed)
        y = layer(x)
        y.pow(3).sum().backward()
        for copy in copies:
            again = copy(x.detach().requires_grad_())
            again.pow(3).sum().backward()
            torch.testing.assert_close(again, y, rtol=0, atol=0)
    for copy in copies:
        assert_states_equal(state(copy), state(layer))


def test_what_is_not_finite_is_not_recorded():
    layer = layer_of()
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


def test_momentum_none_averages_all_batches_each_normalised_on_its_own():
    layer = layer_of(compensation=None)
    layer.momentum = None
    layer.reset_running_stats()
    plain = nn.BatchNorm1d(3, momentum=None, dtype=torch.float64)
    plain.load_state_dict({name: layer.state_dict()[name] for name in plain.state_dict()})
    for seed in range(4):
        x = leaf((4, 3), seed=seed)
        torch.testing.assert_close(layer(x), plain(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.running_mean, plain.running_mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.running_var, plain.running_var, rtol=0, atol=1e-12)


def test_resetting_forgets_everything():
    layer = layer_of(momentum=0.1)
    fresh = state(layer)
    layer(leaf((4, 3), seed=0)).pow(3).sum().backward()
    layer.reset_running_stats()
    assert not changed(layer, fresh)


def test_without_affine_parameters_it_normalises_alone():
    layer = OnlineNorm(3, affine=False, compensation=None, dtype=torch.float64)
    x = leaf((1, 3, 4), seed=0)
    torch.testing.assert_close(layer(x), x / (1 + EPS) ** 0.5, rtol=0, atol=1e-12)


def test_autocast_and_channels_last_agree_with_plain():
    layer = OnlineNorm(3, momentum=0.1)
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
            out.float().pow(3).sum().backward()
        torch.testing.assert_close(z, y, rtol=0, atol=1e-5)
        torch.testing.assert_close(last.grad, x.grad, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(w.float(), y, rtol=0.02, atol=0.02)
        torch.testing.assert_close(half.grad.float(), x.grad, rtol=0.1, atol=0.2)


def test_half_precision_leaves_what_is_remembered_wide():
    layer = OnlineNorm(3).half()
    y = layer(leaf((4, 3, 5), seed=0, dtype=torch.float16))
    y.sum().backward()
    assert y.dtype == torch.float16
    assert layer.control_mean.dtype == torch.float32
    assert layer.double().control_mean.dtype == torch.float64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backward_decay": 1.5}, "backward_decay must lie in .0, 1.; got 1.5"),
        ({"compensation": "ls"}, "compensation must be 'layer_scaling', 'clamp' or None; got 'ls'"),
        ({"clamp": 0}, "clamp must be a positive number; got 0"),
        ({"alpha_fwd": 0.9}, "unknown option alpha_fwd; its options are backward_decay, compensation, clamp"),
    ],
)
def test_wrong_options_are_errors(options, message):
    with pytest.raises(OptionError, match=message):
        OnlineNorm(3, **options)


def test_conversion_keeps_parameters_statistics_and_mode_and_plain_checkpoints_load():
    plain = small_net()
    plain(images(4, seed=0))
    net = converted(deepcopy(plain.eval()), ENTRY, compensation=None)
    assert not net[1].training
    x = images(4, seed=1)
    torch.testing.assert_close(net(x), plain(x), rtol=0, atol=0)
    assert net[1].evaluates_as_batchnorm
    assert not OnlineNorm(3).evaluates_as_batchnorm
    again = converted(small_net(seed=3), ENTRY, compensation=None)
    again(x).sum().backward()
    again.load_state_dict(plain.state_dict())
    torch.testing.assert_close(again.eval()(x), plain(x), rtol=0, atol=0)
    assert again[1].control_mean.eq(0).all()
