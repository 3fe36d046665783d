"""Parse the arms of a comparison, a norm and a scheme, as users write them: `bn`, `mbn-1`."""

from __future__ import annotations

import memnorm
from memnorm.lab.errors import UsageError
from memnorm.lab.spec import MEMORY_NORMS, RunSpec
from memnorm.lab.tables import unsupported


def registered() -> dict[str, bool]:
    """Map each norm of this version to True if its layers record, which Double-Forward needs."""
    return {name: memnorm.norms.get(name).records for name in memnorm.norms.available()}


def parse_arm(word: str, scheme: str | None = None) -> dict[str, str]:
    """Norm and scheme of `bn`, `mbn`, `mbn-1` or `mbn-2`. `mbn` alone means `mbn-2`, with Double-Forward, as in the
    paper, unless `scheme` says otherwise.
    """
    norm, dash, number = word.strip().lower().rpartition("-")
    if not (dash and number in ("1", "2")):
        norm, number = word.strip().lower(), ""
    norm = norm.replace("-", "_")
    if norm not in registered():
        raise UsageError(
            f"there is no norm {word!r}; there are {', '.join(registered())} (mbn-1: without Double-Forward)"
        )
    written = {"1": "single", "2": "double"}.get(number)
    if scheme and written and scheme != written:
        raise UsageError(f"{word} means the scheme {written}; got {scheme}")
    arm = {"norm": norm, "scheme": scheme or written or ("double" if norm in MEMORY_NORMS else "single")}
    reason = unsupported(RunSpec.from_dict(arm), registered())
    if reason:
        raise UsageError(f"{word}: {reason}")
    return arm
