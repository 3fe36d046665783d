"""Building: a wheel for every Python, an install without a compiler, and the kernels under sanitizers."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "memnorm/kernels"
pytestmark = pytest.mark.slow


def run(*command, cwd, **environment):
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "2", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def source(tmp_path):
    """The source as one would unpack it, with nothing built in it."""
    leave = shutil.ignore_patterns("*.so", "__pycache__", ".*", "build", "dist", "results", "*.egg-info")
    return shutil.copytree(ROOT, tmp_path / "source", ignore=leave)


def wheel(source, **environment):
    folder = source.parent / "wheels"
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder]
    run(sys.executable, "-m", "pip", "wheel", *options, source, cwd=source.parent, **environment)
    return next(folder.glob("*.whl"))


TRAINING = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import memnorm
from memnorm.kernels import cpu
layer = memnorm.MemorizedBatchNorm2d(3)
for _ in range(3):
    layer(torch.randn(4, 3, 5, 6)).pow(2).sum().backward()
assert memnorm.__file__.startswith(sys.argv[1]), memnorm.__file__
print(cpu.description(), int(layer.num_batches_tracked), sep="|")
"""


def train(built, **environment):
    """What a layer of the unpacked wheel is computed by, and how many batches it recorded."""
    site = built.parent / "site"
    with zipfile.ZipFile(built) as archive:
        archive.extractall(site)
    return run(sys.executable, "-c", TRAINING, site, cwd=built.parent, PYTHONPATH="", **environment).strip()


def test_a_wheel_holds_the_kernels_for_every_python(source):
    built = wheel(source)
    assert "-cp310-abi3-" in built.name
    with zipfile.ZipFile(built) as archive:
        assert "memnorm/kernels/_cpu.abi3.so" in archive.namelist()
    assert train(built) == "C++ kernels for the CPU|3"


def test_without_a_compiler_a_wheel_is_built_and_computes_with_torch_operations(source):
    built = wheel(source, CC="/bin/false", CXX="/bin/false")
    with zipfile.ZipFile(built) as archive:
        assert [name for name in archive.namelist() if name.endswith(".so")] == []
    assert train(built) == "torch operations: not built|3"


def test_a_wheel_holds_the_commit_it_was_built_from(source):
    def git(*words):
        return run("git", "-c", "user.name=x", "-c", "user.email=x", *words, cwd=source)

    def recorded():
        with zipfile.ZipFile(wheel(source, MEMNORM_KERNELS="off")) as archive:
            return archive.read("memnorm/lab/COMMIT").decode()

    git("init")
    git("add", ".")
    git("commit", "-m", "x")
    name = git("rev-parse", "HEAD")[:12]
    assert recorded() == f"{name}\n"
    shutil.rmtree(source / ".git")
    assert recorded() == "\n"


def test_a_source_distribution_holds_everything_the_kernels_are_built_from(source):
    code = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    name = run(sys.executable, "-c", code, source.parent, cwd=source).split()[-1]
    with tarfile.open(source.parent / name) as archive:
        held = {Path(member).name for member in archive.getnames() if "/memnorm/kernels/" in member}
    assert held >= {one.name for one in KERNELS.iterdir() if one.suffix in (".h", ".cpp", ".py")}


