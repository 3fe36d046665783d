"""Unusable inputs of layers: the layer raises before it records anything, or does what torch does."""

import copy
import threading
import time
from contextlib import nullcontext

import pytest
import torch
from helpers.common import randn
from helpers.kernels import in_torch
from torch import nn
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode

import memnorm
from memnorm import norms
from memnorm.errors import InputError, MemnormWarning
from memnorm.kernels import cpu

SHAPE = (4, 3, 5, 6)
RECORDING = ["two_way", "mbn", "bn", "brn", "lagged_bn", "momentum_bn", "moving_bn", "ghost", "mabn", "online"]


def trained(name="mbn", dtype=torch.float32, **options):
    layer = memnorm.convert(nn.BatchNorm2d(3), name, **options).to(dtype)
    for seed in range(2):
        layer(randn(*SHAPE, seed=seed).to(dtype))
    return layer


def state(layer):
    return copy.deepcopy(layer.state_dict())


def assert_unchanged(layer, before):
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("backend", ["kernels", "torch"])
@pytest.mark.parametrize("name", ["mbn", "two_way"])
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"activation": "relu", "residual": torch.zeros(4, 3, 5, 7)}, InputError),
        ({"activation": "relu", "residual": torch.zeros(2, 4, 3, 5, 6)}, InputError),
        ({"residual": "a"}, InputError),
        ({"residual": torch.zeros(SHAPE, device="meta")}, InputError),
        ({"activation": "relu", "residual": torch.zeros(SHAPE, dtype=torch.complex64)}, InputError),
        ({"activation": "tanh"}, ValueError),
    ],
    ids=["wrong shape", "too many dimensions", "no tensor", "another device", "complex", "activation"],
)
def test_a_forward_that_fails_records_nothing(arguments, error, name, backend):
    layer = trained(name)
    before = state(layer)
    if backend == "torch":
        with in_torch(), pytest.raises(error):
            layer(randn(*SHAPE, seed=5).float(), **arguments)
    else:
        with pytest.raises(error):
            layer(randn(*SHAPE, seed=5).float(), **arguments)
    assert_unchanged(layer, before)
    assert layer(randn(*SHAPE, seed=6).float()).isfinite().all()


@pytest.mark.parametrize("name", ["mbn", "two_way"])
def test_an_inference_tensor_that_must_be_saved_raises_and_records_nothing(name):
    layer = trained(name)
    with torch.inference_mode():
        x = randn(*SHAPE, seed=5).float().clone()
    before = state(layer)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        layer(x)
    assert_unchanged(layer, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["mbn", "two_way", "brn", "bn"])
def test_a_freed_storage_raises(name, dtype):
    layer, x = trained(name, dtype), randn(*SHAPE, seed=5).to(dtype)
    x.untyped_storage().resize_(0)
    before = state(layer)
    with pytest.raises(InputError, match="storage was freed"):
        layer(x)
    assert_unchanged(layer, before)


def freed(*shape):
    x = torch.zeros(shape)
    x.untyped_storage().resize_(0)
    return x


@pytest.mark.parametrize("name", ["evonorm_s0", "frn"])
def test_a_freed_storage_raises_in_norms_without_batch_statistics(name):
    layer = memnorm.convert(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()), name)[0]
    with pytest.raises(InputError, match="storage was freed"):
        layer(freed(4, 4, 5, 6))
    layer.weight.data = freed(4)
    with pytest.raises(InputError, match="storage was freed"):
        layer(randn(4, 4, 5, 6, seed=0).float())


@pytest.mark.parametrize("backend", ["kernels", "torch"])
@pytest.mark.parametrize("activation", ["relu", None])
@pytest.mark.parametrize("name", ["mbn", "two_way"])
def test_a_freed_residual_raises_and_records_nothing(name, activation, backend):
    layer = trained(name)
    before = state(layer)
    with in_torch() if backend == "torch" else nullcontext(), pytest.raises(InputError, match="storage was freed"):
        layer(randn(*SHAPE, seed=5).float(), activation=activation, residual=freed(*SHAPE))
    assert_unchanged(layer, before)


@pytest.mark.parametrize("backend", ["kernels", "torch"])
@pytest.mark.parametrize("name", ["mbn", "two_way"])
def test_a_freed_gradient_raises_and_records_nothing(name, backend):
    layer, x = trained(name), randn(*SHAPE, seed=5).float().requires_grad_()
    with in_torch() if backend == "torch" else nullcontext():
        y = layer(x)
        before = state(layer)
        with pytest.raises(InputError, match="storage was freed"):
            y.backward(freed(*SHAPE))
    assert_unchanged(layer, before)


