"""The memory as the kernels write it: in place, where its buffers are now, and not at all for a broken batch."""

import copy
import threading

import pytest
import torch
from helpers.common import LAYERS
from helpers.kernels import (
    LAYOUTS,
    assert_near,
    counted,
    data,
    in_torch,
    layer_for,
    needs_kernels,
    step,
)
from helpers.states import assert_bitwise, snapshot

from memnorm.functional import memorized_batch_norm
from memnorm.kernels import cpu
from memnorm.norms.two_way import TwoWayBatchNorm2d

pytestmark = needs_kernels
SHAPE = (4, 3, 5, 6)
MEMORY = (
    *("running_mean", "running_var", "running_weight", "num_batches_tracked"),
    *("memory_mean", "memory_var", "memory_count"),
)


def train(layer, count=3, start=0, shape=SHAPE):
    for seed in range(start, start + count):
        layer(data(shape, seed, layer.running_mean.dtype))
    return layer


@pytest.mark.parametrize(
    "options",
    [
        {"memory_size": 1},
        {"memory_size": 2},
        {"memory_size": None},
        {"momentum": None},
        {"momentum": None, "memory_size": None},
        {"prior_from_init": True},
        {"prior_from_init": True, "memory_size": 1},
        {"prior_from_init": True, "memory_size": None, "prior_weight": 0.5},
        {"prior_from_init": True, "prior_weight": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("trained", [False, True], ids=["new", "trained before"])
def test_every_buffer_is_what_torch_operations_make_it(options, trained):
    ours, other = (layer_for(SHAPE, torch.float64, **options) for _ in range(2))
    for layer in (ours, other):
        if trained:
            layer.running_mean.fill_(0.5), layer.running_var.fill_(2.0)
    for seed in range(5):
        x, gradient = data(SHAPE, seed, torch.float64), data(SHAPE, seed + 20, torch.float64)
        with counted() as calls:
            found = step(ours, x, gradient)
        with in_torch():
            wanted = step(other, x, gradient)
        assert calls.total() or seed  # a layer keeps the function that it found first
        assert_near(found, wanted, 1e-10)
        assert_near(ours.state_dict(), other.state_dict(), 1e-11)


@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("memory_size", [1, 20, None], ids=str)
def test_a_batch_that_is_not_finite_changes_no_buffer(memory_size, value, layout):
    for shape in (SHAPE, (2, 65, 33, 65)):
        layer = train(layer_for(shape, memory_size=memory_size), shape=shape)
        before = snapshot(layer)
        x = data(shape, 9)
        x[-1, -1, -1, -1] = value
        assert not layer(LAYOUTS[layout](x)).isfinite().all()
        assert_bitwise(snapshot(layer), before)


def test_finite_data_whose_squares_are_not_change_no_buffer():
    layer = train(layer_for(SHAPE))
    before = snapshot(layer)
    layer(data(SHAPE, 9) * 1e30)
    assert_bitwise(snapshot(layer), before)


def test_buffers_are_written_in_place_and_their_versions_count():
    layer = train(layer_for(SHAPE))
    buffers = {name: layer.get_buffer(name) for name in MEMORY}
    before = {name: (one.data_ptr(), one._version) for name, one in buffers.items()}
    train(layer, 1)
    for name, one in buffers.items():
        assert layer.get_buffer(name) is one
        assert one.data_ptr() == before[name][0]
        assert one._version > before[name][1], name


def test_images_are_counted_in_place_where_the_buffer_is_now():
    layer = TwoWayBatchNorm2d(3, warmup=0)
    train(layer, 1)
    with counted() as calls:
        version = layer.num_images._version
        train(layer, 1)
        assert layer.num_images._version > version
        layer.num_images = layer.num_images.clone()
        train(layer, 1)
        layer.num_images.data = layer.num_images.data.clone()
        train(layer, 1)
    assert calls["train"] == 3
    assert int(layer.num_images) == 4 * SHAPE[0]


def test_a_count_of_images_that_was_replaced_is_faded_by_and_reset():
    layer = TwoWayBatchNorm2d(3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    train(layer, 1)
    weight, before, layer.num_images = float(layer.running_weight), layer.num_images, torch.tensor(32)
    version = before._version
    optimizer.step()
    assert (float(layer.running_weight), int(layer.num_images)) == (0.75 * weight, 0)
    assert (int(before), before._version) == (SHAPE[0], version)


@pytest.mark.parametrize("factor", [None, 0.5])
def test_an_update_counts_as_a_write_of_every_buffer_that_it_changes(factor):
    layer = train(TwoWayBatchNorm2d(3), 1)
    changed = ("running_weight", "backward_weight", "num_images")
    before = {name: one._version for name, one in layer.named_buffers()}
    assert cpu.fade([(layer._handle, layer._buffers, factor)])
    assert {name for name, one in layer.named_buffers() if one._version > before[name]} == set(changed)


def test_a_factor_that_is_no_number_changes_nothing():
    layer = train(TwoWayBatchNorm2d(3), 1)
    before = snapshot(layer)
    with pytest.raises(TypeError):
        cpu.fade([(layer._handle, layer._buffers, factor) for factor in (0.5, "half")])
    assert_bitwise(snapshot(layer), before)


def test_without_recording_nothing_is_written():
    layer = train(layer_for(SHAPE))
    before, versions = snapshot(layer), [layer.get_buffer(name)._version for name in MEMORY]
    layer.recording = False
    train(layer, 1)
    assert_bitwise(snapshot(layer), before)
    assert versions == [layer.get_buffer(name)._version for name in MEMORY]


def test_an_eval_graph_over_statistics_recorded_since_is_an_error():
    layer = train(layer_for(SHAPE))
    y = layer.eval()(data(SHAPE, 5).requires_grad_())
    train(layer.train(), 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_the_strength_is_read_at_every_call():
    layer, other = train(layer_for(SHAPE)), train(layer_for(SHAPE))
    for seed, strength in enumerate((0.0, 0.3, 1.0)):
        for one in (layer, other):
            one.recording = False
            one.strength.fill_(strength)
        x = data(SHAPE, seed)
        with in_torch():
            wanted = other(x)
        torch.testing.assert_close(layer(x), wanted, rtol=1e-5, atol=1e-5)


def moved(how, layer):
    if how == "assign":
        layer.load_state_dict({name: one.clone() for name, one in layer.state_dict().items()}, assign=True)
    elif how == "float64":
        layer.to(torch.float64)
    elif how == "there and back":
        layer.to(torch.float64).to(torch.float32)
    elif how == "shared":
        layer.share_memory()
    elif how == "copied":
        return copy.deepcopy(layer)
    elif how == "data":
        for one in layer.buffers():
            one.data = one.data.clone()
    elif how == "reset":
        layer.reset_running_stats()
    elif how == "replaced":
        layer.memory_mean, layer.strength = layer.memory_mean.clone(), torch.tensor(0.9, dtype=torch.float64)
    return layer


@pytest.mark.parametrize(
    "how", ["assign", "float64", "there and back", "shared", "copied", "data", "reset", "replaced"]
)
def test_wherever_the_buffers_went_the_kernels_follow(how):
    ours = moved(how, train(layer_for(SHAPE, memory_size=4)))
    with in_torch():
        other = train(moved(how, train(layer_for(SHAPE, memory_size=4))))
    with counted() as calls:
        train(ours)
    assert calls["train"] == 3
    assert_near(ours.state_dict(), other.state_dict(), 1e-5)


def test_a_deep_copy_shares_nothing_with_its_original():
    layer = train(layer_for(SHAPE))
    before = snapshot(layer)
    train(copy.deepcopy(layer))
    assert_bitwise(snapshot(layer), before)


def test_channels_cut_off_by_views_are_recorded_as_by_torch_operations():
    def cut(layer):
        layer.num_features = 2
        for name in ("running_mean", "running_var"):
            setattr(layer, name, layer.get_buffer(name)[:2])
        layer.memory_mean, layer.memory_var = layer.memory_mean[:, :2], layer.memory_var[:, :2]
        layer.weight, layer.bias = (torch.nn.Parameter(one[:2]) for one in (layer.weight, layer.bias))
        return train(layer, shape=(4, 2, 5, 6))

    ours = cut(train(layer_for(SHAPE, memory_size=4)))
    with in_torch():
        other = cut(train(layer_for(SHAPE, memory_size=4)))
    assert_near(ours.state_dict(), other.state_dict(), 1e-5)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parameter_of_another_size_is_an_error_and_not_read_beyond_its_end(name):
    layer = layer_for(SHAPE)
    setattr(layer, name, torch.nn.Parameter(torch.ones(1)))
    with pytest.raises(RuntimeError, match="1 values, the input 3 channels"):
        layer(data(SHAPE, 0))


def test_statistics_of_another_size_are_an_error():
    layer = layer_for(SHAPE)
    layer.num_features = 4
    with pytest.raises(RuntimeError, match="has 3 values, the input 4 channels"):
        layer(data((4, 4, 5, 6), 0))


def test_parameters_that_are_views_are_read_by_their_strides():
    layer, other = layer_for(SHAPE), layer_for(SHAPE)
    layer.weight = torch.nn.Parameter(torch.stack([other.weight.detach(), torch.zeros(3)], 1)[:, 0])
    layer.bias = torch.nn.Parameter(torch.cat([torch.zeros(1), other.bias.detach()])[1:])
    x = data(SHAPE, 0)
    assert_near(step(layer, x, x), step(other, x, x), 0.0)


@pytest.mark.parametrize(
    "var",
    [torch.tensor([2.0]).expand(3), torch.full((3,), 2.0).double(), torch.full((6,), 2.0)[::2], torch.tensor(2.0)],
    ids=["expanded", "float64", "strided", "one number"],
)
def test_a_function_call_reads_any_memory_by_its_values(var):
    x, mean = data(SHAPE, 0), torch.tensor([1.0, 2.0, 3.0])
    wanted = memorized_batch_norm(x, None, None, mean, torch.full((3,), 2.0), 50.0)
    for same in (mean, torch.stack([mean, mean], 1)[:, 0]):
        torch.testing.assert_close(memorized_batch_norm(x, None, None, same, var, 50.0), wanted, rtol=1e-6, atol=1e-6)
    one = memorized_batch_norm(x, None, None, torch.tensor([1.5]), var, 50.0)
    three = memorized_batch_norm(x, None, None, torch.full((3,), 1.5), var, 50.0)
    torch.testing.assert_close(one, three, rtol=1e-6, atol=1e-6)


def test_inference_mode_trains_the_memory_as_ever():
    ours, other = layer_for(SHAPE), train(layer_for(SHAPE))
    with torch.inference_mode(), counted() as calls:
        train(ours)
    assert calls == {"train": 3}
    assert_bitwise(snapshot(ours), snapshot(other))
    assert train(ours, 1)(data(SHAPE, 4).requires_grad_()).requires_grad


def test_a_layer_made_in_inference_mode_records_on_torch_operations():
    with torch.inference_mode():
        layer = layer_for(SHAPE)
        with counted() as calls:
            train(layer)
    assert not calls["train"]
    assert_near(snapshot(layer), snapshot(train(layer_for(SHAPE))), 1e-5)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_torchs_default_device_is_not_where_the_kernels_write(device):
    x, gradient = data(SHAPE, 0), data(SHAPE, 1)
    layer, other = layer_for(SHAPE), layer_for(SHAPE)
    with torch.device(device):
        found = step(layer, x, gradient)
    assert_near(found, step(other, x, gradient), 0.0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(4, 3, 5, 6), (4, 1, 5, 6), (4, 3, 1, 1), (1, 3, 5, 6), (2, 3, 4, 3, 5)], ids=str)
def test_the_output_is_laid_out_as_batch_norms(shape, layout):
    """The stride of a dimension of one entry means nothing."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        x = LAYOUTS[layout](data(shape, 0, dtype)).requires_grad_()
        layer = layer_for(shape, dtype)
        plain = LAYERS[len(shape)][1](shape[1], dtype=layer.weight.dtype)
        ours, torchs = layer(x), plain(x)
        for size, mine, theirs in zip(shape, ours.stride(), torchs.stride(), strict=True):
            assert size == 1 or mine == theirs, (x.stride(), dtype)
        assert ours.dtype == torchs.dtype


def test_several_python_threads_each_get_what_they_get_alone():
    shapes = [(8, 3, 64, 64), (4, 16, 40, 33), (64, 700), (2, 65, 24, 24)]

    def work(index, results):
        shape = shapes[index % len(shapes)]
        layer = layer_for(shape, memory_size=3)
        for seed in range(12):
            x = LAYOUTS["channels last" if seed % 2 else "contiguous"](data(shape, seed))
            found = step(layer, x, x, activation="relu", residual=x)
        results[index] = {**found, **layer.state_dict()}

    alone, together = {}, {}
    for index in range(len(shapes)):
        work(index, alone)
    running = [threading.Thread(target=work, args=(index, together)) for index in range(2 * len(shapes))]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    for index in range(2 * len(shapes)):
        assert_bitwise(together[index], alone[index % len(shapes)])


@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
def test_a_graph_keeps_no_more_than_batch_norms_and_the_memory(layout):
    x = LAYOUTS[layout](data((8, 16, 12, 12), 0)).requires_grad_()
    sizes = []
    for layer in (layer_for(x.shape), torch.nn.BatchNorm2d(16)):
        layer(x.detach())
        y = layer(x)
        kept = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in saved(y.grad_fn)}
        sizes.append(sum(kept.values()))
    memory = sum(layer_for(x.shape).get_buffer(name).nbytes for name in MEMORY)
    assert x.nbytes < sizes[0] <= sizes[1] + memory
    assert sizes[0] < x.nbytes + 8 * 16 * 4


def saved(node):
    """The tensors that an autograd node holds."""
    if hasattr(node, "saved_tensors"):
        return [one for one in node.saved_tensors if one is not None]
    values = (getattr(node, name) for name in dir(node) if name.startswith("_saved_"))
    return [one for one in values if isinstance(one, torch.Tensor)]
