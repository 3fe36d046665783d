"""Which norm to use, by significance tests between all pairs of arms.

Arms are compared seed by seed, at each batch size and averaged over all batch sizes. p-values are Holm-corrected, so
more norms do not make a false winner more likely. An arm that diverged is not recommended. One seed supports no claim.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from memnorm.lab.significance import CONFIDENCE, Difference, Sample, difference, holm, number, p_text

MANY = 4  # with more arms than this, recommended arms must also pass an uncorrected test against the best one
TEST_HEADER = (
    "batch size",
    "less error",
    "than",
    "difference in points",
    "95 % interval",
    "p after Holm",
    "seeds",
    "detectable difference",
)
Results = Mapping[str, Mapping[int, Mapping[int, float | None]]]  # arm, batch size, seed: error in percent


@dataclass(frozen=True)
class Cost:
    step_ms: float | None = None
    memory_mb: float | None = None


@dataclass(frozen=True)
class PairTest:
    """A significance test between two arms, the one with the lower mean error first."""

    first: str
    second: str
    sizes: tuple[int, ...]  # the batch sizes averaged over
    difference: Difference
    p: float | None  # corrected; None with one seed
    tests: int = 1  # that the p-value is corrected for

    @property
    def significant(self) -> bool:
        return self.p is not None and self.p < 1 - CONFIDENCE

    @property
    def detectable(self) -> float | None:
        return self.difference.detectable(self.tests)

    @property
    def cells(self) -> tuple[str, ...]:
        """A row under TEST_HEADER."""
        one, interval, smallest = self.difference, self.difference.interval(), self.detectable
        return (
            " + ".join(map(str, self.sizes)),
            self.first,
            self.second,
            number(one.mean),
            f"{number(interval[0])} to {number(interval[1])}" if interval else "–",
            "–" if self.p is None else p_text(self.p)[2:].removeprefix("= "),
            f"{one.lower} of {one.n} lower" if one.paired else f"unpaired, n = {one.n}",
            "–" if smallest is None or smallest > 100 else rounded(smallest),
        )


@dataclass(frozen=True)
class Verdict:
    """`use` is empty where nothing can be recommended; `by_size` holds the same for each batch size."""

    headline: str
    details: tuple[str, ...] = ()
    use: tuple[str, ...] = ()
    by_size: Mapping[int, tuple[str, ...]] | None = None
    tests: tuple[PairTest, ...] = ()
    shown: tuple[PairTest, ...] = ()  # the tests against the arm with the lowest error in each scope


def verdict(results: Results, costs: Mapping[str, Mapping[int, Cost]] | None = None) -> Verdict:
    """Test all pairs of arms. An error of None (or not finite) stands for a run that diverged.

    `costs` by arm and batch size are given relative to BN's where it takes part, else to those of the first arm.
    """
    arms = [arm for arm, by_size in results.items() if any(by_size.values())]
    sizes = tuple(sorted({size for arm in arms for size, seeds in results[arm].items() if seeds}))
    if not arms:
        return Verdict("No runs: no claim.")
    notes = tuple(_gaps(results, arms, sizes))
    if len(arms) == 1:
        return Verdict("One norm only: nothing to compare it with.", notes)
    prices = _prices(costs or {}, arms)
    if len(sizes) == 1:
        scope = Scope(results, arms, sizes, pair_tests(results, arms, [sizes]))
        return _verdict(scope, {}, (*prices, *notes))
    # The averages and the single batch sizes are two families of tests: each gets half of the allowed error.
    overall = Scope(results, arms, sizes, _doubled(pair_tests(results, arms, [sizes])))
    tests = _doubled(pair_tests(results, arms, [(size,) for size in sizes]))
    each = {size: Scope(results, arms, (size,), [one for one in tests if one.sizes == (size,)]) for size in sizes}
    return _verdict(overall, each, (*prices, *notes))


def pair_tests(results: Results, arms: Sequence[str], scopes: Iterable[Sequence[int]]) -> list[PairTest]:
    """Test all pairs of arms in each scope; p-values are corrected for all of these tests together."""
    found = []
    for sizes, (a, b) in itertools.product(scopes, itertools.combinations(arms, 2)):
        common = [size for size in sizes if _complete(results, a, size, sizes) and _complete(results, b, size, sizes)]
        first, second = (_averages(results, arm, common) for arm in (a, b))
        one = difference(first, second)
        if one is not None:
            low, high, lower = (a, b, one) if one.mean <= 0 else (b, a, one.mirrored)
            found.append(PairTest(low, high, tuple(common), lower, lower.p))
    known = [index for index, one in enumerate(found) if one.p is not None]
    for index, p in zip(known, holm([found[index].p or 0.0 for index in known]), strict=True):
        found[index] = replace(found[index], p=p, tests=len(known))
    return found


def _doubled(tests: list[PairTest]) -> list[PairTest]:
    return [one if one.p is None else replace(one, p=min(1.0, 2 * one.p), tests=2 * one.tests) for one in tests]


class Scope:
    """The tests at one batch size, or averaged over all of them, and the arms they recommend."""

    def __init__(self, results: Results, arms: Sequence[str], sizes: Sequence[int], tests: list[PairTest]) -> None:
        self.results, self.arms, self.sizes, self.tests = results, arms, sizes, tests
        diverged = {arm: [_diverged(results, arm, size) for size in sizes] for arm in arms}
        finished = {arm: sum(len(_finished(results, arm, size)) for size in sizes) for arm in arms}
        self.failing = [arm for arm in arms if any(diverged[arm])]
        self.lost = [arm for arm in arms if max(diverged[arm]) >= 2 and not finished[arm]]
        self.trained = [arm for arm in arms if finished[arm]]
        self.won = [one for one in tests if one.significant]
        self.beaten = {one.second for one in self.won if one.first not in self.failing}
        self.use = tuple(arm for arm in self._candidates() if self._beats(arm))
        if len(arms) > MANY and self.use:
            self.use = self._near_the_best()
        if self.use:  # an arm with even less error is no worse a choice, though none of its tests is significant
            lowest = min(map(self._mean, self.use))
            tested = {arm for one in tests if one.p is not None for arm in (one.first, one.second)}
            lower = {arm for arm in self._candidates() if arm in tested and self._mean(arm) < lowest}
            self.use = tuple(arm for arm in arms if arm in self.use or arm in lower)

    def _candidates(self) -> list[str]:
        return [arm for arm in self.trained if arm not in self.failing and arm not in self.beaten]

    def _beats(self, arm: str) -> bool:
        """Return True if the arm is significantly better than another, or trains where another never does."""
        alone = bool(self.lost) and min(len(_finished(self.results, arm, size)) for size in self.sizes) >= 2
        return alone or any(one.first == arm for one in self.won)

    def _near_the_best(self) -> tuple[str, ...]:
        """The recommended arms without those that an uncorrected test puts behind the best of them.

        Holm's correction for many arms is severe: an arm could be recommended for beating the worst one alone.
        """
        best = min(self.use, key=self._mean)
        uncorrected = [replace(one, p=one.difference.p) for one in self.tests if one.first == best]
        behind = {one.second for one in uncorrected if one.significant}
        return tuple(arm for arm in self.use if arm not in behind)

    def _mean(self, arm: str) -> float:
        return Sample([error for size in self.sizes for error in _finished(self.results, arm, size).values()]).mean

    @property
    def against_the_best(self) -> list[PairTest]:
        if not self.tests:
            return []
        best = min(self.trained, key=self._mean)
        return [one for one in self.tests if best in (one.first, one.second)]

    @property
    def conclusion(self) -> str:
        if not self.trained:
            return "every run diverged: no claim"
        if self.use:
            worse = [arm for arm in self.arms if any(one.second == arm and one.first in self.use for one in self.won)]
            reasons = [f"significantly less error than {_listed(worse)}"] if worse else []
            reasons += [f"every run of {_listed(self.lost)} diverged"] if self.lost else []
            return f"use {_listed(self.use, ' or ')}: {'; '.join(reasons)}"
        if self.won:
            return "no recommendation: the norm with significantly less error did not finish every run"
        if any(one.p is not None for one in self.tests):
            return "no significant difference"
        seeds = max(len(_finished(self.results, arm, size)) for arm in self.arms for size in self.sizes)
        return "one seed: no claim" if seeds == 1 else "too few runs with the same batch size and seeds: no claim"


def _verdict(overall: Scope, each: dict[int, Scope], notes: Sequence[str]) -> Verdict:
    by_size = {size: scope.use for size, scope in each.items()}
    beaten = {one.second for scope in each.values() for one in scope.won}
    depends = any(arm in beaten for arm in overall.use) or (not overall.use and any(by_size.values()))
    if depends:
        parts = (f"use {_listed(use, ' or ')} at {size}" for size, use in by_size.items() if use)
        headline = f"It depends on the batch size: {'; '.join(parts)}."
    else:
        where = f" (averaged over batch sizes {_listed(overall.sizes)})" if each else ""
        headline = f"{overall.conclusion[0].upper()}{overall.conclusion[1:]}{where}."
    lines = [f"At batch size {size}: {scope.conclusion}." for size, scope in each.items()]
    scopes = [overall, *each.values()]
    return Verdict(
        headline,
        (*lines, *notes),
        () if depends else overall.use,
        by_size or {overall.sizes[0]: overall.use},
        tuple(one for scope in scopes for one in scope.tests),
        tuple(one for scope in scopes for one in scope.against_the_best),
    )


def _prices(costs: Mapping[str, Mapping[int, Cost]], arms: Sequence[str]) -> list[str]:
    """Time and memory of each arm, relative to BN's or the first arm's."""
    measured = [arm for arm in ("BN", *arms) if arm in costs and arm in arms]
    if not measured:
        return []
    base, lines = measured[0], []
    kinds = {"time per step": "step_ms", "memory": "memory_mb"}
    for arm in (one for one in arms if one != base):
        ratios = {kind: cost_ratio(costs, arm, base, field) for kind, field in kinds.items()}
        words = [f"{kind} {number(ratio)} times {base}'s" for kind, ratio in ratios.items() if ratio is not None]
        lines += [f"{arm}: {', '.join(words)}."] if words else []
    return lines


def cost_ratio(costs: Mapping[str, Mapping[int, Cost]], arm: str, base: str, field: str) -> float | None:
    """Geometric mean over the batch sizes that were measured for both arms."""
    own, other = costs.get(arm, {}), costs.get(base, {})
    pairs = [(getattr(own[size], field), getattr(other[size], field)) for size in sorted(own.keys() & other.keys())]
    logs = [math.log(one / two) for one, two in pairs if one and two]
    return math.exp(math.fsum(logs) / len(logs)) if logs else None


def _finished(results: Results, arm: str, size: int) -> dict[int, float]:
    found = results.get(arm, {}).get(size, {})
    return {seed: error for seed, error in found.items() if error is not None and math.isfinite(error)}


def _diverged(results: Results, arm: str, size: int) -> int:
    return len(results.get(arm, {}).get(size, {})) - len(_finished(results, arm, size))


def _complete(results: Results, arm: str, size: int, sizes: Sequence[int]) -> bool:
    """Return True if a mean over batch sizes can include this one: every seed that ran at all sizes finished here."""
    run = [set(found) for one in sizes if (found := results[arm].get(one, {}))]
    here = _finished(results, arm, size)
    return bool(here) and (len(sizes) == 1 or here.keys() >= (set.intersection(*run) or set.union(*run)))


def _averages(results: Results, arm: str, sizes: Sequence[int]) -> dict[int, float]:
    by_size = [_finished(results, arm, size) for size in sizes]
    seeds = sorted(set.intersection(*map(set, by_size))) if by_size else []
    return {seed: Sample([one[seed] for one in by_size]).mean for seed in seeds}


def _gaps(results: Results, arms: Sequence[str], sizes: Sequence[int]) -> Iterator[str]:
    """Sentences on runs that diverged, then on runs that are missing."""
    seeds = {seed for arm in arms for found in results[arm].values() for seed in found}
    for arm, size in itertools.product(arms, sizes):
        if count := _diverged(results, arm, size):
            yield f"{arm} diverged in {count} of {len(results[arm][size])} seeds at batch size {size}."
    for arm, size in itertools.product(arms, sizes):
        if count := len(seeds - results[arm].get(size, {}).keys()):
            yield f"{arm} has no result for {count} of {len(seeds)} seeds at batch size {size}."


def _listed(words: Iterable[object], last_joint: str = " and ") -> str:
    *rest, last = [str(word) for word in words]
    return f"{', '.join(rest)}{last_joint}{last}" if rest else last


def rounded(value: float) -> str:
    """Two significant digits, roughly."""
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 10 else f"{value:.0f}"