@pytest.mark.parametrize("trainable", [True, False], ids=["norm", "residual only"])
@pytest.mark.skipif(cpu.module() is None, reason="the kernels were not built")
def test_a_freed_output_of_a_relu_raises_in_backward(trainable):
    layer, residual = trained().requires_grad_(trainable), randn(*SHAPE, seed=1).float().requires_grad_()
    y = layer(randn(*SHAPE, seed=5).float(), activation="relu", residual=residual)
    y.data.untyped_storage().resize_(0)
    with pytest.raises(InputError, match="storage was freed"):
        y.backward(torch.ones(SHAPE))


@pytest.mark.parametrize("name", ["brn", "bn", "mabn"])
def test_a_freed_buffer_raises_in_running_norms(name):
    layer = trained(name)
    layer.running_var.untyped_storage().resize_(0)
    with pytest.raises(InputError, match="storage was freed"):
        layer(randn(*SHAPE, seed=5).float())


@pytest.mark.parametrize("name", ["mabn", "online"])
def test_a_freed_buffer_raises_in_a_backward_that_reads_it(name):
    layer = trained(name)
    y = layer(randn(*SHAPE, seed=5).float().requires_grad_())
    for buffer in layer.buffers():
        buffer.untyped_storage().resize_(0)
    with pytest.raises(InputError, match="storage was freed"):
        y.sum().backward()


def test_converting_a_layer_with_freed_buffers_reads_none_of_them():
    plain = nn.BatchNorm2d(3)
    plain.running_mean.untyped_storage().resize_(0)
    assert isinstance(memnorm.convert(plain), memnorm.MemorizedBatchNorm2d)


@pytest.mark.parametrize("name", RECORDING)
def test_a_zero_tensor_without_memory_is_a_batch_of_zeros(name):
    layer, other = trained(name), trained(name)
    torch.testing.assert_close(layer(torch._efficientzerotensor(SHAPE)), other(torch.zeros(SHAPE)))


@pytest.mark.parametrize("name", [*(one for one in RECORDING if one not in ("bn", "moving_bn")), "cbn"])
@pytest.mark.parametrize("scale", [3e18, 1e38, 1e60])
def test_wide_data_beyond_the_range_of_the_buffers_is_not_recorded(name, scale):
    """The moments are finite in float64, and the statistics are float32. `bn` and `moving_bn` refuse such data, as
    torch does.
    """
    model = memnorm.convert(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)), name)
    layer, x = model[1], scale * randn(*SHAPE, seed=5)
    model(randn(*SHAPE, seed=0).float())
    layer(x.requires_grad_()).backward(torch.full(SHAPE, 1e60, dtype=torch.float64))
    assert all(one.isfinite().all() for one in layer.buffers())
    assert layer(randn(*SHAPE, seed=6).float()).isfinite().all()


@pytest.mark.parametrize("name", [name for name in RECORDING if name not in ("mbn", "two_way")])
def test_a_variance_beyond_half_precision_does_not_enter_half_precision_buffers(name):
    layer = memnorm.convert(nn.BatchNorm2d(3), name).half()
    for seed in range(2):
        layer(3000 * randn(*SHAPE, seed=seed).half())
    assert all(one.isfinite().all() for one in layer.buffers())


def test_one_value_that_is_not_finite_leaves_two_way_memory_empty():
    layer = memnorm.TwoWayBatchNorm2d(3)
    layer(torch.full((1, 3, 1, 1), float("nan")))
    assert float(layer.running_weight) == 0


def test_instance_norm_gives_an_empty_output_for_an_empty_batch():
    layer, x = memnorm.convert(nn.BatchNorm2d(3), "instance"), torch.zeros(0, 3, 5, 6, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 3, 5, 6)


def test_recalibrating_on_a_freed_storage_raises():
    x = randn(*SHAPE, seed=5).float()
    x.untyped_storage().resize_(0)
    with pytest.raises(InputError, match="storage was freed"):
        memnorm.recalibrate(nn.Sequential(nn.BatchNorm2d(3)), [x])


@pytest.mark.parametrize("name", RECORDING)
@pytest.mark.parametrize("shape", [(0, 3, 5, 6), (2, 3, 0, 6)], ids=str)
def test_an_empty_batch_gives_an_empty_output_and_is_not_recorded(name, shape):
    layer = trained(name)
    before = state(layer)
    x = torch.zeros(shape, requires_grad=True)
    y = layer(x)
    assert y.shape == shape
    y.sum().backward()
    assert x.grad.shape == shape
    assert_unchanged(layer, before)
    assert layer(randn(*SHAPE, seed=6).float()).isfinite().all()


