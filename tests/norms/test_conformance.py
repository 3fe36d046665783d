"""Known mistakes of public implementations, checked for every norm that could make them."""

import pytest
import torch
from helpers.common import images, randn
from helpers.norms import EACH, chain, each_norm, step
from torch import nn

import memnorm
from memnorm import norms
from memnorm.layers import Recording

STATISTICAL = [name for name in EACH if norms.get(name).records]
each_statistical = pytest.mark.parametrize("name", STATISTICAL)

COUNTERS = ("num_batches_tracked", "num_updates")
# Norms that keep torch's statistics, with Bessel's factor. The others keep the biased variance, MABN the second moment.
UNBIASED = ("bn", "cbn", "ghost", "moving_bn")


def layer_of(name, *, eps=1e-5, **options):
    """One layer after an identity convolution, in float64; with momentum 0.5 if it has a momentum."""
    net = nn.Sequential(nn.Conv2d(3, 3, 1, bias=False), nn.BatchNorm2d(3, eps=eps)).double()
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(3).view(3, 3, 1, 1))
    own = {"mbn": {}, "two_way": {"center": None}, "momentum_bn": {"momentum": 0.5, "ideal_batch_size": 2}}.get(
        name, {"momentum": 0.5}
    )
    return memnorm.convert(net, name, **{**own, **options})


def recorder(net):
    (layer,) = [one for one in net.modules() if isinstance(one, Recording)]
    return layer


def converged(name, x, **options):
    """The layer after so many forwards of one batch that its statistics are constant, and its input. All images of the
    batch must be equal, because the statistics of online norm change with each image.
    """
    net = layer_of(name, **options)
    entered = entering(net)
    for _ in range(100):
        net(x)
    return recorder(net), entered[-1]


def entering(net):
    """A list that collects the inputs of the norm from now on."""
    found = []
    recorder(net).register_forward_pre_hook(lambda _layer, args: found.append(args[0].detach()))
    return found


def kept_variance(name, x):
    if name == "mabn":
        return x.square().mean((0, 2, 3))
    return x.var((0, 2, 3), correction=int(name in UNBIASED))


@each_norm
def test_warm_up_counters_stop_growing(name):
    """The counters of batches and updates do not stop."""
    options = {"mabn": {"window": 3, "warmup": 2, "correct_after": 4}, "cbn": {"window": 3, "burn_in": 4}}.get(name, {})
    net = memnorm.convert(chain(), name, **options)
    for _ in range(8):
        step(net, 4)

    def counters():
        return {
            key: int(buffer)
            for key, buffer in net.named_buffers()
            if not buffer.is_floating_point() and buffer.dim() == 0 and not key.endswith(COUNTERS)
        }

    before = counters()
    for _ in range(2):  # CBN has two rows to write to
        step(net, 4)
    assert counters() == before


@pytest.mark.parametrize(("name", "ask"), [("brn", "limits"), ("momentum_bn", "past_share")])
def test_a_schedule_keeps_its_last_value(name, ask):
    layer = recorder(layer_of(name, total_steps=10))
    arguments = () if ask == "limits" else (2,)
    at_the_end = torch.as_tensor(getattr(layer, ask)(*arguments, torch.tensor(10)))
    long_after = torch.as_tensor(getattr(layer, ask)(*arguments, torch.tensor(10_000)))
    assert torch.equal(at_the_end, long_after)


@each_statistical
def test_statistics_begin_with_mean_zero_and_deviation_one(name):
    layer = recorder(layer_of(name))
    assert torch.equal(layer.running_mean, torch.zeros(3, dtype=torch.float64))
    assert torch.equal(layer.running_var, torch.ones(3, dtype=torch.float64))


@each_norm
def test_eval_changes_no_statistics(name):
    net = memnorm.convert(chain(), name)
    step(net, 4)
    net.eval()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    net(images(4, seed=5) + 3)
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key]), key


@each_statistical
def test_epsilon_does_not_leak_into_the_running_variance(name):
    layer, entered = converged(name, 2 * randn(1, 3, 5, 5, seed=0).expand(4, -1, -1, -1) + 1, eps=0.5)
    layer.eval()(entered)
    torch.testing.assert_close(layer.running_var, kept_variance(name, entered), rtol=1e-9, atol=0)


