"""docs/evidence.md and the published report, from the records of the studies. Any of them may be missing."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import claims_page
import evidence_figures
from evidence_parts import parts
from evidence_reasons import reasons
from evidence_summary import summary
from evidence_tables import (
    BASE,
    NOT_RUN,
    OURS,
    agreement,
    choice_of_rates,
    failures,
    head,
    origin,
    pairs,
    place,
    recalibrations,
    row,
    so_far,
    table,
    verdicts,
)

from memnorm.lab.bench.clock import geometric_mean
from memnorm.lab.evidence import Study
from memnorm.lab.evidence.claims import Material
from memnorm.lab.evidence.findings import Findings, apart, compared
from memnorm.lab.evidence.standing import choice, corrected_p, standings
from memnorm.lab.group import RECALIBRATED
from memnorm.lab.report import figures, html
from memnorm.lab.report.collect import collect
from memnorm.lab.report.model import Grid, Section
from memnorm.lab.significance import number

MEASURED = ("recalibration", "late_and_literal")  # results of benchmarks that are told here
TITLE = "Memorized Batch Normalization: the runs behind our evidence"
ABOUT = (
    "First the tables of our evidence page, then every run behind them. Times in this report are no measurements: the "
    "runs shared their machine with others and were paused. What MBN costs is measured elsewhere, on a quiet machine."
)


def page(
    found: Findings, bench: Mapping[str, Any], digits: str, drawn: Collection[str], measured: Mapping[str, Any]
) -> str:
    """docs/evidence.md; `digits` is the section on the small comparison that needs no download, `drawn` the figures
    that there are, `measured` what each of `MEASURED` gave, None if it was not tried.
    """
    return (
        "\n\n".join(
            [
                "# Evidence",
                "Made of the runs in `results/` by `make evidence`, every number of it; `make evidence-runs` repeats "
                "the runs. What is run, and why, was laid down before: see the [protocol](protocol.md). How the "
                "paper's claims stand is on a page [of its own](claims.md)."
                + report_link(found)
                + " Intervals and p-values are of one comparison each, unless they are called corrected.",
                f"**In short.** {summary(found)}",
                "## When does MBN help, and by how much?",
                bullets(helps(found)),
                "## What does it cost?",
                bullets(costs(found, bench)),
                "## When is something else better?",
                bullets(rivals(found)),
                "## Which norm should I use?",
                bullets(choices(found)),
                "## Where does it come out otherwise than in the paper?",
                *reasons(found, measured["late_and_literal"]),
                "## Which part of the method does what?",
                *parts(found),
                *both_ways(found, measured["recalibration"]),
                *(text for study in found.studies for text in section(found, study, drawn)),
                "## Digits",
                digits,
                "## Elsewhere",
                "- [Norms](norms/README.md): the cost of each, and their errors on digits, learning rate tuned\n"
                "- [Records](records.md): single runs on real data, which support no comparison\n"
                "- [Test record](test-record.md): the last run of all tests\n"
                "- [The lab](lab.md): how to make such numbers yourself",
            ]
        )
        + "\n"
    )


def both_ways(found: Findings, measured: Mapping[str, Any] | None) -> list[str]:
    """What it means for recalibrated numbers that the old memory took part in many of them."""
    count = sum(len(one.recalibrated_with_memory) for study in found.studies for one in found.arms(study))
    if not count:
        return []
    told = "How much that matters has not been measured."
    if measured is not None:
        gaps = [run["with_memory"] - run["without"] for run in measured["runs"]]
        told = (
            f"Measured both ways (trained networks: {len(gaps)}), the error with the memory minus that without "
            f"is {number(sum(gaps) / len(gaps))} points on average, {number(min(gaps))} to {number(max(gaps))} "
            f"(`benchmarks/recalibration_both_ways.py`; commit {measured['where']['commit']}, "
            f"{measured['where']['machine']})."
        )
    return [
        "**Recalibrated MBN.** Until 2026-11-17 the old memory took part when MBN was recalibrated: deeper layers got "
        f"statistics of inputs that it had helped to normalise. The tables say of which runs that is so. {told}"
    ]


def report_link(found: Findings) -> str:
    return " Every run of it is in [this report](static/report.html)." if found.specs() else ""


def bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def with_missing(lines: Sequence[str], missing: Sequence[str]) -> list[str]:
    """What can be said, and in one line what cannot yet."""
    return [*lines, *([f"{NOT_RUN.capitalize()}: {'; '.join(missing)}."] if missing else [])]


def helps(found: Findings) -> list[str]:
    lines, missing = [], []
    for where, ours, base, _ in pairs(found):
        gap = apart(ours, base)
        if not (ours.runs and base.runs):
            missing.append(where)
            continue
        told = compared(OURS, BASE, gap, corrected_p(found, ours, base)) if gap else "no claim"
        told += failures(ours, base)
        again = apart(ours, base, RECALIBRATED)
        told += f". Both with recalibrated statistics: {compared(OURS, BASE, again)}" if again else ""
        lines.append(f"**{where}**: {told}.")
    return with_missing(lines, missing)


def costs(found: Findings, bench: Mapping[str, Any]) -> list[str]:
    steps: dict[str, list[str]] = {}
    for network in bench["step"]["networks"]:
        for one in network["arms"]:
            where = f"{network['model']} at batch size {network['batch_size']}"
            steps.setdefault(one["name"], []).append(f"{where} {one['ratio']:.2f}")
    machine = f"{bench['where']['machine']}, {bench['where']['threads']} threads"
    lines = [
        f"A training step with {name} takes, in steps of {BASE}: {', '.join(told)}."
        for name, told in steps.items()
        if name.startswith(OURS)
    ]
    evaluation = geometric_mean([row["eval"]["ratio"] for row in bench["layer"]["shapes"]])
    lines.append(
        f"A layer in eval takes {evaluation:.2f} times {BASE}'s time. [Performance](performance.md) has the rest."
    )
    lines.append(f"Measured on a quiet machine: {machine}.")
    lines.append("The runs below shared their machine with others and were paused: their times are no measurements.")
    return lines + cheaper(found)


def cheaper(found: Findings) -> list[str]:
    """What a part of the second forward costs in accuracy, where that is a study's question."""
    lines, missing = [], []
    for study in (one for one in found.studies if one.baseline == OURS):
        for one in found.arms(study):
            whole = found.arm(study.name, OURS, one.arm.spec.batch_size)
            if whole is None or one.label == OURS or one.arm.spec.scheme == "single":
                continue
            where, gap = f"{place(study, one.arm.spec.batch_size)}, {one.label}", apart(one, whole)
            if gap is None:
                missing.append(where)
                continue
            lines.append(f"**{where}**: {compared(one.label, OURS, gap, corrected_p(found, one, whole))}.")
    return with_missing(lines, missing)


