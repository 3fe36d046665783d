"""Which norm to use, in words: use X, how sure, at what cost; or no difference found, and what could have been found.

Every pair of arms is compared seed by seed, at each batch size and averaged over all of them, and p-values are
corrected for the number of comparisons (Holm), so that trying more norms does not make a winner more likely. An arm
that diverged anywhere is not recommended there. One seed supports no claim at all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from memnorm.lab.significance import CONFIDENCE, Difference, Sample, difference, holm, number, p_text
from memnorm.text import capital

MANY = 4  # arms; with more of them not every pair is told
Results = Mapping[str, Mapping[int, Mapping[int, float | None]]]  # arm, batch size, seed: error in percent


@dataclass(frozen=True)
class Cost:
    """What one training step takes."""

    step_ms: float | None = None
    memory_mb: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Two arms, the one with the lower mean error first."""

    first: str
    second: str
    sizes: tuple[int, ...]  # the batch sizes averaged over
    difference: Difference
    p: float | None  # corrected; None with one seed

    @property
    def significant(self) -> bool:
        return self.p is not None and self.p < 1 - CONFIDENCE

    @property
    def evidence(self) -> str:
        """The interval, the p-value and the count of seeds, in words."""
        words = []
        interval = self.difference.interval()
        if interval:
            words.append(
                f"{CONFIDENCE:.0%} interval {number(-interval[1])} to {number(-interval[0])}".replace("%", " %")
            )
        if self.p is not None:
            words.append(p_text(self.p))
        one = self.difference
        words.append(f"lower in {one.lower} of {one.n} seeds" if one.paired else f"no common seeds, n = {one.n}")
        return ", ".join(words)


@dataclass(frozen=True)
class Verdict:
    """`use` is empty where nothing can be recommended; `by_size` says the same for each batch size."""

    headline: str
    details: tuple[str, ...] = ()
    use: tuple[str, ...] = ()
    by_size: Mapping[int, tuple[str, ...]] | None = None
    comparisons: tuple[Comparison, ...] = ()

    @property
    def text(self) -> str:
        return "\n".join((self.headline, *self.details))


def verdict(
    results: Results, costs: Mapping[str, Mapping[int, Cost]] | None = None, *, baseline: str | None = None
) -> Verdict:
    """What `results` say about the arms. An error of None (or not finite) is a run that diverged.

    `costs` by arm and batch size are told relative to `baseline`: BN where it takes part, else the first arm.
    """
    arms = [arm for arm, by_size in results.items() if any(by_size.values())]
    sizes = tuple(sorted({size for arm in arms for size, seeds in results[arm].items() if seeds}))
    if not arms:
        return Verdict("No runs: no claim.")
    trouble = (*_failures(results, arms), *_missing(results, arms, sizes))
    if len(arms) == 1:
        return Verdict(f"One arm only, nothing to compare it with: {_means(results, arms, sizes)}.", trouble)
    bill = Bill(costs or {}, arms, baseline)
    if len(sizes) == 1:
        return _assemble(Scope(results, arms, sizes, compare(results, arms, [sizes])), {}, bill, trouble)
    # Either family can decide the verdict, so each gets half of the error that is allowed.
    overall = Scope(results, arms, sizes, _twice(compare(results, arms, [sizes])))
    family = _twice(compare(results, arms, [(size,) for size in sizes]))
    each = {size: Scope(results, arms, (size,), [one for one in family if one.sizes == (size,)]) for size in sizes}
    return _assemble(overall, each, bill, trouble)


def compare(results: Results, arms: Sequence[str], scopes: Iterable[Sequence[int]]) -> list[Comparison]:
    """All pairs of arms in each scope, one family: corrected for all of them together."""
    found = []
    for sizes, (a, b) in itertools.product(scopes, itertools.combinations(arms, 2)):
        common = [size for size in sizes if _complete(results, a, size, sizes) and _complete(results, b, size, sizes)]
        first, second = (_averages(results, arm, common) for arm in (a, b))
        one, other = difference(first, second), difference(second, first)
        if one is not None and other is not None:
            low, high, lower = (a, b, one) if one.mean <= 0 else (b, a, other)
            found.append(Comparison(low, high, tuple(common), lower, lower.p))
    known = [index for index, one in enumerate(found) if one.p is not None]
    for index, p in zip(known, holm([found[index].p or 0.0 for index in known]), strict=True):
        found[index] = replace(found[index], p=p)
    return found


