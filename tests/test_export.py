"""Deployment of a trained model: torch.fx, fusion, torch.export, ONNX, quantization, torch.jit."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from helpers.common import assert_same_state, images
from helpers.export import assert_folded, quantized
from helpers.torch_tools import Layer, compute_on, double, resnet, trained
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

import memnorm

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of torch about itself
    from torch.fx.experimental.optimization import fuse


def evaluating(dtype: torch.dtype = double) -> nn.Module:
    return trained(resnet(dtype)).eval()


def other_images(dtype: torch.dtype = double) -> Tensor:
    """A batch of another size than that of the export."""
    return images(7, seed=99, dtype=dtype)


def norms(net: nn.Module) -> list[nn.Module]:
    return [module for module in net.modules() if isinstance(module, _BatchNorm)]


# torch.fx


@pytest.mark.parametrize("which", ["kernels", "torch"])
def test_a_traced_residual_network_trains_as_it_does_untraced(which, monkeypatch):
    compute_on(which, monkeypatch)
    net = resnet()
    traced = fx.symbolic_trace(copy.deepcopy(net))
    trained(net)
    trained(traced)
    assert_same_state(traced, net, atol=1e-12)


@pytest.mark.parametrize("first", ["plain", "traced"])
def test_fusion_leaves_no_norm_in_a_network_made_plain(first):
    net, x = evaluating(), other_images()
    traced = fx.symbolic_trace(copy.deepcopy(net)) if first == "traced" else copy.deepcopy(net)
    fused = fuse(memnorm.to_batchnorm(traced))
    assert norms(fused) == []
    torch.testing.assert_close(fused(x), net(x), rtol=0, atol=1e-12)


def test_fusion_of_a_converted_network_changes_nothing():
    """Fusion knows torch's classes only, so memorized layers stay."""
    net, x = evaluating(), other_images()
    fused = fuse(copy.deepcopy(net))
    assert len(norms(fused)) == len(norms(net)) == 7
    torch.testing.assert_close(fused(x), net(x), rtol=0, atol=0)


# torch.export


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


# ONNX and quantization


@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True], ids=["converted", "made plain"])
def test_quantization_folds_every_norm_and_stays_near_the_network(plain):
    """The result equals that of the same weights in a plain network."""
    net = evaluating(torch.float32)
    made_plain = memnorm.to_batchnorm(copy.deepcopy(net))
    narrow = quantized(made_plain if plain else copy.deepcopy(net))
    assert_folded(narrow)
    twin = memnorm.to_batchnorm(resnet(torch.float32)).eval()
    twin.load_state_dict(made_plain.state_dict())
    x = images(16, seed=9)
    with torch.no_grad():
        torch.testing.assert_close(narrow(x), quantized(twin)(x), rtol=0, atol=0)
        assert (narrow(x) - net(x)).std() < 0.1 * net(x).std()
