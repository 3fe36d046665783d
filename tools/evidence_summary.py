"""Our evidence in short: README's table, and what those need who read no further."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import evidence_figures
from evidence_tables import (
    BASE,
    NOT_RUN,
    OURS,
    agreement,
    error_cell,
    failures,
    failures_of,
    markdown_row,
    printed,
    so_far,
    verdicts,
)

from memnorm.lab.evidence import Study
from memnorm.lab.evidence.findings import Findings, Found, apart, gap_text, interval_text, model_name, seeds_text
from memnorm.lab.evidence.sentences import rounded
from memnorm.lab.evidence.standing import corrected_p, family
from memnorm.lab.significance import CONFIDENCE, Difference, number
from memnorm.text import capital

FIRST, TUNED, HEADLINE = "small-batch-resnet20", "small-batch-resnet20-tuned", "headline-resnet56"
IMAGES = 50_000  # of CIFAR-10's training set
LESS, MORE, EITHER = "less error", "more error", "may be chance"
ONE_SEED, FAILED = "one seed, no claim", "failed to train"
REST = {EITHER: EITHER, ONE_SEED: "have one seed", FAILED: FAILED, NOT_RUN: f"are {NOT_RUN}"}
HEAD = (
    "CIFAR-10",
    f"{OURS} minus {BASE}, in points",
    "95 % interval",
    "found reliably from",
    "seeds",
    "counting all comparisons of its study",
)


class Line(NamedTuple):
    """MBN-2 beside BN somewhere."""

    kind: str
    cells: Sequence[str]


def summary(found: Findings) -> str:
    """Every comparison of MBN-2 with BN in short, for those who read no further."""
    lines = [_line(found, ours, base) for ours, base in found.pairs(OURS, BASE)]
    counts = Counter(line.kind for line in lines)
    rest = ", ".join(f"{words} ({counts[kind]})" for kind, words in REST.items() if counts[kind])
    told = (
        f"Of {len(lines)} comparisons that we planned on CIFAR-10, {OURS} was found to have less error than {BASE} in "
        f"{counts[LESS]} and more in {counts[MORE]}{'; the others ' if rest else ''}{rest}."
    )
    sure = "" if counts[LESS] else f" A gain over {BASE} is so far the paper's claim, not our finding."
    where = f" These are small networks, trained {_where(found)}, on no GPU."
    rows = [markdown_row(cells) for cells in (HEAD, ["---"] * len(HEAD), *(line.cells for line in lines))]
    note = (
        "*Found reliably from*: with so many seeds and this spread, a true difference of that size would be found four "
        "times in five, counting all comparisons of its study. It is a rough number: with few seeds the spread itself "
        "is hardly known."
    )
    return "\n".join([told + sure + where, "", *rows, "", note])


def _line(found: Findings, ours: Found, base: Found) -> Line:
    gap = apart(ours, base)
    failed = failures(ours, base)
    if gap is None:
        kind = FAILED if failed else NOT_RUN
        return Line(kind, [ours.place, "–", "–", "–", "–", f"{kind}{failed}"])
    kind = _kind(gap, corrected_p(found, ours, base))
    if kind == LESS and ours.failed:  # the seeds that are left are the good ones
        kind = FAILED
    numbers = [number(gap.mean), interval_text(gap) or "–", _reliable(gap, family(found, ours.study)), seeds_text(gap)]
    return Line(kind, [ours.place, *numbers, f"{kind}{failed}"])


def _reliable(gap: Difference, comparisons: int) -> str:
    least = gap.detectable(comparisons)
    return "–" if least is None else "no difference is" if least >= 100 else f"about {rounded(least)} points"


def _kind(gap: Difference, corrected: float | None) -> str:
    if gap.p is None or corrected is None:
        return ONE_SEED
    return EITHER if corrected >= 1 - CONFIDENCE else LESS if gap.mean < 0 else MORE


def _where(found: Findings) -> str:
    """On how many machines, as far as their names tell."""
    machines = len(found.machines())
    return "on one machine" if machines < 2 else f"on {machines} kinds of machine"


def readme(found: Findings) -> str | None:
    """README's table and figure: the paper's learning rate, and beside it one that is chosen for each norm. A study is
    shown as soon as BN and MBN-2 have two seeds each; None while the first is not.
    """
    first, tuned = found.study(FIRST), found.study(TUNED)
    if not _ready(found, first):
        return None
    spec = first.arms[0].spec
    shown = {f"learning rate {spec.base_learning_rate:g}": first}
    if _ready(found, tuned):
        shown[f"rate chosen of {', '.join(f'{rate:g}' for rate in tuned.arms[0].rates)}"] = tuned
    return "\n".join(
        [
            *_table(found, shown, f"CIFAR-10, {model_name(spec)}, batch size {spec.batch_size}"),
            "",
            f"![Test error of each seed](docs/figures/{evidence_figures.of_seeds(first)})",
            "",
            *(f"- {capital(words)}: {verdicts(found, one)}{so_far(found.arms(one))}" for words, one in shown.items()),
            "",
            f"{spec.iterations:,} iterations, a quarter of the paper's: {spec.iterations * spec.batch_size / IMAGES:g} "
            "epochs, far from converged. Differences are over the seeds that both have; the figure is at the paper's "
            "learning rate. `make evidence-runs` repeats it; [Evidence](docs/evidence.md) has the rest.",
            "",
            headline(found),
        ]
    )


def _table(found: Findings, shown: Mapping[str, Study], where: str) -> list[str]:
    """The arms of the first study, in every study that is shown."""
    header = [where]
    for words in shown:
        header += [f"{words}: test error in %, mean ± sd", f"minus {BASE}'s (95 % interval)"]
    labels = [one.label for one in found.arms(next(iter(shown.values()))) if one.runs]
    rows = [[label, *(cell for study in shown.values() for cell in _cells(found, study, label))] for label in labels]
    return [markdown_row(header), f"|{'---|' * len(header)}", *map(markdown_row, rows)]


def _ready(found: Findings, study: Study) -> bool:
    counts = {one.label: len(one.runs) for one in found.arms(study)}
    return min(counts[OURS], counts[BASE]) >= 2


def _cells(found: Findings, study: Study, label: str) -> tuple[str, str]:
    """The error of an arm, and how far it is from the baseline's."""
    one, base = found.arm(study.name, label), found.arm(study.name, BASE)
    assert one is not None
    assert base is not None
    gap = apart(one, base) if label != BASE else None
    rate = f", at {one.rate:g}" if one.arm.rates and one.rate is not None and one.runs else ""
    return f"{error_cell(one)}{rate}{failures_of(one)}", gap_text(gap) if gap else "–"


def headline(found: Findings) -> str:
    """The paper's headline beside ours: the same model and protocol."""
    told = []
    for one in found.arms(found.study(HEADLINE)):
        sample = one.sample()
        ours = f"{sample.text}{failures_of(one)}" if sample else "diverged" if one.diverged else NOT_RUN
        told.append(f"{one.label} {ours} here, {number(printed(one))} in the paper")
    words = f"The paper's headline, ResNet-56 at batch size 8 in full length, test error in %: {'; '.join(told)}."
    return " ".join([words, *agreement(found, found.study(HEADLINE))])
