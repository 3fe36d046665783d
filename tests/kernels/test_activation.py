"""relu(norm(x) + residual) in one pass is the same in three."""

import pytest
import torch
from helpers.common import randn
from helpers.kernels import LAYOUTS, assert_near, counted, data, in_torch, layer_for, needs_kernels, threads
from torch.nn import functional as F

pytestmark = needs_kernels
SHAPES = [(6, 5), (5, 4, 6), (4, 3, 5, 6), (2, 3, 4, 3, 5), (3, 65, 33, 2), (2, 17, 1, 1)]


def fused(layer, x, residual):
    return layer(x, activation="relu", residual=residual)


def unfused(layer, x, residual):
    y = layer(x)
    return F.relu(y if residual is None else y + residual)


def run(call, shape, dtype, layout, residual_layout, order=1):
    """Output, gradients of this order in everything, and the memory, after two batches."""
    layer = layer_for(shape, dtype)
    found = {}
    for seed in range(2):
        x = LAYOUTS[layout](data(shape, seed, dtype)).requires_grad_()
        residual = residual_layout and LAYOUTS[residual_layout](data(shape, seed + 7, dtype)).requires_grad_()
        wanted = [one for one in (x, residual, *layer.parameters()) if one is not None]
        y = call(layer, x, residual)
        gradients = torch.autograd.grad(y, wanted, randn(*shape, seed=3).to(dtype), create_graph=order == 2)
        if order == 2:
            total = sum(one.square().sum() for one in gradients)
            gradients = torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)
        found |= {f"{seed}, {index}": one.detach() for index, one in enumerate((y, *gradients))}
    return {**found, **layer.state_dict()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_gradients_and_memory_are_those_of_three_operations(shape, dtype):
    """In narrow dtypes the one pass rounds once, three operations twice; a value next to 0 may fall on either side."""
    narrow = dtype in (torch.bfloat16, torch.float16)
    for layout in ("contiguous", "channels last"):
        for residual_layout in (None, layout, "channels last"):
            with counted() as calls:
                ours = run(fused, shape, dtype, layout, residual_layout)
            assert calls == {"train": 2, "backward": 2}
            if narrow:
                wide = run(unfused, shape, torch.float32, layout, residual_layout)
                assert_near({"y": ours["0, 0"]}, {"y": wide["0, 0"]}, 2**-6)
            else:
                assert_near(ours, run(unfused, shape, dtype, layout, residual_layout), 1e-5)


@pytest.mark.parametrize("residual_layout", [None, "contiguous"])
def test_second_derivatives_are_those_of_three_operations(residual_layout):
    one, three = (run(call, (3, 2, 4), torch.float64, "contiguous", residual_layout, 2) for call in (fused, unfused))
    assert_near(one, three, 1e-10)


def test_a_residual_without_grad_is_added_and_gets_none():
    layer, other = layer_for((4, 3, 5, 6)), layer_for((4, 3, 5, 6))
    x, residual = data((4, 3, 5, 6), 0), data((4, 3, 5, 6), 1)
    fused(layer, x, residual).square().sum().backward()
    unfused(other, x, residual).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, other.weight.grad, rtol=1e-5, atol=1e-5)
    assert residual.grad is None


def test_only_the_residual_may_want_a_gradient():
    layer = layer_for((4, 3, 5, 6)).requires_grad_(False)
    x, residual = data((4, 3, 5, 6), 0), data((4, 3, 5, 6), 1).requires_grad_()
    y = fused(layer, x, residual)
    y.sum().backward()
    torch.testing.assert_close(residual.grad, (y > 0).float(), rtol=0, atol=0)


def test_the_input_may_be_its_own_residual():
    gradients = []
    for call in (fused, unfused):
        layer, x = layer_for((4, 3, 5, 6)), data((4, 3, 5, 6), 0).requires_grad_()
        call(layer, x, x).pow(2).sum().backward()
        gradients.append((x.grad, layer.weight.grad, layer.bias.grad))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "residual",
    [
        torch.ones(3, 1, 1),
        torch.ones(4, 3, 5, 6, dtype=torch.float64),
        torch.ones(4, 3, 5, 6, dtype=torch.bfloat16),
        torch.ones(4, 3, 5, 6).to_sparse(),
    ],
    ids=["broadcast", "wider", "narrower", "sparse"],
)
def test_a_residual_unlike_the_input_is_added_by_torch(residual):
    x = data((4, 3, 5, 6), 0)
    layer = layer_for(x.shape)
    torch.testing.assert_close(
        fused(layer, x, residual), unfused(layer_for(x.shape), x, residual), rtol=1e-6, atol=1e-6
    )


def test_a_negated_view_is_read_as_what_it_says():
    x, other = data((4, 3, 5, 6), 0).requires_grad_(), data((4, 3, 5, 6), 1)
    for call in (fused, lambda layer, x, residual: layer(x) + residual):
        results = []
        for flipped in (torch._neg_view(other), -other):
            y = call(layer_for(x.shape), x, flipped)
            results.append((y, *torch.autograd.grad(y, x, flipped)))
        torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
def test_what_is_not_a_number_passes_the_rectifier_as_torchs(layout):
    x = LAYOUTS[layout](data((4, 3, 5, 6), 0))
    residual = torch.zeros_like(x)
    residual[0, 0, 0, 0], residual[1, 1, 1, 1], residual[2, 2, 2, 2] = float("nan"), float("inf"), float("-inf")
    found = []
    for call in (fused, unfused):
        point, other = x.clone().requires_grad_(), residual.clone().requires_grad_()
        layer = layer_for(x.shape)
        y = call(layer, point, other)
        found.append((y, *torch.autograd.grad(y, [point, other, layer.weight], torch.ones_like(y))))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5, equal_nan=True)
    x[0, 0, 0, 0] = float("nan")
    outputs = [call(layer_for(x.shape), x, None) for call in (fused, unfused)]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_an_output_changed_before_backward_is_an_error():
    layer, x = layer_for((4, 3, 5, 6)), data((4, 3, 5, 6), 0).requires_grad_()
    y = fused(layer, x, None)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_several_threads_share_out_the_residual_too():
    shape = (5, 3, 70, 70)
    for layout in ("contiguous", "channels last"):
        results = []
        for team in (1, 2):
            with threads(team):
                results.append(run(fused, shape, torch.float32, layout, "contiguous"))
        assert_near(*results, 1e-5)


def test_torch_operations_give_the_same():
    ours = run(fused, (4, 3, 5, 6), torch.float64, "contiguous", "contiguous")
    with in_torch():
        assert_near(ours, run(fused, (4, 3, 5, 6), torch.float64, "contiguous", "contiguous"), 1e-10)
