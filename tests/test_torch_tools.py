"""Torch's own tools on memorized layers: averaging, fusion, tracing, torch.func."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.common import assert_same_state, images, labels, leaf, randn, randomize, small_net
from helpers.conversion import BatchNormAct2d
from helpers.torch_tools import Layer, compute_on, double, resnet
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn

import memnorm

no_jit_deprecations = pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning")


def norms(net: nn.Module) -> list[Any]:
    return [module for module in net.modules() if isinstance(module, _BatchNorm)]


def train_a_little(net: nn.Module, steps: int = 3) -> None:
    """Run a few training forwards, so that the statistics differ from the initial ones."""
    dtype = next(net.parameters()).dtype
    for step in range(steps):
        net(images(4, seed=500 + step, dtype=dtype) + 1)


def updated(sizes: list[int], **options: Any) -> tuple[nn.Module, nn.Module, list[Tensor]]:
    """A plain network and its memorized twin after update_bn over batches of these sizes, and the batches."""
    plain = small_net(dtype=double)
    train_a_little(plain)
    memorized = memnorm.convert(copy.deepcopy(plain), **options)
    train_a_little(memorized)
    batches = [images(size, seed=seed, dtype=double) for seed, size in enumerate(sizes)]
    for net in (plain, memorized):
        update_bn(batches, net)
    return plain, memorized, batches


@pytest.mark.parametrize("memory_size", [2, 20, None])
@pytest.mark.parametrize("sizes", [[6] * 5, [2, 9, 4, 1]], ids=["even", "uneven"])
def test_update_bn_gives_every_layer_the_moments_of_all_its_inputs_together(memory_size, sizes):
    plain, memorized, batches = updated(sizes, memory_size=memory_size)
    seen: list[list[Tensor]] = [[] for _ in norms(plain)]
    for layer, inputs in zip(norms(plain), seen, strict=True):
        layer.register_forward_pre_hook(lambda _module, args, inputs=inputs: inputs.append(args[0].detach()))
    plain.train()
    for batch in batches:
        plain(batch)
    for layer, inputs in zip(norms(memorized), seen, strict=True):
        var, mean = torch.var_mean(torch.cat(inputs), (0, 2, 3), correction=0)
        torch.testing.assert_close(layer.running_mean, mean, rtol=0, atol=1e-10)
        torch.testing.assert_close(layer.running_var, var, rtol=0, atol=1e-10)


def test_update_bn_ignores_the_initial_statistics_with_prior_from_init():
    _, memorized, batches = updated([2, 9, 4], prior_from_init=True)
    expected = memorized[0](torch.cat(batches)).mean((0, 2, 3))
    torch.testing.assert_close(memorized[1].running_mean, expected, rtol=0, atol=1e-10)


def test_update_bn_leaves_the_last_batches_in_the_memory():
    _, memorized, batches = updated([3, 4, 5], memory_size=2)
    pixels = memorized[0](batches[0])[0, 0].numel()
    assert memorized[1].memory_count.tolist() == [5 * pixels, 4 * pixels]


def traced(net: nn.Module) -> tuple[Any, set[str]]:
    """The traced module and the kinds of warnings that tracing gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = torch.jit.trace(net.eval(), images(4, seed=0))
    return module, {warning.category.__name__ for warning in caught}


def test_tracing_gives_no_warning_that_plain_batch_norm_does_not_give():
    assert traced(memnorm.convert(small_net()))[1] == traced(small_net())[1]


@pytest.mark.parametrize(
    ("plain", "kind"),
    [*((one, one) for one in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)), (nn.SyncBatchNorm, _BatchNorm)],
)
def test_a_memorized_layer_is_an_instance_of_torchs(plain, kind):
    assert isinstance(memnorm.convert(plain(3)), kind)


def functional(net: nn.Module, x: Tensor) -> Callable[..., Tensor]:
    target = labels(len(x), seed=3)

    def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(net, (parameters, buffers), (x,)), target)

    return loss


