"""A trained model on its way out: torch.fx, fusion, torch.export, ONNX, quantization, torch.jit."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from optional import library
from support import assert_same_state, images
from tooling import Layer, compute_on, double, resnet, trained
from torch import Tensor, fx, nn
from torch.export import Dim
from torch.nn.modules.batchnorm import _BatchNorm

import memnorm

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch about itself
    from torch.fx.experimental.optimization import fuse

MANY = {0: Dim("images", min=1)}  # any number of images


def evaluating(dtype: torch.dtype = double) -> nn.Module:
    return trained(resnet(dtype)).eval()


def other_images(dtype: torch.dtype = double) -> Tensor:
    """As many as no tool has seen."""
    return images(7, seed=99, dtype=dtype)


def norms(net: nn.Module) -> list[nn.Module]:
    return [module for module in net.modules() if isinstance(module, _BatchNorm)]


# torch.fx


def test_a_residual_network_made_plain_again_evaluates_the_same():
    net, x = evaluating(), other_images()
    plain = memnorm.to_batchnorm(copy.deepcopy(net))
    assert {type(layer) for layer in norms(plain)} == {nn.BatchNorm2d}
    torch.testing.assert_close(plain(x), net(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("which", ["kernels", "torch"])
def test_a_traced_residual_network_trains_as_it_does_untraced(which, monkeypatch):
    compute_on(which, monkeypatch)
    net = resnet()
    traced = fx.symbolic_trace(copy.deepcopy(net))
    trained(net)
    trained(traced)
    assert_same_state(traced, net, atol=1e-12)


def test_a_traced_residual_network_can_be_made_plain_again():
    net, x = evaluating(), other_images()
    plain = memnorm.to_batchnorm(fx.symbolic_trace(copy.deepcopy(net)))
    assert {type(layer) for layer in norms(plain)} == {nn.BatchNorm2d}
    torch.testing.assert_close(plain(x), net(x), rtol=0, atol=1e-12)


def test_a_traced_network_saved_as_a_whole_trains_on_alike(tmp_path):
    net = trained(resnet())
    torch.save(fx.symbolic_trace(copy.deepcopy(net)), tmp_path / "traced.pt")
    loaded = torch.load(tmp_path / "traced.pt", weights_only=False)
    assert_same_state(trained(loaded), trained(net), atol=1e-12)


@pytest.mark.parametrize("first", ["plain", "traced"])
def test_fusion_leaves_no_norm_in_a_network_made_plain(first):
    net, x = evaluating(), other_images()
    traced = fx.symbolic_trace(copy.deepcopy(net)) if first == "traced" else copy.deepcopy(net)
    fused = fuse(memnorm.to_batchnorm(traced))
    assert norms(fused) == []
    torch.testing.assert_close(fused(x), net(x), rtol=0, atol=1e-12)


def test_fusion_of_a_converted_network_changes_nothing():
    """It knows torch's classes alone: memorized layers stay, and the outputs are right."""
    net, x = evaluating(), other_images()
    fused = fuse(copy.deepcopy(net))
    assert len(norms(fused)) == len(norms(net)) == 7
    torch.testing.assert_close(fused(x), net(x), rtol=0, atol=0)


# torch.export


def test_an_exported_network_evaluates_the_same_on_any_number_of_images():
    net = evaluating()
    program = torch.export.export(net, (images(4, seed=0, dtype=double),), dynamic_shapes=(MANY,))
    assert not program.graph_signature.buffers_to_mutate
    for x in (other_images(), images(1, seed=3, dtype=double)):
        torch.testing.assert_close(program.module()(x), net(x), rtol=0, atol=1e-12)


def test_an_exported_network_needs_nothing_of_memnorm(tmp_path):
    """Its operations are torch's own: the batch norm of eval mode is one of them."""
    net, x = evaluating(), other_images()
    program = torch.export.export(net, (x,))
    used = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert "aten.batch_norm.default" in used
    assert {name.split(".")[0] for name in used} == {"aten"}
    torch.export.save(program, tmp_path / "net.pt2")
    torch.testing.assert_close(torch.export.load(tmp_path / "net.pt2").module()(x), net(x), rtol=0, atol=1e-12)


def test_an_exported_training_forward_records_as_the_layer_does():
    net = nn.Sequential(Layer(3, memory_size=2, dtype=double))
    example = (images(4, seed=0, dtype=double),)
    exported = torch.export.export(copy.deepcopy(net), example).module()
    for seed in range(4):
        x = images(4, seed=seed, dtype=double)
        torch.testing.assert_close(exported(x), net(x), rtol=0, atol=1e-12)
    for name, value in net.named_buffers():
        torch.testing.assert_close(exported.get_buffer(name), value, rtol=0, atol=1e-12, msg=lambda m, n=name: n + m)


# torch.jit


@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning")
def test_a_jit_trace_of_a_residual_network_evaluates_the_same_on_another_number_of_images(tmp_path):
    net = evaluating()
    torch.jit.trace(net, images(4, seed=0, dtype=double)).save(tmp_path / "net.pt")
    loaded = torch.jit.load(tmp_path / "net.pt")
    x = other_images()
    torch.testing.assert_close(loaded(x), net(x), rtol=0, atol=1e-12)


# ONNX


@pytest.fixture(scope="module")
def onnxruntime() -> Any:
    for name in ("onnx", "onnxscript"):
        library(name)
    return library("onnxruntime")


@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True], ids=["converted", "made plain"])
@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")
def test_onnx_runtime_computes_what_the_network_does_on_any_number_of_images(onnxruntime, plain, tmp_path):
    net = evaluating(torch.float32)
    exported = memnorm.to_batchnorm(copy.deepcopy(net)) if plain else net
    example = (images(4, seed=0),)
    torch.onnx.export(exported, example, tmp_path / "net.onnx", dynamic_shapes=(MANY,), verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    for x in (other_images(torch.float32), images(1, seed=3)):
        (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(y), net(x).detach(), rtol=0, atol=1e-5)


# Quantization


@pytest.fixture(scope="module")
def torchao() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, as it imports
        library("torchao")
        library("torchao.quantization.pt2e.quantize_pt2e")
        return library("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")


def quantized(net: nn.Module, torchao: Any) -> Any:
    """pt2e quantization to 8 bits after training, calibrated on a few batches."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    quantizer = torchao.X86InductorQuantizer()
    quantizer.set_global(torchao.get_default_x86_inductor_quantization_config())
    observed = prepare_pt2e(torch.export.export(net, (images(16, seed=0),)).module(), quantizer)
    for seed in range(4):
        observed(images(16, seed=seed))
    return convert_pt2e(observed)


@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True], ids=["converted", "made plain"])
def test_quantization_folds_every_norm_and_stays_near_the_network(torchao, plain):
    """As near as the same weights in a network that never had a memory; and no norm is left to be computed."""
    net = evaluating(torch.float32)
    made_plain = memnorm.to_batchnorm(copy.deepcopy(net))
    narrow = quantized(made_plain if plain else copy.deepcopy(net), torchao)
    used = {str(node.target) for node in narrow.graph.nodes if node.op == "call_function"}
    assert "quantized_decomposed.dequantize_per_channel.default" in used
    assert not any("batch_norm" in name for name in used)
    twin = memnorm.to_batchnorm(resnet(torch.float32)).eval()
    twin.load_state_dict(made_plain.state_dict())
    x = images(16, seed=9)
    with torch.no_grad():
        torch.testing.assert_close(narrow(x), quantized(twin, torchao)(x), rtol=0, atol=0)
        assert (narrow(x) - net(x)).std() < 0.1 * net(x).std()
