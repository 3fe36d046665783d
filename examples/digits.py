"""What the examples on digits share: 8×8 images of scikit-learn's digits, a small network, the error on test images."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def data() -> tuple[TensorDataset, TensorDataset]:
    """1,297 images to train with and 500 to test with."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, targets = images[order], torch.tensor(labels)[order]
    return TensorDataset(images[500:], targets[500:]), TensorDataset(images[:500], targets[:500])


def loader(images: TensorDataset, batch_size: int) -> DataLoader:
    return DataLoader(images, batch_size, shuffle=True, drop_last=True)


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


@torch.no_grad()
def test_error(model: nn.Module, test: TensorDataset) -> float:
    """Per cent of test images that get another label."""
    model.eval()
    images, labels = test.tensors
    wrong: Tensor = model(images).argmax(1) != labels
    model.train()
    return 100 * wrong.float().mean().item()
