"""Memorized layers: identities with batch norm, derivatives, memory, errors."""

import numpy as np
import pytest
import torch
from helpers.common import LAYERS, SHAPES, assert_same_output_and_gradients, leaf, randn, twins
from torch import nn

import memnorm
from memnorm.errors import DTypeError, InputError
from memnorm.functional import Moments, batch_moments, memorized_batch_norm, merge, pool
from memnorm.reference import ReferenceBatchNorm


def warm(layer, shape, batches=3):
    for seed in range(batches):
        layer(leaf(shape, seed=200 + seed))
    return layer


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(5, 2), (3, 2, 2), (3, 2, 2, 2), (2, 2, 2, 1, 2)], ids=str)
def test_first_and_second_derivatives_pass_gradcheck(shape, affine, training):
    layer = warm(LAYERS[len(shape)][0](shape[1], affine=affine, dtype=torch.float64), shape).train(training)
    layer.recording = False
    x = leaf(shape, seed=0)
    names = [name for name, _ in layer.named_parameters()]

    def run(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    inputs = (x, *(parameter.detach().clone().requires_grad_() for parameter in layer.parameters()))
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_zero_strength_is_plain_batch_norm(shape):
    ours, torchs = twins(shape, strength=0.0)
    warm(ours, shape)
    assert_same_output_and_gradients(ours, torchs, leaf(shape, seed=0), atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_empty_memory_is_plain_batch_norm(shape):
    ours, torchs = twins(shape, strength=1.0)
    assert_same_output_and_gradients(ours, torchs, leaf(shape, seed=0), atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_eval_is_torchs_own_operation_bit_for_bit(shape):
    ours, torchs = twins(shape, dtype=torch.float32)
    for seed in range(3):
        ours(leaf(shape, seed=seed, dtype=torch.float32))
    torchs.running_mean.copy_(ours.running_mean)
    torchs.running_var.copy_(ours.running_var)
    x = leaf(shape, seed=9, dtype=torch.float32)
    torch.testing.assert_close(ours.eval()(x), torchs.eval()(x), rtol=0, atol=0)


def test_moments_do_not_depend_on_how_the_data_is_split():
    data = leaf((60, 3, 2), seed=0).detach()
    states = []
    for sizes in ([60], [1] * 60, [7, 13, 1, 29, 10], [30, 30]):
        layer = memnorm.MemorizedBatchNorm1d(3, memory_size=None, decay=1.0, dtype=torch.float64)
        for part in data.split(sizes):
            layer(part)
        states.append((layer.running_mean, layer.running_var, layer.running_weight))
    for state in states[1:]:
        torch.testing.assert_close(state, states[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(states[0][1], data.transpose(0, 1).flatten(1).var(1, correction=0), rtol=0, atol=1e-12)


def test_with_strength_equal_to_decay_eval_uses_the_last_training_moments():
    layer = memnorm.MemorizedBatchNorm2d(3, memory_size=None, decay=0.9, strength=0.9, dtype=torch.float64)
    for seed in range(30):
        x = leaf((4, 3, 3, 3), seed=seed)
        y = layer(x)
    torch.testing.assert_close(layer.eval()(x), y, rtol=0, atol=1e-12)


def test_momentum_none_merges_everything_since_the_reset_by_count():
    layer = memnorm.MemorizedBatchNorm1d(3, momentum=None, memory_size=2, dtype=torch.float64)
    layer(leaf((5, 3), seed=99))
    layer.reset_running_stats()
    batches = [leaf((size, 3), seed=size).detach() for size in (2, 9, 4, 7)]
    for batch in batches:
        layer(batch)
    data = torch.cat(batches)
    torch.testing.assert_close(layer.running_mean, data.mean(0), rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.running_var, data.var(0, correction=0), rtol=0, atol=1e-12)


def test_without_running_statistics_it_is_plain_batch_norm_in_training_and_eval():
    ours = memnorm.MemorizedBatchNorm2d(3, track_running_stats=False, dtype=torch.float64)
    torchs = nn.BatchNorm2d(3, track_running_stats=False, dtype=torch.float64)
    x = leaf((4, 3, 2, 2), seed=0)
    for mode in (True, False):
        assert_same_output_and_gradients(ours.train(mode), torchs.train(mode), x, atol=0)
    assert [name for name, _ in ours.named_buffers()] == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_batch_that_is_not_finite_is_never_recorded(bad):
    layer = warm(memnorm.MemorizedBatchNorm2d(3, dtype=torch.float64), (4, 3, 2, 2))
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    x = leaf((4, 3, 2, 2), seed=0).detach()
    x[1, 2, 0, 1] = bad
    layer(x)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_one_value_per_channel_trains_once_there_is_a_memory():
    layer = memnorm.MemorizedBatchNorm1d(3, dtype=torch.float64)
    layer(leaf((4, 3), seed=0))
    reference = ReferenceBatchNorm(3)
    reference(leaf((4, 3), seed=0))
    x = leaf((1, 3), seed=1)
    assert_same_output_and_gradients(layer, reference, x, atol=1e-12)
    assert layer.memory_count[:2].tolist() == [1, 4]


def test_one_value_per_channel_with_nothing_to_merge_is_batch_norms_error():
    layer = memnorm.MemorizedBatchNorm2d(3)
    with pytest.raises(ValueError, match=r"Expected more than 1 value per channel when training.*prior_from_init"):
        layer(torch.randn(1, 3, 1, 1))


def test_one_value_per_channel_can_start_from_the_initial_statistics():
    layer = memnorm.MemorizedBatchNorm2d(3, prior_from_init=True, strength=0.5, dtype=torch.float64)
    x = leaf((1, 3, 1, 1), seed=0)
    initial = Moments(torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64), 0.5)
    hat = merge(initial, batch_moments(x.detach()))
    expected = (x - hat.mean.view(1, 3, 1, 1)) / torch.sqrt(hat.var.view(1, 3, 1, 1) + layer.eps)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)
    assert layer.memory_count[:3].tolist() == [1, 1, 0]


def test_the_functional_form_takes_live_buffers():
    layer = warm(memnorm.MemorizedBatchNorm2d(3, dtype=torch.float64), (4, 3, 2, 2))
    x = leaf((4, 3, 2, 2), seed=0)
    y = memorized_batch_norm(
        x,
        layer.weight,
        layer.bias,
        layer.running_mean,
        layer.running_var,
        layer.strength * layer.running_weight,
        layer.eps,
    )
    torch.testing.assert_close(layer(x), y, rtol=0, atol=0)  # overwrites the buffers
    (gradient,) = torch.autograd.grad(y.pow(2).sum(), x)
    assert gradient.isfinite().all()


def test_pool_and_merge_agree():
    means, variances = randn(4, 3, seed=0), randn(4, 3, seed=1).square()
    weights = torch.tensor([3.0, 0.0, 5.5, 1.25], dtype=torch.float64)
    merged = Moments(means[0], variances[0], weights[0])
    for row in range(1, 4):
        merged = merge(merged, Moments(means[row], variances[row], weights[row]))
    torch.testing.assert_close(tuple(pool(means, variances, weights)), tuple(merged), rtol=0, atol=1e-12)


def test_the_memory_holds_the_newest_k_batches():
    layer = memnorm.MemorizedBatchNorm1d(1, memory_size=3, decay=0.5, dtype=torch.float64)
    filled = []
    for step in range(5):
        filled.append((layer.memory_mean[:, 0].tolist(), float(layer.running_weight)))
        layer(torch.tensor([[step - 1.0], [step + 1.0]], dtype=torch.float64))
    assert filled == [([0, 0, 0], 0), ([0, 0, 0], 2), ([1, 0, 0], 3), ([2, 1, 0], 3.5), ([3, 2, 1], 3.5)]


def test_repr_shows_the_memory():
    layer = memnorm.MemorizedBatchNorm2d(8, memory_size=None, decay=0.95, strength=0.25, bias=False)
    assert repr(layer) == (
        "MemorizedBatchNorm2d(8, memory_size=None, decay=0.95, strength=0.25, eps=1e-05, momentum=0.1, affine=True, "
        "bias=False, track_running_stats=True)"
    )
    layer.set_strength(0.5)
    assert "strength=0.5" in repr(layer)


@pytest.mark.parametrize(
    ("layer", "x", "error", "text"),
    [
        (memnorm.MemorizedBatchNorm2d(3), torch.randn(2, 3, 4), InputError, "expected 4-D input.*got 3-D"),
        (memnorm.MemorizedBatchNorm1d(3), torch.randn(2, 3, 4, 5), InputError, "expected 2-D or 3-D input"),
        (memnorm.MemorizedBatchNorm3d(3), torch.randn(2, 3, 4, 5), InputError, "expected 5-D input"),
        (memnorm.MemorizedBatchNorm2d(3), torch.randn(2, 4, 5, 5), InputError, "3 channels, the input has 4"),
        (
            memnorm.MemorizedBatchNorm2d(3),
            torch.ones(2, 3, 5, 5, dtype=torch.int64),
            DTypeError,
            "floating-point.*int64",
        ),
    ],
    ids=["rank", "rank 1d", "rank 3d", "channels", "integers"],
)
def test_a_bad_input_raises_an_error_that_says_what_was_expected(layer, x, error, text):
    with pytest.raises(error, match=text):
        layer(x)
    assert int(layer.num_batches_tracked) == 0


def test_recording_does_not_depend_on_grad_mode():
    with_grad, without = (memnorm.MemorizedBatchNorm2d(3, dtype=torch.float64) for _ in range(2))
    for seed in range(3):
        x = leaf((4, 3, 2, 2), seed=seed)
        with_grad(x)
        with torch.no_grad():
            without(x)
    for name, value in with_grad.state_dict().items():
        assert torch.equal(value, without.state_dict()[name]), name


@pytest.mark.parametrize("options", [{"strength": 0.0}, {"prior_weight": 0.0}], ids=str)
def test_one_value_per_channel_needs_a_memory_that_weighs_something(options):
    layer = memnorm.MemorizedBatchNorm1d(3, **options)
    layer.running_mean.fill_(0.5)
    with pytest.raises(InputError, match="more than 1 value per channel"):
        layer(torch.randn(1, 3))


def test_one_value_per_channel_is_an_error_again_when_the_strength_drops_to_zero():
    layer = memnorm.MemorizedBatchNorm1d(3)
    layer(torch.randn(4, 3))
    assert layer(torch.randn(1, 3)).isfinite().all()
    layer.set_strength(0.0)
    with pytest.raises(InputError, match="more than 1 value per channel"):
        layer(torch.randn(1, 3))


def test_a_batch_that_would_overflow_the_pooled_variance_is_not_recorded():
    layer = memnorm.MemorizedBatchNorm1d(2, memory_size=None)
    layer(torch.randn(4, 2))
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    layer(torch.full((4, 2), 1e25))
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_options_may_be_numbers_of_numpy():
    layer = memnorm.MemorizedBatchNorm2d(3, memory_size=np.int64(4), decay=np.float32(0.5), strength=np.float64(0.25))
    assert (layer.memory_size, layer.decay, float(layer.strength)) == (4, 0.5, 0.25)


def test_one_value_per_channel_trains_on_loaded_statistics_and_not_after_a_reset():
    layer = memnorm.MemorizedBatchNorm1d(2)
    plain = nn.BatchNorm1d(2)
    plain.running_mean.fill_(0.5)
    layer.load_state_dict(plain.state_dict())
    assert layer(torch.ones(1, 2)).isfinite().all()
    layer.reset_running_stats()
    with pytest.raises(InputError, match="memory is empty"):
        layer(torch.ones(1, 2))


def test_gamma_equal_to_sigma_and_beta_to_mu_restores_the_input():
    layer = warm(memnorm.MemorizedBatchNorm2d(3, dtype=torch.float64), (4, 3, 3, 3))
    x = leaf((4, 3, 3, 3), seed=0)
    hat = merge(layer._read(36), batch_moments(x.detach()))
    with torch.no_grad():
        layer.weight.copy_(torch.sqrt(hat.var + layer.eps))
        layer.bias.copy_(hat.mean)
    torch.testing.assert_close(layer(x), x, rtol=0, atol=1e-12)
