"""docs/evidence.md and README's table, from the records of the studies. Any of them may be missing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import claims_page
import evidence_figures

from memnorm.lab.bench.clock import geometric_mean
from memnorm.lab.evidence import Study
from memnorm.lab.evidence.claims import Material
from memnorm.lab.evidence.findings import (
    Findings,
    Found,
    apart,
    compared,
    gap_text,
    significant,
)
from memnorm.lab.report import figures, html
from memnorm.lab.report.collect import collect
from memnorm.lab.report.model import RECALIBRATED
from memnorm.lab.statistics import holm, number

NOT_RUN = "not run yet"
OURS, BASE = "MBN-2", "BN"
FIRST, HEADLINE = "small-batch-resnet20", "headline-resnet56"
TITLE = "Memorized Batch Normalization: the runs behind our evidence"


def page(found: Findings, bench: Mapping[str, Any], digits: str, drawn: Collection[str]) -> str:
    """docs/evidence.md; `digits` is the section on the small comparison that needs no download, `drawn` the figures
    that there are.
    """
    return (
        "\n\n".join(
            [
                "# Evidence",
                "Made of the runs in `results/` by `make evidence`, every sentence of it; `make evidence-runs` repeats "
                "the runs. What is run, and why, was laid down before: see the [protocol](protocol.md). How the "
                "paper's claims stand is on a page [of its own](claims.md)." + report_link(found),
                f"**In short.** {summary(found)}",
                "## When does MBN help, and by how much?",
                bullets(helps(found)),
                "## What does it cost?",
                bullets(costs(found, bench)),
                "## When is something else better?",
                bullets(rivals(found)),
                "## Which norm should I use?",
                bullets(choices(found)),
                *(text for study in found.studies for text in section(found, study, drawn)),
                "## Digits",
                digits,
                "## Elsewhere",
                "- [Norms](norms/README.md): the cost of each, and their errors on digits, learning rate tuned\n"
                "- [Records](records.md): single runs on real data, which support no comparison\n"
                "- [Test record](test-record.md): the last run of all tests\n"
                "- [The lab](lab.md): how to make such numbers yourself\n\n"
                "Nothing has been run on a GPU.",
            ]
        )
        + "\n"
    )


def report_link(found: Findings) -> str:
    return " Every run of it is in [this report](static/report.html)." if found.specs() else ""


def bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def scope(study: Study, batch_size: int) -> str:
    """Where a sentence holds: ResNet-20, batch size 8, 20,000 iterations, learning rate 0.1."""
    spec = study.at(batch_size)[0].spec
    tuned = all(arm.rates for arm in study.at(batch_size))
    rate = "each norm's best learning rate" if tuned else f"learning rate {spec.base_learning_rate:g}"
    return f"{spec.data}, {spec.model}, batch size {batch_size}, {spec.iterations:,} iterations, {rate}"


def place(study: Study, batch_size: int) -> str:
    """The name of a comparison."""
    return study.title if len(study.batch_sizes) == 1 else f"{study.title}, batch size {batch_size}"


def pairs(found: Findings) -> list[tuple[str, Found, Found, list[Found]]]:
    """Every place where MBN-2 is compared with BN: what it is, the two, and the arms beside them."""
    places = []
    for study in (one for one in found.studies if one.baseline == BASE):
        for size in study.batch_sizes:
            arms = found.arms(study, size)
            by_label = {one.label: one for one in arms}
            if OURS in by_label and BASE in by_label:
                others = [one for one in arms if one.label not in (OURS, BASE)]
                places.append((place(study, size), by_label[OURS], by_label[BASE], others))
    return places


def failures(*arms: Found) -> str:
    words = [f"{one.label} diverged in {len(one.diverged)} of {len(one.runs)} seeds" for one in arms if one.diverged]
    return f"; {', '.join(words)}" if words else ""


def with_missing(lines: Sequence[str], missing: Sequence[str]) -> list[str]:
    """What can be said, and in one line what cannot yet."""
    return [*lines, *([f"{NOT_RUN.capitalize()}: {'; '.join(missing)}."] if missing else [])]


def helps(found: Findings) -> list[str]:
    lines, missing = [], []
    for where, ours, base, _ in pairs(found):
        gap = apart(ours, base)
        if gap is None and not (ours.runs and base.runs):
            missing.append(where)
            continue
        told = f"{compared(OURS, BASE, gap) if gap else 'no claim'}{failures(ours, base)}"
        if gap is not None and ours.sample(RECALIBRATED) and base.sample(RECALIBRATED):
            again = apart(ours, base, RECALIBRATED)
            told += f". With recalibrated statistics: {compared(OURS, BASE, again)}"
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
        f"{name}: a step in steps of {BASE}, measured on a quiet machine ({machine}): {', '.join(told)}."
        for name, told in steps.items()
        if name.startswith(OURS)
    ]
    evaluation = geometric_mean([row["eval"]["ratio"] for row in bench["layer"]["shapes"]])
    lines.append(
        f"A layer in eval takes {evaluation:.2f} times {BASE}'s time. [Performance](performance.md) has the rest."
    )
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
            lines.append(f"**{where}**: {compared(one.label, OURS, gap)}.")
    return with_missing(lines, missing)


def rivals(found: Findings) -> list[str]:
    """Who has less error than MBN-2, corrected for the number of rivals; and BN with recalibrated statistics."""
    lines, missing = [], []
    for where, ours, base, others in pairs(found):
        gaps = [(one, apart(one, ours)) for one in (base, *others) if one.arm.spec.norm != "mbn"]
        tested = [(one, gap, gap.p) for one, gap in gaps if gap is not None and gap.p is not None]
        if not tested:
            missing += [where] if not any(gap for _, gap in gaps) else []
            lines += [f"**{where}**: one seed, no claim."] if any(gap for _, gap in gaps) else []
            continue
        corrected = holm([p for _, _, p in tested])
        better = [(one, gap) for (one, gap, _), p in zip(tested, corrected, strict=True) if gap.mean < 0 and p < 0.05]
        names = ", ".join(one.label for one, _, _ in tested)
        told = "; ".join(compared(one.label, OURS, gap) for one, gap in better)
        lines.append(f"**{where}**: {told or f'of {names}, none was found to have less error than {OURS}'}.")
        again = apart(base, ours, RECALIBRATED, "test_error")
        if again is not None and again.p is not None:
            told = compared(f"recalibrated {BASE}", OURS, again)
            lines.append(f"**{where}**, {BASE} with recalibrated statistics beside {OURS} as it is: {told}.")
    return with_missing(lines, missing)


def choices(found: Findings) -> list[str]:
    done = [study for study in found.studies if any(one.runs for one in found.arms(study))]
    lines = [f"**{study.title}**: {found.verdict(study).headline}" for study in done]
    return with_missing(lines, [study.title for study in found.studies if study not in done])


def section(found: Findings, study: Study, drawn: Collection[str]) -> list[str]:
    arms = found.arms(study)
    parts = [f"## {study.title}", f"*{study.question}* {study.notes}", table(found, study)]
    parts += agreement(found, study)
    names = [name for name in evidence_figures.names(study) if name in drawn]
    parts += [f"![{evidence_figures.title(name, study)}](figures/{name})" for name in names]
    if any(one.runs for one in arms):
        judged = found.verdict(study)
        told = [text for text in judged.details if " has no result for " not in text]  # the table shows that
        parts += [" ".join([f"**{judged.headline}**", *told]), origin(arms)]
    trials = choice_of_rates(found, study)
    return parts + ([trials] if trials else [])


def table(found: Findings, study: Study) -> str:
    beside = any(arm.cell for arm in study.arms)
    several = len(study.batch_sizes) > 1
    header = ["arm", *(["batch"] if several else []), "learning rate", "test error in %", f"minus {study.baseline}'s"]
    header += ["recalibrated", "diverged", *(["paper"] if beside else [])]
    rows = [row(found, one, several, beside) for one in found.arms(study)]
    return "\n".join([_row(header), _row(["---"] * len(header)), *rows])


def row(found: Findings, one: Found, several: bool, beside: bool) -> str:
    spec = one.arm.spec
    base = found.arm(one.study.name, one.study.baseline, spec.batch_size)
    gap = apart(one, base) if base and one.label != one.study.baseline else None
    again = one.sample(RECALIBRATED)
    printed = one.arm.cell.printed if one.arm.cell else None
    cells = [
        one.label,
        *([str(spec.batch_size)] if several else []),
        "to be chosen" if one.rate is None else f"{one.arm.run(0, one.rate).base_learning_rate:g}",
        error_cell(one),
        gap_text(gap) if gap else "–",
        again.text if again else "–",
        f"{len(one.diverged)} of {len(one.runs)}" if one.runs else "–",
        *([number(printed) if printed is not None else "–"] if beside else []),
    ]
    return _row(cells)


def error_cell(one: Found) -> str:
    sample = one.sample()
    words = [sample.text] if sample else []
    if one.missing:
        words.append(f"{one.missing} of {one.arm.seeds} seeds {NOT_RUN}" if one.runs else NOT_RUN)
    return ", ".join(words) or "–"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def origin(arms: Sequence[Found]) -> str:
    """Where the runs were made."""
    seen = [run.environment for one in arms for run in one.runs]

    def each(name: str) -> str:
        return ", ".join(sorted({str(where[name]) for where in seen if where.get(name)})) or "unknown"

    days = sorted({str(where["started"])[:10] for where in seen if where.get("started")})
    span = days[0] if len(set(days)) == 1 else f"{days[0]} to {days[-1]}" if days else "unknown"
    return (
        f"Commit {each('commit')}; {each('machine')}; {each('threads')} thread per run; torch {each('torch')}; {span}. "
        "Differences are paired by seed, over the seeds that both have, with a 95 % interval and a p-value that is not "
        "corrected; the sentence in bold is."
    )


def choice_of_rates(found: Findings, study: Study) -> str:
    lines = []
    for one in found.arms(study):
        told = []
        for trial in one.arm.trials(study.holdout):
            result = found.result(trial)
            error = None if result is None else (result.get("final") or {}).get("test_error")
            state = (
                NOT_RUN if result is None else "diverged" if result["status"] == "diverged" else f"{number(error)} %"
            )
            told.append(f"{trial.base_learning_rate:g}: {state}")
        if told:
            lines.append(f"{one.label} {', '.join(told)}")
    return f"Held-out error by learning rate: {'; '.join(lines)}." if lines else ""


def report(found: Findings, root: Any) -> str | None:
    """The runs behind the evidence as one page of HTML; None without runs."""
    specs = found.specs()
    if not specs:
        return None
    content = collect([root], title=TITLE, only=specs)
    return html.render(content, figures.pictures(content))


def readme(found: Findings) -> str | None:
    """README's table and figure; None while BN and MBN-2 have not two seeds each."""
    study = found.study(FIRST)
    arms = [one for one in found.arms(study) if one.sample()]
    counts = {one.label: len(one.errors()) for one in arms}
    if min(counts.get(OURS, 0), counts.get(BASE, 0)) < 2:
        return None
    spec = study.arms[0].spec
    base = next(one for one in arms if one.label == BASE)
    rows = []
    for one in arms:
        gap = apart(one, base) if one is not base else None
        rows.append(_row([one.label, error_cell(one), gap_text(gap) if gap else "–"]))
    where = f"CIFAR-10, {spec.model}, batch size {spec.batch_size}"
    return "\n".join(
        [
            _row([where, "test error in %, mean ± sd", "minus BN's (95 % interval)"]),
            "|---|---|---|",
            *rows,
            "",
            f"![Test error of each seed](docs/figures/{evidence_figures.of_seeds(study)})",
            "",
            f"{found.verdict(study).headline} ({spec.iterations:,} iterations, the paper's learning rate "
            f"{spec.base_learning_rate:g} for all; `make evidence-runs` repeats it. [Evidence](docs/evidence.md) has "
            "each norm at its best learning rate, and the rest.)",
            "",
            headline(found),
        ]
    )