def _twice(comparisons: list[Comparison]) -> list[Comparison]:
    return [one if one.p is None else replace(one, p=min(1.0, 2 * one.p)) for one in comparisons]


class Scope:
    """One batch size, or all of them averaged: what was found there."""

    def __init__(self, results: Results, arms: Sequence[str], sizes: Sequence[int], comparisons: list[Comparison]):
        self.results, self.arms, self.sizes, self.comparisons = results, arms, sizes, comparisons
        diverged = {arm: sum(_diverged(results, arm, size) for size in sizes) for arm in arms}
        finished = {arm: sum(len(_finished(results, arm, size)) for size in sizes) for arm in arms}
        most = {arm: max(_diverged(results, arm, size) for size in sizes) for arm in arms}
        self.failing = [arm for arm in arms if diverged[arm]]
        self.lost = [arm for arm in arms if most[arm] >= 2 and not finished[arm]]
        self.trained = [arm for arm in arms if finished[arm]]
        self.tested = [one for one in comparisons if one.p is not None]
        self.won = [one for one in comparisons if one.significant]
        beaten = {one.second for one in self.won if one.first not in self.failing}
        self.use = tuple(
            arm for arm in self.trained if arm not in self.failing and arm not in beaten and self._beats(arm)
        )
        self.many = len(arms) > MANY
        if self.many and self.use:
            self.use = self._near_the_best()
        if self.use:
            self.use = tuple(arm for arm in arms if arm in self.use or self._lower_still(arm, beaten))

    def _near_the_best(self) -> tuple[str, ...]:
        """Among many arms the correction is severe: to beat the worst is no merit. So an arm is recommended only if it
        is not behind the best one by an uncorrected test either.
        """
        best = min(self.use, key=self._mean)
        behind = {
            one.second
            for one in self.comparisons
            if one.first == best and one.difference.p is not None and one.difference.p < 1 - CONFIDENCE
        }
        return tuple(arm for arm in self.use if arm not in behind)

    def _lower_still(self, arm: str, beaten: set[str]) -> bool:
        """Whether an arm that beats nobody for certain has less error than all that do: it is no worse a choice."""
        compared = arm in self._compared() and arm not in self.failing and arm not in beaten
        return compared and self._mean(arm) < min(map(self._mean, self.use))

    def _mean(self, arm: str) -> float:
        return Sample([error for size in self.sizes for error in _finished(self.results, arm, size).values()]).mean

    def _beats(self, arm: str) -> bool:
        alone = bool(self.lost) and min(len(_finished(self.results, arm, size)) for size in self.sizes) >= 2
        return alone or any(one.first == arm for one in self.won)

    @property
    def sentence(self) -> str:
        if not self.trained:
            return "every run diverged: no claim"
        if self.use:
            return f"use {_any_of(self.use)}: {'; '.join(self._reasons())}"
        if self.won:
            found = "; ".join(f"{_of(one.first)} error is {self._below(one)}" for one in self.won)
            return f"no recommendation: {found}; but {_all_of(self.failing)} did not finish every run"
        if self.tested:
            return self._nothing_found()
        seeds = max(len(_finished(self.results, arm, size)) for arm in self.arms for size in self.sizes)
        few = "one seed" if seeds == 1 else "too few runs with the same batch size and seeds"
        return f"{few}: no claim ({_means(self.results, self.arms, self.sizes)})"

    def _below(self, one: Comparison) -> str:
        return f"{number(-one.difference.mean)} points below {_of(one.second)} ({one.evidence}{self._only(one)})"

    def _reasons(self) -> list[str]:
        reasons = []
        if self.many:
            worse = dict.fromkeys(one.second for one in self.won if one.first in self.use)
            if worse:
                reasons.append(f"found worse: {_all_of(worse)} (each against one of them, corrected p below 0.05)")
            if self.lost:
                reasons.append(f"every run of {_all_of(self.lost)} diverged")
            return reasons + ([f"among {_all_of(self.use)} no difference was found"] if len(self.use) > 1 else [])
        for arm in self.use:
            below = ", and ".join(self._below(one) for one in self.won if one.first == arm)
            reasons += [f"{'its' if len(self.use) == 1 else _of(arm)} error is {below}"] if below else []
        if self.lost:
            reasons.append(f"every run of {_all_of(self.lost)} diverged")
        open_ = [one for one in self.tested if not one.significant and {one.first, one.second} & set(self.use)]
        if open_:
            pairs = _all_of([f"{one.first} and {one.second}" for one in open_], ", or ")
            reasons.append(f"between {pairs} no difference was found")
        return reasons

    def _nothing_found(self) -> str:
        clearest = min(self.tested, key=lambda one: (one.difference.p or 0.0, one.difference.mean))
        words = f"no difference found between {_all_of(self._compared())}"
        if clearest.difference.mean == 0:
            return f"{words}: every seed gave them the same error"
        which = "the clearest, " if len(self.tested) > 1 else ""
        words += f": {which}{_of(clearest.first)} error {self._below(clearest)}, may be chance"
        could = clearest.difference.detectable(len(self.tested))
        if could is not None and could < 100:  # percent
            where = "there" if which else "here"
            words += f"; a difference below about {rounded(could)} points would not have been seen reliably {where}"
        return words

    def _compared(self) -> list[str]:
        return [arm for arm in self.arms if any(arm in (one.first, one.second) for one in self.tested)]

    def _only(self, one: Comparison) -> str:
        return "" if one.sizes == tuple(self.sizes) else f", batch size {_all_of(one.sizes)} only"


