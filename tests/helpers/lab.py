"""What the tests of the lab share: small runs, processes to be killed, and comparisons that leave time out."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memnorm
from memnorm.lab.data import Source
from memnorm.lab.listen import Listener
from memnorm.lab.runner import run
from memnorm.lab.spec import Execution, RunSpec
from memnorm.lab.store import Store
from memnorm.lab.training import Training

TESTS = Path(__file__).parents[1]
PLAIN = Execution(threads=1, device="cpu", workers=0, checkpoint_seconds=1e9)
EVERY_STEP = replace(PLAIN, checkpoint_seconds=0)
TIMES = ("seconds", "images_per_second", "step_ms", "peak_memory_mb")


def tiny(**changes: Any) -> RunSpec:
    """A run of a fraction of a second; the last batch of an epoch is a smaller one."""
    data = {"classes": 4, "channels": 1, "image_size": 8, "train": 44, "test": 20}
    spec = RunSpec(
        model="helpers.lab:net",
        data="synthetic",
        data_options=data,
        batch_size=8,
        iterations=12,
        evaluations=3,
        learning_rate=0.05,
        weight_decay=1e-3,
    )
    return spec.but(**changes)


# Killed between two of its evaluations, with dropout to be drawn alike afterwards.
LONG = tiny(iterations=20, evaluations=2, model_options={"dropout": 0.3})


class Pause(nn.Module):
    """Slows training down."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            time.sleep(self.seconds)
        return x


def net(num_classes: int, in_channels: int, dropout: float = 0.0, pause: float = 0.0) -> nn.Module:
    """The smallest thing with two norms; with dropout, and slow, where that is asked for."""
    return nn.Sequential(
        nn.Dropout(dropout) if not pause else Pause(pause),
        nn.Conv2d(in_channels, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, num_classes),
    )


def refuse(num_classes: int) -> nn.Module:
    """A factory that fails."""
    raise RuntimeError("this factory fails")


class Ear(Listener):
    """Records every call."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def began(self, spec: RunSpec, iteration: int) -> None:
        self.heard.append(("began", iteration))

    def stepped(self, spec: RunSpec, iteration: int) -> None:
        self.heard.append(("stepped", iteration))

    def evaluated(self, spec: RunSpec, line: dict[str, Any]) -> None:
        self.heard.append(("evaluated", line["iteration"]))

    def message(self, spec: RunSpec, text: str) -> None:
        self.heard.append(("message", text))

    def all(self, kind: str) -> list[Any]:
        return [value for one, value in self.heard if one == kind]


class Crash(Exception):
    pass


class Crasher(Ear):
    """Ends the process, as far as the run can tell, after a step."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def stepped(self, spec: RunSpec, iteration: int) -> None:
        super().stepped(spec, iteration)
        if iteration == self.at:
            raise Crash


def crash(spec: RunSpec, store: Store, at: int) -> None:
    """Leaves checkpoints of the two iterations before `at`."""
    with pytest.raises(Crash):
        run(spec, store, execution=EVERY_STEP, listener=Crasher(at))


def checkpoints(store: Store, spec: RunSpec) -> list[Path]:
    return sorted(store.run(spec).path.glob("checkpoint-*.pt"))


_UNDISTURBED: dict[str, tuple[Any, Any]] = {}


def undisturbed(spec: RunSpec) -> tuple[Any, Any]:
    """Result and metrics of a run that nothing interrupts and nothing slows down."""
    if spec.digest not in _UNDISTURBED:
        with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
            patch.setattr(Pause, "forward", lambda _pause, x: x)
            store = Store(root)
            _UNDISTURBED[spec.digest] = timeless(run(spec, store, execution=PLAIN)), timeless(store.run(spec).metrics())
    return _UNDISTURBED[spec.digest]


def assert_ends_as_undisturbed(
    spec: RunSpec, store: Store, *, began: int | None = None, tidy: bool = True, **execution: Any
) -> Ear:
    """Resume the run. It is bit for bit what it would have been, and leaves no temporary file."""
    ear = Ear()
    result = run(spec, store, execution=replace(PLAIN, **execution), listener=ear)
    folder = store.run(spec)
    assert (timeless(result), timeless(folder.metrics())) == undisturbed(spec)
    files = {"spec.yaml", "env.json", "metrics.jsonl", "result.json", "lock"}
    assert not tidy or set(os.listdir(folder.path)) <= files
    if began is not None:
        assert ear.all("began") == [began]
    return ear


