"""The kernels against the paper's equations in float64: output, gradients and memory over trajectories."""

import pytest
import torch
from helpers.common import randn
from helpers.kernels import (
    LAYOUTS,
    assert_follows_reference,
    assert_near,
    counted,
    data,
    in_torch,
    layer_for,
    needs_kernels,
    step,
    threads,
)

from memnorm.kernels import cpu

pytestmark = needs_kernels
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPES = [(6, 5), (5, 4, 6), (4, 3, 5, 6), (2, 3, 4, 3, 5)]


def batches(shape, dtype, layout="contiguous", count=4):
    return [LAYOUTS[layout](data(shape, seed, dtype)) for seed in range(count)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_trajectory_longer_than_the_memory_is_the_references(dtype, shape):
    for layout in ("contiguous", "channels last"):
        with counted() as calls:
            assert_follows_reference(
                layer_for(shape, dtype, memory_size=3, strength=0.7), batches(shape, dtype, layout, 6)
            )
        assert calls == {"train": 6, "backward": 6}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_read_by_attributes_give_the_same_values(dtype, layout):
    """Old versions of torch have no table of functions that describes tensors."""

    def trajectory():
        layer = layer_for((4, 3, 5, 6), dtype, memory_size=2)
        steps = [step(layer, x, data(x.shape, 9, dtype)) for x in batches((4, 3, 5, 6), dtype, layout)]
        return [*steps, dict(layer.named_buffers())]

    with counted() as calls:
        expected = trajectory()
        cpu.introduce_torch(cpu.module(), None)
        try:
            found = trajectory()
        finally:
            cpu.introduce_torch(cpu.module(), cpu._EXCHANGE)
    assert calls == {"train": 8, "backward": 8}
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("memory_size", [1, 2, 20, None, 1000], ids=str)
@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_every_memory_size_is_the_references(memory_size, strength):
    shape = (4, 3, 5)
    layer = layer_for(shape, torch.float64, memory_size=memory_size, strength=strength, decay=0.8)
    assert_follows_reference(layer, batches(shape, torch.float64, count=23))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(4, 3, 5, 6), (2, 17, 7, 7)], ids=str)
def test_every_layout_of_the_input_and_of_the_gradient_is_the_references(layout, shape):
    for dtype in (torch.float64, torch.bfloat16):
        gradients = [LAYOUTS[layout](randn(*shape, seed=9 + index).to(dtype)) for index in range(2)]
        with counted() as calls:
            assert_follows_reference(layer_for(shape, dtype), batches(shape, dtype, layout, 2), gradients)
            assert_follows_reference(layer_for(shape, dtype), batches(shape, dtype, count=2), gradients)
            assert_follows_reference(layer_for(shape, dtype), batches(shape, dtype, layout, 2))
        assert calls == {"train": 6, "backward": 6}


ODD = [
    *[(3, c, 2, 2) for c in (1, 3, 17, 63, 64, 65, 1000)],
    *[(3, c) for c in (1, 3, 17, 63, 64, 65, 1000)],
    *[(3, 5, *size) for size in ((1, 1), (1, 2), (7, 7), (33, 65))],
    *[(1, c, 7, 7) for c in (1, 3, 65)],
    (1, 3, 33, 65),
    (1, 2, 2),
    (600, 3, 1, 2),  # images shared out to tiles
    (2, 3, 3, 7, 111),
]


@pytest.mark.parametrize("shape", ODD, ids=str)
def test_odd_sizes_are_the_references(shape):
    for layout in ("contiguous", "channels last"):
        assert_follows_reference(layer_for(shape, memory_size=2), batches(shape, torch.float32, layout, 2))


def test_a_sum_sends_back_an_expanded_gradient():
    shape = (4, 3, 5, 6)
    for layout in ("contiguous", "channels last"):
        for dtype in DTYPES:
            ones = [torch.ones((), dtype=dtype).expand(shape)] * 3
            assert_follows_reference(layer_for(shape, dtype, strength=1.0), batches(shape, dtype, layout, 3), ones)


