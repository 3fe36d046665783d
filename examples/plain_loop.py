"""The paper's method in a plain loop: digits at batch size 4, one epoch.

python examples/plain_loop.py
"""

import copy

import digits
import torch
from torch.nn import functional as F

import memnorm


def main() -> None:
    torch.manual_seed(0)
    train, test = digits.data()
    loader = digits.loader(train, batch_size=4)

    model = memnorm.convert(digits.network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    memnorm.double_forward(model, optimizer)
    schedule = memnorm.StrengthSchedule(model, total_steps=len(loader))
    for images, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        schedule.step()
    print(f"test error {digits.test_error(model, test):.1f} %")

    deploy = memnorm.to_batchnorm(copy.deepcopy(model)).eval()
    print("the same as plain batch norm:", torch.equal(deploy(test.tensors[0]), model.eval()(test.tensors[0])))


if __name__ == "__main__":
    main()
