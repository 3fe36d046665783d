"""Taking turns: times of several calls in one run, their ratios to the first, and bounds on them."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from memnorm.lab.errors import UsageError

LEAST = 5e-3  # seconds of a turn, so that its first call, with cold caches, does not matter
QUIET = 0.15  # share of CPU time that others may use


@dataclass(frozen=True)
class Ratio:
    """Median time of a call, and its ratio to the first one's, with quartiles over the rounds."""

    name: str
    milliseconds: float
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Target:
    """A measured value, the bound that it must not exceed, and a bound that would be good."""

    what: str
    value: float
    must: float
    good: float | None = None
    unit: str = "× BN"

    @property
    def verdict(self) -> str:
        if self.value > self.must:
            return "missed"
        return "good" if self.good is not None and self.value <= self.good else "reached"


def take_turns(calls: Mapping[str, Callable[[], object]], *, rounds: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Seconds per call, a value for each round. Short calls are repeated within a turn."""
    repeats = {}
    for name, call in calls.items():
        for _ in range(warm_up):  # the first ones allocate
            seconds = _timed(call, 1)
        repeats[name] = max(1, math.ceil(LEAST / max(seconds, 1e-6)))
    seconds_of: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            seconds_of[name].append(_timed(call, repeats[name]))
    return seconds_of


def _timed(call: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def ratios(seconds: Mapping[str, list[float]]) -> list[Ratio]:
    """Ratios to the first; each round's turns are compared with one another."""
    base, found = next(iter(seconds.values())), []
    for name, own in seconds.items():
        low, middle, high = statistics.quantiles([one / other for one, other in zip(own, base, strict=True)], n=4)
        found.append(Ratio(name, 1000 * statistics.median(own), middle, low, high))
    return found


def busy(seconds: float = 1.0) -> float | None:
    """The share of CPU time that other processes use; None where the system does not report it."""
    try:
        before = _cpu_times()
        time.sleep(seconds)
        after = _cpu_times()
    except (OSError, ValueError, IndexError):  # no Linux
        return os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else None
    idle, total = after[0] - before[0], after[1] - before[1]
    return 1 - idle / max(total, 1)


def _cpu_times() -> tuple[int, int]:
    """Idle and total time of all CPUs since start, in ticks."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return fields[3] + fields[4], sum(fields[:8])


def require_quiet() -> float | None:
    """The share of CPU time that others use; raises an error if it is too large for measurements."""
    share = busy()
    if share is not None and share > QUIET:
        raise UsageError(
            f"the machine is busy ({100 * share:.0f} % of its CPU time is used by others): times measured now would "
            "be unreliable. Stop other programs, or measure anyway with --busy."
        )
    return share
