"""Where our runs part from the paper: which comparisons come out the other way, and what is known of the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from evidence_tables import BASE, NOT_RUN, OURS, markdown_row, than_printed

from memnorm.lab.evidence.findings import Findings, Found, apart, evidence_text, gap_text, model_name
from memnorm.lab.evidence.phases import Phase, phases
from memnorm.lab.evidence.studies import HEADLINE
from memnorm.lab.group import RECALIBRATED
from memnorm.lab.significance import Difference, number

LITERAL = "tests/lab/test_training_literally.py"
ROUNDING = 1e-6  # of what steps in float64 have moved; they are apart by far less, a fault by far more
HEAD = ("where", "iterations", "λ", "n", "training error", "test error", "test error − training error")


class Comparison(NamedTuple):
    """MBN-2 minus BN somewhere."""

    ours: Found
    base: Found
    gap: Difference
    along: list[Phase]

    @property
    def told(self) -> str:
        """ResNet-20 at batch size 8, 20,000 iterations (1.85 points, 95 % interval …)."""
        return f"{self.ours.place} ({number(self.gap.mean)} points, {evidence_text(self.gap)})"


def reasons(found: Findings, late: Mapping[str, Any] | None) -> list[str]:
    """Paragraphs; the table has every comparison, those that come out as printed included. `late`: trained networks
    that went on with everything written out, if that was tried.
    """
    planned = found.pairs(OURS, BASE)
    run = [
        Comparison(ours, base, gap, phases(ours, base))
        for ours, base in planned
        if (gap := apart(ours, base)) is not None
    ]
    higher, lower = [one for one in run if one.gap.mean > 0], [one for one in run if one.gap.mean <= 0]
    signs = [
        f"{what}: {'; '.join(one.told for one in some)}."
        for what, some in (("Here it is lower as well", lower), ("Here it is higher", higher))
        if some
    ]
    if len(run) < len(planned):
        signs.append(f"{NOT_RUN.capitalize()}: {len(planned) - len(run)} of {len(planned)}.")
    return [
        " ".join([f"The paper prints less error with {OURS} than with {BASE} wherever it has both.", *signs]),
        *(_suspects(run, late) if higher else []),
        *(_table(run) if any(one.along for one in run) else []),
    ]


def _suspects(run: Sequence[Comparison], late: Mapping[str, Any] | None) -> list[str]:
    """What could be the reason, and what could not."""
    rate = f"learning rate {HEADLINE.base_learning_rate:g}"
    setting = f"{model_name(HEADLINE)}, {HEADLINE.iterations:,} iterations, {rate}"
    cells = [one for one in run if one.ours.arm.cell]
    own = f"has not been run with both {OURS} and {BASE}"
    if cells:
        where = f"{'is' if cells[0].gap.mean > 0 else 'is not'} among those where {OURS} has more error"
        own = f"{where}; there {than_printed(cells[0].ours, cells[0].base)}"
    again = [
        f"{one.ours.place}: from {number(one.gap.mean)} to {number(gap.mean)} points ({evidence_text(gap)})"
        for one in run
        if (gap := apart(one.ours, one.base, RECALIBRATED)) is not None
    ]
    statistics = f"**The statistics at inference?** Recalibrating both takes {OURS} minus {BASE}: {'; '.join(again)}."
    return [
        f"**A fault of ours?** `{LITERAL}` trains a small network as the lab does, with {BASE} and with MBN, and the "
        "same network with the equations written out. In float64 weights, losses and errors agree through both changes "
        "of λ and of the learning rate; in float32, step by step, they agree but for rounding. Augmentation and "
        f"resuming have tests of their own. {_late(late)} What remains beside that is our reading of the paper where "
        f"it is loose, the setting (the paper's own, {setting}, {own}), and where the interval includes zero or there "
        "is one seed, chance.",
        *([statistics] if again else []),
    ]


def _late(late: Mapping[str, Any] | None) -> str:
    small = "That is a small network for some tens of steps"
    if late is None:
        return f"{small}: a fault that shows only later or with real data would escape it."
    runs, where, apart = late["runs"], late["where"], max(run["apart"] for run in late["runs"])
    which = ", ".join(sorted({run["network"] for run in runs}))
    strengths = ", ".join(f"{one:g}" for one in sorted({run["strength"] for run in runs}))
    told = (
        f"{small}. So {'a trained network' if len(runs) == 1 else f'{len(runs)} trained networks'} ({which}) went on "
        f"for {late['steps']} steps on the last batches of the run, with λ = {strengths}, in the lab and written out, "
        "in float64, from empty memories and without momentum. Afterwards the weights were apart by at most "
        f"{apart:.0e} of the way that these steps had moved them"
    )
    unequal = sum(run["lab"]["test_error"] != run["literal"]["test_error"] for run in runs)
    errors = "equal" if not unequal else f"not equal in {unequal} of {len(runs)}"
    source = f"`benchmarks/late_and_literal.py`; commit {where['commit']}, {where['machine']}"
    told += f", and the test errors on {late['test_images']:,} images were {errors} ({source})."
    if unequal or apart > ROUNDING:
        return f"{told} **That is more than rounding: there is a fault, and the runs are not to be trusted.**"
    return (
        f"{told} Both see the same images, so that a fault in how images are prepared would escape this, as would one "
        "that shows in float32 alone and only after many steps."
    )


def _table(run: Sequence[Comparison]) -> list[str]:
    """When in the run the two part."""
    rows = [
        [
            one.ours.place,
            f"{phase.iteration:,}",
            f"{phase.strength:g}" if phase.strength is not None else "–",
            str(phase.test.n),
            *(gap_text(gap) for gap in (phase.training, phase.test, phase.excess)),
        ]
        for one in run
        for phase in one.along
    ]
    return [
        f"**When in the run?** {OURS} minus {BASE} at the last evaluation before each milestone, and at the end. The "
        "learning rate falls where λ grows, so that no row shows the effect of λ alone. The training error is that of "
        "the training pass, on augmented images, averaged since the evaluation before.",
        "\n".join(markdown_row(cells) for cells in (HEAD, ["---"] * len(HEAD), *rows)),
        *_reading(run),
    ]


def _reading(run: Sequence[Comparison]) -> list[str]:
    """The last column at the end of the runs."""
    ends = [one.along[-1].excess.mean for one in run if one.along]
    if len(ends) < 2 or min(ends) <= 0:
        return []
    return [
        f"At the end {OURS}'s training error understates its test error more than {BASE}'s does, everywhere, by "
        f"{number(min(ends))} to {number(max(ends))} points: its training pass normalises with more images, and shows "
        "more of what evaluation will. So a lower training error is no sign of a lower test error; that is lower only "
        "where the gain in training is larger than this."
    ]
