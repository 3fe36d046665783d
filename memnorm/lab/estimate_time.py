"""How long a run would take on this machine, before it is run.

A training step at batch n is taken to cost

    calls · a  +  n · (FLOPs · b  +  elements · c)  +  parameters · d  +  what the norm adds

with the model's layer calls, FLOPs and layer outputs of one image, counted on tensors without data, and a, b, c, d from
a few steps of two small networks, timed once. A forward is a third of the first two terms. The result is for telling
minutes from days: a third too much or too little is within its accuracy, and reading the data is left out. The time of
a stored step, where there is one, is better.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memnorm.lab.data import EVALUATION_BATCH
from memnorm.lab.spec import RunSpec

if TYPE_CHECKING:
    from torch import nn

    from memnorm.lab.store import StoredRun

FORWARD = 1 / 3  # of a training step
LEAST_STEP = 1e-4  # seconds; a noisy calibration must not promise less
SMALL, LARGE = 2, 8  # batch sizes of the calibration
REPEATS, PATIENCE = 3, 0.5  # times a step is timed at most; seconds after which once is enough


@dataclass(frozen=True)
class Images:
    """What a data set asks of a model, and how many images an evaluation takes."""

    classes: int
    shape: tuple[int, int, int]
    test: int


DATA = {
    "digits": Images(10, (1, 8, 8), 500),
    "cifar10": Images(10, (3, 32, 32), 10_000),
    "cifar100": Images(100, (3, 32, 32), 10_000),
    "fashion-mnist": Images(10, (1, 28, 28), 10_000),
    "imagenet": Images(1000, (3, 224, 224), 50_000),
    "synthetic": Images(10, (3, 32, 32), 256),
}


@dataclass(frozen=True)
class Work:
    """One forward of one image."""

    calls: int
    flops: int
    elements: int
    norms: int
    norm_elements: int
    parameters: int


@dataclass(frozen=True)
class Speed:
    """Seconds per unit of work. `extra`: by (norm, scheme), what it adds to BN per norm layer and per norm element."""

    call: float
    flop: float
    element: float
    parameter: float
    extra: Mapping[tuple[str, str], tuple[float, float]]

    def pass_and_back(self, work: Work, batch: int) -> float:
        return work.calls * self.call + batch * (work.flops * self.flop + work.elements * self.element)

    def step(self, work: Work, batch: int, norm: str, scheme: str, second: float = 1.0) -> float:
        """`second`: part of the batch that goes through the second forward, on average over steps."""
        seconds = self.pass_and_back(work, batch) + work.parameters * self.parameter
        seconds += self._extra(work, batch, norm, "single")
        if scheme == "double":
            again = FORWARD * self.pass_and_back(work, batch)
            again += self._extra(work, batch, norm, "double") - self._extra(work, batch, norm, "single")
            seconds += second * again
        return max(seconds, LEAST_STEP)

    def evaluation(self, work: Work, images: int) -> float:
        batches = -(-images // EVALUATION_BATCH)
        return FORWARD * self.pass_and_back(work, images) + FORWARD * (batches - 1) * work.calls * self.call

    def _extra(self, work: Work, batch: int, norm: str, scheme: str) -> float:
        per_layer, per_element = self.extra.get((norm, scheme), (0.0, 0.0))
        return work.norms * per_layer + batch * work.norm_elements * per_element


def estimate(
    specs: Iterable[RunSpec], threads: int = 0, *, known: Mapping[str, float] | None = None, device: str = "cpu"
) -> dict[str, float]:
    """Seconds of each run, evaluations included, by digest; a run that cannot be judged is left out.

    Args:
        threads: of torch; 0 leaves torch's own choice.
        known: seconds per step by `same_work(spec)`, as `measured` gives them; preferred to an estimate.
    """
    known = known or {}
    return {
        spec.digest: seconds
        for spec in specs
        if (seconds := _one(spec, known.get(same_work(spec)), threads, device)) is not None
    }


def _one(spec: RunSpec, step: float | None, threads: int, device: str) -> float | None:
    images = images_of(spec)
    sweeps = [images.test if images else 0] * min(spec.evaluations, spec.iterations)
    if spec.recalibrate:
        sweeps += [spec.recalibrate, sweeps[0]]
    if step is not None:
        forward = FORWARD * step * (0.5 if spec.scheme == "double" else 1.0)
        return spec.iterations * step + sum(sweeps) * forward / spec.batch_size
    if images is None:
        return None
    work = _count(spec.model, json.dumps(spec.model_options, sort_keys=True), images.classes, images.shape)
    if work is None:
        return None
    speed = calibrate(threads, device)
    step = speed.step(work, spec.batch_size, spec.norm, spec.scheme, spec.fraction / spec.every)
    return spec.iterations * step + sum(speed.evaluation(work, count) for count in sweeps)


def same_work(spec: RunSpec) -> str:
    """A key that runs share if a step of one takes as long as a step of the other: seed and schedules are left out."""
    images = images_of(spec)
    what: dict[str, Any] = {
        "model": [spec.model, spec.model_options],
        "images": [images.classes, images.shape] if images else [spec.data, spec.data_options],
        "norm": [spec.norm, spec.norm_options, spec.scheme, spec.every, spec.fraction],
        "batch": [spec.batch_size, spec.precision],
    }
    return json.dumps(what, sort_keys=True)


def measured(runs: Iterable[StoredRun], threads: int, machine: str) -> dict[str, float]:
    """Median seconds per step of the stored runs that were made on this machine with as many threads."""
    times: dict[str, list[float]] = {}
    for run in runs:
        if (run.environment.get("machine"), run.environment.get("threads")) == (machine, threads):
            known = [line.get("step_ms") for line in run.metrics]
            steps = [one / 1000 for one in known if isinstance(one, (int, float)) and 0 < one < math.inf]
            times.setdefault(same_work(run.spec), []).extend(steps)
    return {work: statistics.median(steps) for work, steps in times.items() if steps}


def images_of(spec: RunSpec) -> Images | None:
    """None for a folder of images, whose size is not known before it is read."""
    if spec.data not in DATA:
        return None
    base, options = DATA[spec.data], spec.data_options
    size = options.get("image_size")
    shape = (options.get("channels", base.shape[0]), *((size, size) if size else base.shape[1:]))
    test = spec.test_images or spec.holdout or options.get("test", base.test)
    return Images(options.get("classes", base.classes), shape, test)


@functools.cache
def _count(model: str, options: str, classes: int, shape: tuple[int, int, int]) -> Work | None:
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
    import torch

    images = DATA["cifar10"]
    small, wide = (_count(name, "{}", images.classes, images.shape) for name in ("resnet20", "vgg16"))
    assert small is not None
    assert wide is not None
    with _threads(threads), torch.random.fork_rng(devices=[]):
        parameter = _update_time(device)
        times: dict[tuple[str, str, int], float] = {
            (norm, scheme, batch): _step_time("resnet20", norm, scheme, batch, device)
            for norm, scheme in (("bn", "single"), ("mbn", "single"), ("mbn", "double"))
            for batch in (SMALL, LARGE)
        }
        of_wide = _step_time("vgg16", "bn", "single", LARGE, device)
    return _solved(small, wide, times, of_wide, parameter)


def _solved(
    small: Work, wide: Work, times: Mapping[tuple[str, str, int], float], of_wide: float, parameter: float
) -> Speed:
    """The prices that explain the times exactly, or, if noise makes one negative, as well as can be without it."""
    bn = [times["bn", "single", batch] - small.parameters * parameter for batch in (SMALL, LARGE)]
    per_image = max((bn[1] - bn[0]) / (LARGE - SMALL), 0.0)
    call = max(bn[0] - SMALL * per_image, 0.0) / small.calls
    wide_image = max(of_wide - wide.parameters * parameter - wide.calls * call, 0.0) / LARGE
    determinant = small.flops * wide.elements - wide.flops * small.elements
    flop = (per_image * wide.elements - wide_image * small.elements) / determinant
    element = (small.flops * wide_image - wide.flops * per_image) / determinant
    if min(flop, element) < 0:
        flop, element = (per_image + wide_image) / (small.flops + wide.flops), 0.0
    plain = Speed(call, flop, element, parameter, {})
    extra = {}
    for scheme, again in (("single", 0.0), ("double", FORWARD)):
        added = [
            times["mbn", scheme, batch]
            - plain.step(small, batch, "bn", "single")
            - again * plain.pass_and_back(small, batch)
            for batch in (SMALL, LARGE)
        ]
        per_element = max((added[1] - added[0]) / (LARGE - SMALL), 0.0) / small.norm_elements
        per_layer = max(added[0] - SMALL * small.norm_elements * per_element, 0.0) / small.norms
        extra["mbn", scheme] = (per_layer, per_element)
    return Speed(call, flop, element, parameter, extra)


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


def _step_time(model: str, norm: str, scheme: str, batch: int, device: str) -> float:
    import torch
    from torch import nn

    import memnorm
    from memnorm.lab import models

    images = DATA["cifar10"]
    network = models.build(model, classes=images.classes, image_shape=images.shape)
    if norm != "bn":
        network = memnorm.convert(network, norm)
    network.to(device).train()
    optimizer = torch.optim.SGD(network.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)
    if scheme == "double":
        memnorm.double_forward(network, optimizer)
    pixels = torch.randn(batch, *images.shape, device=device)
    labels = torch.arange(batch, device=device) % images.classes

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(pixels), labels).backward()
        optimizer.step()

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


def human(seconds: float, about: bool = True) -> str:
    """≈ 3 h 20 min."""
    sign = "≈ " if about else ""
    if seconds < 1:
        return "< 1 s"
    if round(seconds) < 120:
        return f"{sign}{round(seconds)} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{sign}{minutes} min"
    if minutes < 48 * 60:
        hours, rest = divmod(minutes, 60)
        return f"{sign}{hours} h {rest} min" if rest else f"{sign}{hours} h"
    days = seconds / 86_400
    if round(days) < 730:
        return f"{sign}{round(days)} days"
    return f"{sign}{days / 365.25:.1f} years"