def headline(found: Findings) -> str:
    """The paper's headline beside ours: the same model and protocol."""
    told = []
    for one in found.arms(found.study(HEADLINE)):
        sample = one.sample()
        ours = sample.text if sample else "diverged" if one.diverged else NOT_RUN
        told.append(f"{one.label} {ours} here, {number(printed(one))} in the paper")
    words = f"The paper's headline, ResNet-56 at batch size 8 in full length, test error in %: {'; '.join(told)}."
    return " ".join([words, *agreement(found, found.study(HEADLINE))])


def printed(one: Found) -> float:
    assert one.arm.cell is not None
    assert one.arm.cell.printed is not None
    return one.arm.cell.printed


def agreement(found: Findings, study: Study) -> list[str]:
    """Whether a difference has the paper's sign, where the paper prints numbers of the same model and protocol."""
    ours, base = (found.arm(study.name, label) for label in (OURS, BASE))
    if not (ours and base and ours.arm.cell and base.arm.cell):
        return []
    gap, theirs = apart(ours, base), printed(ours) - printed(base)
    if gap is None:
        return []
    sign = "the same" if gap.mean * theirs > 0 else "the opposite"
    return [f"{OURS} minus {BASE} is {number(gap.mean)} points here and {number(theirs)} in the paper: {sign} sign."]


