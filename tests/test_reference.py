"""The reference against the paper: Eq. 5 is Eq. 6, the printed gradient is autograd's, Algorithm 1 is as printed."""

import pytest
import torch
from helpers.common import SHAPES, leaf, randn
from torch import nn

from memnorm.reference import ReferenceBatchNorm, algorithm_1, alpha, memorized_moments, values_per_channel


def remembered(count, channels, *, seed):
    """Batches of different sizes, means and deviations."""
    return [randn(3 + 2 * i, channels, seed=seed + i) * (1 + i) + i for i in range(count)]


def test_eq_5_is_the_moments_of_the_concatenation_when_all_weights_are_equal():
    batches = remembered(4, 3, seed=0)
    mean_hat, var_hat = memorized_moments(batches, [0.7] * 4)
    torch.testing.assert_close(mean_hat, torch.cat(batches).mean(0), rtol=0, atol=1e-12)
    torch.testing.assert_close(var_hat, torch.cat(batches).var(0, correction=0), rtol=0, atol=1e-12)


def test_eq_5_with_integer_weights_repeats_batches():
    first, second = remembered(2, 3, seed=1)
    weighted = memorized_moments([first, second], [3.0, 1.0])
    repeated = memorized_moments([first, first, first, second], [1.0] * 4)
    torch.testing.assert_close(weighted, repeated, rtol=0, atol=1e-12)


def test_eq_6_as_printed_equals_eq_5():
    batches = remembered(5, 3, seed=2)
    alphas = [alpha(0.4, 0.9, age) for age in range(4)] + [1.0]
    total = sum(a * len(b) for a, b in zip(alphas, batches, strict=True))
    mean_hat = sum(a * len(b) * b.mean(0) for a, b in zip(alphas, batches, strict=True)) / total
    terms = [((b.mean(0) - mean_hat) ** 2 + b.var(0, correction=0)) for b in batches]
    var_hat = sum(a * len(b) * t for a, b, t in zip(alphas, batches, terms, strict=True)) / total
    torch.testing.assert_close((mean_hat, var_hat), memorized_moments(batches, alphas), rtol=0, atol=1e-12)


def printed_gradients(x, grad_y, gamma, memory, alphas, eps):
    """The paper's backward propagation, line by line, for the current batch x (n, C).

    With the two corrections of a misprinted first and fifth line: they are about x̂, not x.
    """
    batches, weights = [*memory, x], [*alphas, 1.0]
    total = sum(a * len(b) for a, b in zip(weights, batches, strict=True))
    mean_hat, var_hat = memorized_moments(batches, weights)
    x_hat = (x - mean_hat) / torch.sqrt(var_hat + eps)
    d_x_hat = grad_y * gamma
    d_var = -0.5 * (d_x_hat * (x - mean_hat) * (var_hat + eps) ** -1.5).sum(0)
    off_centre = sum(a * len(b) * (b.mean(0) - mean_hat) for a, b in zip(weights, batches, strict=True)) / total
    d_mean = (d_x_hat * -1 / torch.sqrt(var_hat + eps)).sum(0) - 2 * d_var * off_centre
    d_x = d_x_hat / torch.sqrt(var_hat + eps) + d_var * 2 / total * (x - mean_hat) + d_mean / total
    return d_x, (grad_y * x_hat).sum(0), grad_y.sum(0)


@pytest.mark.parametrize("strength", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("remember", [0, 1, 4])
def test_the_printed_gradient_is_that_of_autograd_through_the_reference(strength, remember):
    layer = ReferenceBatchNorm(3, memory_size=4, decay=0.8, strength=strength)
    with torch.no_grad():
        layer.weight.copy_(randn(3, seed=5))
        for batch in remembered(remember, 3, seed=10):
            layer.remember(batch)
    layer.recording = False
    x, grad_y = leaf((6, 3), seed=3), randn(6, 3, seed=4)
    by_autograd = torch.autograd.grad(layer(x), [x, layer.weight, layer.bias], grad_y)
    alphas = [alpha(strength, 0.8, age) for age in range(len(layer.memory))]
    with torch.no_grad():
        printed = printed_gradients(x, grad_y, layer.weight, layer.memory, alphas, layer.eps)
    torch.testing.assert_close(tuple(printed), by_autograd, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_per_channel_keeps_every_value_in_its_channel(shape):
    x = randn(*shape, seed=0)
    values = values_per_channel(x)
    assert values.shape == (x.numel() // shape[1], shape[1])
    for channel in range(shape[1]):
        torch.testing.assert_close(
            values[:, channel].sort().values, x[:, channel].flatten().sort().values, rtol=0, atol=0
        )


def test_memory_holds_the_newest_batches_first_and_no_more_than_k():
    layer = ReferenceBatchNorm(2, memory_size=3)
    batches = [torch.full((4, 2), float(i), dtype=torch.float64) for i in range(5)]
    for batch in batches:
        layer(batch)
    assert [batch[0, 0].item() for batch in layer.memory] == [4, 3, 2]


@pytest.mark.parametrize("double_forward", [False, True])
def test_algorithm_1_remembers_the_batch_under_the_old_or_the_new_weights(double_forward):
    network = nn.Sequential(nn.Linear(4, 3), ReferenceBatchNorm(3), nn.Linear(3, 1)).double()
    x, target = randn(6, 4, seed=0), randn(6, 1, seed=1)
    before = network[0](x).detach()
    losses = algorithm_1(network, [(x, target)], nn.functional.mse_loss, 0.1, double_forward=double_forward)
    after = network[0](x).detach()
    assert len(losses) == 1
    assert not torch.equal(before, after)
    torch.testing.assert_close(network[1].memory[0], after if double_forward else before, rtol=0, atol=1e-12)