def split(net: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    parameters = {name: value.detach() for name, value in net.named_parameters()}
    return parameters, {name: value.clone() for name, value in net.named_buffers()}


def chain() -> nn.Module:
    return memnorm.convert(small_net(dtype=double), memory_size=3)


networks = pytest.mark.parametrize("build", [chain, resnet])


@networks
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_func_grad_with_state_passed_in_gives_autograds_gradients(build, training):
    net = build()
    train_a_little(net)
    net.train(training)
    x = images(4, seed=0, dtype=double)
    gradients = torch.func.grad(functional(net, x))(*split(net))
    F.cross_entropy(net(x), labels(4, seed=3)).backward()
    torch.testing.assert_close(gradients, {n: p.grad for n, p in net.named_parameters()}, rtol=0, atol=1e-10)


@networks
@pytest.mark.parametrize("transform", [torch.func.grad, lambda loss: loss], ids=["grad", "none"])
@pytest.mark.parametrize("which", ["kernels", "torch"])
def test_a_functional_call_records_into_the_buffers_passed_in_and_no_others(build, transform, which, monkeypatch):
    compute_on(which, monkeypatch)
    net = build()
    before = copy.deepcopy(net)
    parameters, buffers = split(net)
    given = dict(buffers)
    for seed in range(4):
        transform(functional(net, images(4, seed=seed, dtype=double)))(parameters, buffers)
    assert_same_state(net, before)
    assert all(buffers[name] is given[name] for name in given)
    for seed in range(4):
        net(images(4, seed=seed, dtype=double))
    torch.testing.assert_close(buffers, dict(net.named_buffers()), rtol=0, atol=1e-12)


def test_vmap_over_eval_is_a_loop_over_eval():
    layer = Layer(3, dtype=double)
    layer(leaf((6, 3, 4, 4), seed=1).detach())
    layer.eval()
    x = randn(5, 2, 3, 4, 4, seed=0)
    torch.testing.assert_close(torch.vmap(layer)(x), torch.stack([layer(one) for one in x]), rtol=0, atol=1e-12)


def test_vmap_over_training_that_records_nothing_is_a_loop_over_it():
    layer = remembering()
    x = randn(5, 2, 3, 4, 4, seed=0)
    with memnorm.recording(layer, False):
        torch.testing.assert_close(torch.vmap(layer)(x), torch.stack([layer(one) for one in x]), rtol=0, atol=1e-12)


def directional(tool: str, layer: Any, x: Tensor, direction: Tensor) -> Tensor:
    """The derivative of a training forward along a direction, by forward-mode AD."""
    if tool == "func.jvp":
        with memnorm.recording(layer, False):  # functorch forbids writing to captured buffers, as for plain batch norm
            return torch.func.jvp(layer, (x,), (direction,))[1]
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(layer(forward_ad.make_dual(x, direction))).tangent


def remembering() -> Any:
    layer = Layer(3, dtype=double)
    randomize(layer, seed=4)
    for seed in range(3):
        layer(leaf((6, 3, 4, 4), seed=seed).detach())
    return layer


@no_jit_deprecations
@pytest.mark.parametrize("tool", ["func.jvp", "forward_ad"])
def test_forward_mode_matches_finite_differences_in_training(tool):
    layer = remembering()
    x, direction, step = leaf((5, 3, 4, 4), seed=8).detach(), randn(5, 3, 4, 4, seed=9), 1e-5
    with memnorm.recording(layer, False):
        difference = (layer(x + step * direction) - layer(x - step * direction)) / (2 * step)
    torch.testing.assert_close(directional(tool, layer, x, direction), difference, rtol=0, atol=1e-8)


@no_jit_deprecations
def test_forward_mode_records_like_any_forward():
    layer, other = remembering(), remembering()
    x = leaf((5, 3, 4, 4), seed=8).detach()
    directional("forward_ad", layer, x, torch.ones_like(x))
    other(x)
    assert_same_state(layer, other, atol=1e-12)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, BatchNormAct2d], ids=["plain", "with activation"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_torch_fx_takes_a_memorized_layer_for_a_leaf(norm, training):
    net = memnorm.convert(small_net(norm)).train(training)
    traced = torch.fx.symbolic_trace(copy.deepcopy(net))
    for seed in range(3):
        x = images(4, seed=seed)
        torch.testing.assert_close(traced(x), net(x), rtol=0, atol=0)
    assert {node.target for node in traced.graph.nodes if node.op == "call_module"} >= {"1", "4"}
    for name, value in net.state_dict().items():
        assert torch.equal(traced.state_dict()[name], value), name
