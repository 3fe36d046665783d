"""Batch norm and memorized batch norm side by side: a small network, small batches, scikit-learn's handwritten digits.

The protocol is fixed here and no arm is tuned: the same initial weights, batches and schedule for each arm of a seed.
What comes out is printed as it is; `--record FILE` also writes it down, with machine and versions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import memnorm

ARMS = {"BN": "plain batch norm", "MBN-1": "memory only", "MBN-2": "memory and Double-Forward"}
BATCH_SIZE, STEPS, LEARNING_RATE, SEEDS = 4, 600, 0.1, 5
PROTOCOL = f"digits, batch size {BATCH_SIZE}, {STEPS} steps, learning rate {LEARNING_RATE}, {SEEDS} seeds"


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for channels_in, channels_out, stride in ((1, 16, 1), (16, 32, 2), (32, 32, 1)):
        layers += [
            nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1,297 images to train on and 500 to test on, in a fixed random order."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images, labels = (
        torch.tensor(data.images, dtype=torch.float32)[order].unsqueeze(1) / 16,
        torch.tensor(data.target)[order],
    )
    return images[500:], labels[500:], images[:500], labels[:500]


def test_error(arm: str, seed: int, data: tuple[Tensor, Tensor, Tensor, Tensor]) -> float:
    """Train one network and return its error on the test images in percent."""
    train_x, train_y, test_x, test_y = data
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9, weight_decay=1e-4)
    learning_rate = torch.optim.lr_scheduler.MultiStepLR(optimizer, [int(0.4 * STEPS), int(0.6 * STEPS)])
    strength = None
    if arm != "BN":
        model = memnorm.convert(model)
        strength = memnorm.StrengthSchedule(model, STEPS)
    if arm == "MBN-2":
        memnorm.double_forward(model, optimizer)
    batches = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        chosen = torch.randint(len(train_y), (BATCH_SIZE,), generator=batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(train_x[chosen]), train_y[chosen]).backward()
        optimizer.step()
        learning_rate.step()
        if strength is not None:
            strength.step()
    model.eval()
    with torch.no_grad():
        return 100 * (model(test_x).argmax(1) != test_y).double().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, help="write the result to this JSON file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the network is too small for more
    print(f"{PROTOCOL}; test error in percent", flush=True)
    data = digits()
    errors: dict[str, list[float]] = {arm: [] for arm in ARMS}
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for seed in range(SEEDS):
        for arm in ARMS:
            start = time.perf_counter()
            errors[arm].append(round(test_error(arm, seed, data), 2))
            seconds[arm].append(round(time.perf_counter() - start, 3))
        print(f"seed {seed}: " + ", ".join(f"{arm} {errors[arm][-1]:.1f}" for arm in ARMS), flush=True)
    print(f"\n{'':7}{'mean ± sd':>14}   {'time per run':>12}")
    for arm, what in ARMS.items():
        spread = f"{statistics.mean(errors[arm]):.2f} ± {statistics.stdev(errors[arm]):.2f}"
        print(f"{arm:7}{spread:>14}   {statistics.median(seconds[arm]):10.1f} s   {what}")
    print("\nA small data set and few seeds: differences within the spread are no differences.")
    if arguments.record:
        record = {"protocol": PROTOCOL, "error_percent": errors, "seconds": seconds, **environment()}
        arguments.record.write_text(json.dumps(record, indent=1) + "\n")


def environment() -> dict[str, str]:
    """Where a record comes from."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, 1 thread",
    }


if __name__ == "__main__":
    main()
