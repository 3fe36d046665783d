"""Fine-tuning a network pretrained with BN, two images at a time.

It is pretrained here, at batch size 64, on digits as they are; the new task is a few hundred digits upside down.

python examples/finetune_pretrained.py
"""

import copy

import digits
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import memnorm


def train(model: nn.Module, images: TensorDataset, *, batch_size: int, epochs: int, lr: float) -> None:
    torch.manual_seed(1)
    loader = digits.loader(images, batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


def freeze_statistics(model: nn.Module) -> None:
    """What people do today: batch norms stay in eval mode, with the statistics of the old data."""
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eval()
            layer.train = lambda mode=True, layer=layer: layer  # type: ignore[method-assign]


def upside_down(images: TensorDataset, count: int) -> TensorDataset:
    x, y = images.tensors
    return TensorDataset(x[:count].flip(2), y[:count])


def main() -> None:
    torch.manual_seed(0)
    train_images, test_images = digits.data()
    pretrained = digits.network()
    train(pretrained, train_images, batch_size=64, epochs=8, lr=0.1)
    print(f"pretrained: test error {digits.test_error(pretrained, test_images):.1f} % on its own task")

    few, test = upside_down(train_images, 300), upside_down(test_images, 500)
    plain, frozen, two_way = (copy.deepcopy(pretrained) for _ in range(3))
    freeze_statistics(frozen)
    memnorm.convert(two_way, "two_way")  # the pretrained statistics are the first memory
    print("fine-tuned at batch size 2, one seed: no proof")
    for name, model in (("BN", plain), ("frozen BN", frozen), ("two-way", two_way)):
        train(model, few, batch_size=2, epochs=3, lr=0.005)
        print(f"{name:9} test error {digits.test_error(model, test):.1f} %")


if __name__ == "__main__":
    main()
