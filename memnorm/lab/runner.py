"""One run from its specification to its result, through any number of interruptions.

After each step: evaluate and write a line of metrics if due; write a checkpoint if due; stop if requested. So a
checkpoint at iteration i covers everything up to i, and later steps are repeated identically.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from memnorm.errors import NothingToRecord
from memnorm.lab import checkpoint, environment
from memnorm.lab.data import Data, Source, epoch_length
from memnorm.lab.disk import replacing
from memnorm.lab.errors import Interrupted, LabError, UsageError
from memnorm.lab.listen import Listener
from memnorm.lab.processes import ProcessGroup, is_first
from memnorm.lab.signals import stop_signals
from memnorm.lab.spec import Execution, RunSpec, unsupported
from memnorm.lab.store import RunFolder, Store
from memnorm.lab.training import (
    Training,
    choose_device,
    drawn,
    load_data,
    recalibration_source,
    set_threads,
    sources,
)

Probe = Callable[[Training, Source, int], dict[str, float]]


def run(
    spec: RunSpec,
    store: Store,
    *,
    execution: Execution | None = None,
    data_root: Path | None = None,
    listener: Listener | None = None,
    wait: bool = False,
    probe: Probe | None = None,
) -> dict[str, Any]:
    """Train, or resume training, and return the result; a finished run is not repeated.

    `probe(training, training images, iteration)` is called at each evaluation; the numbers that it returns join the
    line of metrics. It must leave the training as it was. For runs in one process.
    """
    execution, listener = execution or Execution(), listener or Listener()
    folder = store.run(spec)
    done = folder.result()
    if done is not None:
        return done
    if reason := unsupported(spec):
        raise UsageError(reason)
    data = load_data(spec, data_root)
    if not is_first():  # rank 0 writes the record
        return _Run(spec, RunFolder(folder.path, spec, silent=True), execution, data, listener, probe).train()
    with folder.held(wait):
        done = folder.result()  # another process may have finished it while this one waited
        return done or _Run(spec, folder, execution, data, listener, probe).train()


class _Run:
    def __init__(
        self,
        spec: RunSpec,
        folder: RunFolder,
        execution: Execution,
        data: Data,
        listener: Listener,
        probe: Probe | None = None,
    ) -> None:
        self.spec, self.folder, self.execution, self.listener = spec, folder, execution, listener
        self.data, self.probe = data, probe
        self.train_source, self.test_source = sources(spec, data)
        self.recalibration_source = recalibration_source(spec, data)
        self.threads, self.device = set_threads(execution), choose_device(execution.device)
        self.group = ProcessGroup(spec, self.device)
        self.peak = environment.PeakMemory(self.device)
        self.iteration, self.seconds = 0, 0.0
        self.lines: list[dict[str, Any]] = []  # of metrics.jsonl
        self.training = self._resumed() or self._fresh()
        self.plan = self._plan()  # before anything is written, since it may raise
        folder.write_metrics(self.lines)  # lines after the checkpoint will be written again
        self.session = environment.session(self.device, self.threads, self.iteration)
        self.session["channels_last"] = execution.channels_last
        folder.begin(self.session)

    def _fresh(self) -> Training:
        return Training(self.spec, self.data.classes, self.data.shape, self.device, self.execution.channels_last)

    def _resumed(self) -> Training | None:
        """Resume from the newest checkpoint that rank 0 can read and all processes can load. A rejected one leaves no
        trace.
        """
        complain = functools.partial(self.listener.message, self.spec)
        states = checkpoint.readable(self.folder.path, complain) if self.group.rank == 0 else iter(())
        while (state := self.group.broadcast(next(states, None))) is not None:
            training = self._fresh()
            problem = None
            try:
                if state["run"] != self.spec.name:
                    raise ValueError(f"it belongs to the run {state['run']}")
                training.load_state(state["training"])
                iteration, seconds = int(state["iteration"]), float(state["seconds"])
                if not 0 < iteration < self.spec.iterations:
                    raise ValueError(f"it was saved at iteration {iteration}, and the run has {self.spec.iterations}")
                lines = [dict(line) for line in state["lines"]]
            except Exception as error:  # an older checkpoint may work
                problem = error
            if self.group.sum(problem is not None) == [0]:
                self.iteration, self.seconds, self.lines = iteration, seconds, lines
                return training
            complain(f"a checkpoint does not fit this run ({problem}); using the one before")
        return None

    def _plan(self) -> Iterator[tuple[torch.Tensor, int | None]]:
        labels, spec = self.train_source.labels, self.spec
        self.epoch_length = epoch_length(
            labels, sampler=spec.sampler, batch_size=spec.images_per_step, classes_per_batch=spec.classes_per_batch
        )
        return self.group.shares(drawn(spec, labels, self.iteration))

    def train(self) -> dict[str, Any]:
        self.listener.began(self.spec, self.iteration)
        if self.training.note and self.iteration == 0:
            self.listener.message(self.spec, self.training.note)
        batches = self.train_source.batches(self.plan, workers=self.execution.workers)
        wanted = self.execution.tensorboard and self.group.rank == 0
        with tensorboard(self.folder.path, wanted, self.iteration) as events, stop_signals() as request:
            saved, resumed = time.monotonic(), time.perf_counter()
            for images, labels in batches:
                if not self.training.step(self.iteration, images, labels):
                    return self._result("diverged", diverged_at=self.iteration)
                self.iteration += 1
                self.listener.stepped(self.spec, self.iteration)
                if evaluation_due(self.spec, self.iteration):
                    self.seconds += self._since(resumed)
                    self._evaluate(events)
                    resumed = time.perf_counter()
                late = time.monotonic() - saved >= self.execution.checkpoint_seconds
                late, stop = map(bool, self.group.sum(late, request.made))
                if (late or stop) and self.iteration < self.spec.iterations:
                    self.seconds += self._since(resumed)
                    self._save()
                    saved, resumed = time.monotonic(), time.perf_counter()
                    if stop:
                        raise Interrupted(
                            f"stopped at iteration {self.iteration:,} of {self.spec.iterations:,}; everything is "
                            "saved, and the same command resumes from here"
                        )
        if not math.isfinite(self.lines[-1]["test_loss"]):  # diverged in the last step
            return self._result("diverged", diverged_at=self.iteration)
        result = self._result("finished")
        if request.made:
            raise Interrupted("stopped after the last step of a run; its result is saved")
        return result

    def _since(self, start: float) -> float:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def _evaluate(self, events: Any) -> None:
        training = self.training
        before = self.lines[-1] if self.lines else {"iteration": 0, "seconds": 0.0}
        steps, seconds = self.iteration - before["iteration"], self.seconds - before["seconds"]
        tally = training.tally.over(self.group)
        line = self.group.rank == 0 and {
            "iteration": self.iteration,
            "epoch": round(self.iteration / self.epoch_length, 4),
            **tally.summary("train"),
            **training.evaluate(self.test_source, self.execution.workers),
            **self._recalibrated(),
            "learning_rate": training.optimizer.param_groups[0]["lr"],
            "strength": training.last_strength,
            "seconds": round(self.seconds, 3),
            "images_per_second": round(tally.images / max(seconds, 1e-9), 2),
            "step_ms": round(1000 * seconds / steps, 3),
            "peak_memory_mb": self.peak.read(),
            **(self.probe(training, self.train_source, self.iteration) if self.probe else {}),
        }
        line = self.group.broadcast(line)
        training.tally = training.task.tally()
        self.folder.add_metrics(line)
        self.lines.append(line)
        for name, value in line.items():
            if events is not None and value is not None:
                events.add_scalar(name, value, self.iteration)
        self.listener.evaluated(self.spec, line)

    def _recalibrated(self) -> dict[str, Any]:
        """Recalibrated errors after the last step, if the run asks for them."""
        if self.recalibration_source is None or self.iteration < self.spec.iterations:
            return {}
        try:
            return self.training.evaluate_recalibrated(
                self.recalibration_source, self.test_source, self.execution.workers
            )
        except NothingToRecord as error:  # no batch is finite, or there is no norm
            self.listener.message(self.spec, f"not recalibrated: {error}")
            return {"test_error_recalibrated": None, "test_loss_recalibrated": None}

    def _save(self) -> None:
        state = {"run": self.spec.name, "iteration": self.iteration, "seconds": self.seconds, "lines": self.lines}
        state["training"] = self.training.state()
        if self.group.rank == 0:
            checkpoint.save(self.folder.path, self.iteration, state)

    def _result(self, status: str, **extra: Any) -> dict[str, Any]:
        if self.execution.keep_weights and status == "finished" and self.group.rank == 0:
            with replacing(self.folder.path / "weights.pt") as temporary:
                checkpoint.write(temporary, self.training.model.state_dict())
        evaluated = [line for line in self.lines if line["test_error"] is not None]
        best = min(evaluated, key=lambda line: line["test_error"], default=None)
        result = self.folder.finish(
            {
                "status": status,
                "name": self.spec.name,
                "iteration": self.iteration,
                **extra,
                "final": self.lines[-1] if self.lines else None,
                "best": {name: best[name] for name in ("test_error", "iteration")} if best else None,
                "parameters": sum(parameter.numel() for parameter in self.training.model.parameters()),
                "seconds": round(self.seconds, 3),
                "digest_of_weights": self.training.digest(),
                "environment": self.session,
            }
        )
        return self.group.broadcast(result)


def evaluation_due(spec: RunSpec, iteration: int) -> bool:
    count = min(spec.evaluations, spec.iterations)
    return iteration * count // spec.iterations > (iteration - 1) * count // spec.iterations


@contextlib.contextmanager
def tensorboard(folder: Path, wanted: bool, iteration: int) -> Iterator[Any]:
    """Torch's writer of event files if wanted, else None."""
    if not wanted:
        yield None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise LabError("--tensorboard needs the package tensorboard: pip install tensorboard") from error
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=iteration + 1)
    try:
        yield writer
    finally:
        writer.close()