def summary(found: Findings) -> str:
    """One sentence for those who read no further."""
    ours, base = (found.arm(FIRST, label) for label in (OURS, BASE))
    gap = apart(ours, base) if ours and base else None
    if gap is None or gap.p is None:
        claim = "The paper's tables have not been rerun yet: treat its numbers as its authors' claim."
        return " ".join([*_first_signs(found), claim])
    told = compared(OURS, BASE, gap)
    where = scope(found.study(FIRST), found.study(FIRST).batch_sizes[0])
    certain = "" if significant(gap) else " Treat the paper's gain as its authors' claim."
    return f"In our own runs ({where}), {told}.{certain} They are small networks on one machine."


def _first_signs(found: Findings) -> list[str]:
    """What there is before the first study has two seeds."""
    gaps = [(where, apart(ours, base)) for where, ours, base, _ in pairs(found)]
    known = [(where, gap) for where, gap in gaps if gap is not None and gap.p is not None]
    told = [f"On CIFAR-10 ({where}), {compared(OURS, BASE, gap)}." for where, gap in known]
    if any(significant(gap) and gap.mean < 0 for _, gap in known):
        return told
    return [f"Our own evidence is so far small and shows no certain gain over {BASE}.", *told]


def render(found: Findings, bench: Mapping[str, Any], digits: str, root: Any) -> dict[str, str]:
    """The files below docs/."""
    drawn = evidence_figures.pictures(found)
    made = {"evidence.md": page(found, bench, digits, drawn), "claims.md": claims_page.page(Material(found, bench))}
    made |= {f"figures/{name}": text for name, text in drawn.items()}
    html_page = report(found, root)
    return made | ({"static/report.html": html_page} if html_page else {})
