"""Arms of a comparison: a norm and a scheme, by the names that users give them."""

from __future__ import annotations

import memnorm
from memnorm.lab import tables
from memnorm.lab.errors import UsageError
from memnorm.lab.spec import MEMORY_NORMS, RunSpec


def registered() -> dict[str, bool]:
    """The norms of this version, and whether their layers can be told when to record, as Double-Forward needs."""
    return {name: memnorm.norms.get(name).records for name in memnorm.norms.available()}


def why_not(spec: RunSpec) -> str | None:
    """The reason that a run cannot be made in this version, whatever its data; None if it can."""
    return tables.why_not(spec, registered())


def parse_arm(word: str) -> dict[str, str]:
    """`bn`, `mbn`, `mbn-1`, `mbn-2`: norm and scheme. A memory comes with Double-Forward unless told otherwise."""
    norm, dash, number = word.strip().lower().rpartition("-")
    if not (dash and number in ("1", "2")):
        norm, number = word.strip().lower(), ""
    norm = norm.replace("-", "_")
    if norm not in registered():
        raise UsageError(
            f"there is no norm {word!r}; there are {', '.join(registered())} (mbn-1: without Double-Forward)"
        )
    scheme = {"1": "single", "2": "double"}.get(number, "double" if norm in MEMORY_NORMS else "single")
    arm = {"norm": norm, "scheme": scheme}
    reason = why_not(RunSpec.from_dict(arm))
    if reason:
        raise UsageError(f"{word}: {reason}")
    return arm
