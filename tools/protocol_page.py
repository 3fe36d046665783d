"""docs/protocol.md: the studies in words, made of the list that the queue is made of."""

from __future__ import annotations

from collections.abc import Iterable

from memnorm.lab.evidence import Arm, Study
from memnorm.lab.evidence.findings import STUCK
from memnorm.lab.evidence.study import TRIAL_SHARE
from memnorm.lab.experiment import TUNING_SEED
from memnorm.lab.spec import RunSpec

PAPER = RunSpec()
CHANGES = """\
No run's specification was changed, none was added or left out. Runs that were interrupted went on with the code of the
day; `env.json` has the commit of each session. The baseline of the sixth study became MBN-2 in place of BN when its
first two runs had begun and none had ended. How runs are read was changed, on 2026-11-16, when the sixth study and seed
0 of five arms of the first were done:

- For some hours the seeds of one study counted in another that shares its runs. With them, MBN-2 was not told apart
  from BN in the fifth study at batch size 8 (n = 3); with the two seeds of its own it was then said to have more error.
  Each study has its own seeds again, and the evidence shows both.
- Verdicts in words compare each arm with the baseline, as this page says; before, they compared every pair.
- Claims are judged part by part, on every study that has the arms; before, on some studies, and one part could decide.
  *Close* is 0.5 points; before, 1. *About 30 %* is 20 to 40 %; for some hours it was at most 40 %.

Later that day, when three seeds of every arm of the first study and a fourth of BN were done, and the last of these
points when it was nearly complete:

- Runs are computed with the channels last in memory, and the moments of BRN and MABN in fewer operations: the same
  numbers but for rounding, sooner. MBN-1 and MBN-2 of seed 3 of the first study changed over on their way. Where a run
  was computed how is in its `env.json`.
- A run that ends at chance counts as failed beside its mean; before, only a diverged one did.

In the evening, when the first study was complete, and of the second all trials and seed 0 of BN, MBN-1 and MBN-2, or
up to five runs more:

- An arm that is apart from the baseline by itself, but not once corrected, is named with its p-value. The verdict is
  the same.
- From there on runs were made on another kind of machine; `env.json` names it.
- p-values are corrected for all comparisons that a study plans; before, for those that had been run, so that MBN-2 was
  said to have more error in the fifth study at batch size 8 with nothing else run there.
- The summary in words goes by corrected p-values; before, by those of one comparison.
- Recalibrating had a fault with norms that read their running statistics in training: deeper layers got the statistics
  of inputs that the old ones had made. Of the runs of BRN and MABN until then that number is left out; they are not
  repeated. Nothing else of them is concerned. (MBN's memory had the same fault, to a lesser degree: see below.)
- Claims: that two arms are *close* is refuted by an interval wholly outside of 0.5 points; before, by one without zero.
  The second drop is judged by MBN-2's beside BN's, not by each alone. A claim about all of several things is no longer
  held in part, and that something *may* fail is held as soon as it does.

On 2026-11-17, when of the second study 13 to 14 of 24 runs were done:

- The section of the evidence on where it comes out otherwise than in the paper was added: errors along the run,
  training error beside test error. It was made after signs were seen to differ, and decides no verdict.

Later that day, when the first, second, fifth and sixth study were complete:

- Where an arm with a lower mean than BN has two seeds or fewer, the advice says that they are too few; before, it was
  to stay with BN. At batch size 2 MABN, lower in both seeds, is such an arm. No verdict changes.

After that, when of the fourth study seed 0 of BN, MBN-1 and MBN-2 and the trials of group norm were done:

- The summary is a table, and a section shows the differences of single changes of the fourth study. It decides no
  verdict.
- Arms that are planned with one seed no longer count among the comparisons of a study: they cannot be tested. In the
  fourth study two comparisons remain. No verdict changes.
- Which arms have a lower mean than BN is told over the seeds that both have; before, over all seeds of each.
- Comparisons that this page does not plan are said to be *by themselves*.
- Claims: that BN suffers from small batches and MBN less is judged by how errors grow from batch size 8 to 4 and 2;
  before, by MBN-2 minus BN at each. Costs are judged at every batch size; before, at 128 alone. What only settings of
  our own refute is called so.
- Recalibrating let MBN's old memory take part: at batch size 8 and λ = 0.9 it weighs about 60 images, beside the 250
  of a batch of the recalibration; at 4 half as many, at 2 a quarter. Runs of MBN from there on are recalibrated without
  it; the evidence says which were before."""


def page(studies: Iterable[Study]) -> str:
    parts = [
        "# Protocol",
        "What our [evidence](evidence.md) rests on, laid down before it is run. This page is made of the list in "
        "`memnorm/lab/evidence/studies.py` by `tools/docs.py`, and `memnorm evidence` makes its queue of the same "
        "list. The studies test hypotheses; none of them has to come out in favour of MBN.",
        "## What all runs share",
        shared(),
        "## What is compared, and how",
        comparison(),
        *(text for number, study in enumerate(studies, 1) for text in section(number, study)),
        "## What was changed after runs had been seen",
        CHANGES,
    ]
    return "\n\n".join(parts) + "\n"


