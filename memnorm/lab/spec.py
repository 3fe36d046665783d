"""The specification of a run: a frozen, validated dataclass, whose hash is in the run's name.

It holds every field that a number depends on. How the run is computed (threads, device, workers) is in `Execution`. The
hash covers the fields that differ from their defaults, so a new field does not change the names of old runs, and a
released default must never change. Users write the norm of a run as `bn`, `mbn-1`, `two_way:decay=0.75`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import json
import re
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from memnorm import norms
from memnorm.lab.errors import UsageError

MEMORY_NORMS = ("mbn",)  # those with a strength λ
LARGEST_FLOAT = 3.4e38  # of float32, nearly
DEEPEST = 20  # levels of values in a YAML file
LARGEST_INT = 2**63 - 1  # torch's; a larger one may overflow in arithmetic with floats
RESERVED_OPTIONS = {  # arguments that the run sets itself
    "model_options": ("name", "classes", "image_shape", "norm_layer", "outputs"),
    "data_options": ("name", "root"),
    "norm_options": ("model", "norm"),
}


def option(default: Any, help: str, least: int | None = None) -> Any:
    """A field of a specification and its least value; the command line shows `help`."""
    metadata = {"help": help, "least": least}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class RunSpec:
    """One training run. The defaults are the paper's protocol on CIFAR-10."""

    model: str = option("resnet20", "built-in name, or package.module:factory of your own")
    model_options: dict[str, Any] = option({}, "keyword arguments of the model")
    pretrained: str | None = option(None, "file of a state dict that the network starts from, before its norms change")
    pretrained_sha256: str | None = option(None, "SHA-256 of that file; filled in if absent, an error if it differs")
    task: str = option("classification", "classification, segmentation, or package.module:factory of your own")
    data: str = option("cifar10", "built-in name, or a folder with train/ and val/ or test/")
    data_options: dict[str, Any] = option({}, "keyword arguments of the data set, such as image_size")
    train_images: int | None = option(None, "train on this many images only, the same ones for every seed", least=1)
    test_images: int | None = option(None, "evaluate on this many images only", least=1)
    holdout: int = option(0, "hold out this many training images and evaluate on them, not on the test set", least=0)
    augment: bool = option(True, "augment the training images")
    sampler: Literal["shuffle", "few-classes", "sorted"] = option("shuffle", "how batches are drawn")
    classes_per_batch: int = option(2, "for the sampler few-classes", least=1)
    norm: str = option("bn", "a name of memnorm.norms; bn is the model as it is")
    norm_options: dict[str, Any] = option({}, "options of the norm, such as memory_size")
    scheme: Literal["single", "double"] = option("single", "double adds Double-Forward")
    every: int = option(1, "Double-Forward in every n-th step only", least=1)
    fraction: float = option(1.0, "Double-Forward with this part of each batch")
    strength: tuple[float, ...] = option(
        (0.1, 0.5, 0.9), "λ before, between and after the milestones, comma-separated, or one constant"
    )
    batch_size: int = option(128, "images per forward: the micro-batch, where batches are accumulated", least=1)
    accumulate: int = option(1, "micro-batches per optimizer step", least=1)
    iterations: int = option(78_200, "optimizer steps", least=1)
    learning_rate: float = option(0.1, "learning rate before scaling")
    scaling: Literal["none", "linear", "sqrt"] = option(
        "none", "scale the learning rate with the images per step / base_batch_size"
    )
    base_batch_size: int = option(128, "images per step that the learning rate is meant for", least=1)
    schedule: Literal["step", "cosine", "constant"] = option("step", "step divides by 10 at each milestone")
    milestones: tuple[float, ...] = option((0.4, 0.6), "fractions of the iterations, comma-separated")
    warmup: int = option(0, "iterations of linear warm-up", least=0)
    optimizer: Literal["sgd", "adamw"] = option("sgd", "adamw needs a learning rate near 0.001")
    momentum: float = option(0.9, "momentum of SGD", least=0)
    weight_decay: float = option(1e-4, "weight decay of every parameter", least=0)
    precision: Literal["float32", "float64", "bfloat16"] = option("float32", "bfloat16 is autocast")
    evaluations: int = option(20, "number of evaluations, evenly spaced; the last one counts", least=1)
    recalibrate: int = option(
        0, "after the last step, also evaluate with running statistics recomputed from this many images", least=0
    )
    processes: int = option(1, "processes that share each batch; torchrun sets it", least=1)
    seed: int = option(0, "seed of initial weights, data order and augmentation, the same for every norm", least=0)

    def __post_init__(self) -> None:
        check_types(self)
        for name, hint in hints(type(self)).items():
            if get_origin(hint) is dict:  # the caller may change its own later
                object.__setattr__(self, name, copy.deepcopy(getattr(self, name)))
            elif hint is float:  # 1 and 1.0 are the same run
                object.__setattr__(self, name, float(getattr(self, name)))
            elif get_origin(hint) is tuple:
                object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        for problem in _problems(self):
            raise UsageError(problem)

    @property
    def images_per_step(self) -> int:
        return self.batch_size * self.accumulate

    @property
    def batch(self) -> str:
        """The batch for tables: 8, or 2 × 16 for 16 micro-batches of 2."""
        return f"{self.batch_size:,}" + (f" × {self.accumulate}" if self.accumulate > 1 else "")

    @property
    def base_learning_rate(self) -> float:
        """The learning rate after scaling with the images per step."""
        ratio = self.images_per_step / self.base_batch_size
        return self.learning_rate * {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[self.scaling]

    @property
    def identity(self) -> dict[str, Any]:
        """The fields that differ from their defaults. Pretrained weights are known by their hash, not by their path."""
        changed = {name: value for name, value in self.as_dict().items() if value != _DEFAULTS[name]}
        changed.pop("pretrained", None)
        return changed

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        """Name of the run's folder: readable, and unique by the digest."""
        batch = f"b{self.batch_size}" + (f"x{self.accumulate}" if self.accumulate > 1 else "")
        readable = f"{self.data}-{self.model}-{self.norm}-{self.scheme}-{batch}-s{self.seed}"
        return f"{re.sub(r'[^A-Za-z0-9.]+', '-', readable).strip('-.')[-80:].lstrip('-.')}-{self.digest}"

    @property
    def arm(self) -> str:
        """The norm as the paper writes it: BN, MBN-2."""
        return arm_name(self.norm, self.scheme)

    def but(self, **changes: Any) -> RunSpec:
        return dataclasses.replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as YAML and JSON know them."""
        plain = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}

    def as_yaml(self) -> str:
        return yaml.safe_dump(self.as_dict(), sort_keys=False, allow_unicode=True)

    @classmethod
    def from_dict(cls, values: Any) -> RunSpec:
        if not isinstance(values, dict):
            raise UsageError(f"a run's specification is a mapping of names to values; got {type(values).__name__}")
        unknown = sorted(map(str, values.keys() - _DEFAULTS.keys()))
        if unknown:
            raise UsageError(f"unknown name in the specification: {', '.join(unknown)}")
        arguments: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        return cls(**arguments)

    @classmethod
    def from_yaml(cls, text: str) -> RunSpec:
        return cls.from_dict(parse_yaml(text, yaml.safe_load))


@dataclass(frozen=True)
class Execution:
    """How a run is computed; not part of its identity."""

    threads: int = option(0, "threads of torch; 0 leaves torch's own choice", least=0)
    device: str = option("auto", "cpu, cuda, cuda:1 …; auto takes a GPU where there is one")
    channels_last: bool = option(False, "keep weights and images with channels last, faster for most convolutions")
    workers: int = option(2, "processes that decode image files; 0 decodes in the training process", least=0)
    checkpoint_seconds: float = option(60.0, "time between checkpoints, the most a killed run loses", least=0)
    keep_weights: bool = option(False, "write the final weights to weights.pt in the run's folder")
    tensorboard: bool = option(False, "write event files as well (needs the package tensorboard)")

    def __post_init__(self) -> None:
        check_types(self)
        for problem in _too_small(self):
            raise UsageError(problem)


def parse_yaml(text: str, load: Callable[[str], Any]) -> Any:
    """`load(text)` for a text without aliases, of which a few can fill the memory, and without deep nesting."""
    depth = 0
    try:
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise yaml.YAMLError(f"aliases are not allowed; got *{event.anchor}")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise yaml.YAMLError(f"values are nested more than {DEEPEST} levels deep")
        return load(text)
    except Exception as error:  # it raises more than YAMLError, for example on an impossible date
        raise UsageError(f"not a YAML file: {error}") from error


def arm_name(norm: str, scheme: str) -> str:
    """BN, MBN-1, MBN-2, GROUP: the number says how many forwards, where the scheme matters."""
    suffix = "-2" if scheme == "double" else "-1" if norm in MEMORY_NORMS else ""
    return norm.upper().replace("_", "-") + suffix


def parse_arm(word: str, scheme: str | None = None) -> dict[str, Any]:
    """The fields of a specification that `bn`, `mbn-1` or `two_way:decay=0.75:warmup=20` stands for. `mbn` alone means
    `mbn-2`, with Double-Forward, as in the paper, unless `scheme` says otherwise.
    """
    name, *parts = word.strip().split(":")
    norm, dash, number = name.lower().rpartition("-")
    if not (dash and number in ("1", "2")):
        norm, number = name.lower(), ""
    norm = norm.replace("-", "_")
    if norm not in norms.available():
        available = ", ".join(norms.available())
        raise UsageError(f"there is no norm {name!r}; there are {available} (mbn-1: without Double-Forward)")
    written = {"1": "single", "2": "double"}.get(number)
    if scheme and written and scheme != written:
        raise UsageError(f"{word} means the scheme {written}; got {scheme}")
    arm: dict[str, Any] = {
        "norm": norm,
        "scheme": scheme or written or ("double" if norm in MEMORY_NORMS else "single"),
    }
    options = _options(word, parts)
    if norm in MEMORY_NORMS and "strength" in options:  # a field of its own, since it can change over the run
        arm["strength"] = (options.pop("strength"),)
    if options:
        arm["norm_options"] = options
    if reason := unsupported(RunSpec.from_dict(arm)):
        raise UsageError(f"{word}: {reason}")
    return arm


def _options(word: str, parts: Sequence[str]) -> dict[str, Any]:
    """The options of an arm from texts such as `decay=0.75`; the values are YAML scalars."""
    options: dict[str, Any] = {}
    for part in parts:
        name, equals, text = (one.strip() for one in part.partition("="))
        if not (name and equals and text):
            raise UsageError(f"{word}: options are written as two_way:decay=0.75:warmup=20; got {part!r}")
        if name in options:
            raise UsageError(f"{word}: the option {name} is given twice")
        try:
            options[name] = parse_yaml(text, yaml.safe_load)
        except UsageError:
            raise UsageError(f"{word}: the value of {name} must be a number, a text, true, false or null") from None
        if isinstance(options[name], str):
            with contextlib.suppress(ValueError):  # YAML 1.1 reads 1e-3 as a text
                options[name] = float(text)
    return options


def unsupported(spec: RunSpec) -> str | None:
    """The reason that a run cannot be made with the registered norms; None if it can."""
    if spec.norm not in norms.available():
        return f"the norm {spec.norm!r} is not registered in this version of memnorm"
    records = norms.get(spec.norm).records
    if spec.scheme == "double" and not records:
        return f"Double-Forward needs a norm that records its statistics, and {spec.norm!r} does not"
    if spec.recalibrate and spec.norm != "bn" and not records:
        return f"recalibrate needs running statistics, and {spec.norm!r} has none"
    return None


hints: Callable[[Any], dict[str, Any]] = functools.cache(get_type_hints)  # of a dataclass; evaluating them is slow


def check_types(spec: Any) -> None:
    """Check that dataclass fields have their annotated types; an int is accepted as a float."""
    wanted_types = hints(type(spec))
    for one in dataclasses.fields(spec):
        value = getattr(spec, one.name)
        if not _is_a(value, wanted_types[one.name]):
            wanted = _words(wanted_types[one.name])
            raise UsageError(f"{one.name} must be {wanted}; got {value!r}")
        if isinstance(value, int) and value > LARGEST_INT and wanted_types[one.name] is not float:
            raise UsageError(f"{one.name} must be below 2**63; got {value}")


def _is_a(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is Literal:
        return value in get_args(hint)
    if origin is types.UnionType:
        return any(_is_a(value, one) for one in get_args(hint))
    if origin is tuple:
        return isinstance(value, (tuple, list)) and all(_is_a(one, get_args(hint)[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and _is_plain(value)
    if hint is float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number and value == value and (isinstance(value, float) or abs(value) < 1e308)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _is_plain(value: Any) -> bool:
    """Return True if the value survives a JSON round trip, which its hash needs."""
    try:
        return json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError, RecursionError):
        return False


def _words(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        return "a list of numbers"
    if get_origin(hint) is dict:
        return "a mapping of names to plain values (numbers, texts, lists, mappings)"
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return words.get(hint, str(hint).replace("None", "null"))


def _too_small(spec: Any) -> Iterator[str]:
    for one in dataclasses.fields(spec):
        value, least = getattr(spec, one.name), one.metadata["least"]
        if least is not None and value is not None and value < least:
            yield f"{one.name} must {'not be negative' if least == 0 else 'be at least 1'}; got {value}"


def _problems(spec: RunSpec) -> Iterator[str]:
    yield from _too_small(spec)
    if not 0 < spec.learning_rate < float("inf"):
        yield f"learning_rate must be positive and finite; got {spec.learning_rate}"
    if spec.base_learning_rate > LARGEST_FLOAT:
        yield f"learning_rate must be at most {LARGEST_FLOAT} after scaling; got {spec.base_learning_rate}"
    if spec.weight_decay > LARGEST_FLOAT:
        yield f"weight_decay must be at most {LARGEST_FLOAT}; got {spec.weight_decay}"
    if spec.momentum >= 1:
        yield f"momentum must be below 1; got {spec.momentum}"
    if not 0 < spec.fraction <= 1:
        yield f"fraction must be above 0 and at most 1; got {spec.fraction}"
    if list(spec.milestones) != sorted(spec.milestones) or not all(0 < one < 1 for one in spec.milestones):
        yield f"milestones must be increasing fractions between 0 and 1; got {list(spec.milestones)}"
    if spec.warmup >= spec.iterations:
        yield f"warmup must be shorter than the {spec.iterations} iterations; got {spec.warmup}"
    if not all(0 <= one <= 1 for one in spec.strength):
        yield f"strength must lie in [0, 1]; got {list(spec.strength)}"
    yield from _contradictions(spec)


def _contradictions(spec: RunSpec) -> Iterator[str]:
    count = len(spec.milestones)
    if spec.norm in MEMORY_NORMS and len(spec.strength) not in (1, count + 1):
        yield f"strength needs one value, or {count + 1} for {count} milestones; got {len(spec.strength)}"
    if spec.norm not in MEMORY_NORMS and list(spec.strength) != _DEFAULTS["strength"]:
        yield f"strength belongs to the norm {' or '.join(MEMORY_NORMS)}; {spec.norm} has none"
    if spec.scheme == "single" and (spec.every != 1 or spec.fraction != 1):
        yield "every and fraction belong to scheme: double"
    if spec.task == "segmentation" and spec.sampler != "shuffle":
        yield f"the sampler {spec.sampler} needs a class per image, and segmentation has none"
    if spec.optimizer != "sgd" and spec.momentum != _DEFAULTS["momentum"]:
        yield f"momentum belongs to the optimizer sgd; {spec.optimizer} has its own"
    if (spec.pretrained is None) != (spec.pretrained_sha256 is None):
        yield "pretrained and pretrained_sha256 belong together; the hash is that of the file's bytes"
    if spec.recalibrate and spec.processes > 1:
        yield "recalibrate is for runs in one process"
    if spec.batch_size < spec.processes:
        yield f"{spec.processes} processes cannot share a batch of {spec.batch_size}"
    if "strength" in spec.norm_options and spec.norm in MEMORY_NORMS:
        yield "give strength as a field of its own, not in norm_options"
    for options, names in RESERVED_OPTIONS.items():
        yield from (
            f"{options} cannot hold {name!r}: the run sets it" for name in names if name in getattr(spec, options)
        )


_DEFAULTS = {
    one.name: list(one.default) if isinstance(one.default, tuple) else one.default
    for one in dataclasses.fields(RunSpec)
}
_DEFAULTS |= {name: {} for name in RESERVED_OPTIONS}
