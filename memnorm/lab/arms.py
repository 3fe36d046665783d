"""The arms of a comparison as users write them: a norm, a scheme and options, `bn`, `mbn-1`, `two_way:decay=0.75`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import yaml

from memnorm import norms
from memnorm.lab.errors import UsageError
from memnorm.lab.spec import MEMORY_NORMS, RunSpec, parse_yaml


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
