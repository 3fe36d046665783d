"""A study as a table and in a few words, from what is found of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memnorm.lab.evidence import Study
from memnorm.lab.evidence.findings import STUCK, Findings, Found, apart, gap_text
from memnorm.lab.evidence.standing import standings, told
from memnorm.lab.group import RECALIBRATED
from memnorm.lab.significance import number
from memnorm.lab.store import StoredRun
from memnorm.text import capital

NOT_RUN = "not run yet"
OURS, BASE = "MBN-2", "BN"


def pairs(found: Findings) -> list[tuple[str, Found, Found, list[Found]]]:
    """Every place where MBN-2 is compared with BN: what it is, the two, and the arms beside them."""
    places = []
    for study in found.studies:
        for size in study.batch_sizes:
            arms = found.arms(study, size)
            by_label = {one.label: one for one in arms}
            if OURS in by_label and BASE in by_label:
                others = [one for one in arms if one.label not in (OURS, BASE)]
                places.append((place(study, size), by_label[OURS], by_label[BASE], others))
    return places


def place(study: Study, batch_size: int) -> str:
    """The name of a comparison."""
    return study.title if len(study.batch_sizes) == 1 else f"{study.title}, batch size {batch_size}"


def failures(*arms: Found) -> str:
    """Which arms failed to train, to go behind something else."""
    words = [f"{one.label} {told[2:]}" for one in arms if (told := failures_of(one))]
    return f"; {', '.join(words)}" if words else ""


def failures_of(one: Found) -> str:
    words = [
        f"{what} in {len(runs)} of {len(one.runs)} seeds"
        for what, runs in (("diverged", one.diverged), ("did not train", one.stuck))
        if runs
    ]
    return f"; {', '.join(words)}" if words else ""


def so_far(arms: Sequence[Found]) -> str:
    done, planned = sum(len(one.runs) for one in arms), sum(one.arm.seeds for one in arms)
    return f" So far: {done} of {planned} runs." if done < planned else ""


def table(found: Findings, study: Study) -> str:
    header = head(study)
    return "\n".join(
        [
            markdown_row(header),
            markdown_row(["---"] * len(header)),
            *(markdown_row(row(found, one)) for one in found.arms(study)),
        ]
    )


def head(study: Study) -> list[str]:
    names = ["arm", *(["batch"] if len(study.batch_sizes) > 1 else []), "learning rate", "test error in %"]
    names += [f"minus {study.baseline}'s", "recalibrated", "minus the same as it is", "failed"]
    return [*names, *(["paper"] if _beside(study) else [])]


def _beside(study: Study) -> bool:
    return any(arm.cell for arm in study.arms)


def row(found: Findings, one: Found) -> list[str]:
    spec = one.arm.spec
    base = found.arm(one.study.name, one.study.baseline, spec.batch_size)
    gap = apart(one, base) if base and one.label != one.study.baseline else None
    again, change = one.sample(RECALIBRATED), apart(one, one, RECALIBRATED, "test_error")
    return [
        one.label,
        *([str(spec.batch_size)] if len(one.study.batch_sizes) > 1 else []),
        "to be chosen" if one.rate is None else f"{one.arm.run(0, one.rate).base_learning_rate:g}",
        error_cell(one),
        gap_text(gap) if gap else "–",
        again.text if again else "–",
        gap_text(change) if change else "–",
        f"{len(one.failed)} of {len(one.runs)}" if one.runs else "–",
        *([number(printed(one)) if one.arm.cell else "–"] if _beside(one.study) else []),
    ]


def printed(one: Found) -> float:
    assert one.arm.cell is not None
    assert one.arm.cell.printed is not None
    return one.arm.cell.printed


def error_cell(one: Found) -> str:
    sample = one.sample()
    words = [sample.text] if sample else []
    if one.missing:
        words.append(f"{one.missing} of {one.arm.seeds} seeds {NOT_RUN}" if one.runs else NOT_RUN)
    return ", ".join(words) or "–"


def markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def verdicts(found: Findings, study: Study) -> str:
    """Each batch size of a study in words."""
    standing, texts = standings(found, study), []
    for size in study.batch_sizes:
        arms = [one for one in standing if one.found.arm.spec.batch_size == size]
        where = f"Batch size {size}: " if len(study.batch_sizes) > 1 else ""
        words = where + told(arms, study.baseline)
        texts.append(f"{capital(words)}.")
    return " ".join(texts)


def agreement(found: Findings, study: Study) -> list[str]:
    """Whether a difference has the paper's sign, where the paper prints numbers of the same model and protocol."""
    ours, base = (found.arm(study.name, label) for label in (OURS, BASE))
    if not (ours and base and ours.arm.cell and base.arm.cell):
        return []
    gap, theirs = apart(ours, base), printed(ours) - printed(base)
    if gap is None:
        return []
    sign = "the same sign" if gap.mean * theirs > 0 else "the opposite sign" if gap.mean else "no difference here"
    gaps = f"{OURS} minus {BASE} is {number(gap.mean)} points here and {number(theirs)} in the paper: {sign}"
    return [f"{gaps}. {than_printed(ours, base)}."]


