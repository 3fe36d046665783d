"""How long a run would take on this machine, before it is run.

A training step at batch n is taken to cost

    calls · a  +  n · (FLOPs · b  +  elements · c)  +  parameters · d  +  what the norm adds

with the model's layer calls, FLOPs and layer outputs of one image, counted on tensors without data, and a, b, c, d from
a few steps of two small networks, timed once; a few more for every norm that is asked for. A forward is a third of the
first two terms. The result is for telling minutes from days: a third too much or too little is within its accuracy, and
reading the data is left out. The time of a stored step, where there is one, is better.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memnorm.lab.spec import RunSpec
from memnorm.lab.speed import FORWARD, added, calibrate, work_of

if TYPE_CHECKING:
    from memnorm.lab.store import StoredRun


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
        return spec.iterations * step + sum(sweeps) * forward / spec.images_per_step
    if images is None:
        return None
    work = work_of(spec.model, json.dumps(spec.model_options, sort_keys=True), images.classes, images.shape)
    if work is None:
        return None
    speed, options = calibrate(threads, device), json.dumps(spec.norm_options, sort_keys=True)
    arm = added(spec.norm, options, spec.scheme, threads, device)
    second = spec.fraction / spec.every if spec.scheme == "double" else 0.0
    step = spec.accumulate * speed.step(work, spec.batch_size, arm, second)
    return spec.iterations * step + sum(speed.evaluation(work, count) for count in sweeps)


def same_work(spec: RunSpec) -> str:
    """A key that runs share if a step of one takes as long as a step of the other: seed and schedules are left out."""
    images = images_of(spec)
    what: dict[str, Any] = {
        "model": [spec.model, spec.model_options],
        "images": [images.classes, images.shape] if images else [spec.data, spec.data_options],
        "norm": [spec.norm, spec.norm_options, spec.scheme, spec.every, spec.fraction],
        "batch": [spec.batch_size, spec.accumulate, spec.precision],
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