@pytest.mark.parametrize("count", [2, 3, 16])
@pytest.mark.parametrize(
    "shape",
    [
        (7, 1, 100, 100),
        (40, 2, 30, 31),
        (5, 3, 70, 70),  # fewer images and channels than threads
        (1, 3, 150, 150),  # one image
        (8, 65, 13, 11),  # whole channels to a thread
        (3, 17, 40, 41),
        (70000, 1),
        (2, 40000),  # fewer rows than threads
    ],
    ids=str,
)
def test_any_number_of_threads_gives_the_result_of_one(shape, count):
    """However the work is shared out: by channels, images or rows, with more threads than work."""
    for dtype in (torch.float32, torch.bfloat16):
        for layout in ("contiguous", "channels last"):
            results = []
            for team in (1, count):
                layer = layer_for(shape, dtype, memory_size=2)
                x, residual = batches(shape, dtype, layout, 2)
                with threads(team):
                    found = step(layer, x, randn(*shape, seed=8).to(dtype))
                    more = step(layer, residual, x, activation="relu", residual=x)
                results.append({**found, **{f"second {name}": one for name, one in more.items()}, **layer.state_dict()})
            assert_near(results[1], results[0], 2**-8 if dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("options", [{"affine": False}, {"bias": False}], ids=str)
def test_layers_without_parameters_are_the_references(options):
    shape = (4, 3, 5, 6)
    for layout in ("contiguous", "channels last"):
        assert_follows_reference(layer_for(shape, **options), batches(shape, torch.float32, layout))


def test_a_frozen_weight_gets_no_gradient_and_the_others_the_references():
    layer = layer_for((4, 3, 5, 6))
    layer.weight.requires_grad_(False)
    with counted() as calls:
        assert_follows_reference(layer, batches((4, 3, 5, 6), torch.float32))
    assert calls["backward"] == 4
    assert layer.weight.grad is None


def test_without_a_gradient_for_the_input_the_parameters_get_theirs():
    layer, other = layer_for((4, 3, 5, 6)), layer_for((4, 3, 5, 6))
    x, gradient = batches((4, 3, 5, 6), torch.float32, count=2)
    layer(x).backward(gradient)
    wanted = step(other, x, gradient)
    torch.testing.assert_close(layer.weight.grad, wanted["weight"], rtol=0, atol=0)
    torch.testing.assert_close(layer.bias.grad, wanted["bias"], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_results_are_the_nearest_to_those_of_float32(dtype):
    """All but some that lie between two narrow numbers: a sum in another order may send these to the other one."""
    shape = (8, 5, 20, 20)
    for layout in ("contiguous", "channels last"):
        x, gradient = batches(shape, dtype, layout, 2)
        narrow, wide = step(layer_for(shape), x, gradient), step(layer_for(shape), x.float(), gradient.float())
        for name in ("x", "y"):
            assert (narrow[name] != wide[name].to(dtype)).double().mean() < 0.01, name


def test_bfloat16_parameters_get_bfloat16_gradients():
    shape = (4, 3, 5, 6)
    layer, wide = layer_for(shape).bfloat16(), layer_for(shape).bfloat16().float()
    x, gradient = batches(shape, torch.bfloat16, count=2)
    ours, wanted = step(layer, x, gradient), step(wide, x, gradient)
    assert {one.dtype for one in ours.values()} == {torch.bfloat16}
    assert_near(ours, wanted, 2**-8)


def test_gradients_of_gradients_are_those_of_torch_operations():
    def second(layer):
        x = data((3, 2, 4), 0, torch.float64).requires_grad_()
        layer(data((3, 2, 4), 1, torch.float64))
        first = torch.autograd.grad(layer(x).pow(3).sum(), [x, layer.weight], create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in first), [x, *layer.parameters()])

    with counted() as calls:
        ours = second(layer_for((3, 2, 4), torch.float64))
    assert calls["train"] == 2
    with in_torch():
        wanted = second(layer_for((3, 2, 4), torch.float64))
    torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9)


def test_gradients_and_their_gradients_match_finite_differences():
    layer = layer_for((3, 2, 2, 2), torch.float64)
    layer(data((3, 2, 2, 2), 1, torch.float64))
    layer.recording = False
    x = data((3, 2, 2, 2), 0, torch.float64).requires_grad_()
    residual = data((3, 2, 2, 2), 2, torch.float64).requires_grad_()
    parameters = (layer.weight, layer.bias)
    for options in ({}, {"activation": "relu"}, {"activation": "relu", "residual": residual}):

        def call(x, residual, weight, bias, options=options):
            return layer(x, **options)

        torch.autograd.gradcheck(call, (x, residual, *parameters))
        torch.autograd.gradgradcheck(call, (x, residual, *parameters))
