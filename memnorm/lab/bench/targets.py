"""What must be reached, and whether it was."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A measured value beside the bound it must not exceed, and the one that would be good."""

    what: str
    value: float
    must: float
    good: float | None = None
    unit: str = "× BN"

    @property
    def met(self) -> bool:
        return self.value <= self.must

    @property
    def verdict(self) -> str:
        if not self.met:
            return "missed"
        return "good" if self.good is not None and self.value <= self.good else "reached"