@pytest.mark.parametrize("name", [name for name in RECORDING if norms.get(name).folds])
@pytest.mark.parametrize("eps", [0.0, -1e-5, float("nan")])
def test_an_eps_that_is_not_positive_raises_torchs_error_in_training(name, eps):
    layer = trained(name)
    layer.eps = eps
    before = state(layer)
    with pytest.raises(ValueError, match="eps must be positive"):
        layer(randn(*SHAPE, seed=5).float())
    assert_unchanged(layer, before)


@pytest.mark.parametrize("name", ["group", "layer", "instance"])
def test_a_batch_norm_whose_eps_is_not_positive_is_not_converted(name):
    plain = nn.BatchNorm2d(4, eps=-1.0)
    with pytest.raises(ValueError, match="eps must be a positive number"):
        memnorm.convert(plain, name)


@pytest.mark.parametrize("name", ["evonorm_s0", "frn"])
def test_an_eps_set_later_that_is_not_positive_raises(name):
    layer = memnorm.convert(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()), name)[0]
    layer.eps = -1.0
    with pytest.raises(ValueError, match="eps must be a positive number"):
        layer(randn(4, 4, 5, 6, seed=0).float())


@pytest.mark.parametrize("buffer", ["running_mean", "running_var", "backward_product"])
def test_a_buffer_with_gaps_between_its_values_trains_as_a_dense_one(buffer):
    dense, odd = (memnorm.TwoWayBatchNorm2d(3, warmup=0) for _ in range(2))
    setattr(odd, buffer, torch.stack([getattr(odd, buffer)] * 2, 1)[:, 0])
    for seed in range(3):
        x = [randn(*SHAPE, seed=seed).float().requires_grad_() for _ in range(2)]
        for layer, data in zip((dense, odd), x, strict=True):
            (layer(data) * randn(*SHAPE, seed=9).float()).sum().backward()
        torch.testing.assert_close(x[0].grad, x[1].grad, rtol=1e-5, atol=1e-5)
    for name, value in dense.state_dict().items():
        torch.testing.assert_close(odd.state_dict()[name], value, rtol=1e-5, atol=1e-5)


