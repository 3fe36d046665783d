"""The environment of a run: versions, machine, device, threads, memory; no names of persons or paths."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

import memnorm
from memnorm.kernels import cpu
from memnorm.lab.commit import RECORD, commit_of

LIBRARIES = ("torch", "numpy", "matplotlib", "jsonargparse", "rich", "jinja2", "scikit-learn", "pillow")


def session(device: str, threads: int, iteration: int) -> dict[str, Any]:
    """The entry of env.json for a process that starts to work on a run."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "iteration": iteration,
        "threads": threads,
        "device": device,
        **software_and_machine(),
        "kernels": cpu.description(),
    }


def software_and_machine() -> dict[str, str | None]:
    return {
        "memnorm": memnorm.__version__,
        "commit": commit(),
        "torch": version("torch"),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {cores()} cores, {cpu_name()}",
    }


def cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.processor() or "unknown CPU"


def version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def commit() -> str | None:
    """The commit of the source tree that contains this package, or that its wheel was built from; None if unknown.
    Cached: later commits are not what this process runs.
    """
    root = Path(__file__).resolve().parents[2]
    with contextlib.suppress(FileNotFoundError):
        return (root / RECORD).read_text().strip() or None
    return commit_of(root)


class PeakMemory:
    """The largest resident memory of this process since it was made, in MiB; on a GPU, what torch allocated there."""

    def __init__(self, device: str) -> None:
        self._cuda = device if device.startswith("cuda") else None
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._cuda)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # Linux: restart the high-water mark

    def read(self) -> float | None:
        if self._cuda:
            return round(torch.cuda.max_memory_allocated(self._cuda) / 2**20, 1)
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM"):
                    return round(int(line.split()[1]) / 1024, 1)
        return None
