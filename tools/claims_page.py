"""docs/claims.md: what the paper asserts, what we did to test it, and how it stands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from memnorm.lab.evidence.claims import JUDGES, Judgement, Material, judge
from memnorm.lab.tables import CLAIMS, Claim

ORDER = ("held", "held in part", "not held", "not held in our settings", "undecided", "not tested")
INTRODUCTION = """\
Each sentence of the paper that asserts something testable, and how it stands by our own records. Made of `results/` by
`tools/docs.py`; the judges are in `memnorm/lab/evidence/claims.py`, the runs in the [protocol](protocol.md), their
results in [Evidence](evidence.md). Lines are those of the paper's LaTeX source.

A claim has parts: one for every comparison that we ran, one for whatever else it says. A part is *held* or *not held*
if the 95 % interval of a paired difference lies on its side, or on the other; if the statement is exact and a test
checks it; or by the bound that the test names. It is *undecided* if the interval includes zero or there is one seed
only. A claim is held if all its parts are, *held in part* if some are, and *not held* if none is and one is refuted; a
claim about all its parts at once (*best*, *at every batch size*) is refuted by one of them and never held in part. Our
runs, those of the headline excepted, are in settings of our own: another network, length or learning rate than the
paper's. What nothing else refutes is *not held in our settings*, and may hold in the paper's. That two arms are close
is held or not by whether the interval lies within 0.5 points of zero, or wholly beyond; that something may fail is held
as soon as a run does. *Not tested* is what has not been run, or is not planned.

Differences are in points of error, first arm minus second. Here, unlike in the verdicts of the evidence, p-values are
not corrected: of the {decided} different comparisons below that an interval could decide, one in twenty would be
decided by chance if nothing were different. Arms that the protocol gives one seed (single changes of MBN-2, BN-2) can
only show a direction."""


def page(material: Material) -> str:
    judged = [(claim, judge(claim, material)) for claim in CLAIMS]
    counts = Counter(one.standing for _, one in judged)
    summary = ", ".join(f"{counts[standing]} {standing}" for standing in ORDER if counts[standing])
    return "\n".join(
        [
            "# Claims",
            "",
            INTRODUCTION.format(decided=comparisons(one for _, one in judged)),
            "",
            f"{len(CLAIMS)} claims: {summary}.",
            "",
            *[line for standing in ORDER if counts[standing] for line in section(standing, judged)],
        ]
    )


def comparisons(judged: Iterable[Judgement]) -> int:
    """Several claims may rest on the same one."""
    return len({part for one in judged for part in one.found.split("; ") if " % interval " in part})


def section(standing: str, judged: Sequence[tuple[Claim, Judgement]]) -> list[str]:
    """The claims that stand so."""
    entries = [entry(claim, one) for claim, one in judged if one.standing == standing]
    return [f"## {standing.capitalize()}", "", *entries, ""]


def entry(claim: Claim, one: Judgement) -> str:
    lines = f"line{'s' if len(claim.lines) > 1 else ''} {', '.join(map(str, claim.lines))}" if claim.lines else ""
    where = "; ".join(part for part in (claim.where, lines) if part)
    remark = f" *{claim.remark}*" if claim.remark else ""
    planned = "planned, see the [protocol](protocol.md)" if claim.name in JUDGES else f"would be: {claim.how}"
    parts = [f"- **{claim.statement}**{remark}", f"In the paper: {where}.", f"Our test: {one.test or planned}."]
    return "\\\n  ".join(
        [*parts, *([f"Found{f' ({one.tally})' if one.tally else ''}: {one.found}."] if one.found else [])]
    )
