"""Cross-iteration batch norm: its equations over whole trajectories, and how it finds the layer before it."""

from copy import deepcopy

import pytest
import torch
from helpers.common import (
    LAYERS,
    SHAPES,
    assert_same_output_and_gradients,
    images,
    leaf,
    randn,
    randomize,
)
from torch import nn

import memnorm
from memnorm.errors import InputError, OptionError
from memnorm.norms.cbn import NOTE, CrossIterationBatchNorm, note_source, take_source, unwatch_sources, watch_sources

EPS = 1e-5
FEEDERS = {
    "linear": (lambda: nn.Linear(5, 4), (6, 5)),
    "linear without bias": (lambda: nn.Linear(5, 4, bias=False), (6, 5)),
    "1-d": (lambda: nn.Conv1d(3, 4, 3, padding=1), (5, 3, 6)),
    "2-d strided, no bias": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False), (4, 3, 7, 6)),
    "2-d grouped, dilated": (lambda: nn.Conv2d(4, 4, 2, dilation=2, groups=2), (4, 4, 6, 5)),
    "2-d depthwise, same": (lambda: nn.Conv2d(4, 4, (2, 3), padding="same", groups=4), (4, 4, 5, 5)),
    "2-d reflected": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), (4, 3, 5, 5)),
    "2-d valid": (lambda: nn.Conv2d(3, 4, 3, padding="valid"), (4, 3, 5, 5)),
    "3-d": (lambda: nn.Conv3d(2, 4, 2), (3, 2, 3, 3, 3)),
}


def fed(feeder="2-d strided, no bias", **options):
    """A layer followed by the norm, in float64, and the shape of its data."""
    build, shape = FEEDERS[feeder]
    torch.manual_seed(3)
    net = nn.Sequential(build(), CrossIterationBatchNorm(4, **options)).double()
    randomize(net[1], seed=5)
    watch_sources(net)
    return net, shape


def step(net, x, seed, lr=0.05):
    """One step of a training that moves the weights; the output and all gradients."""
    point = x.detach().clone().requires_grad_()
    y = net(point)
    probe = randn(*y.shape, seed=seed)
    grads = torch.autograd.grad((y * probe).sum(), [point, *net.parameters()])
    with torch.no_grad():
        for parameter, grad in zip(net.parameters(), grads[1:], strict=True):
            parameter.sub_(lr * grad)
    return [y, *grads]


def column(vector, x):
    return vector.view(1, -1, *[1] * (x.dim() - 2))


def read_memory(net, x):
    """What a training forward reads, without the forward."""
    out = net[0](x)
    net[1]._feed = take_source(out), out.detach()
    try:
        return net[1]._read()
    finally:
        net[1]._feed = None


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


def test_a_mean_far_from_zero_keeps_the_precision():
    net = nn.Sequential(nn.Conv2d(2, 4, 1), CrossIterationBatchNorm(4, window=4))
    watch_sources(net)
    exact = deepcopy(net).double()
    with torch.no_grad():
        for model in (net, exact):
            model[0].bias.add_(1000)
    for seed in range(6):
        x = randn(8, 2, 4, 4, seed=seed)
        torch.testing.assert_close(net(x.float()).double(), exact(x), rtol=0, atol=2e-2)


@pytest.mark.parametrize(
    ("options", "burn_in"),
    [({}, 0), ({"total_steps": 9}, 6), ({"total_steps": 9, "burn_in": 2}, 2), ({"burn_in": 0, "total_steps": 9}, 0)],
)
def test_the_first_two_thirds_of_a_training_of_known_length_are_batch_norm(options, burn_in):
    net, shape = fed(**options)
    plain, _ = fed(window=1)
    for seed in range(8):
        x = leaf(shape, seed=seed) + 0.1 * seed
        same = torch.allclose(net(x), plain(x), rtol=0, atol=1e-9)
        assert same == (seed < max(burn_in, 1)), seed


def test_one_value_per_channel_trains_once_there_is_a_memory():
    net, shape = fed("linear", window=4)
    with pytest.raises(InputError, match="no earlier batch is remembered"):
        net(leaf((1, 5), seed=0))
    net(leaf(shape, seed=1))
    step(net, leaf((1, 5), seed=2), 2)
    assert int(net[1].memory_filled) == 2


def test_a_norm_without_a_preceding_layer_is_batch_norm():
    ours = CrossIterationBatchNorm(3, window=4, dtype=torch.float64)
    torchs = nn.BatchNorm1d(3, dtype=torch.float64)
    for seed in range(4):
        assert_same_output_and_gradients(ours, torchs, leaf((8, 3), seed=seed), atol=1e-12)
    assert int(ours.memory_filled) == 0