EXERCISE = """
import collections, itertools, sys
import torch
from torch import nn
sys.path.insert(0, sys.argv[1])
import memnorm
from memnorm.kernels import cpu
kernels = cpu.module()
assert kernels.__file__.startswith(sys.argv[1]), kernels.__file__
looks = collections.Counter()
def watched(name):
    function = getattr(kernels, name)
    def call(*arguments):
        found = function(*arguments)
        looks[name, found is not None] += 1
        return found
    setattr(kernels, name, call)
for name in ("check", "train", "backward"):
    watched(name)
layers = {2: memnorm.MemorizedBatchNorm1d, 3: memnorm.MemorizedBatchNorm1d, 4: memnorm.MemorizedBatchNorm2d,
          5: memnorm.MemorizedBatchNorm3d}
last = {4: torch.channels_last, 5: torch.channels_last_3d}
shapes = [(3, 1), (3, 65), (2, 1000), (1, 3, 7), (600, 3, 2), (2, 17, 1, 1), (1, 3, 33, 65), (5, 63, 3, 3),
          (9, 1, 100, 100), (40, 2, 30, 31), (1, 3, 150, 150), (2, 129, 17, 17), (70000, 1), (2, 40000),
          (2, 3, 3, 7, 111)]
kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
for shape, dtype, threads, size in itertools.product(shapes, kinds, (1, 2, 16), (1, 3, None)):
    torch.set_num_threads(threads)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    layer = layers[len(shape)](shape[1], dtype=wide, memory_size=size)
    for step in range(2):
        whole = torch.randn(torch.Size(shape).numel() + 1).to(dtype)
        x = whole[1:].view(shape).requires_grad_()
        y = x.contiguous(memory_format=last[len(shape)]) if step and len(shape) in last else x
        residual = torch.randn(shape).to(dtype).requires_grad_()
        for options in ({}, {"activation": "relu"}, {"activation": "relu", "residual": residual}):
            layer(y, **options).pow(2).sum().backward()
    assert layer.num_batches_tracked == 6
usual = looks["train", True], looks["backward", True]
assert min(usual) > 500 and looks["train", False] and looks["check", True], looks

# What each look must survive: parameters that go, change or are frozen, arguments of other kinds, a layer that dies.
def without(layer, weight, bias):
    layer.weight = layer.weight if weight else None
    layer.bias = layer.bias if bias else None
def cut(layer, size):
    for buffer in (layer.memory_mean, layer.memory_var, layer.memory_count):
        buffer.resize_(size, *buffer.shape[1:])
    layer.memory_size = size
changes = [lambda layer, w=w, b=b: without(layer, w, b) for w in (False, True) for b in (False, True)]
changes += [lambda layer, w=w, b=b: (layer.weight.requires_grad_(w), layer.bias.requires_grad_(b))
            for w in (False, True) for b in (False, True)]
changes += [lambda layer: setattr(layer, "weight", nn.Parameter(torch.ones(5))),
            lambda layer: layer.half(),
            lambda layer: layer.weight.data.resize_(2).resize_(5),
            lambda layer: cut(layer, 2),
            lambda layer: layer.running_mean.data.set_(torch.zeros(5)),
            lambda layer: delattr(layer, "weight")]
for change, grad, residual in itertools.product(changes, (False, True), (None, torch.randn(4, 5, 3, 3))):
    layer = memnorm.MemorizedBatchNorm2d(5, memory_size=3)
    for step in range(4):
        if step == 2:
            change(layer)
        x = torch.randn(4, 5, 3, 3, requires_grad=grad)
        try:
            y = layer(x, activation=residual is not None and "relu" or None, residual=residual)
        except AttributeError:  # without a weight
            continue
        if y.requires_grad:
            torch.autograd.backward(y, torch.randn(4, 5, 3, 3))
for arguments in ([None] * 6, [{}], [{"strength": 1}], [{name: 1 for name in layer._buffers}]):
    try:
        kernels.check(*arguments)
    except TypeError:
        pass
print("done")
"""


def library(name):
    return subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None or not Path(library("libasan.so")).is_absolute(),
    reason="needs g++ with AddressSanitizer",
)
def test_sanitizers_find_nothing_to_report(source):
    flags = ["-O1", "-g", "-std=c++17", "-fopenmp", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    include = f"-I{sysconfig.get_paths()['include']}"
    kernels = source / "memnorm/kernels"
    run(
        "g++", *flags, "-DMEMNORM_ONE_VERSION", "-shared", "-fPIC", include, "cpu.cpp", "-o", "_cpu.abi3.so",
        cwd=kernels,
    )  # fmt: skip
    out = run(
        sys.executable, "-c", EXERCISE, source, cwd=source.parent, PYTHONPATH="",
        LD_PRELOAD=library("libasan.so"), ASAN_OPTIONS="detect_leaks=0", UBSAN_OPTIONS="print_stacktrace=1",
    )  # fmt: skip
    assert out.strip() == "done"
