"""Our evidence in short: README's table, and the paragraph for those who read no further."""

from __future__ import annotations

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

from memnorm.lab.evidence.findings import Findings, apart, gap_text, model_name, significant
from memnorm.lab.statistics import number

FIRST, HEADLINE = "small-batch-resnet20", "headline-resnet56"
LESS, MORE, EITHER = "less error", "more error", "may be chance"
ONE_SEED, FAILED = "one seed, no claim", "failed to train"


def summary(found: Findings) -> str:
    """Every comparison of MBN-2 with BN in short, for those who read no further."""
    told: dict[str, list[str]] = {what: [] for what in (LESS, MORE, EITHER, ONE_SEED, FAILED)}
    missing = 0
    for ours, base in found.pairs(OURS, BASE):
        gap = apart(ours, base)
        if not (ours.runs and base.runs):
            missing += 1
        if gap is not None:
            kind = ONE_SEED if gap.p is None else EITHER if not significant(gap) else LESS if gap.mean < 0 else MORE
            told[kind].append(f"{ours.place} ({number(gap.mean)}, n = {gap.n})")
        if failed := failures(ours, base):
            told[FAILED].append(f"{ours.place} ({failed[2:]})")
    parts = [f"{what}: {', '.join(places)}" for what, places in told.items() if places]
    parts += [f"not run yet: {missing} of {len(found.pairs(OURS, BASE))} comparisons"] if missing else []
    sure = "" if told[LESS] else f" A gain over {BASE} is so far the paper's claim, not our finding."
    return (
        f"{OURS} beside {BASE} in our own runs on CIFAR-10, error of {OURS} minus {BASE}'s in points: "
        f"{'; '.join(parts)}.{sure} These are small networks on one machine."
    )


def readme(found: Findings) -> str | None:
    """README's table and figure; None while BN and MBN-2 have not two seeds each."""
    study = found.study(FIRST)
    arms = [one for one in found.arms(study) if one.runs]
    counts = {one.label: len(one.runs) for one in arms}
    if min(counts.get(OURS, 0), counts.get(BASE, 0)) < 2:
        return None
    spec = study.arms[0].spec
    base = next(one for one in arms if one.label == BASE)
    rows = []
    for one in arms:
        gap = apart(one, base) if one is not base else None
        rows.append(markdown_row([one.label, f"{error_cell(one)}{failures_of(one)}", gap_text(gap) if gap else "–"]))
    where = f"CIFAR-10, {model_name(spec)}, batch size {spec.batch_size}"
    return "\n".join(
        [
            markdown_row([where, "test error in %, mean ± sd", "minus BN's (95 % interval)"]),
            "|---|---|---|",
            *rows,
            "",
            f"![Test error of each seed](docs/figures/{evidence_figures.of_seeds(study)})",
            "",
            f"{verdicts(found, study)}{so_far(found.arms(study))} ({spec.iterations:,} iterations, the paper's "
            f"learning rate {spec.base_learning_rate:g} for all; `make evidence-runs` repeats it; "
            "[Evidence](docs/evidence.md) has the rest.)",
            "",
            headline(found),
        ]
    )


def headline(found: Findings) -> str:
    """The paper's headline beside ours: the same model and protocol."""
    told = []
    for one in found.arms(found.study(HEADLINE)):
        sample = one.sample()
        ours = f"{sample.text}{failures_of(one)}" if sample else "diverged" if one.diverged else NOT_RUN
        told.append(f"{one.label} {ours} here, {number(printed(one))} in the paper")
    words = f"The paper's headline, ResNet-56 at batch size 8 in full length, test error in %: {'; '.join(told)}."
    return " ".join([words, *agreement(found, found.study(HEADLINE))])