@each_statistical
def test_bessels_factor_counts_images_and_pixels(name):
    """n = N·H·W = 8."""
    layer, entered = converged(name, randn(1, 3, 2, 2, seed=0).expand(2, -1, -1, -1))
    torch.testing.assert_close(layer.running_var, kept_variance(name, entered), rtol=1e-9, atol=0)


@each_norm
def test_no_batch_size_is_fixed(name):
    net = memnorm.convert(chain(), name)
    for batch in (4, 2, 7, 1, 3):
        step(net, batch)
    net.eval()
    with torch.no_grad():
        whole = net(images(5, seed=0))
        parts = torch.cat([net(images(5, seed=0)[:2]), net(images(5, seed=0)[2:])])
    torch.testing.assert_close(whole, parts, rtol=1e-5, atol=1e-5)


@each_norm
def test_state_dict_holds_all_that_training_changed(name):
    """A network that loads the state trains and evaluates the same."""
    net = memnorm.convert(chain(), name)
    for seed in range(5):
        step(net, 4, seed=seed)
    twin = memnorm.convert(chain(seed=1), name)
    twin.load_state_dict(net.state_dict())
    for seed in range(5, 8):
        for model in (net, twin):
            step(model, 4, seed=seed)
    for key, value in twin.state_dict().items():
        assert torch.equal(value, net.state_dict()[key]), key
    assert torch.equal(net.eval()(images(4, seed=9)), twin.eval()(images(4, seed=9)))


# The other norms average deviations or variances without the shift, as their papers and torch do. The second moment of
# MABN has no mean.
@pytest.mark.parametrize("name", ["mbn", "online"])
def test_the_variance_of_several_batches_has_the_shift_between_their_means(name):
    """Batches of alternating mean ±1 and almost no variance have variance 1 together."""
    net = layer_of(name, **({"momentum": 0.01} if name == "online" else {"decay": 1.0}))
    for index in range(500 if name == "online" else 20):
        net(0.01 * randn(4, 3, 2, 2, seed=index) + (-1) ** index)
    torch.testing.assert_close(recorder(net).running_var, torch.ones(3, dtype=torch.float64), rtol=0.05, atol=0)


def test_the_window_of_cbn_has_the_shift_between_its_means():
    """Normalized by the union of four such batches, values are about ±1; without the shift they would be larger."""
    net = layer_of("cbn", window=4)
    for index in range(4):
        y = net(0.01 * randn(4, 3, 2, 2, seed=index) + (-1) ** index)
    torch.testing.assert_close(y.abs(), torch.ones_like(y), rtol=0, atol=0.1)


@each_statistical
def test_recalibration_has_the_shift_between_means(name):
    net = layer_of(name)
    entered = entering(net)
    memnorm.recalibrate(net, [0.01 * randn(4, 3, 2, 2, seed=index) + (-1) ** index for index in range(2)])
    together = torch.cat(entered)
    wanted = kept_variance(name, together) if name == "mabn" else together.var((0, 2, 3), correction=0)
    torch.testing.assert_close(recorder(net).running_var, wanted, rtol=1e-9, atol=0)


@pytest.mark.parametrize("momentum", [0.05, 0.3])
@pytest.mark.parametrize("name", ["lagged_bn", "mabn"])
def test_debiasing_uses_the_decay_of_the_average(name, momentum):
    """After t batches the i-th has the weight (1 − m)^(t − i), divided by the sum of these weights."""
    net = layer_of(name, momentum=momentum)
    seen = entering(net)
    for index in range(7):
        net((1 + index) * randn(4, 3, 2, 2, seed=index))
        ages = torch.arange(index, -1, -1, dtype=torch.float64)
        weights = (1 - momentum) ** ages
        values = torch.stack([kept_variance(name, x) for x in seen])
        wanted = (weights[:, None] * values).sum(0) / weights.sum()
        torch.testing.assert_close(recorder(net).running_var, wanted, rtol=1e-12, atol=0)


@each_norm
def test_buffers_stay_the_same_tensors(name):
    net = memnorm.convert(chain(), name)
    step(net, 4)  # CBN allocates its memory when it finds the preceding layer
    before = {key: buffer.data_ptr() for key, buffer in net.named_buffers()}
    for batch in (4, 2):
        step(net, batch)
    net.eval()(images(3, seed=0))
    assert {key: buffer.data_ptr() for key, buffer in net.named_buffers()} == before
