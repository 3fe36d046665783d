"""Many runs on a Ray cluster: a task per run, with a processor each.

The folders of runs and of data must lie where every machine of the cluster sees them under the same path: what a run
writes is looked for there by the command that asked for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from memnorm.lab.data import default_root
from memnorm.lab.errors import Interrupted, UsageError
from memnorm.lab.grid import Work
from memnorm.lab.listen import Outcome, Relay
from memnorm.lab.spec import RunSpec
from memnorm.lab.store import Store

try:
    import ray
    from ray.util.queue import Queue
except ImportError as error:
    raise UsageError("--launcher ray needs the package ray: pip install 'memnorm[ray]'") from error

PATIENCE = 0.5  # seconds between two looks at what runs say


class Cluster:
    """A crew on the cluster that `ray.init` finds (RAY_ADDRESS, or `ray start` on this machine), else on a local one
    that lives as long as this.
    """

    def __init__(self, work: Work, jobs: int) -> None:
        self.jobs, self.running = jobs, dict[Any, RunSpec]()
        self.is_ours = not ray.is_initialized()
        if self.is_ours:
            ray.init(logging_level="warning", log_to_driver=False)
        self.store = Store(work.root.resolve())
        data_root = (work.data_root or default_root()).resolve()
        self.work = replace(work, root=self.store.root, data_root=data_root)
        self.said = Queue(actor_options={"num_cpus": 0})
        gpus = int(work.execution.device.startswith("cuda"))
        self.task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_attempt)

    def has_room(self) -> bool:
        return not self.jobs or len(self.running) < self.jobs

    def is_busy(self) -> bool:
        return bool(self.running)

    def begin(self, spec: RunSpec, wait_for_holder: bool) -> None:
        self.running[self.task.remote(self.work, spec, wait_for_holder, self.said)] = spec

    def heard(self) -> Iterator[tuple[str, Any]]:
        done, _ = ray.wait(list(self.running), timeout=PATIENCE)
        yield from self.said.get_nowait_batch(self.said.qsize())  # before the end of the run that said it
        for reference in done:
            kind, payload = self._answer(reference)
            if kind == "stop":
                self.save_and_stop()  # those that the cluster has not begun, too
            yield kind, payload

    def _answer(self, reference: Any) -> tuple[str, Any]:
        spec = self.running.pop(reference)
        try:
            kind, payload = ray.get(reference)
        except ray.exceptions.TaskCancelledError:
            return "stop", Interrupted("stopped on the cluster; the same command goes on from what was saved")
        except ray.exceptions.RayError as error:
            why = str(error).strip().splitlines()[0]
            return "ended", Outcome(spec, "failed", f"its task ended: {why}; the same command goes on with it")
        if kind == "ended" and payload.result is not None and self.store.run(spec).result() is None:
            why = f"its result is not in {self.store.root}: --runs must be a folder that all machines share"
            return "ended", Outcome(spec, "failed", why)
        return kind, payload

    def save_and_stop(self) -> None:
        for reference in self.running:
            ray.cancel(reference)  # reaches a run as Ctrl-C does

    def dismiss(self) -> None:
        if self.running:
            ray.wait(list(self.running), num_returns=len(self.running))
        self.said.shutdown()
        if self.is_ours:
            ray.shutdown()


def _attempt(work: Work, spec: RunSpec, wait_for_holder: bool, said: Queue) -> tuple[str, Any]:
    """The cluster's side of a run."""

    def send(kind: str, *arguments: Any) -> None:
        with contextlib.suppress(ray.exceptions.TaskCancelledError):  # a cancelled run must still save
            said.put((kind, arguments))

    return work.attempt(spec, Relay(spec, send), wait_for_holder)
