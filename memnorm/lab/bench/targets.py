"""Bounds on measured costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A measured value, the bound that it must not exceed, and a bound that would be good."""

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