def shared() -> str:
    steps = ", ".join(f"{one:.0%}" for one in PAPER.milestones).replace("%", " %")
    return "\n".join(
        [
            f"- Data: {PAPER.data}, all training images, augmented by random crops and flips; the test images are used "
            "for evaluation and choose nothing.",
            f"- SGD with momentum {PAPER.momentum:g} and weight decay {PAPER.weight_decay:g}; the learning rate is "
            f"divided by 10 at {steps} of the iterations, where MBN's strength λ grows as well: "
            f"{', '.join(f'{one:g}' for one in PAPER.strength)}.",
            "- The result of a run is its *last* evaluation, never its best one.",
            "- A seed decides the initial weights, the order of the images and their augmentation, and does so in the "
            "same way for every arm: at a given seed, arms differ in the norm alone, and in the learning rate where "
            "one is chosen. (MABN centres the weights that it is given: that belongs to the norm.) The kind of "
            "machine, the layout in memory and the commit may differ between them, which changes rounding; each run's "
            "`env.json` has them.",
            "- *Recalibrated*: after the last step the running statistics are measured afresh, on so many training "
            "images that are not augmented, and the test error is taken a second time. The images are the same for "
            "every run; the weights are not touched. Norms without running statistics have no such number.",
            "- One thread per run; the layout in memory is no part of a run. Seconds are those of training, "
            "evaluations left out; runs side by side disturb each other's.",
        ]
    )


def comparison() -> str:
    return "\n".join(
        [
            "- Arms are compared with the study's baseline, at the same batch size, *paired by seed*: the mean of the "
            "differences, its 95 % interval by Student's t, and the two-sided p-value. Verdicts in words correct the "
            "p-values for the number of these comparisons in the study (Holm). One seed supports no claim.",
            f"- Where a learning rate is chosen, each arm gets the one with the lowest error on held-out *training* "
            f"images, in runs of 1/{TRIAL_SHARE} of the iterations with seed {TUNING_SEED}; the larger of equals. A "
            "trial that diverges is the worst; if all diverge, the least rate is taken.",
            "- Everything that finished is reported, losers and diverged runs included. A run that diverged has no "
            "error to average; it is counted beside the mean. A run that ends with an error of "
            f"{STUCK:g} % and more did not train: it is averaged as it is, and counted as failed as well. What has "
            "not been run is shown as such.",
            "- A number of the paper stands beside ours only for the same model and protocol.",
        ]
    )


def section(number: int, study: Study) -> list[str]:
    spec = study.arms[0].spec
    sizes = ", ".join(map(str, study.batch_sizes))
    where = f"Model {spec.model}, batch size {sizes}, {spec.evaluations} evaluations. Baseline: {study.baseline}."
    held_out = f" Learning rates are chosen on {study.holdout:,} held-out images." if _tunes(study) else ""
    rows = [row(study, arm) for arm in study.arms]
    return [
        f"## {number}. {study.title}",
        f"*{study.question}* (`memnorm evidence {study.name}`)",
        f"{where}{held_out} {study.notes}",
        "\n".join(
            [
                "| arm | norm | forwards | batch | iterations | learning rate | seeds | recalibrated on | besides |",
                "|---|---|---|---|---|---|---|---|---|",
                *rows,
            ]
        ),
        *printed(study),
    ]


def _tunes(study: Study) -> bool:
    return any(arm.rates for arm in study.arms)


def row(study: Study, arm: Arm) -> str:
    spec = arm.spec
    rates = ", ".join(f"{rate:g}" for rate in arm.rates)
    cells = [
        arm.label,
        f"`{spec.norm}`",
        "2" if spec.scheme == "double" else "1",
        spec.batch_size,
        f"{spec.iterations:,}",
        f"best of {rates}" if rates else f"{spec.base_learning_rate:g}",
        f"0 to {arm.seeds - 1}" if arm.seeds > 1 else "0",
        f"{spec.recalibrate:,} images" if spec.recalibrate else "–",
        besides(spec) or "–",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def besides(spec: RunSpec) -> str:
    """What else differs from the paper's protocol."""
    found = [f"`{name}={value}`" for name, value in spec.norm_options.items()]
    if spec.strength != PAPER.strength:
        found.append("λ " + ", ".join(f"{one:g}" for one in spec.strength))
    if spec.every != 1:
        found.append(f"second forward in every {spec.every}th step")
    if spec.fraction != 1:
        found.append(f"second forward with {spec.fraction:.0%} of the batch".replace("%", " %"))
    return ", ".join(found)


def printed(study: Study) -> list[str]:
    known = [f"{arm.label} {arm.cell.printed:.2f} %" for arm in study.arms if arm.cell and arm.cell.printed]
    return [f"The paper prints: {', '.join(known)}."] if known else []
