"""docs/claims.md: what the paper asserts, what we did to test it, and how it stands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from memnorm.lab.evidence.claims import JUDGES, Judgement, Material, judge
from memnorm.lab.tables import CLAIMS, Claim

ORDER = ("held", "not held", "undecided", "not tested")
INTRODUCTION = """\
Each sentence of the paper that asserts something testable, and how it stands by our own records. Made of `results/` by
`tools/docs.py`; the judges are in `memnorm/lab/evidence/claims.py`, the runs in the [protocol](protocol.md), their
results in [Evidence](evidence.md). Lines are those of the paper's LaTeX source.

*Held*, *not held*: the 95 % interval of a paired difference lies on the claim's side, or on the other; or the statement
is exact, and a test checks it. *Undecided*: tested, but the interval includes zero, or there is one seed only. *Not
tested*: not run yet, or not planned; what would test it is said. Differences are in points of error; below zero, the
arm named first has less."""


def page(material: Material) -> str:
    judged = [(claim, judge(claim, material)) for claim in CLAIMS]
    counts = Counter(one.standing for _, one in judged)
    summary = ", ".join(f"{counts[standing]} {standing}" for standing in ORDER if counts[standing])
    return "\n".join(
        [
            "# Claims",
            "",
            INTRODUCTION,
            "",
            f"{len(CLAIMS)} claims: {summary}.",
            "",
            *[line for standing in ORDER if counts[standing] for line in section(standing, judged)],
        ]
    )


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
    return "\\\n  ".join([*parts, *([f"Found: {one.found}."] if one.found else [])])
