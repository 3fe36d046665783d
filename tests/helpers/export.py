"""Networks in ONNX Runtime and in torchao's quantization."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from helpers.common import images
from helpers.optional import library
from torch import Tensor, nn
from torch.export import Dim

MANY = {0: Dim("images", min=1)}  # any number of images


def in_onnx_runtime(net: nn.Module, folder: Path) -> Callable[[Tensor], Tensor]:
    """A function that runs the network in ONNX Runtime."""
    for needed in ("onnx", "onnxscript"):
        library(needed)
    runtime = library("onnxruntime")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)  # of torch about itself
        torch.onnx.export(net, (images(4, seed=0),), folder / "net.onnx", dynamic_shapes=(MANY,), verbose=False)
    session = runtime.InferenceSession(folder / "net.onnx", providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


def quantized(net: nn.Module) -> Any:
    """pt2e quantization to 8 bits after training, calibrated on a few batches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, as it imports
        library("torchao")
        pt2e = library("torchao.quantization.pt2e.quantize_pt2e")
        x86 = library("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    observed = pt2e.prepare_pt2e(torch.export.export(net, (images(16, seed=0),)).module(), quantizer)
    for seed in range(4):
        observed(images(16, seed=seed))
    return pt2e.convert_pt2e(observed)


def assert_folded(narrow: Any) -> None:
    """Check that the network is quantized and computes no norm."""
    used = {str(node.target) for node in narrow.graph.nodes if node.op == "call_function"}
    assert "quantized_decomposed.dequantize_per_channel.default" in used
    assert not any("batch_norm" in name for name in used)
