"""Tests that take long: many random trajectories, a fresh install, the demo."""

import os
import random
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch
from helpers.common import LAYERS, cpu_seconds, leaf, randn

from memnorm.reference import ReferenceBatchNorm

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", range(150))
def test_a_random_trajectory_equals_the_reference(seed):
    """Any options, any batches, strength and mode changing at any time, batches that are not finite in between."""
    draw = random.Random(seed)
    rank, channels = draw.choice([2, 3, 4, 5]), draw.choice([1, 2, 7])
    options = {
        "memory_size": draw.choice([1, 2, 3, 5, 8, None]),
        "decay": draw.choice([0.3, 0.9, 1.0]),
        "strength": draw.choice([0.0, 0.3, 1.0]),
        "eps": draw.choice([1e-5, 1e-3]),
    }
    fast = LAYERS[rank][0](channels, dtype=torch.float64, **options)
    slow = ReferenceBatchNorm(channels, **options)
    for step in range(25):
        if draw.random() < 0.2:
            slow.strength = draw.random()
            fast.set_strength(slow.strength)
        smallest = 1 if slow.memory and slow.strength else 2  # one value needs something to be merged with
        shape = (draw.randint(smallest, 6), channels, *(draw.randint(1, 4) for _ in range(rank - 2)))
        x = leaf(shape, seed=1000 * seed + step)
        broken = slow.memory and draw.random() < 0.1
        if broken:
            with torch.no_grad():
                x[0, 0] = float("nan")
            fast(x)
            continue
        mode, recording = draw.random() < 0.8, draw.random() < 0.8
        results = []
        for layer in (fast, slow):
            layer.train(mode)
            layer.recording = recording
            y = layer(x)
            gradients = torch.autograd.grad(y, [x, layer.weight, layer.bias], randn(*y.shape, seed=step))
            layer.train()
            layer.recording = True
            results.append((y, *gradients))
        torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-9)


@pytest.fixture(scope="module")
def fresh_environment(tmp_path_factory):
    """A virtual environment in which pip installed the source without a compiler. Torch is that of this environment."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv/bin/python"
    site = next((folder / "venv/lib").glob("python*")) / "site-packages"
    (site / "lent.pth").write_text(sysconfig.get_path("purelib"))
    environment = {**os.environ, "CC": "/bin/false", "CXX": "/bin/false"}
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", ROOT], check=True, env=environment, cwd=folder)
    return folder, python, site


def test_a_fresh_install_without_a_compiler_trains_and_comes_back(fresh_environment):
    folder, python, site = fresh_environment
    program = """
import torch, memnorm
print(memnorm.__file__)
model = memnorm.convert(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
memnorm.double_forward(model, optimizer)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(2, 3, 8, 8)).square().mean().backward()
    optimizer.step()
assert int(model[1].num_batches_tracked) == 3
assert type(memnorm.to_batchnorm(model)[1]) is torch.nn.BatchNorm2d
"""
    result = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True, cwd=folder)
    assert result.stdout.strip() == str(site / "memnorm/__init__.py")
    assert (site / "memnorm/py.typed").exists()


def test_the_demo_takes_less_than_two_minutes_and_prints_every_arm(tmp_path):
    before = cpu_seconds()
    command = [sys.executable, "-m", "memnorm.lab", "demo"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert all(f"{arm} " in result.stdout for arm in ("BN", "TWO-WAY", "MBN-2"))
    assert (tmp_path / "demo/report.html").exists()
    assert cpu_seconds() - before < 2 * 120  # on two CPU cores