class Bill:
    """Time and memory of each arm as multiples of the baseline's."""

    def __init__(self, costs: Mapping[str, Mapping[int, Cost]], arms: Sequence[str], baseline: str | None) -> None:
        self.costs = {arm: costs[arm] for arm in arms if arm in costs}
        named = [arm for arm in (baseline, "BN", *arms) if arm in self.costs]
        self.baseline = named[0] if named else ""

    def ratio(self, arm: str, what: str) -> float | None:
        """Geometric mean over the batch sizes that were measured for both."""
        own, base = self.costs.get(arm, {}), self.costs.get(self.baseline, {})
        pairs = [(getattr(own[size], what), getattr(base[size], what)) for size in sorted(own.keys() & base.keys())]
        logs = [math.log(one / other) for one, other in pairs if one and other]
        return math.exp(math.fsum(logs) / len(logs)) if logs else None

    def words(self, arm: str) -> str:
        """'1.35 times the time per step and 1.02 times the memory of BN', or nothing."""
        if arm == self.baseline:
            return ""
        ratios = [(self.ratio(arm, "step_ms"), "the time per step"), (self.ratio(arm, "memory_mb"), "the memory")]
        parts = [f"{number(ratio)} times {what}" for ratio, what in ratios if ratio is not None]
        return f"{' and '.join(parts)} of {self.baseline}" if parts else ""

    def cheapest(self, arms: Iterable[str]) -> str | None:
        known = {arm: ratio for arm in arms if (ratio := self.ratio(arm, "step_ms")) is not None}
        return min(known, key=lambda arm: known[arm]) if len(known) > 1 else None


