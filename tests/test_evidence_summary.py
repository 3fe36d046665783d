"""README's table, and what those are told who read no further, from made-up records."""

import importlib
from pathlib import Path

import pytest
from helpers.evidence import BETTER, FIRST, HEADLINE, LONG, TINY, WORSE, cells_of, found, record, study, write

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def short(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("evidence_summary")


def test_every_comparison_is_in_the_summary_the_losses_and_the_diverged_as_well(short, tmp_path):
    record(tmp_path, FIRST, BETTER)
    record(tmp_path, LONG, {label: values[:3] for label, values in WORSE.items()})
    record(tmp_path, HEADLINE, {"BN": [19.0], "MBN-2": [None]})
    record(tmp_path, TINY, {"BN": [50.0], "MBN-2": [48.0]}, 2)
    told = short.summary(found(tmp_path))
    assert cells_of(told, "ResNet-20 at batch size 8, 20,000 iterations")[1:] == [
        "−2.98",
        "−3.14 to −2.82",
        "about 0.34 points",
        "lower in 5 of 5 seeds",
        "less error",
    ]
    assert cells_of(told, "ResNet-8 at batch size 8, 78,200 iterations")[-2:] == [
        "higher in 3 of 3 seeds",
        "more error",
    ]
    one_seed = ["−2.00", "–", "–", "n = 1", "one seed, no claim"]
    assert cells_of(told, "ResNet-8 at batch size 2, 80,000 iterations")[1:] == one_seed
    failed = "failed to train; MBN-2 diverged in 1 of 1 seeds"
    assert cells_of(told, "ResNet-56 at batch size 8, 78,200 iterations")[1:] == ["–", "–", "–", "–", failed]
    assert (
        "Of 7 comparisons that we planned on CIFAR-10, MBN-2 was found to have less error than BN in 1 and more in 1; "
        "the others have one seed (1), failed to train (1), are not run yet (3). These are small networks" in told
    )


def test_what_two_seeds_would_find_among_many_comparisons_is_nothing(short, tmp_path):
    record(tmp_path, TINY, {"BN": [36.0, 36.1], "MBN-2": [38.0, 41.5]}, size=4)
    cells = cells_of(short.summary(found(tmp_path)), "ResNet-8 at batch size 4, 40,000 iterations")
    assert cells[3] == "no difference is"


def test_readme_waits_for_two_seeds_of_both_and_says_what_is_missing_or_diverged(short, tmp_path):
    record(tmp_path, FIRST, {"BN": [34.0, 34.4], "MBN-2": [31.0]})
    assert short.readme(found(tmp_path)) is None
    record(tmp_path, FIRST, {"MBN-2": [31.0, 31.5], "MABN": [None, 35.0], "BRN-2": [90.0, 36.0], "GROUP": [None]})
    text = short.readme(found(tmp_path))
    assert "| MBN-2 | 31.25 ± 0.35 (n = 2), 3 of 5 seeds not run yet |" in text
    assert "| MABN | 35.00 (n = 1), 1 of 3 seeds not run yet; diverged in 1 of 2 seeds |" in text
    assert "| GROUP | 2 of 3 seeds not run yet; diverged in 1 of 1 seeds | – |" in text
    assert "| BRN-2 | 63.00 ± 38.18 (n = 2), 1 of 3 seeds not run yet; did not train in 1 of 2 seeds |" in text
    assert "So far: 9 of 24 runs." in text
    assert f"docs/figures/{FIRST}-seeds.svg" in text
    assert "| CIFAR-10, ResNet-20, batch size 8 |" in text


def test_readme_has_each_norms_chosen_rate_beside_the_papers_once_both_have_two_seeds(short, tmp_path):
    record(tmp_path, FIRST, {"BN": [34.0, 34.4], "MBN-2": [31.0, 31.5], "GROUP": [43.0, 43.5]})
    chosen_at(tmp_path, 0.01, {"BN": [30.6], "MBN-2": [31.8, 31.9]})
    assert "rate chosen of" not in short.readme(found(tmp_path))
    chosen_at(tmp_path, 0.01, {"BN": [30.6, 30.8]})
    text = short.readme(found(tmp_path))
    assert "| rate chosen of 0.1, 0.03, 0.01: test error" in text
    (line,) = [line for line in text.splitlines() if line.startswith("| MBN-2 |")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1] == "31.25 ± 0.35 (n = 2), 3 of 5 seeds not run yet"
    assert cells[2].startswith("−2.95 (")
    assert cells[3] == "31.85 ± 0.07 (n = 2), 3 of 5 seeds not run yet, at 0.01"
    assert cells[4].startswith("1.15 (")
    assert text.count("\n- ") == 2
    assert "| GROUP | 43.25 ± 0.35 (n = 2), 1 of 3 seeds not run yet |" in text
    (group,) = [line for line in text.splitlines() if line.startswith("| GROUP |")]
    assert group.endswith("| not run yet | – |")


def chosen_at(root, rate, errors):
    """Runs of the tuned study, with trials that choose this rate."""
    tuned = study("small-batch-resnet20-tuned")
    for arm in tuned.arms:
        if arm.label in errors:
            for trial in arm.trials(tuned.holdout):
                write(root, trial, 40.0 if trial.learning_rate == rate else 50.0)
            for seed, error in enumerate(errors[arm.label]):
                write(root, arm.run(seed, rate), error)


def test_the_summary_says_on_how_many_kinds_of_machine_runs_were_made(short, tmp_path):
    record(tmp_path, FIRST, {"BN": [34.0, 34.4], "MBN-2": [31.0, 31.5]})
    assert "trained on one machine, on no GPU.\n" in short.summary(found(tmp_path))
    (env,) = tmp_path.glob("*-mbn-double-b8-s0-*/env.json")
    env.write_text(env.read_text().replace("Some Processor", "Another Processor"))
    assert "trained on 2 kinds of machine, on no GPU.\n" in short.summary(found(tmp_path))


def test_less_error_in_the_seeds_that_did_not_fail_is_no_gain(short, tmp_path):
    record(tmp_path, FIRST, {"BN": BETTER["BN"], "MBN-2": [*BETTER["MBN-2"][:4], None]})
    told = short.summary(found(tmp_path))
    verdict = cells_of(told, "ResNet-20 at batch size 8, 20,000 iterations")[-1]
    assert verdict == "failed to train; MBN-2 diverged in 1 of 5 seeds"
    assert "in 0 and more in 0; the others failed to train (1), are" in told
    assert "the paper's claim, not our finding" in told
