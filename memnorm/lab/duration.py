"""How long runs take on this machine: time a few steps of each kind of run, multiply by the number of steps.

Each model and norm is timed at two small batches; other batch sizes lie on the line through them. A forward without
backward counts as a third of a step. Reading the data is left out. The error is about a third: enough to distinguish
minutes from days. The time of a stored step, where there is one, is preferred.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memnorm.errors import MemnormError
from memnorm.lab.errors import LabError
from memnorm.lab.spec import RunSpec

if TYPE_CHECKING:
    from memnorm.lab.store import StoredRun

FORWARD = 1 / 3  # of a training step
PIXELS = 8 * 32 * 32  # in a timed batch, so that ImageNet's networks are timed with two images
REPEATS, LONGEST = 2, 0.2  # timed steps at most; seconds after which one is enough
_LINES: dict[tuple[str, int], tuple[float, float]] = {}  # what was timed, by kind of step and threads


@dataclass(frozen=True)
class ImageFacts:
    """What a data set asks of a model, and the number of images of an evaluation."""

    classes: int
    shape: tuple[int, int, int]
    test: int


DATA = {
    "digits": ImageFacts(10, (1, 8, 8), 500),
    "cifar10": ImageFacts(10, (3, 32, 32), 10_000),
    "cifar100": ImageFacts(100, (3, 32, 32), 10_000),
    "fashion-mnist": ImageFacts(10, (1, 28, 28), 10_000),
    "imagenet": ImageFacts(1000, (3, 224, 224), 50_000),
    "synthetic": ImageFacts(10, (3, 32, 32), 256),
}


def estimate(
    specs: Iterable[RunSpec], threads: int = 0, *, known: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Seconds of each run, evaluations included, by digest; runs that cannot be timed are left out.

    Args:
        threads: of torch; 0 leaves torch's own choice.
        known: seconds per step by `same_step(spec)`, as `measured` returns them; used instead of timing.
    """
    known = dict(known or {})
    found = {}
    for spec in specs:
        key = same_step(spec)
        if key not in known:
            known[key] = _step_seconds(spec, threads)
        if not math.isnan(known[key]):
            found[spec.digest] = _run_seconds(spec, known[key])
    return found


def _run_seconds(spec: RunSpec, step: float) -> float:
    facts = facts_of(spec)
    test = facts.test if facts else 0
    images = test * min(spec.evaluations, spec.iterations)
    if spec.recalibrate:
        images += spec.recalibrate + test
    forward = FORWARD * step / (1 + FORWARD if spec.scheme == "double" else 1) / spec.images_per_step
    return spec.iterations * step + images * forward


def _step_seconds(spec: RunSpec, threads: int) -> float:
    """Seconds of an optimizer step; NaN if it cannot be timed."""
    facts = facts_of(spec)
    kind = same_step(spec.but(batch_size=spec.processes, accumulate=1))
    if facts is None:
        return math.nan
    if (kind, threads) not in _LINES:
        _LINES[kind, threads] = math.nan, math.nan
        with contextlib.suppress(MemnormError), _measuring(threads):
            _LINES[kind, threads] = _line(spec, facts)
    fixed, per_image = _LINES[kind, threads]
    return spec.accumulate * (fixed + spec.batch_size * per_image)


def _line(spec: RunSpec, facts: ImageFacts) -> tuple[float, float]:
    """Seconds of a micro-batch as a line over its size: what any batch costs, and what each image adds."""
    large = max(2, PIXELS // (facts.shape[1] * facts.shape[2]))
    small = max(2, large // 4)
    seconds = time_step(spec.but(batch_size=large), facts)
    if small == large:
        return 0.0, seconds / large
    less = min(time_step(spec.but(batch_size=small), facts), seconds)
    per_image = (seconds - less) / (large - small)
    return max(less - small * per_image, 0.0), per_image


def time_step(spec: RunSpec, facts: ImageFacts) -> float:
    """Seconds of one micro-batch on random images, the fastest of a few; the first, which allocates, does not count."""
    import torch

    from memnorm.lab.training import Training

    alone = spec.but(accumulate=1, processes=1, learning_rate=1e-3)  # low, so that no norm diverges
    training = Training(alone, facts.classes, facts.shape, "cpu")
    images, labels = torch.randn(spec.batch_size, *facts.shape), torch.arange(spec.batch_size) % facts.classes
    times: list[float] = []
    while len(times) < 2 or (len(times) <= REPEATS and sum(times) < LONGEST):
        start = time.perf_counter()
        if not training.step(0, images, labels):
            raise LabError(f"{spec.arm} diverges in its first step")
        times.append(time.perf_counter() - start)
    return min(times[1:])


@contextlib.contextmanager
def _measuring(threads: int) -> Iterator[None]:
    """Use this many threads, and restore them and the random state."""
    import torch

    before = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        try:
            if threads:
                torch.set_num_threads(threads)
            yield
        finally:
            torch.set_num_threads(before)


def same_step(spec: RunSpec) -> str:
    """A key that runs share if their steps take equally long: seed and schedules are left out."""
    facts = facts_of(spec)
    what: dict[str, Any] = {
        "model": [spec.model, spec.model_options],
        "images": [facts.classes, facts.shape] if facts else [spec.data, spec.data_options],
        "norm": [spec.norm, spec.norm_options, spec.scheme, spec.every, spec.fraction],
        "batch": [spec.batch_size, spec.accumulate, spec.precision],
    }
    return json.dumps(what, sort_keys=True)


def measured(runs: Iterable[StoredRun], threads: int, machine: str) -> dict[str, float]:
    """Median seconds per step of the stored runs made on this machine with this many threads, by `same_step`."""
    times: dict[str, list[float]] = {}
    for run in runs:
        if (run.environment.get("machine"), run.environment.get("threads")) == (machine, threads):
            known = [line.get("step_ms") for line in run.metrics]
            steps = [one / 1000 for one in known if isinstance(one, (int, float)) and 0 < one < math.inf]
            times.setdefault(same_step(run.spec), []).extend(steps)
    return {key: statistics.median(steps) for key, steps in times.items() if steps}


def facts_of(spec: RunSpec) -> ImageFacts | None:
    """None for a folder of images, whose size is unknown before it is read."""
    if spec.data not in DATA:
        return None
    base, options = DATA[spec.data], spec.data_options
    size = options.get("image_size")
    shape = (options.get("channels", base.shape[0]), *((size, size) if size else base.shape[1:]))
    test = spec.test_images or spec.holdout or options.get("test", base.test)
    return ImageFacts(options.get("classes", base.classes), shape, test)


def human(seconds: float) -> str:
    """≈ 3 h 20 min."""
    if seconds < 1:
        return "< 1 s"
    if round(seconds) < 120:
        return f"≈ {round(seconds)} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"≈ {minutes} min"
    if minutes < 48 * 60:
        hours, rest = divmod(minutes, 60)
        return f"≈ {hours} h {rest} min" if rest else f"≈ {hours} h"
    days = seconds / 86_400
    return f"≈ {round(days)} days" if round(days) < 730 else f"≈ {days / 365.25:.1f} years"
