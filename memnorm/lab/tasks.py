"""Tasks: what a run learns. A task is data, a loss and a metric; the rest of the lab does not know which one it is.

A task of your own is `package.module:factory`, a class derived from `Task` or a function that returns one:

    class Counting(Task):
        error = "mean distance from the true count"
        def load(self, name, root, **options): ...              # a memnorm.lab.data.Data
        def outputs(self, classes, shape): return (1,)          # the shape of the network's answer for one image
        def loss(self, answers, targets, reduction="mean"): ...
        tally = CountingTally                                   # sums of the metric over images

Every task has one number in percent that is better when it is lower, the `error`: runs are compared by it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor
from torch.nn import functional as F

from memnorm.lab import data as data_sets
from memnorm.lab.data import Data
from memnorm.lab.errors import UsageError
from memnorm.lab.models import imported
from memnorm.lab.processes import ProcessGroup

Self = TypeVar("Self", bound="Tally")


class Tally(ABC):
    """Sums over images: the loss, and what the metrics of a task need. Every attribute is such a sum."""

    def __init__(self) -> None:
        self.loss, self.images = 0.0, 0

    def add(self, loss_sum: Tensor, answers: Tensor, targets: Tensor) -> None:
        self.images += len(targets)
        self.loss += loss_sum.item()
        self.count(answers, targets)

    @abstractmethod
    def count(self, answers: Tensor, targets: Tensor) -> None:
        """Add a batch to the sums."""

    @abstractmethod
    def metrics(self, images: int) -> dict[str, float | None]:
        """The metrics over this many images. One is `error`, in percent."""

    def over(self: Self, group: ProcessGroup) -> Self:
        joint = type(self)()
        joint.load_state(dict(zip(vars(self), group.sum(*vars(self).values()), strict=True)))
        return joint

    def summary(self, prefix: str) -> dict[str, Any]:
        count = max(self.images, 1)
        found = {"loss": self.loss / count, **self.metrics(count)}
        return {f"{prefix}_{name}": value for name, value in found.items()}

    def state(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state(self, state: dict[str, Any]) -> None:
        vars(self).update({name: state[name] for name in vars(self)})


class Task(ABC):
    error: str  # what the error measures, for people
    tally: type[Tally]

    @abstractmethod
    def load(self, name: str, root: Path | None, **options: Any) -> Data:
        """The data set with this name or path."""

    @abstractmethod
    def outputs(self, classes: int, shape: tuple[int, int, int]) -> tuple[int, ...]:
        """The shape of the network's answer for one image of this shape."""

    @abstractmethod
    def loss(self, answers: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        """The mean over the images of a batch, or their sum."""


class _Mistakes(Tally):
    def __init__(self) -> None:
        super().__init__()
        self.wrong, self.wrong_top5, self.has_top5 = 0, 0, False

    def count(self, answers: Tensor, targets: Tensor) -> None:
        best = answers.topk(min(5, answers.shape[1]), dim=1).indices == targets[:, None]
        self.wrong += len(targets) - int(best[:, 0].sum())
        self.wrong_top5 += len(targets) - int(best.sum())
        self.has_top5 = answers.shape[1] > 5

    def metrics(self, images: int) -> dict[str, float | None]:
        return {
            "error": 100 * self.wrong / images,
            "error_top5": 100 * self.wrong_top5 / images if self.has_top5 else None,
        }


class Classification(Task):
    error = "images in the wrong class"
    tally = _Mistakes

    def load(self, name: str, root: Path | None, **options: Any) -> Data:
        return data_sets.load(name, root, **options)

    def outputs(self, classes: int, shape: tuple[int, int, int]) -> tuple[int, ...]:
        return (classes,)

    def loss(self, answers: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        return F.cross_entropy(answers, targets, reduction=reduction)


class _Overlaps(Tally):
    """Sums of IoU = |A∩B| / |A∪B| and Dice = 2|A∩B| / (|A| + |B|), each a mean over the classes that an image's mask or
    prediction has.
    """

    def __init__(self) -> None:
        super().__init__()
        self.iou, self.dice = 0.0, 0.0

    def count(self, answers: Tensor, targets: Tensor) -> None:
        classes = answers.shape[1]
        predicted, true = (F.one_hot(one.flatten(1), classes).bool() for one in (answers.argmax(1), targets))
        both_NC, either_NC = (predicted & true).sum(1).double(), (predicted | true).sum(1).double()
        present_N = (either_NC > 0).sum(1)
        self.iou += float(((both_NC / either_NC.clamp(min=1)).sum(1) / present_N).sum())
        self.dice += float(((2 * both_NC / (either_NC + both_NC).clamp(min=1)).sum(1) / present_N).sum())

    def metrics(self, images: int) -> dict[str, float | None]:
        iou = 100 * self.iou / images
        return {"error": 100 - iou, "iou": iou, "dice": 100 * self.dice / images}


class Segmentation(Task):
    """One class per pixel; the classes are the values in the masks."""

    error = "100 % minus the mean IoU of an image"
    tally = _Overlaps

    def load(self, name: str, root: Path | None, **options: Any) -> Data:
        from memnorm.lab.data.masks import folder  # loads numpy and Pillow

        return folder(Path(name).expanduser(), **data_sets.checked_options(name, {"image_size": 128}, options))

    def outputs(self, classes: int, shape: tuple[int, int, int]) -> tuple[int, ...]:
        return (classes, *shape[1:])

    def loss(self, answers: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        mean = F.cross_entropy(answers, targets)
        return mean if reduction == "mean" else mean * len(targets)


TASKS: dict[str, type[Task]] = {"classification": Classification, "segmentation": Segmentation}


def get(name: str) -> Task:
    """A built-in task, or your own as `package.module:factory`."""
    if name in TASKS:
        return TASKS[name]()
    if ":" not in name:
        raise UsageError(f"unknown task {name!r}; there are {', '.join(TASKS)}, or your own as package.module:factory")
    factory = imported("task", name)
    try:
        made = factory()
    except Exception as error:
        raise UsageError(f"task {name}: making it raised {type(error).__name__}: {error}") from error
    if not isinstance(made, Task):
        raise UsageError(f"task {name}: it must be a memnorm.lab.tasks.Task; got {type(made).__name__}")
    return made