def _assemble(overall: Scope, each: dict[int, Scope], bill: Bill, trouble: Sequence[str]) -> Verdict:
    by_size = {size: scope.use for size, scope in each.items()}
    overruled = {one.second for scope in each.values() for one in scope.comparisons if one.significant}
    depends = any(arm in overruled for arm in overall.use) or (not overall.use and any(by_size.values()))
    if depends:
        headline = f"It depends on the batch size: {_by_size(each)}."
    else:
        across = f"averaged over batch sizes {_all_of(overall.sizes)}, " if each and overall.tested else ""
        told = () if overall.many else overall.use
        price = [f"{arm} takes {words}" for arm in told if (words := bill.words(arm))]
        headline = f"{capital(across + '; '.join([overall.sentence, *price]))}."
    use = () if depends else overall.use
    untold = [arm for arm in overall.trained if overall.many or arm not in use]
    prices = [f"{arm} takes {words}." for arm in untold if (words := bill.words(arm))]
    cheapest = bill.cheapest(arm for arm in overall.trained if arm not in overall.failing)
    if cheapest and not depends and len(use) != 1:
        prices.append(f"The fastest of them is {cheapest}.")
    notes = [f"At batch size {size}: {scope.sentence}." for size, scope in each.items()]
    families = [len(overall.tested), sum(len(scope.tested) for scope in each.values())]
    if any(count > 1 for count in families):
        counts = _all_of([str(count) for count in families if count])
        notes.append(f"p-values are corrected for {counts} comparisons (Holm); intervals are for one comparison each.")
    comparisons = (*overall.comparisons, *(one for scope in each.values() for one in scope.comparisons))
    return Verdict(headline, (*prices, *notes, *trouble), use, by_size or {overall.sizes[0]: use}, comparisons)


def _by_size(each: Mapping[int, Scope]) -> str:
    groups: dict[str, list[int]] = {}
    for size, scope in each.items():
        groups.setdefault(f"use {_any_of(scope.use)}" if scope.use else "no difference found", []).append(size)
    return "; ".join(f"{what} at {_all_of(sizes)}" for what, sizes in groups.items())


def _finished(results: Results, arm: str, size: int) -> dict[int, float]:
    found = results.get(arm, {}).get(size, {})
    return {seed: error for seed, error in found.items() if error is not None and math.isfinite(error)}


def _diverged(results: Results, arm: str, size: int) -> int:
    return len(results.get(arm, {}).get(size, {})) - len(_finished(results, arm, size))


def _complete(results: Results, arm: str, size: int, sizes: Sequence[int]) -> bool:
    """Averages over batch sizes need the same seeds at each of them: those that were run at all sizes, if there are
    any. Where one of these diverged, the size is left out.
    """
    run = [set(found) for one in sizes if (found := results[arm].get(one, {}))]
    here = _finished(results, arm, size)
    return bool(here) and (len(sizes) == 1 or here.keys() >= (set.intersection(*run) or set.union(*run)))


def _averages(results: Results, arm: str, sizes: Sequence[int]) -> dict[int, float]:
    by_size = [_finished(results, arm, size) for size in sizes]
    seeds = sorted(set.intersection(*map(set, by_size))) if by_size else []
    return {seed: Sample([one[seed] for one in by_size]).mean for seed in seeds}


def _failures(results: Results, arms: Sequence[str]) -> list[str]:
    return [
        f"{arm} diverged in {count} of {len(results[arm][size])} seeds at batch size {size}."
        for arm in arms
        for size in sorted(results[arm])
        if (count := _diverged(results, arm, size))
    ]


def _missing(results: Results, arms: Sequence[str], sizes: Sequence[int]) -> list[str]:
    seeds = {seed for arm in arms for found in results[arm].values() for seed in found}
    return [
        f"{arm} has no result for {count} of {len(seeds)} seeds at batch size {size}."
        for arm in arms
        for size in sizes
        if (count := len(seeds - results[arm].get(size, {}).keys()))
    ]


def _means(results: Results, arms: Sequence[str], sizes: Sequence[int]) -> str:
    parts = []
    for arm, size in itertools.product(arms, sizes):
        values = list(_finished(results, arm, size).values())
        where = f" at batch size {size}" if len(sizes) > 1 else ""
        if results[arm].get(size):
            parts.append(f"{arm} {Sample(values).text if values else 'diverged'}{where}")
    return ", ".join(parts)


def _all_of(words: Iterable[object], joint: str = " and ") -> str:
    *rest, last = [str(word) for word in words]
    return f"{', '.join(rest)}{joint}{last}" if rest else last


def _any_of(words: Iterable[object]) -> str:
    return _all_of(words, " or ")


def _of(arm: str) -> str:
    return f"{arm}'s" if not arm.endswith("S") else f"{arm}'"


def rounded(value: float) -> str:
    """It is a rough number."""
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 10 else f"{value:.0f}"
