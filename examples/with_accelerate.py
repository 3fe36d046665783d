"""MBN in a loop with Accelerate: convert before `prepare`, attach after it.

pip install ".[accelerate]"; python examples/with_accelerate.py
"""

import digits
import torch
from accelerate import Accelerator
from torch.nn import functional as F

import memnorm
from memnorm.integrations.accelerate import attach

ACCUMULATE = 2


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=ACCUMULATE)
    train, test = digits.data()
    loader = digits.loader(train, batch_size=4)
    model = memnorm.convert(digits.network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    attach(accelerator, model, optimizer, total_steps=len(loader) // ACCUMULATE)

    for images, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"test error {digits.test_error(accelerator.unwrap_model(model), test):.1f} %")


if __name__ == "__main__":
    main()
