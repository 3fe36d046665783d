"""How fast this machine is: the work that a network asks for, and what a unit of it costs here, timed once.

Work is counted on tensors without data. Its prices are those that explain the steps of two small networks, and what a
norm adds is what the steps of the smaller take beyond batch norm's; one that is cheaper is taken to cost as much.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from memnorm.errors import MemnormError
from memnorm.lab.data import EVALUATION_BATCH
from memnorm.lab.errors import LabError
from memnorm.lab.spec import RunSpec

if TYPE_CHECKING:
    from torch import nn

CLASSES, SHAPE = 10, (3, 32, 32)  # of what is timed
FORWARD = 1 / 3  # of a training step
LEAST_STEP = 1e-4  # seconds; a noisy calibration must not promise less
SMALL, LARGE = 2, 8  # batch sizes of the calibration
REPEATS, PATIENCE = 3, 0.5  # times a step is timed at most; seconds after which once is enough


@dataclass(frozen=True)
class Work:
    """One forward of one image."""

    calls: int
    flops: int
    elements: int
    norms: int
    norm_elements: int
    parameters: int


class Extra(NamedTuple):
    """Seconds that a norm adds to batch norm's, per layer and per element it normalises."""

    layer: float = 0.0
    element: float = 0.0

    def of(self, work: Work, batch: int) -> float:
        return work.norms * self.layer + batch * work.norm_elements * self.element


class Arm(NamedTuple):
    """What an arm adds: in its step with one forward, and in the second forward beyond what a plain one takes."""

    step: Extra = Extra()
    second: Extra = Extra()


PLAIN = Arm()


@dataclass(frozen=True)
class Speed:
    """Seconds per unit of work."""

    call: float
    flop: float
    element: float
    parameter: float

    def pass_and_back(self, work: Work, batch: int) -> float:
        return work.calls * self.call + batch * (work.flops * self.flop + work.elements * self.element)

    def step(self, work: Work, batch: int, arm: Arm = PLAIN, second: float = 0.0) -> float:
        """`second`: part of the batch that goes through a second forward, on average over steps."""
        seconds = self.pass_and_back(work, batch) + work.parameters * self.parameter + arm.step.of(work, batch)
        again = FORWARD * self.pass_and_back(work, batch) + arm.second.of(work, batch)
        return max(seconds + second * again, LEAST_STEP)

    def evaluation(self, work: Work, images: int) -> float:
        batches = -(-images // EVALUATION_BATCH)
        return FORWARD * self.pass_and_back(work, images) + FORWARD * (batches - 1) * work.calls * self.call


@functools.cache
def work_of(model: str, options: str, classes: int, shape: tuple[int, int, int]) -> Work | None:
    """None for a model that cannot be counted: an estimate is no reason to fail."""
    import torch

    from memnorm.lab import models

    with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]):
        with torch.device("meta"):
            network = models.build(model, classes=classes, image_shape=shape, **json.loads(options))
        return count(network, shape)
    return None


def count(network: nn.Module, shape: tuple[int, int, int]) -> Work:
    """The work of one forward of one image through a network on the meta device."""
    import torch
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.utils.flop_counter import FlopCounterMode

    tally = {"calls": 0, "elements": 0, "norms": 0, "norm_elements": 0}

    def add(layer: nn.Module, inputs: Any, output: Any) -> None:
        size = output.numel() if isinstance(output, torch.Tensor) else 0
        tally["calls"] += 1
        tally["elements"] += size
        if isinstance(layer, _BatchNorm):
            tally["norms"] += 1
            tally["norm_elements"] += size

    handles = [one.register_forward_hook(add) for one in network.modules() if not any(one.children())]
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        network.eval()(torch.empty(1, *shape, device="meta"))
    for handle in handles:
        handle.remove()
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return Work(flops=counter.get_total_flops(), parameters=parameters, **tally)


@functools.cache
def calibrate(threads: int = 0, device: str = "cpu") -> Speed:
    """Time a few steps of ResNet-20 and VGG-16 on random images: some seconds, once per process."""
    small, wide = (work_of(model, "{}", CLASSES, SHAPE) for model in ("resnet20", "vgg16"))
    assert small is not None
    assert wide is not None
    with _measuring(threads):
        parameter = _update_time(device)
        times = [_step_time(RunSpec(model="resnet20", batch_size=batch), device) for batch in (SMALL, LARGE)]
        of_wide = _step_time(RunSpec(model="vgg16", batch_size=LARGE), device)
    return _solved(small, wide, times, of_wide, parameter)


