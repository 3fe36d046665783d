"""What may be concluded from a few seeds: spread, differences between arms, intervals. Plain Python.

The same seed gives every arm the same initial weights, data order and augmentation, so two arms are compared seed by
seed. With n differences d of mean m and deviation s,

    t = m / (s/√n),   n − 1 degrees of freedom,   P(|T| > t) = I(df/(df + t²); df/2, 1/2)

where I is the regularised incomplete beta function. Nothing is ever concluded from one seed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

CONFIDENCE = 0.95
POWER = 0.8
SAME = 1e-9  # deviations below this share of the values are rounding


@dataclass(frozen=True)
class Sample:
    """Results of the same thing under several seeds."""

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
        """Standard deviation with n − 1; one value has none."""
        if self.n == 1:
            return None
        return math.sqrt(math.fsum((value - self.mean) ** 2 for value in self.values) / (self.n - 1))

    @property
    def text(self) -> str:
        return f"{number(self.mean)}{'' if self.sd is None else f' ± {number(self.sd)}'} (n = {self.n})"


@dataclass(frozen=True)
class Difference:
    """First arm minus second, averaged over seeds: below zero, the first arm has less error."""

    mean: float
    standard_error: float | None  # None: one seed, no idea of the spread
    df: float | None
    n: int  # pairs of runs, or runs in the smaller sample
    lower: int | None = None  # pairs in which the first is lower
    higher: int | None = None

    @property
    def paired(self) -> bool:
        return self.lower is not None

    @property
    def mirrored(self) -> Difference:
        """Second arm minus first."""
        return replace(self, mean=-self.mean, lower=self.higher, higher=self.lower)

    @property
    def spread(self) -> bool:
        """Whether the seeds differ at all; a t-test without spread would be sure of anything."""
        return bool(self.standard_error)

    @property
    def p(self) -> float | None:
        """Two-sided p-value. Without any spread a difference is judged by its sign alone."""
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
        """The difference that such an experiment finds four times in five, when it makes this many comparisons."""
        if self.standard_error is None or self.df is None or not self.spread:
            return None
        return noncentrality((1 - CONFIDENCE) / comparisons, self.df) * self.standard_error


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> Difference | None:
    """Over the seeds that both have; None if there is none."""
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
    """For arms without common seeds: unequal variances, degrees of freedom by Welch and Satterthwaite."""
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
    """Seed by seed where two seeds or more are common, else between the two samples.

    Seeds that all gave the same difference, as a small test set can make them, leave no spread to judge it by; the
    spread between seeds then stands in.
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
    """Corrected for having looked several times: the i-th smallest of m is multiplied by m − i, and never falls."""
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda one: p_values[one])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def t_two_sided(t: float, df: float) -> float:
    """P(|T| > |t|) for Student's T."""
    if math.isinf(t):
        return 0.0
    square = t * t
    if square < 1:  # near zero the other argument would lose its digits
        return 1 - incomplete_beta(square / (df + square), 0.5, df / 2)
    return incomplete_beta(df / (df + square), df / 2, 0.5)


@functools.cache
def t_quantile(probability: float, df: float) -> float:
    """The t that Student's T stays below with this probability."""
    if not 0 < probability < 1 or df <= 0:
        raise ValueError(f"needs 0 < probability < 1 and df > 0; got {probability} and {df}")
    if probability < 0.5:
        return -t_quantile(1 - probability, df)
    tail = 2 * (1 - probability)
    low, high = 0.0, 1.0
    while t_two_sided(high, df) > tail:
        low, high = high, 2 * high
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if t_two_sided(middle, df) > tail else (low, middle)
    return (low + high) / 2


@functools.cache
def noncentrality(level: float, df: float, power: float = POWER) -> float:
    """How many standard errors a difference must have for a two-sided test at this level to find it so often."""
    critical = t_quantile(1 - level / 2, df)
    low, high = 0.0, 1.0
    while t_power(high, critical, df) < power:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_power(middle, critical, df) < power else (low, middle)
    return (low + high) / 2


def t_power(shift: float, critical: float, df: float) -> float:
    """P(T > critical) for noncentral T: a normal of mean `shift` over S, the root of an independent χ²/df.

    Given S = s it is Φ(shift − critical·s): one up to eight deviations left of s = shift/critical, zero as far right.
    """
    widest = 1 + 12 / math.sqrt(df)  # S beyond has no mass that counts
    left, right = (min(max((shift + side) / critical, 0.0), widest) for side in (-8.0, 8.0))

    def density(s: float) -> float:
        if s <= 0:
            return math.sqrt(2 / math.pi) if df == 1 else 0.0
        log = math.log(2) + df / 2 * math.log(df / 2) - math.lgamma(df / 2) + (df - 1) * math.log(s) - df * s * s / 2
        return math.exp(log)

    def part(s: float) -> float:
        return density(s) * 0.5 * math.erfc((critical * s - shift) / math.sqrt(2))

    return _simpson(density, 0.0, left) + _simpson(part, left, right)


def _simpson(f: Callable[[float], float], low: float, high: float, panels: int = 400) -> float:
    """The integral of a smooth function."""
    step = (high - low) / (2 * panels)
    values = [f(low + index * step) for index in range(2 * panels + 1)]
    return step / 3 * (values[0] + values[-1] + 4 * math.fsum(values[1::2]) + 2 * math.fsum(values[2:-1:2]))


def incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I(x; a, b), by its continued fraction."""
    if not 0 <= x <= 1:
        raise ValueError(f"x must lie in [0, 1]; got {x}")
    if x in (0.0, 1.0):
        return x
    if x > (a + 1) / (a + b + 2):  # beyond, the fraction of the mirror image converges faster
        return 1 - incomplete_beta(1 - x, b, a)
    front = a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(front) / (a * _fraction(x, a, b))


def _fraction(x: float, a: float, b: float) -> float:
    """1 + d₁/(1 + d₂/(1 + …)), evaluated forwards as a product of ratios of successive convergents (Lentz)."""
    value, numerator, denominator = 1.0, 1.0, 0.0
    for term in range(1, 10_000):
        m = term // 2
        d = m * (b - m) if term % 2 == 0 else -(a + m) * (a + b + m)
        d *= x / ((a + term - 1) * (a + term))
        numerator = 1 + d / numerator or 1e-300
        denominator = 1 / (1 + d * denominator or 1e-300)
        step = numerator * denominator
        value *= step
        if abs(step - 1) < 1e-16:
            break
    return value


def number(value: float, digits: int = 2) -> str:
    """With a minus sign that is one, and no negative zero."""
    text = f"{value:.{digits}f}"
    return text.replace("-", "−") if float(text) else text.lstrip("-")


def p_text(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}" if p < 0.1 else f"p = {p:.2f}"
