"""Accumulating gradients makes the step see 16 images, but batch norm still sees 2. With a memory it sees more.

python examples/gradient_accumulation.py
"""

import digits
import torch
from torch import nn
from torch.nn import functional as F

import memnorm

MICRO_BATCH, ACCUMULATE, EPOCHS = 2, 8, 2


def train(model: nn.Module, *, memory: bool) -> nn.Module:
    torch.manual_seed(0)
    loader = digits.loader(digits.data()[0], MICRO_BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = None
    if memory:
        memnorm.double_forward(model, optimizer)  # each micro-batch goes forward again after the step: 8 entries
        schedule = memnorm.StrengthSchedule(model, total_steps=EPOCHS * len(loader) // ACCUMULATE)
    batches = (batch for _ in range(EPOCHS) for batch in loader)
    for number, (images, labels) in enumerate(batches, 1):
        (F.cross_entropy(model(images), labels) / ACCUMULATE).backward()
        if number % ACCUMULATE == 0:
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step()  # once per optimizer step
    return model


def main() -> None:
    torch.manual_seed(0)
    plain, memorized = digits.network(), digits.network()
    memorized.load_state_dict(plain.state_dict())
    # An entry of the memory is a micro-batch of two images: a long memory, 1 / (1 - 0.97) ≈ 33 entries.
    memorized = memnorm.convert(memorized, memory_size=64, decay=0.97)
    test = digits.data()[1]
    print(
        f"micro-batches of {MICRO_BATCH}, {ACCUMULATE} to a step, {EPOCHS} epochs, one seed: no comparison to rely on"
    )
    print(f"BN    test error {digits.test_error(train(plain, memory=False), test):.1f} %")
    print(f"MBN-2 test error {digits.test_error(train(memorized, memory=True), test):.1f} %")


if __name__ == "__main__":
    main()
