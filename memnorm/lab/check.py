"""The layers on one device compared with the paper, literally, in float64 on the CPU.

Each check is a number: the largest difference from the reference, relative to the largest value that it is a difference
of. It passes if the number is at most what rounding explains. A check that raises is run again with torch's own batch
norm: if that raises as well, the device cannot do it and the check is skipped.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memnorm
from memnorm.errors import MemnormWarning
from memnorm.lab.errors import DeviceMissing, first_line
from memnorm.reference import ReferenceBatchNorm, ReferenceTwoWayBatchNorm, algorithm_1, memorized_moments

NORMS = ("mbn", "two_way")
ALLOWED = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # rounding is 6e-8, 5e-4 and 4e-3
EXACT = 1e-12  # in float64
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
BATCHES, SHAPE = 12, (4, 8, 6, 5)
STEPS, ACCUMULATED = 20, 2


@dataclass(frozen=True)
class Check:
    """What is computed, with which norm, and the largest error that passes. `measure(norm, device)` is the error."""

    what: str
    norm: str
    allowed: float
    measure: Callable[[str, torch.device], float]


@dataclass(frozen=True)
class Result:
    """The error of a check; nan and a `problem` if it raised."""

    what: str
    norm: str
    error: float
    allowed: float
    problem: str = ""
    skipped: bool = False

    @property
    def outcome(self) -> str:
        if self.skipped:
            return "skipped"
        return "passed" if self.error <= self.allowed else "FAILED"


def run(device: str, checks: Sequence[Check] | None = None) -> Iterator[Result]:
    """The results on `device`, one after the other.

    for result in run("cuda"):
        print(result.what, result.norm, result.outcome)
    """
    place = require(device)
    with warnings.catch_warnings(), torch.backends.cudnn.flags(torch.backends.cudnn.enabled, allow_tf32=False):
        warnings.simplefilter("ignore", MemnormWarning)
        for check in all_checks() if checks is None else checks:
            yield _result(check, place)


def require(device: str) -> torch.device:
    try:
        place = torch.device(device)
        float(torch.ones((), device=place))
    except (RuntimeError, AssertionError) as error:
        raise DeviceMissing(f"device {device!r} cannot be used here: {first_line(error)}") from error
    return place


def all_checks() -> list[Check]:
    layers = [
        Check(f"layer, {_name(dtype)}, {layout}", norm, allowed, partial(_layer_error, dtype=dtype, layout=layout))
        for dtype, allowed in ALLOWED.items()
        for layout in LAYOUTS
        for norm in NORMS
    ]
    compiled = [
        Check("layer, float32, compiled", norm, ALLOWED[torch.float32], partial(_layer_error, compiled=True))
        for norm in NORMS
    ]
    trained = [Check(f"training, {STEPS} steps, float32", norm, 1e-4, _training_error) for norm in NORMS]
    scaled = Check(
        f"training, {STEPS} steps, float16 autocast", "two_way", 0.05, partial(_training_error, autocast=torch.float16)
    )
    return [*layers, *compiled, *trained, scaled]


def exact_checks() -> list[Check]:
    """Checks in float64, in which only rounding is left: single layers, and Algorithm 1 on a network."""
    layers = [
        Check(f"layer, float64, {BATCHES} batches", norm, EXACT, partial(_layer_error, dtype=torch.float64))
        for norm in NORMS
    ]
    whole = [
        Check(f"Algorithm 1, {forwards}, {STEPS} steps", "mbn", EXACT, partial(_algorithm_1_error, double=double))
        for forwards, double in (("single forward", False), ("Double-Forward", True))
    ]
    return [*layers, *whole]


def _result(check: Check, device: torch.device) -> Result:
    try:
        error = check.measure(check.norm, device)
        return Result(check.what, check.norm, error, check.allowed)
    except Exception as problem:
        skipped = False
        try:
            check.measure("bn", device)
        except Exception:
            skipped = True
        words = f"{type(problem).__name__}: {first_line(problem)}"
        return Result(check.what, check.norm, math.nan, check.allowed, words, skipped)


def _layer_error(
    norm: str,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    layout: str = "contiguous",
    compiled: bool = False,
) -> float:
    """A layer against the reference: outputs, gradients and inference, over batches that drift.

    Parameters are float32 and data `dtype`, as under autocast, unless that is float64. Two batches make an update.
    """
    layer, paper = _layer_and_reference(norm)
    layer.to(device, torch.promote_types(dtype, torch.float32))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    module: Any = torch.compile(layer, fullgraph=True) if compiled else layer
    random, largest = torch.Generator().manual_seed(0), 0.0
    for number in range(BATCHES):
        data = _batch(number, random).to(dtype)
        probe = torch.randn(SHAPE, generator=random).to(dtype)
        ours = _output_and_gradients(module, _on(data, device, layout), _on(probe, device, layout))
        theirs = _output_and_gradients(paper, data.double(), probe.double())
        largest = max(largest, *map(_difference, ours, theirs))
        if number % ACCUMULATED:
            optimizer.step()
            getattr(paper, "update", lambda: None)()
    data = _batch(BATCHES, random).to(dtype)
    module.eval()
    inferred, (mean, var) = module(_on(data, device, layout)), _remembered(paper)
    expected = F.batch_norm(data.double(), mean, var, paper.weight, paper.bias, eps=paper.eps)
    return max(largest, _difference(inferred, expected))


def _layer_and_reference(norm: str) -> tuple[Any, Any]:
    channels = SHAPE[1]
    layer: Any
    paper: Any
    if norm == "two_way":
        layer, paper = memnorm.TwoWayBatchNorm2d(channels, warmup=0), ReferenceTwoWayBatchNorm(channels)
    else:
        layer = memnorm.MemorizedBatchNorm2d(channels, memory_size=4) if norm == "mbn" else nn.BatchNorm2d(channels)
        paper = ReferenceBatchNorm(channels, memory_size=4)
    with torch.no_grad():
        for one in (layer, paper):
            one.weight.copy_(torch.linspace(0.5, 2, channels))
            one.bias.copy_(torch.linspace(-1, 1, channels))
    return layer, paper


def _batch(number: int, random: torch.Generator) -> Tensor:
    scale = torch.arange(1.0, SHAPE[1] + 1).view(-1, 1, 1)
    return (torch.randn(SHAPE, generator=random) * (1 + number / 10) + number / 5 + 0.5) * scale


def _on(data: Tensor, device: torch.device, layout: str) -> Tensor:
    return data.to(device).contiguous(memory_format=LAYOUTS[layout])


def _output_and_gradients(module: Any, data: Tensor, probe: Tensor) -> list[Tensor]:
    x = data.detach().requires_grad_()
    y = module(x)
    return [y, *torch.autograd.grad(y, [x, *module.parameters()], probe)]


def _remembered(paper: Any) -> tuple[Tensor, Tensor]:
    """The moments of everything that the reference remembers."""
    if isinstance(paper, ReferenceBatchNorm):
        return paper.moments(None)
    batches = [batch for _, batch in paper.forwards]
    return memorized_moments(batches, [paper.alpha(update) for update, _ in paper.forwards])


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest value; inf if a value is not finite."""
    ours, theirs = ours.detach().cpu().double(), theirs.detach().cpu().double()
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    return difference if math.isfinite(difference) else math.inf


