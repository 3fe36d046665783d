"""The arms of a comparison, a norm and a scheme, as users write them: `bn`, `mbn-1`."""

from __future__ import annotations

from memnorm import norms
from memnorm.lab.errors import UsageError
from memnorm.lab.spec import MEMORY_NORMS, RunSpec


def parse_arm(word: str, scheme: str | None = None) -> dict[str, str]:
    """Norm and scheme of `bn`, `mbn`, `mbn-1` or `mbn-2`. `mbn` alone means `mbn-2`, with Double-Forward, as in the
    paper, unless `scheme` says otherwise.
    """
    norm, dash, number = word.strip().lower().rpartition("-")
    if not (dash and number in ("1", "2")):
        norm, number = word.strip().lower(), ""
    norm = norm.replace("-", "_")
    if norm not in norms.available():
        available = ", ".join(norms.available())
        raise UsageError(f"there is no norm {word!r}; there are {available} (mbn-1: without Double-Forward)")
    written = {"1": "single", "2": "double"}.get(number)
    if scheme and written and scheme != written:
        raise UsageError(f"{word} means the scheme {written}; got {scheme}")
    arm = {"norm": norm, "scheme": scheme or written or ("double" if norm in MEMORY_NORMS else "single")}
    if reason := unsupported(RunSpec.from_dict(arm)):
        raise UsageError(f"{word}: {reason}")
    return arm


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