@pytest.mark.parametrize(
    "between", [nn.ReLU(inplace=True), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.5, inplace=True)], ids=str
)
def test_an_operation_between_layer_and_norm_disables_the_memory(between):
    net, shape = fed(window=4)
    net.insert(1, between)
    for seed in range(3):
        step(net, leaf(shape, seed=seed), seed)
    assert int(net[2].memory_filled) == 0


def test_an_input_changed_in_place_disables_the_memory():
    net, shape = fed(window=4)
    x = leaf(shape, seed=0).detach()
    with torch.no_grad():
        out = net[0](x)
        x.zero_()
        net[1](out)
    assert int(net[1].memory_filled) == 0


def test_a_norm_after_two_layers_remembers_only_the_first():
    net, shape = fed(window=4)
    other = deepcopy(net[0])
    x = leaf(shape, seed=0)
    net(x)
    y = net[1](other(x))
    plain = nn.BatchNorm2d(4, dtype=torch.float64)
    plain.load_state_dict({name: net[1].state_dict()[name] for name in plain.state_dict()})
    torch.testing.assert_close(y, plain(other(x)), rtol=0, atol=1e-12)
    assert int(net[1].memory_filled) == 1


def test_a_copy_after_a_layer_of_another_shape_has_an_empty_memory():
    net, shape = fed(window=4)
    for seed in range(2):
        step(net, leaf(shape, seed=seed), seed)
    other, shape = fed("3-d")
    other[1] = deepcopy(net[1])
    plain = nn.BatchNorm3d(4, dtype=torch.float64)
    plain.load_state_dict({name: other[1].state_dict()[name] for name in plain.state_dict()})
    x = leaf(shape, seed=9)
    torch.testing.assert_close(other(x), plain(other[0](x)), rtol=0, atol=1e-12)
    assert (int(other[1].memory_filled), int(other[1].memory_next)) == (1, 1)


def test_a_source_is_attached_in_training_only_and_removed_by_the_norm():
    net, shape = fed(window=4)
    x = leaf(shape, seed=0)
    out = net[0](x)
    assert hasattr(out, NOTE)
    net[1](out)
    assert not hasattr(out, NOTE)
    assert not hasattr(net[0].eval()(x), NOTE)
    assert not hasattr(net[0].train()(x[0]), NOTE)
    with torch.inference_mode():
        assert not hasattr(net[0](x), NOTE)
    assert hasattr(net[0](input=x), NOTE)


def test_a_checkpoint_from_before_the_first_batch_empties_the_memory():
    net, shape = fed(window=3)
    fresh = deepcopy(net.state_dict())
    step(net, leaf(shape, seed=0), 0)
    net.load_state_dict(fresh)
    torch.testing.assert_close(net(leaf(shape, seed=1)), fed(window=3)[0](leaf(shape, seed=1)), rtol=0, atol=0)


def test_other_hooks_stay_when_those_of_cbn_are_removed():
    net, _ = fed()
    seen = []
    net[0].register_forward_hook(lambda *_: seen.append(1))
    unwatch_sources(net)
    net[0](leaf(FEEDERS["2-d strided, no bias"][1], seed=0))
    assert seen == [1]
    assert note_source not in net[0]._forward_hooks.values()


def test_transposed_convolutions_are_not_watched():
    net = nn.Sequential(nn.ConvTranspose2d(3, 4, 2), nn.BatchNorm2d(4))
    memnorm.convert(net, "cbn")(images(2, seed=0))
    assert not net[0]._forward_hooks
    assert int(net[1].memory_filled) == 0


def test_under_autocast_the_memory_is_written_and_read_without_loss():
    net, shape = fed("linear", window=3)
    net.float()
    batches = [leaf(shape, seed=seed, dtype=torch.float32).detach() for seed in range(2)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for batch in batches:
            out = net[0](batch)
            net[1](out)
        still = read_memory(net, batches[0])
        centred = out.float() - out.float().mean(0)
        mean, var = net[1].memory_mean, net[1].memory_var
        torch.testing.assert_close(still.mean, mean.mean(0), rtol=0, atol=1e-6)
        torch.testing.assert_close(still.var, var.mean(0) + mean.var(0, correction=0), rtol=0, atol=1e-6)
        with torch.no_grad():
            net[0].weight.mul_(1.001)
        moved = read_memory(net, batches[0])
    slope = centred.double().t() @ batches[1].double() * 2 / shape[0]
    torch.testing.assert_close(net[1].memory_slope_var[1].double(), slope, rtol=0, atol=1e-4)
    torch.testing.assert_close(moved, read_memory(net, batches[0]), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be a whole number, at least 1; got 0"),
        ({"burn_in": 1.5}, "burn_in must be a whole number, at least 0; got 1.5"),
        ({"total_steps": 0}, "total_steps must be the number of steps of the training"),
        ({"rho": 1}, "unknown option rho; its options are window, burn_in, total_steps"),
    ],
)
def test_wrong_options_are_errors(options, message):
    with pytest.raises(OptionError, match=message):
        CrossIterationBatchNorm(3, **options)
