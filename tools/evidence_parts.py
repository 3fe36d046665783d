"""Which part of the method does what: the differences that single changes make, at full length."""

from __future__ import annotations

from typing import NamedTuple

from evidence_tables import BASE, NOT_RUN, OURS, failures, markdown_row

from memnorm.lab.evidence.findings import Findings, apart, gap_text
from memnorm.lab.group import RECALIBRATED
from memnorm.lab.significance import number

ABLATION = "ablation-resnet8"
HEAD = ("what is added", "difference", "in points", "seeds")


class Part(NamedTuple):
    """One change: the arm that has it minus the arm that has not."""

    name: str
    changed: str
    plain: str
    recalibrated: bool = False  # the changed arm, evaluated with recalibrated statistics


PARTS = (
    Part("the memory", "MBN-1", BASE),
    Part("the second forward, with the memory", OURS, "MBN-1"),
    Part("the second forward, without the memory", "BN-2", BASE),
    Part("the shift between the means (Eq. 6 in place of Eq. 4)", OURS, f"{OURS} shift=False"),
    Part("a growing λ in place of 0.1", OURS, f"{OURS} λ=0.1"),
    Part("a growing λ in place of 0.5", OURS, f"{OURS} λ=0.5"),
    Part("a growing λ in place of 0.9", OURS, f"{OURS} λ=0.9"),
    Part("recalibrated statistics, BN", BASE, BASE, recalibrated=True),
    Part("recalibrated statistics, MBN-2", OURS, OURS, recalibrated=True),
    Part("moving averages in place of the batch's own moments", "MOVING-BN", BASE),
)


def parts(found: Findings) -> list[str]:
    """Paragraphs."""
    study = found.study(ABLATION)
    rows = [_row(found, part) for part in PARTS]
    return [
        f"Single changes, of the study “{study.title}”: the arm that has the part minus the arm that has not, so that "
        "below zero the part lowers the error. Intervals and p-values are of one comparison each.",
        "\n".join(markdown_row(cells) for cells in (HEAD, ["---"] * len(HEAD), *rows)),
        *_yardstick(found),
    ]


def _row(found: Findings, part: Part) -> list[str]:
    changed, plain = found.arm(ABLATION, part.changed), found.arm(ABLATION, part.plain)
    assert changed is not None
    assert plain is not None
    gap = apart(changed, plain, RECALIBRATED if part.recalibrated else "test_error", "test_error")
    again = "recalibrated " if part.recalibrated else ""
    told = (gap_text(gap) if gap else NOT_RUN if not (changed.runs and plain.runs) else "–") + failures(changed, plain)
    return [part.name, f"{again}{part.changed} − {part.plain}", told, str(gap.n) if gap else "–"]


def _yardstick(found: Findings) -> list[str]:
    """What a difference in one seed has to be measured by: how much differences vary between seeds."""
    told = []
    for part in PARTS:
        changed, plain = found.arm(ABLATION, part.changed), found.arm(ABLATION, part.plain)
        gap = apart(changed, plain) if changed and plain and part.changed != part.plain else None
        if gap is not None and gap.n > 1 and gap.standard_error is not None:
            told.append(f"{part.changed} − {part.plain} {number(gap.standard_error * gap.n**0.5)} (n = {gap.n})")
    if not told:
        return []
    return [
        f"Such differences vary between seeds; their standard deviations here, in points: {', '.join(told)}. A "
        "difference in one seed that is below twice as much may well be chance."
    ]
