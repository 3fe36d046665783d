"""Networks of the studies that are more than a norm in a built-in network: `study.networks:resnet8_centred`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import memnorm
from memnorm.functional import Moments
from memnorm.lab import models
from memnorm.norms.two_way import TwoWayBatchNorm2d

RUNS = "MEMNORM_STUDY_RUNS"  # the environment variable with the folder of the runs; child processes inherit it


def resnet8_centred(num_classes: int, in_channels: int, mode: Any = "gradients") -> nn.Module:
    """ResNet-8 with batch norm and centred gradients or weights."""
    network = models.build("resnet8", classes=num_classes, image_shape=(in_channels, 32, 32))
    memnorm.center(network, mode)
    return network


class ForwardMemory2d(TwoWayBatchNorm2d):
    """Two-way memory without its backward half: backward is the derivative of the forward, as in the paper."""

    def forward(self, input: Tensor, **_: Any) -> Tensor:
        return self._forward(input, None, None)

    def _train_on_kernels(self, *_: object) -> None:
        return None

    def _backward_memory(self, *_: object) -> None:  # type: ignore[override]
        return None


class BackwardMemory2d(TwoWayBatchNorm2d):
    """Two-way memory without its forward half: forward is plain batch norm."""

    def forward(self, input: Tensor, **_: Any) -> Tensor:
        return self._forward(input, None, None)

    def _train_on_kernels(self, *_: object) -> None:
        return None

    def _read(self, count: Tensor | float, at_once: bool = False) -> Moments:
        memory = super()._read(count, at_once)
        return Moments(memory.mean, memory.var, 0 * memory.weight)


HALVES = {"forward": ForwardMemory2d, "backward": BackwardMemory2d}


def resnet8_half(num_classes: int, in_channels: int, half: str, **options: Any) -> nn.Module:
    """ResNet-8 with the forward or the backward half of two-way memory; `options` are those of the norm."""
    network = models.build("resnet8", classes=num_classes, image_shape=(in_channels, 32, 32))
    memnorm.convert(network, "two_way", **options)
    for layer in network.modules():
        if isinstance(layer, TwoWayBatchNorm2d):
            layer.__class__ = HALVES[half]
    return network


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """Batch norm that stays in eval mode: its statistics are fixed, its affine map trains."""

    def train(self, _mode: bool = True) -> FrozenBatchNorm2d:
        return super().train(False)


def pretrained(num_classes: int, in_channels: int, network: str, run: str, frozen: bool = False) -> nn.Module:
    """A network with the weights that the run of this name has kept, and a fresh classifier."""
    path = Path(os.environ.get(RUNS, "runs")) / run / "weights.pt"
    model = models.build(network, classes=num_classes, image_shape=(in_channels, 32, 32))
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}: run the study in the folder in which its pretraining was run")
    fresh = {name: value for name, value in model.state_dict().items() if name.startswith("fc.")}
    model.load_state_dict({**torch.load(path, weights_only=True), **fresh})
    for layer in model.modules():
        if frozen and type(layer) is nn.BatchNorm2d:
            layer.__class__ = FrozenBatchNorm2d
            layer.eval()
    return model
