"""Spread over seeds, differences between arms, confidence intervals and p-values.

The same seed gives every arm the same initial weights, data order and augmentation, so two arms are compared seed by
seed. With n differences of mean m and standard deviation s,

    t = m / (s/√n),   n − 1 degrees of freedom

is tested with Student's t distribution (scipy.special). One seed supports no conclusion.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

CONFIDENCE = 0.95
POWER = 0.8
SAME = 1e-9  # deviations below this share of the values are rounding


@dataclass(frozen=True)
class Sample:
    """Results of one specification under several seeds."""

    values: Sequence[float]

    def __post_init__(self) -> None:
        values = tuple(map(float, self.values))
        if not values or not all(map(math.isfinite, values)):
            raise ValueError(f"a sample needs at least one value, all of them finite; got {list(values)}")
        object.__setattr__(self, "values", values)

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / self.n

    @property
    def sd(self) -> float | None:
        """Standard deviation with n − 1; None for a single value."""
        if self.n == 1:
            return None
        return math.sqrt(math.fsum((value - self.mean) ** 2 for value in self.values) / (self.n - 1))

    @property
    def text(self) -> str:
        return f"{number(self.mean)}{'' if self.sd is None else f' ± {number(self.sd)}'} (n = {self.n})"


@dataclass(frozen=True)
class Difference:
    """First arm minus second, averaged over seeds. A negative mean: the first arm has less error."""

    mean: float
    standard_error: float | None  # None for one seed
    df: float | None
    n: int  # pairs of runs, or runs in the smaller sample
    lower: int | None = None  # pairs in which the first arm is lower
    higher: int | None = None

    @property
    def paired(self) -> bool:
        return self.lower is not None

    @property
    def mirrored(self) -> Difference:
        return replace(self, mean=-self.mean, lower=self.higher, higher=self.lower)

    @property
    def spread(self) -> bool:
        """Return True if the differences vary between seeds; else a t-test would call any difference significant."""
        return bool(self.standard_error)

    @property
    def p(self) -> float | None:
        """Two-sided p-value. Without spread this is a sign test."""
        if self.standard_error is None or self.df is None:
            return None
        if self.mean == 0:
            return 1.0
        if not self.spread:
            return min(1.0, 2 * 0.5**self.n) if self.paired else 1.0
        return t_two_sided(self.mean / self.standard_error, self.df)

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float] | None:
        if self.standard_error is None or self.df is None or not self.spread:
            return None
        half = t_quantile(0.5 + confidence / 2, self.df) * self.standard_error
        return self.mean - half, self.mean + half

    def detectable(self, comparisons: int = 1) -> float | None:
        """Minimum detectable difference: found with 80 % power after correction for this many comparisons."""
        if self.standard_error is None or self.df is None or not self.spread:
            return None
        return noncentrality((1 - CONFIDENCE) / comparisons, self.df) * self.standard_error


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> Difference | None:
    """Difference over the seeds that both arms have; None without a common seed."""
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    values = [first[seed] - second[seed] for seed in seeds]
    size = max(abs(one) for seed in seeds for one in (first[seed], second[seed]))
    values = [value if abs(value) > SAME * size else 0.0 for value in values]
    sample = Sample(values)
    lower, higher = sum(value < 0 for value in values), sum(value > 0 for value in values)
    if sample.sd is None:
        return Difference(sample.mean, None, None, 1, lower, higher)
    error = sample.sd / math.sqrt(sample.n) if sample.sd > SAME * size else 0.0
    return Difference(sample.mean, error, sample.n - 1, sample.n, lower, higher)


def welch(first: Sequence[float], second: Sequence[float]) -> Difference | None:
    """Difference of two samples without common seeds: Welch's test."""
    if not first or not second:
        return None
    a, b = Sample(first), Sample(second)
    mean, n = a.mean - b.mean, min(a.n, b.n)
    if a.sd is None or b.sd is None:
        return Difference(mean, None, None, n)
    va, vb = a.sd**2 / a.n, b.sd**2 / b.n
    size = max(map(abs, (*a.values, *b.values)))
    if math.sqrt(va + vb) <= SAME * size:
        return Difference(mean if abs(mean) > SAME * size else 0.0, 0.0, a.n + b.n - 2, n)
    df = (va + vb) ** 2 / (va**2 / (a.n - 1) + vb**2 / (b.n - 1))
    return Difference(mean, math.sqrt(va + vb), df, n)


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> Difference | None:
    """Paired where the arms have two common seeds or more, else Welch's test.

    On a small test set all pairs can have the same difference. Then the spread between seeds is used instead.
    """
    pairs = paired(first, second)
    if pairs is None or pairs.n == 1:
        unpaired = welch(list(first.values()), list(second.values()))
        return unpaired if unpaired is not None and unpaired.standard_error is not None else pairs or unpaired
    if pairs.spread or pairs.mean == 0:
        return pairs
    seeds = sorted(first.keys() & second.keys())
    between = welch([first[seed] for seed in seeds], [second[seed] for seed in seeds])
    return replace(between, lower=pairs.lower, higher=pairs.higher) if between and between.spread else pairs


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction: the i-th smallest of m p-values, counted from 0, times m − i, made monotone."""
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda one: p_values[one])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def t_two_sided(t: float, df: float) -> float:
    """P(|T| > |t|) for Student's T."""
    return 2 * _student("stdtr", df, -abs(t))


def t_quantile(probability: float, df: float) -> float:
    """The value that Student's T stays below with this probability."""
    return _student("stdtrit", df, probability)


def noncentrality(level: float, df: float, power: float = POWER) -> float:
    """The true difference, in standard errors, that a two-sided test at this level detects with this power."""
    return _student("nctdtrinc", df, 1 - power, t_quantile(1 - level / 2, df))


def _student(function: str, *arguments: float) -> float:
    from scipy import special  # type: ignore[import-untyped]  # here: the command line starts without scipy

    return float(getattr(special, function)(*arguments))


def number(value: float, digits: int = 2) -> str:
    """The rounded value with a typographic minus sign and no negative zero."""
    text = f"{value:.{digits}f}"
    return text.replace("-", "−") if float(text) else text.lstrip("-")


def p_text(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}" if p < 0.1 else f"p = {p:.2f}"