def _solved(small: Work, wide: Work, times: Sequence[float], of_wide: float, parameter: float) -> Speed:
    """The prices that explain the times exactly, or, if noise makes one negative, as well as can be without it."""
    bn = [seconds - small.parameters * parameter for seconds in times]
    per_image, rest = _line(bn)
    call = rest / small.calls
    wide_image = max(of_wide - wide.parameters * parameter - wide.calls * call, 0.0) / LARGE
    determinant = small.flops * wide.elements - wide.flops * small.elements
    flop = (per_image * wide.elements - wide_image * small.elements) / determinant
    element = (small.flops * wide_image - wide.flops * per_image) / determinant
    if min(flop, element) < 0:
        flop, element = (per_image + wide_image) / (small.flops + wide.flops), 0.0
    return Speed(call, flop, element, parameter)


@functools.cache
def added(norm: str, options: str, scheme: str, threads: int = 0, device: str = "cpu") -> Arm:
    """What this norm adds to batch norm, by a few steps of ResNet-20; nothing if ResNet-20 cannot be trained with it.

    Args:
        options: of the norm, as JSON.
    """
    run = RunSpec(model="resnet20", norm=norm, norm_options=json.loads(options))
    speed, work = calibrate(threads, device), work_of(run.model, "{}", CLASSES, SHAPE)
    assert work is not None
    arm, plain = PLAIN, [speed.step(work, batch) for batch in (SMALL, LARGE)]
    with contextlib.suppress(MemnormError), _measuring(threads):
        once = plain if norm == "bn" else [_step_time(run.but(batch_size=batch), device) for batch in (SMALL, LARGE)]
        arm = Arm(_extra(work, once, plain))
        if scheme == "double":
            forward = [FORWARD * speed.pass_and_back(work, batch) for batch in (SMALL, LARGE)]
            twice = [_step_time(run.but(batch_size=batch, scheme="double"), device) for batch in (SMALL, LARGE)]
            second = [both - one for both, one in zip(twice, once, strict=True)]
            arm = arm._replace(second=_extra(work, second, forward))
    return arm


def _extra(work: Work, seconds: Sequence[float], plain: Sequence[float]) -> Extra:
    per_image, rest = _line([one - other for one, other in zip(seconds, plain, strict=True)])
    return Extra(rest / work.norms, per_image / work.norm_elements)


def _line(seconds: Sequence[float]) -> tuple[float, float]:
    """Seconds per image, and those that come whatever the batch, from the times of both batches; neither negative."""
    per_image = max((seconds[1] - seconds[0]) / (LARGE - SMALL), 0.0)
    return per_image, max(seconds[0] - SMALL * per_image, 0.0)


@contextlib.contextmanager
def _measuring(threads: int) -> Iterator[None]:
    """With so many threads; what is random elsewhere stays as it was."""
    import torch

    with _threads(threads), torch.random.fork_rng(devices=[]):
        yield


@contextlib.contextmanager
def _threads(wanted: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    try:
        if wanted:
            torch.set_num_threads(wanted)
        yield
    finally:
        torch.set_num_threads(before)


def _step_time(spec: RunSpec, device: str) -> float:
    """Seconds of a training step as the lab takes it, on noise images of CIFAR's size."""
    import torch

    from memnorm.lab.training import Training

    training = Training(spec.but(learning_rate=1e-3), CLASSES, SHAPE, device)  # low: what diverges is not a step
    pixels, labels = torch.randn(spec.batch_size, *SHAPE), torch.arange(spec.batch_size) % CLASSES

    def step() -> None:
        if not training.step(0, pixels, labels):
            raise LabError(f"{spec.arm} diverges at once")  # and is no step, without a backward

    return _fastest(step, device)


def _update_time(device: str) -> float:
    """Seconds per parameter of an update by SGD, its gradient in fresh memory: too much for the caches."""
    import torch

    weights = torch.zeros(2**23, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weights], 0.1, momentum=0.9, weight_decay=1e-4)

    def update() -> None:
        weights.grad = torch.zeros_like(weights).add_(1)
        optimizer.step()
        optimizer.zero_grad()

    return _fastest(update, device) / weights.numel()


def _fastest(action: Callable[[], object], device: str) -> float:
    """Seconds of the fastest of a few; the first does not count, because it allocates."""
    import torch

    times: list[float] = []
    while len(times) < 2 or (len(times) <= REPEATS and sum(times) < PATIENCE):
        start = time.perf_counter()
        action()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])
