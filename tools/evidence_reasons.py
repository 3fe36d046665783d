"""Where our runs part from the paper: which comparisons come out the other way, and when in the run they do."""

from __future__ import annotations

from collections.abc import Sequence

from evidence_tables import BASE, NOT_RUN, OURS, markdown_row

from memnorm.lab.evidence.findings import Findings, Found, apart, gap_text
from memnorm.lab.evidence.phases import phases
from memnorm.lab.statistics import number

TEST = "tests/lab/test_training_literally.py"
HEAD = ("where", "λ", "training error", "test error", f"{BASE}: test − training", f"{OURS}: test − training")
Pair = tuple[Found, Found]


def reasons(found: Findings) -> list[str]:
    """Paragraphs; the table has every comparison, those that come out as printed included."""
    pairs = [(ours, base) for ours, base in found.pairs(OURS, BASE) if apart(ours, base) is not None]
    opposite = [(ours, base) for ours, base in pairs if _mean(ours, base) > 0]
    if not opposite:
        nowhere = f"Nowhere so far: {OURS}'s mean error is not above {BASE}'s in any comparison."
        return [nowhere if pairs else f"{NOT_RUN.capitalize()}."]
    places = [f"{ours.place} ({number(_mean(ours, base))} points)" for ours, base in opposite]
    return [
        f"The paper prints less error with {OURS} than with {BASE} wherever it has both. Here the mean is higher, by "
        f"chance or not: {'; '.join(places)}.",
        f"A fault of ours was looked for first. `{TEST}` trains a network as the lab does, and with the paper's "
        "equations written out: weights and evaluations agree after every step, through both changes of λ and of the "
        "learning rate. What remains is how we read the paper where it is loose, and what differs from its protocol: "
        "the network, the length, the learning rate.",
        f"Then, when in the run they part. Errors of {OURS} minus {BASE}'s at the last evaluation with each λ; and how "
        "far each one's test error is from its own training error, which is taken while training, on augmented images, "
        "with the statistics of the training pass.",
        "\n".join(markdown_row(cells) for cells in (HEAD, ["---"] * len(HEAD), *_rows(pairs))),
        *_reading(opposite),
        "Single changes of the method, at full length, are the study on where a gain comes from.",
    ]


def _mean(ours: Found, base: Found) -> float:
    gap = apart(ours, base)
    assert gap is not None
    return gap.mean


def _rows(pairs: Sequence[Pair]) -> list[list[str]]:
    return [
        [
            ours.place,
            f"{one.strength:g}",
            gap_text(one.training),
            gap_text(one.test),
            number(one.second_rise.mean),
            number(one.first_rise.mean),
        ]
        for ours, base in pairs
        for one in phases(ours, base)
    ]


def _reading(opposite: Sequence[Pair]) -> list[str]:
    """What the table says of the comparisons that come out the other way."""
    ends = {ours.place: along[-1] for ours, base in opposite if (along := phases(ours, base))}
    early = [ours.place for ours, base in opposite if (along := phases(ours, base)) and along[0].test.mean > 0]
    lines = []
    if early:
        lines.append(f"The mean is higher with the least λ already: {'; '.join(early)}.")
    fitting = [place for place, end in ends.items() if end.training.mean <= 0]
    if fitting:
        lines.append(
            f"More test error without more training error: {'; '.join(fitting)}. One reading, not a finding: the noise "
            f"of small batches costs {BASE} errors in the training pass that are gone at evaluation, whereas {OURS}, "
            "with less of that noise, shows in training what it can do."
        )
    return lines
