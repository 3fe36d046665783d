"""Select cells and curves of the paper by name, and scale their runs down."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, get_args

from memnorm.lab.errors import UsageError
from memnorm.lab.paper import FIGURES, TABLES, Cell, Curve
from memnorm.lab.spec import RunSpec
from memnorm.text import suggestion

Scale = Literal["smoke", "reduced", "paper"]
SCALES: tuple[Scale, ...] = get_args(Scale)
RULES: dict[str, str] = {
    "paper": (
        "The paper's protocol. 200 epochs at batch 128: 78,200 iterations on CIFAR, at every batch size, and 2,002,000 "
        "on ImageNet. SGD with momentum 0.9 and weight decay 1e-4; learning rate 0.1, divided by 10 at 40 % and 60 % "
        "of the run; λ 0.1, 0.5, 0.9 at the same points; an evaluation per epoch, of which the last one counts."
    ),
    "reduced": (
        "Fewer iterations than the paper, everything else as printed. A tenth of the iterations on CIFAR (7,820) and a "
        "hundredth on ImageNet (20,020), on the real data; learning rate and λ change at 40 % and 60 % of the "
        "shortened run; 20 evaluations, of which the last one counts. The protocol differs from the paper's in its "
        "length, so the numbers are to be compared with each other and not with the printed ones."
    ),
    "smoke": (
        "A check that every cell runs; its numbers mean nothing. The real architectures for the real number of "
        "classes, 2 iterations on a few synthetic images (32 pixels wide for CIFAR, 64 for ImageNet), batches of 2 to "
        "6 images, one evaluation."
    ),
}
SMOKE_CLASSES = {"cifar10": 10, "cifar100": 100, "imagenet": 1000}
SMOKE_BATCH = {8: 2, 16: 3, 32: 4, 64: 5, 128: 6}  # small, and still different


class Item(NamedTuple):
    """A cell or a curve, and the name of the table or figure it is part of."""

    name: str
    part: Cell | Curve


def at_scale(spec: RunSpec, scale: str) -> RunSpec:
    """The run that stands for a paper-scale run at another scale, under `RULES[scale]`."""
    if scale == "paper":
        return spec
    if scale == "reduced":
        shorter = 100 if spec.data == "imagenet" else 10
        return spec.but(iterations=max(1, spec.iterations // shorter), evaluations=20)
    if scale != "smoke":
        raise UsageError(f"scale must be one of {', '.join(SCALES)}; got {scale!r}")
    if spec.data not in SMOKE_CLASSES:
        raise UsageError(f"scale smoke replaces {', '.join(SMOKE_CLASSES)}; this run is on {spec.data!r}")
    large = spec.data == "imagenet"
    options = {"classes": SMOKE_CLASSES[spec.data], "image_size": 64 if large else 32, "train": 12, "test": 6}
    batch_size = 2 if large else SMOKE_BATCH.get(spec.batch_size, min(spec.batch_size, 6))
    return spec.but(data="synthetic", data_options=options, batch_size=batch_size, iterations=2, evaluations=1)


def select(names: Sequence[str], only: Sequence[str] = ()) -> list[Item]:
    """Cells and curves of the named tables and figures (or all), in the paper's order of presentation.

    `only` keeps those that match one of its patterns: ROW/COLUMN for a table, PANEL/LABEL for a figure, in any case,
    with `*` for anything. A table and a figure may share a name, which then means both.
    """
    known = list(dict.fromkeys([*TABLES, *FIGURES]))
    if not names:
        raise UsageError(f"name what to reproduce: all, or some of {', '.join(known)}")
    chosen: set[str] = set()
    for name in names:
        wanted = name.strip().lower().replace("_", "-")
        if wanted != "all" and wanted not in known:
            near = difflib.get_close_matches(wanted, [*known, "all"], n=3, cutoff=0.5)
            raise UsageError(f"no table or figure {name!r}.{suggestion(near)} There are {', '.join(known)}, and all.")
        chosen.update(known if wanted == "all" else [wanted])
    ordered = [name for name in known if name in chosen]
    items = [Item(name, part) for name in ordered for part in _parts(name)]
    for pattern in only:
        if not any(_matches(item.part, pattern) for item in items):
            raise UsageError(_no_match(pattern, ordered))
    return [item for item in items if not only or any(_matches(item.part, pattern) for pattern in only)]


def _parts(name: str) -> list[Cell | Curve]:
    cells = TABLES[name].cells if name in TABLES else ()
    return [*cells, *(FIGURES[name].curves if name in FIGURES else ())]


def _matches(part: Cell | Curve, pattern: str) -> bool:
    return fnmatch.fnmatchcase(part.key.lower(), pattern.strip().lower())


def _no_match(pattern: str, names: Sequence[str]) -> str:
    lines = [f"only {pattern!r} matches nothing: patterns are ROW/COLUMN (PANEL/LABEL in a figure), * for anything."]
    for name in names:
        if name in TABLES:
            rows, columns = TABLES[name].rows, TABLES[name].columns
            lines.append(f"  table {name}: rows {', '.join(rows)}; columns {', '.join(columns)}")
        if name in FIGURES:
            labels = dict.fromkeys(curve.label for curve in FIGURES[name].curves)
            lines.append(f"  figure {name}: panels {', '.join(FIGURES[name].panels)}; labels {', '.join(labels)}")
    return "\n".join(lines)


def unique_specs(items: Iterable[Item], scale: str = "paper", seeds: Iterable[int] = (0,)) -> list[RunSpec]:
    """The runs behind the items, each once, in order of first appearance; with all seeds of a run side by side."""
    seeds = tuple(seeds)
    specs = (at_scale(item.part.spec, scale) for item in items if item.part.spec is not None)
    runs = (spec.but(seed=seed) for spec in specs for seed in seeds)
    return list({run.digest: run for run in runs}.values())