def test_negative_bits_of_parameters_and_buffers_are_read():
    plain, odd = trained(), trained()
    negated = torch.complex(torch.zeros(3), -plain.weight.detach()).conj().imag
    assert negated.is_neg()
    odd.weight = nn.Parameter(negated)
    odd.running_mean = torch.complex(torch.zeros(3), -odd.running_mean).conj().imag
    assert odd.running_mean.is_neg()
    x = randn(*SHAPE, seed=5).float()
    torch.testing.assert_close(odd(x), plain(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(odd.running_mean, plain.running_mean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [*RECORDING, "cbn"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("assign", [False, True])
def test_every_floating_entry_of_a_checkpoint_may_be_damaged(name, value, assign):
    saved = state(trained(name))
    for entry in [key for key, one in saved.items() if one.is_floating_point() and one.numel()]:
        if entry in ("weight", "bias"):
            continue
        checkpoint = copy.deepcopy(saved)
        checkpoint[entry].view(-1)[0] = value
        damaged = copy.deepcopy(checkpoint)
        layer = memnorm.convert(nn.BatchNorm2d(3), name)
        with pytest.warns(MemnormWarning, match="not finite were dropped|does not lie in"):
            layer.load_state_dict(checkpoint, assign=assign)
        torch.testing.assert_close(checkpoint[entry], damaged[entry], equal_nan=True)
        assert all(one.isfinite().all() for one in layer.buffers()), entry
        before = int(layer.num_batches_tracked)
        assert layer(randn(*SHAPE, seed=5).float()).isfinite().all()
        assert int(layer.num_batches_tracked) == before + 1


@pytest.mark.parametrize("name", [*RECORDING, "cbn"])
def test_converting_a_batch_norm_with_nan_statistics_drops_them(name):
    plain = nn.BatchNorm2d(3)
    plain.running_var[1] = float("nan")
    with pytest.warns(MemnormWarning, match="not finite were dropped"):
        layer = memnorm.convert(plain, name)
    assert plain.running_var[1].isnan()
    assert layer(randn(*SHAPE, seed=5).float()).isfinite().all()
    assert int(layer.num_batches_tracked) == 1


@pytest.mark.parametrize(
    ("name", "buffer"),
    [("mbn", "memory_mean"), ("mbn", "memory_count"), ("mbn", "running_var"), ("two_way", "backward_mean")],
)
@pytest.mark.parametrize("assign", [False, True])
def test_a_nan_in_a_checkpoint_is_dropped_with_a_warning_and_recording_continues(name, buffer, assign):
    checkpoint = state(trained(name))
    checkpoint[buffer].view(-1)[0] = float("nan")
    layer = memnorm.convert(nn.BatchNorm2d(3), name)
    with pytest.warns(MemnormWarning, match="not finite were dropped"):
        layer.load_state_dict(checkpoint, assign=assign)
    assert all(value.isfinite().all() for value in layer.state_dict().values())
    before = int(layer.num_batches_tracked)
    layer(randn(*SHAPE, seed=5).float())
    assert int(layer.num_batches_tracked) == before + 1


def test_a_plain_checkpoint_whose_statistics_are_nan_starts_from_the_initial_ones():
    checkpoint = nn.BatchNorm2d(3).state_dict()
    checkpoint["running_mean"].fill_(float("nan"))
    layer = memnorm.MemorizedBatchNorm2d(3)
    with pytest.warns(MemnormWarning, match="not finite were dropped"):
        layer.load_state_dict(checkpoint)
    assert torch.equal(layer.running_mean, torch.zeros(3))
    assert layer(randn(*SHAPE, seed=5).float()).isfinite().all()


@pytest.mark.skipif(cpu.module() is None, reason="the kernels were not built")
def test_buffers_may_be_replaced_while_other_threads_train():
    layer, x = memnorm.MemorizedBatchNorm2d(8), randn(2, 8, 2, 2, seed=0).float()
    end = time.monotonic() + 2

    def train():
        while time.monotonic() < end:
            layer(x)

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
    while time.monotonic() < end:
        layer.load_state_dict({name: one.clone() for name, one in layer.state_dict().items()}, assign=True)
    for thread in threads:
        thread.join()
    assert layer(x).isfinite().all()


def test_backwards_in_threads_without_an_optimizer_end():
    layer = memnorm.TwoWayBatchNorm2d(8, warmup=0)
    failures = []

    def train():
        try:
            for _ in range(30):
                layer(randn(2, 8, 4, 4, seed=0).float().requires_grad_()).sum().backward()
        except SystemError as error:
            failures.append(error)

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_narrow_data_with_a_negative_bit_keeps_its_sign():
    x = torch._neg_view(-(randn(*SHAPE, seed=0) + 5).half())
    layer = memnorm.MemorizedBatchNorm2d(3)
    layer(x)
    assert (layer.running_mean > 4).all()


@pytest.mark.parametrize("name", ["mbn", "two_way"])
def test_a_pruned_layer_can_be_evaluated(name):
    layer, x = trained(name), randn(*SHAPE, seed=5).float()
    prune.l1_unstructured(layer, "weight", 1)
    layer(x)
    layer.eval()
    expected = nn.functional.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), expected)


def test_a_gradient_of_the_residual_alone_records_no_backward():
    layer = memnorm.TwoWayBatchNorm2d(3, warmup=0, affine=False)
    residual = randn(*SHAPE, seed=1).float().requires_grad_()
    layer(randn(*SHAPE, seed=0).float(), activation="relu", residual=residual).sum().backward()
    assert float(layer.backward_weight) == 0
    assert residual.grad.unique().tolist() == [0, 1]


def test_an_inference_weight_that_must_be_saved_raises_and_records_nothing():
    layer = trained()
    with torch.inference_mode():
        weight = torch.ones(3)
    before = state(layer)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        torch.func.functional_call(layer, {"weight": weight}, (randn(*SHAPE, seed=5).float().requires_grad_(),))
    assert_unchanged(layer, before)


@pytest.mark.skipif(cpu.module() is None, reason="the kernels were not built")
def test_a_function_mode_that_replaces_the_output_is_an_error_and_no_crash():
    class Meta(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            return made.to("meta") if function is torch.empty_like else made

    layer = trained()
    with Meta(), pytest.raises(RuntimeError, match="another kind"):
        layer(randn(*SHAPE, seed=5).float())


@pytest.mark.parametrize("backend", ["kernels", "torch"])
def test_a_freed_buffer_raises(backend):
    layer = trained()
    layer.running_mean.untyped_storage().resize_(0)
    with in_torch() if backend == "torch" else nullcontext(), pytest.raises(InputError, match="storage was freed"):
        layer(randn(*SHAPE, seed=5).float())


def test_assigned_buffers_of_the_same_version_are_read_anew():
    layer, other = (memnorm.TwoWayBatchNorm2d(3, warmup=100) for _ in range(2))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.0) for one in (layer, other)]
    for one, optimizer, steps in ((layer, optimizers[0], 12), (other, optimizers[1], 10)):
        for seed in range(steps):
            one(randn(*SHAPE, seed=seed).float()).sum().backward()
            optimizer.step()
    other.num_updates.fill_(69)
    checkpoint = other.state_dict()
    layer.load_state_dict(checkpoint, assign=True)
    layer(randn(*SHAPE, seed=20).float()).sum().backward()
    optimizers[0].add_param_group({"params": list(layer.parameters())})
    optimizers[0].step()
    assert int(layer.num_updates) == 70