def than_printed(ours: Found, base: Found) -> str:
    """How far each is from what the paper prints for it: which of the two a disagreement comes from."""
    return f"{BASE} has {_off(base)} and {OURS} {_off(ours)} error than in the paper"


def _off(one: Found) -> str:
    sample = one.sample()
    assert sample is not None
    off = round(sample.mean - printed(one), 2)
    return f"{number(abs(off))} points {'less' if off < 0 else 'more'}"


def origin(arms: Sequence[Found]) -> str:
    """Where the runs were made."""
    seen = [session for one in arms for run in one.runs for session in run.sessions]

    def each(name: str) -> str:
        return ", ".join(sorted({str(where[name]) for where in seen if where.get(name)})) or "unknown"

    days = sorted({str(where["started"])[:10] for where in seen if where.get("started")})
    span = days[0] if len(set(days)) == 1 else f"{days[0]} to {days[-1]}" if days else "unknown"
    layouts = {where.get("channels_last") is True for where in seen}
    layout = {frozenset({True}): "channels last; ", frozenset({True, False}): "some with channels last; "}
    return (
        f"Commit {each('commit')}; {each('machine')}; {each('threads')} thread per run; "
        f"{layout.get(frozenset(layouts), '')}torch {each('torch')}; {span}. "
        "Differences are paired by seed, over the seeds that both have, with a 95 % interval and a p-value that is not "
        "corrected; in the sentence in bold it is, for all arms of the study (Holm). Failed: diverged, or did not "
        f"train, an error of {STUCK:g} % and more, which counts in the mean."
    )


def recalibrations(arms: Sequence[Found]) -> str:
    """Which recalibrated numbers are not shown, and why; which are, although they are not quite as they should be."""

    def named(runs: Callable[[Found], Sequence[StoredRun]]) -> str:
        return ", ".join(f"{whose(one)} ({len(runs(one))} of {len(one.runs)} runs)" for one in arms if runs(one))

    def whose(one: Found) -> str:
        several = len(one.study.batch_sizes) > 1
        return f"{one.label} at batch size {one.arm.spec.batch_size}" if several else one.label

    words = {
        "Recalibrated statistics measured with a fault, since mended, are left out": named(
            lambda one: one.badly_recalibrated
        ),
        "Recalibrated while the old memory still took part": named(lambda one: one.recalibrated_with_memory),
    }
    return " ".join(f"{what}: {which}." for what, which in words.items() if which)


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
    if not lines:
        return ""
    edge = [one.label for one in found.arms(study) if one.arm.rates and one.rate in _ends(one.arm.rates)]
    beyond = f" Chosen at the end of the range, so that a rate beyond it may be better still: {', '.join(edge)}."
    return f"Held-out error by learning rate: {'; '.join(lines)}.{beyond if edge else ''}"


def _ends(rates: Sequence[float]) -> tuple[float, float]:
    return min(rates), max(rates)