def _training_error(norm: str, device: torch.device, autocast: torch.dtype | None = None) -> float:
    """A short training on `device` against the same one in float64 on the CPU: every loss, and inference afterwards."""
    ours = _train(norm, device, torch.float32, autocast)
    theirs = _train(norm, torch.device("cpu"), torch.float64, None)
    return max(map(_difference, ours, theirs))


def _train(norm: str, device: torch.device, dtype: torch.dtype, autocast: torch.dtype | None) -> list[Tensor]:
    """The losses of a training with two micro-batches per step, and the outputs of the plain network made of it."""
    net = _network().to(device, dtype)
    if norm != "bn":
        options: dict[str, Any] = {"warmup": 0} if norm == "two_way" else {}
        memnorm.convert(net, norm, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**8, enabled=autocast is not None)
    random, losses = torch.Generator().manual_seed(1), []
    with contextlib.ExitStack() as attached:
        if norm == "mbn":
            attached.enter_context(memnorm.double_forward(net, optimizer, scaler=scaler))
        for _ in range(STEPS):
            for _ in range(ACCUMULATED):
                images, labels = _examples(random)
                with torch.autocast(device.type, autocast, enabled=autocast is not None):
                    loss = F.cross_entropy(net(images.to(device, dtype)), labels.to(device))
                scaler.scale(loss / ACCUMULATED).backward()
                losses.append(loss.detach())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    images = _examples(random)[0].to(device, dtype)
    plain = net if norm == "bn" else memnorm.to_batchnorm(net)
    return [torch.stack(losses), plain.eval()(images)]


def _algorithm_1_error(norm: str, device: torch.device, double: bool) -> float:
    """A training with an MBN layer against the paper's Algorithm 1: losses and final weights."""
    paper, ours = _network().double(), memnorm.convert(_network().double(), strength=0.1)
    paper[1], paper[4] = (ReferenceBatchNorm(channels, strength=0.1) for channels in (8, 16))
    random = torch.Generator().manual_seed(1)
    batches = [(images.double(), labels) for images, labels in (_examples(random) for _ in range(STEPS))]
    wanted = algorithm_1(paper, batches, F.cross_entropy, 0.05, double_forward=double)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.05)
    found = []
    with memnorm.double_forward(ours, optimizer) if double else contextlib.nullcontext():
        for images, labels in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(ours(images), labels)
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
    pairs = [(torch.stack(found), torch.tensor(wanted, dtype=torch.float64))]
    pairs += zip(ours.parameters(), paper.parameters(), strict=True)
    return max(_difference(*pair) for pair in pairs)


def _network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 16, 3, stride=2, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)),
        )


def _examples(random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Four noisy images whose class is the quarter that is bright."""
    labels = torch.randint(4, (4,), generator=random)
    images = torch.randn(4, 3, 8, 8, generator=random)
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = label // 2 * 4, label % 2 * 4
        image[:, row : row + 4, column : column + 4] += 1.5
    return images, labels


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
