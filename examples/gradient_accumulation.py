"""Accumulation gives each update the gradient of 16 images, but batch norm still sees 2. Two-way memory sees them all.

python examples/gradient_accumulation.py
"""

import copy

import digits
import torch
from torch import nn
from torch.nn import functional as F

import memnorm

MICRO_BATCH, ACCUMULATE, EPOCHS = 2, 8, 4


def train(model: nn.Module) -> nn.Module:
    """The same loop for both norms."""
    torch.manual_seed(0)
    loader = digits.loader(digits.data()[0], MICRO_BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = (batch for _ in range(EPOCHS) for batch in loader)
    for number, (images, labels) in enumerate(batches, 1):
        (F.cross_entropy(model(images), labels) / ACCUMULATE).backward()
        if number % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


def main() -> None:
    torch.manual_seed(0)
    plain = digits.network()
    two_way = memnorm.convert(copy.deepcopy(plain), "two_way")  # the one line that changes
    test = digits.data()[1]
    print(f"micro-batches of {MICRO_BATCH}, {ACCUMULATE} per update, {EPOCHS} epochs, one seed: no proof")
    print(f"BN      test error {digits.test_error(train(plain), test):.1f} %")
    print(f"two-way test error {digits.test_error(train(two_way), test):.1f} %")


if __name__ == "__main__":
    main()