ARMS: dict[str, dict[str, Any]] = {
    "bn": {"norm": "bn"},
    "mbn-1": {"norm": "mbn"},
    "mbn-2": {"norm": "mbn", "scheme": "double"},
    "mbn-2 now and then": {"norm": "mbn", "scheme": "double", "every": 2, "fraction": 0.5},
}
RESUMED: dict[str, dict[str, Any]] = {
    **ARMS,
    "two-way, accumulated": {"norm": "two_way", "batch_size": 2, "accumulate": 4},
    "two-way, AdamW": {"norm": "two_way", "optimizer": "adamw", "learning_rate": 0.003},
}


class Spy:
    """What the steps and evaluations of runs were given, and what came out."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.iterations: list[int] = []
        self.images: list[Tensor] = []
        self.labels: list[Tensor] = []
        self.scores: list[Tensor] = []
        self.dropped: list[Tensor] = []
        self.rates: list[float] = []
        self.strengths: list[set[float]] = []
        self.evaluated: list[Tensor] = []
        step, place, dropout = Training.step, Training.place, nn.Dropout.forward
        patch.setattr(Training, "step", lambda *arguments: self._step(step, *arguments))
        patch.setattr(Training, "place", lambda *arguments: self._place(place, *arguments))
        patch.setattr(nn.Dropout, "forward", lambda *arguments: self._dropout(dropout, *arguments))

    def _step(self, step: Any, training: Training, iteration: int, images: Tensor, labels: Tensor) -> bool:
        self.iterations.append(iteration)
        self.images.append(images.clone())
        self.labels.append(labels.clone())
        layers = [module for module in training.model.modules() if isinstance(module, memnorm.MemorizedBatchNorm2d)]
        self.strengths.append({round(float(layer.strength), 6) for layer in layers})
        hook = training.model.register_forward_hook(lambda _model, _args, scores: self._scores(scores))
        good = step(training, iteration, images, labels)
        hook.remove()
        self.rates.append(training.optimizer.param_groups[0]["lr"])
        return good

    def _scores(self, scores: Tensor) -> None:
        if scores.requires_grad:  # not the second forward
            self.scores.append(scores.detach().clone())

    def _place(self, place: Any, training: Training, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if not training.model.training:
            self.evaluated.append(images.clone())
        return place(training, images, labels)

    def _dropout(self, forward: Any, layer: nn.Dropout, x: Tensor) -> Tensor:
        y = forward(layer, x)
        if layer.training and torch.is_grad_enabled():
            self.dropped.append(y == 0)
        return y


def timeless(value: Any) -> Any:
    """A result or metrics without what differs between two equal runs: time, memory, where and when."""
    if isinstance(value, dict):
        return {name: timeless(one) for name, one in value.items() if name not in (*TIMES, "environment")}
    return [timeless(one) for one in value] if isinstance(value, list) else value


def content(images: Iterable[Tensor]) -> list[bytes]:
    """Images as something that can be compared and counted."""
    return [image.numpy().tobytes() for batch in images for image in batch]


def images_of(source: Source) -> Tensor:
    """All images of a source, as they are evaluated."""
    return torch.cat([images for images, _ in source.batches([(torch.arange(len(source)), None)])])


def python(
    script: str, *arguments: object, prefix: tuple[str, ...] = (), more: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """A process that runs `script` and prints lines; `more` is added to its environment."""
    # no empty part: that would be the folder it runs in
    here = os.pathsep.join(filter(None, [str(TESTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": here, **(more or {})},
    )


def end(process: subprocess.Popen[str]) -> None:
    """Kill the process if it still runs, and close its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


def said(process: subprocess.Popen[str], timeout: float = 60) -> str:
    """Return everything that a process wrote to stdout; its exit code must be 0."""
    output, errors = process.communicate(timeout=timeout)
    assert process.returncode == 0, errors
    return output


def on_a_small_disk(script: str, folder: Path, size: str, *arguments: object) -> str:
    """What `script` says when its first argument is a folder on a disk of this size of its own; the other arguments
    follow.
    """
    prefix = ("unshare", "--user", "--map-root-user", "--mount")
    if not shutil.which("unshare") or subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    folder.mkdir(exist_ok=True)
    mount = f"""
        import subprocess, sys
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size={size}", "tmpfs", sys.argv[1]], check=True)
        """
    return said(python(textwrap.dedent(mount) + textwrap.dedent(script), folder, *arguments, prefix=prefix))


def result_of(answer: tuple[int, str, str]) -> Any:
    """The JSON that a command printed; its exit code must be 0."""
    code, out, err = answer
    assert code == 0, err
    return json.loads(out)
