"""Groups of runs that differ in their seed only, and comparisons of groups that differ in the norm and batch size.

The number of a run is its last evaluation. A run that diverged or is not finished is named and never averaged in.

`memnorm compare` and `memnorm demo` make one of the runs they asked for; `memnorm report` finds the comparisons among
stored runs. The terminal, HTML, Markdown and CSV all show this object.

Two more fields may vary within a comparison: the learning rate, which can be tuned for each norm, and the length, which
can follow the batch size. Both are shown. Runs are split by them where two runs would be the same arm at the same batch
size, or where runs at one batch size differ in length.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import yaml

from memnorm.lab.significance import Sample
from memnorm.lab.spec import RunSpec
from memnorm.lab.store import StoredRun
from memnorm.lab.verdict import Cost, Verdict, verdict

RECALIBRATED = "test_error_recalibrated"  # in the last line of metrics of a run with `recalibrate`
ARM_FIELDS = ("norm", "norm_options", "scheme", "every", "fraction", "strength")
LOOSE_FIELDS = ("learning_rate", "iterations", "evaluations", "recalibrate", "warmup")
VARYING = {*ARM_FIELDS, *LOOSE_FIELDS, "batch_size", "seed"}  # the fields in which runs of a comparison may differ
SAME_LENGTH = 1.15  # numbers of images that differ by less are the same number of epochs, rounded
MOST_NAMES = 5
NORM_ORDER = ("bn", "brn", "normprop", "mbn")


def identity(spec: RunSpec) -> str:
    """A hash that runs share if they differ in the seed only."""
    values = {name: value for name, value in spec.identity.items() if name != "seed"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def measured(values: Any, name: str) -> float | None:
    """A finite number from a line of metrics, or None."""
    value = values.get(name) if isinstance(values, dict) else None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return float(value)


def final(run: StoredRun, metric: str = "test_error") -> float | None:
    """The headline number: the last evaluation of a finished run."""
    return measured(run.result.get("final"), metric) if run.result and run.status == "finished" else None


def best(run: StoredRun) -> tuple[float, int] | None:
    """The lowest test error of all evaluations and its iteration; never the headline number."""
    found = run.result.get("best") if run.result else None
    error, iteration = measured(found, "test_error"), measured(found, "iteration")
    return None if error is None or iteration is None else (error, int(iteration))


def progress(run: StoredRun) -> int:
    reached = measured(run.result, "diverged_at" if run.status == "diverged" else "iteration")
    return int(reached) if reached is not None else run.metrics[-1]["iteration"] if run.metrics else 0


def condition(run: StoredRun) -> str:
    if run.status == "diverged":
        return f"diverged at iteration {progress(run):,}"
    if run.status == "unfinished":
        return f"unfinished, {progress(run):,} of {run.spec.iterations:,} iterations"
    return "finished"


def step_ms(run: StoredRun) -> float | None:
    """Time per step: the median over the evaluations, which ignores a warm-up and a busy minute."""
    return median(measured(line, "step_ms") for line in run.metrics)


def memory_mb(run: StoredRun) -> float | None:
    return max((peak for line in run.metrics if (peak := measured(line, "peak_memory_mb")) is not None), default=None)


def median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


@dataclass(frozen=True)
class Group:
    """Runs of one specification, ordered by seed."""

    runs: tuple[StoredRun, ...]

    @property
    def spec(self) -> RunSpec:
        return self.runs[0].spec

    @cached_property
    def key(self) -> str:
        return identity(self.spec)

    @property
    def anchor(self) -> str:
        return f"run-{self.key}"

    @property
    def title(self) -> str:
        return f"{self.spec.arm} · {self.spec.model} · {self.spec.data} · batch {self.spec.batch}"

    def having(self, status: str) -> list[StoredRun]:
        return [run for run in self.runs if run.status == status]

    def sample(self, metric: str = "test_error") -> Sample | None:
        values = [value for run in self.runs if (value := final(run, metric)) is not None]
        return Sample(values) if values else None

    @property
    def cost(self) -> Cost:
        """Medians over the finished runs."""
        finished = self.having("finished")
        return Cost(median(map(step_ms, finished)), median(map(memory_mb, finished)))

    @property
    def trouble(self) -> str:
        """Why runs of the group are not in its number; empty if all are."""
        others = [run for run in self.runs if run.status != "finished"]
        if len(self.runs) == 1:
            return "; ".join(map(condition, others))
        words = [f"seed {run.spec.seed} {condition(run)}" for run in others]
        words += [f"seed {run.spec.seed} has no number" for run in self.having("finished") if final(run) is None]
        return "; ".join(words)

    @property
    def places(self) -> list[str]:
        return sorted({place(run.environment) for run in self.runs})

    @property
    def yaml(self) -> str:
        values = self.spec.as_dict()
        del values["seed"]
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def place(environment: dict[str, Any]) -> str:
    """Software and machine of a run in one line."""
    known = {name: str(value) for name, value in environment.items() if value is not None}
    words = [f"{name} {known[name]}" for name in ("memnorm", "commit", "torch", "python") if name in known]
    threads = known.get("threads")
    words += [f"{threads} thread{'' if threads == '1' else 's'}"] if threads else []
    words += [f"on {known['device']}"] if "device" in known else []
    words += ["channels last"] if environment.get("channels_last") is True else []
    words += [f"kernels: {known['kernels']}"] if "kernels" in known else []
    words += [known["machine"]] if "machine" in known else []
    return ", ".join(words) or "not recorded"


@dataclass(frozen=True)
class Comparison:
    """Groups of runs, by arm and batch size, and what may be concluded from them."""

    name: str
    title: str
    about: str
    groups: tuple[tuple[str, Group], ...]  # with the arm's label
    verdict: Verdict | None  # None for fewer than two arms, and for runs that chose a setting
    failures: tuple[tuple[str, str], ...] = ()  # run and error message

    @property
    def is_recalibrated(self) -> bool:
        """True if some runs were also evaluated with recalibrated statistics."""
        return any(group.sample(RECALIBRATED) for _, group in self.groups)

    @property
    def arms(self) -> list[str]:
        return list(dict.fromkeys(label for label, _ in self.groups))


def groups_of(runs: Iterable[StoredRun]) -> list[Group]:
    """One group for each specification without its seed."""
    by_key: dict[str, list[StoredRun]] = {}
    for run in runs:
        by_key.setdefault(identity(run.spec), []).append(run)
    return [Group(tuple(sorted(by_key[key], key=lambda run: run.spec.seed))) for key in sorted(by_key)]


def comparisons(groups: Sequence[Group]) -> list[Comparison]:
    """Comparisons that together hold each of the groups once, the largest first."""
    found = [compare(part) for bucket in _buckets(groups, _common).values() for part in _split(bucket)]
    return sorted(found, key=lambda one: (-len(one.arms), one.title, one.about, one.name))


def _common(spec: RunSpec) -> str:
    return json.dumps({name: value for name, value in spec.as_dict().items() if name not in VARYING}, sort_keys=True)


def arm_key(spec: RunSpec) -> str:
    return json.dumps([spec.as_dict()[name] for name in ARM_FIELDS], sort_keys=True)


def _buckets(groups: Sequence[Group], key: Callable[[RunSpec], Any]) -> dict[Any, list[Group]]:
    buckets: dict[Any, list[Group]] = {}
    for group in groups:
        buckets.setdefault(key(group.spec), []).append(group)
    return buckets


def _split(groups: list[Group]) -> list[list[Group]]:
    """The fewest parts of which each is comparable."""
    length = _lengths([group.spec for group in groups])
    splits: tuple[Callable[[RunSpec], Any], ...] = (
        lambda spec: None,
        lambda spec: spec.learning_rate,
        lambda spec: length[_images(spec)],
        lambda spec: spec.iterations,
        lambda spec: (spec.learning_rate, length[_images(spec)]),
        lambda spec: tuple(getattr(spec, name) for name in LOOSE_FIELDS),
    )
    ways = [list(_buckets(groups, split).values()) for split in splits]
    return min((parts for parts in ways if all(map(_comparable, parts))), key=len)


def _images(spec: RunSpec) -> int:
    return spec.iterations * spec.images_per_step


def _lengths(specs: Sequence[RunSpec]) -> dict[int, int]:
    """Map the number of images of a run to its cluster of similar lengths."""
    found: dict[int, int] = {}
    last = 0
    for images in sorted(map(_images, specs)):
        cluster = found[last] + (images > SAME_LENGTH * last) if found else 0
        found.setdefault(images, cluster)
        last = images
    return found


def _comparable(groups: Sequence[Group]) -> bool:
    """Return True if no two groups are the same arm at the same batch size, and a batch size has one length."""
    places = {(arm_key(group.spec), group.spec.batch_size) for group in groups}
    lengths = {(group.spec.batch_size, group.spec.iterations) for group in groups}
    return len(places) == len(groups) and len(lengths) == len({size for size, _ in lengths})


def compare(groups: Sequence[Group], failures: Sequence[tuple[str, str]] = ()) -> Comparison:
    """The comparison of these groups, which must be comparable."""
    labels = arm_labels([group.spec for group in groups])
    ordered = sorted(groups, key=lambda group: (_rank(group.spec), labels[arm_key(group.spec)], group.spec.batch_size))
    named = tuple((labels[arm_key(group.spec)], group) for group in ordered)
    digest = hashlib.sha256("".join(sorted(group.key for group in groups)).encode()).hexdigest()[:8]
    arms, spec = list(dict.fromkeys(label for label, _ in named)), ordered[0].spec
    compared = f": {', '.join(arms[:MOST_NAMES])}{', …' if len(arms) > MOST_NAMES else ''}" if len(arms) > 1 else ""
    title = f"{spec.model} on {spec.data}{compared}"
    return Comparison(f"runs-{digest}", title, _about(ordered), named, _verdict(named), failures=tuple(failures))


def _rank(spec: RunSpec) -> tuple[int, str, bool]:
    known = NORM_ORDER.index(spec.norm) if spec.norm in NORM_ORDER else len(NORM_ORDER) - 1.5
    return int(2 * known), spec.norm, spec.scheme == "double"


def arm_labels(specs: Sequence[RunSpec]) -> dict[str, str]:
    """Map each arm to its label: BN, MBN-2, with the options of its norm, and with what else distinguishes arms of the
    same name.
    """
    arms = {arm_key(spec): spec for spec in specs}
    labels = {}
    for key, spec in arms.items():
        settings = [_settings(other) for other in arms.values() if other.arm == spec.arm]
        mine = _settings(spec)
        distinct = {name: mine[name] for name in mine if len({one[name] for one in settings}) > 1}
        shown = sorted({**spec.norm_options, **distinct}.items())
        labels[key] = " ".join([spec.arm, *(f"{name}={value}" for name, value in shown)])
    return labels


def _settings(spec: RunSpec) -> dict[str, str]:
    return {
        "λ": "–".join(f"{one:g}" for one in spec.strength),
        "every": f"{spec.every}",
        "fraction": f"{spec.fraction:g}",
    }


def _about(groups: Sequence[Group]) -> str:
    """Length, learning rate and settings that differ from the defaults, in one line."""
    specs = [group.spec for group in groups]
    spec = specs[0]
    parts = [f"{_span([one.iterations for one in specs])} iterations"]
    rates = _span([float(f"{one.base_learning_rate:.4g}") for one in specs])
    parts.append(f"learning rate {rates}{' after scaling' if spec.scaling != 'none' else ''}")
    shown = {*VARYING, "model", "data", "holdout"}
    unusual = {name: value for name, value in spec.identity.items() if name not in shown}
    if spec.holdout:
        parts.append(f"evaluated on {spec.holdout:,} held-out training images, not on the test set")
    parts += [f"{name.replace('_', ' ')} {_plain(value)}" for name, value in sorted(unusual.items())]
    return "; ".join(parts) + "."


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={one}" for name, one in sorted(value.items()))
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "on" if value is True else "off" if value is False else str(value)


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _verdict(groups: Sequence[tuple[str, Group]]) -> Verdict | None:
    """None for a single arm and for trials on held-out images."""
    if len({label for label, _ in groups}) < 2 or groups[0][1].spec.holdout:
        return None
    names = ("machine", "device", "threads", "channels_last")
    machines = {tuple(str(run.environment.get(name)) for name in names) for _, group in groups for run in group.runs}
    results: dict[str, dict[int, dict[int, float | None]]] = {}
    costs: dict[str, dict[int, Cost]] = {}
    for label, group in groups:
        results.setdefault(label, {})[group.spec.batch_size] = {
            run.spec.seed: final(run) for run in group.runs if run.status == "diverged" or final(run) is not None
        }
        if len(machines) == 1:  # else the costs cannot be compared
            costs.setdefault(label, {})[group.spec.batch_size] = group.cost
    return verdict(results, costs)