def rivals(found: Findings) -> list[str]:
    """Who has less error than MBN-2, for certain or not; and BN with recalibrated statistics."""
    lines, missing = [], []
    for where, ours, base, others in pairs(found):
        gaps = [(one, gap) for one in (base, *others) if one.arm.spec.norm != "mbn" and (gap := apart(one, ours))]
        if not gaps:
            missing += [where] if not ours.runs or not base.runs else []
            lines += [f"**{where}**: no claim{failures(ours, base)}."] if ours.runs and base.runs else []
            continue
        below = [
            compared(one.label, OURS, gap, corrected_p(found, one, ours) if one is base else None)
            for one, gap in gaps
            if gap.mean < 0
        ]
        above = [one.label for one, gap in gaps if gap.mean >= 0]
        told = [*below, *([f"not below {OURS}'s over the seeds that both have: {', '.join(above)}"] if above else [])]
        lines.append(f"**{where}**: {'; '.join(told)}.")
        again = apart(base, ours, RECALIBRATED, "test_error")
        if again is not None and again.p is not None:
            told_again = compared(f"recalibrated {BASE}", OURS, again)
            lines.append(f"**{where}**, {BASE} with recalibrated statistics beside {OURS} as it is: {told_again}.")
    return with_missing(lines, missing)


def choices(found: Findings) -> list[str]:
    """Beside BN; a study with another baseline asks another question."""
    lines, missing = [], []
    for study in (one for one in found.studies if one.baseline == BASE):
        standing = standings(found, study)
        for size in study.batch_sizes:
            arms = found.arms(study, size)
            base = next(one for one in arms if one.label == study.baseline)
            if not any(one.runs for one in arms):
                missing.append(place(study, size))
                continue
            told = choice([one for one in standing if one.found.arm.spec.batch_size == size], base)
            lines.append(f"**{place(study, size)}**: {told}.{so_far(arms)}")
    return with_missing(lines, missing)


def section(found: Findings, study: Study, drawn: Collection[str]) -> list[str]:
    arms = found.arms(study)
    parts = [f"## {study.title}", f"*{study.question}* {study.notes}", table(found, study)]
    parts += agreement(found, study)
    names = [name for name in evidence_figures.names(study) if name in drawn]
    parts += [f"![{evidence_figures.title(name, study)}](figures/{name})" for name in names]
    if any(one.runs for one in arms):
        parts += [f"**{verdicts(found, study)}**{so_far(arms)}", origin(arms)]
    return parts + [text for text in (recalibrations(arms), choice_of_rates(found, study)) if text]


def report(found: Findings, root: Any) -> str | None:
    """The runs behind the evidence as one page of HTML; None without runs."""
    specs = found.specs()
    if not specs:
        return None
    done = [study for study in found.studies if any(one.runs for one in found.arms(study))]
    grids = [
        Grid(one.title, head(one), [row(found, arm) for arm in found.arms(one)], verdicts(found, one)) for one in done
    ]
    content = collect([root], title=TITLE, only=specs, sections=[Section("The studies", [ABOUT], grids)])
    content = replace(content, comparisons=tuple(replace(one, verdict=None) for one in content.comparisons))
    return html.render(content, figures.pictures(content))


def render(found: Findings, bench: Mapping[str, Any], digits: str, root: Any) -> dict[str, str]:
    """The files below docs/."""
    drawn, paths = evidence_figures.pictures(found), {name: Path(root) / f"{name}.json" for name in MEASURED}
    measured = {name: json.loads(path.read_text()) if path.exists() else None for name, path in paths.items()}
    made = {
        "evidence.md": page(found, bench, digits, drawn, measured),
        "claims.md": claims_page.page(Material(found, bench)),
    }
    made |= {f"figures/{name}": text for name, text in drawn.items()}
    html_page = report(found, root)
    return made | ({"static/report.html": html_page} if html_page else {})
