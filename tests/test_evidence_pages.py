"""The pages of our evidence from made-up records: every direction, any part missing, the same bytes each time."""

import importlib
import json
import re
from pathlib import Path

import pytest
from helpers.evidence import (
    BENCH,
    BETTER,
    CHEAPER,
    EQUAL,
    FIRST,
    HEADLINE,
    LONG,
    TINY,
    WORSE,
    cells_of,
    found,
    record,
    study,
    write,
)

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("evidence_pages")


@pytest.fixture
def short(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("evidence_summary")


def made(pages, root) -> dict[str, str]:
    return pages.render(found(root), BENCH, "digits", root)


def part(text: str, title: str) -> str:
    """A section, from its heading to the next."""
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0].strip()


def row(text: str, title: str, label: str) -> list[str]:
    return cells_of(part(text, title), label)


def test_without_a_record_everything_is_said_to_be_missing(pages, short, tmp_path):
    files = made(pages, tmp_path)
    assert files.keys() == {"evidence.md", "claims.md"}
    text = files["evidence.md"]
    helps = part(text, "When does MBN help, and by how much?")
    assert helps.startswith(f"- Not run yet: {study(FIRST).title}; ")
    assert helps.count(";") == 7
    assert f"{study(TINY).title}, batch size 4" in helps
    assert part(text, "When is something else better?") == helps
    assert row(text, study(FIRST).title, "BN")[2:] == ["not run yet", *["–"] * 4]
    assert row(text, study("small-batch-resnet20-tuned").title, "BN")[1:3] == ["to be chosen", "not run yet"]
    assert "0.1: not run yet, 0.03: not run yet" in text
    assert short.readme(found(tmp_path)) is None
    assert "BN not run yet here, 19.64 in the paper; MBN-2 not run yet here, 15.37" in short.headline(found(tmp_path))
    told = short.summary(found(tmp_path))
    assert "in 0 and more in 0; the others are not run yet (7). A gain over BN is so far the paper's claim" in told
    assert told.count("| – | – | – | – | not run yet |") == 7


@pytest.mark.parametrize(
    ("errors", "sentence", "rival", "choice", "summary"),
    [
        (
            BETTER,
            "MBN-2's error is 2.98 points below BN's (95 % interval 2.",
            "not below MBN-2's over the seeds that both have: BN.",
            "take MBN-2.",
            "less error",
        ),
        (
            WORSE,
            "MBN-2's error is 2.98 points above BN's (95 % interval 2.",
            "BN's error is 2.98 points below MBN-2's (95 % interval 2.",
            "stay with BN: nothing was found to have less error.",
            "more error",
        ),
        (
            EQUAL,
            "MBN-2's error is 0.02 points below BN's, which may be chance (95 % interval −0.",
            "not below MBN-2's over the seeds that both have: BN.",
            "stay with BN: nothing was found to have less error. Lower than BN over the seeds that both have, which "
            "may be chance: MBN-2 (by 0.02 points, lower in 3 of 5 seeds)",
            "may be chance",
        ),
    ],
    ids=["better", "worse", "equal"],
)
def test_the_answers_follow_the_records(pages, short, tmp_path, errors, sentence, rival, choice, summary):
    record(tmp_path, FIRST, errors)
    text = made(pages, tmp_path)["evidence.md"]
    where = f"**{study(FIRST).title}**"
    assert f"- {where}: {sentence}" in part(text, "When does MBN help, and by how much?")
    assert f"- {where}: {rival}" in part(text, "When is something else better?")
    assert f"- {where}: {choice}" in part(text, "Which norm should I use?")
    told = short.summary(found(tmp_path))
    assert cells_of(told, "ResNet-20 at batch size 8, 20,000 iterations")[-1] == summary
    assert ("the paper's claim, not our finding" in told) == (errors is not BETTER)
    assert told in text


def test_what_each_part_does_is_the_difference_of_a_single_change(pages, tmp_path):
    title = "Which part of the method does what?"
    told = part(made(pages, tmp_path)["evidence.md"], title)
    assert told.count("| not run yet | – |") == 10
    assert "vary between seeds" not in told
    record(tmp_path, LONG, {"BN": [20.0, 21.0], "MBN-2": [19.0, 19.5]}, test_error_recalibrated=18.5)
    record(tmp_path, LONG, {"MBN-1": [19.5, 20.2], "MBN-2 shift=False": [18.0], "BN-2": [None], "MOVING-BN": [90.0]})
    told = part(made(pages, tmp_path)["evidence.md"], title)
    assert (
        "| the shift between the means (Eq. 6 in place of Eq. 4) | MBN-2 − MBN-2 shift=False | 1.00 (one seed) | 1 |"
        in told
    )
    assert "| the memory | MBN-1 − BN | −0.65 (" in told
    assert "| the second forward, with the memory | MBN-2 − MBN-1 | −0.60 (" in told
    assert "| BN-2 − BN | –; BN-2 diverged in 1 of 1 seeds | – |" in told
    assert "| MOVING-BN − BN | 70.00 (one seed); MOVING-BN did not train in 1 of 1 seeds | 1 |" in told
    assert "| recalibrated statistics, MBN-2 | recalibrated MBN-2 − MBN-2 | −0.75 (" in told
    spreads = "MBN-1 − BN 0.21 (n = 2), MBN-2 − MBN-1 0.14 (n = 2). A difference in one seed that is below twice"
    assert f"their standard deviations here, in points: {spreads}" in told


def test_a_study_whose_baseline_is_not_bn_recommends_nothing(pages, tmp_path):
    record(tmp_path, CHEAPER, {"BN": [37.0, 37.1, 37.3], "MBN-2": [34.0, 34.2, 34.4]})
    text = made(pages, tmp_path)["evidence.md"]
    assert study(CHEAPER).title not in part(text, "Which norm should I use?")
    assert f"**{study(CHEAPER).title}**: MBN-2's error is 2." in part(text, "When does MBN help, and by how much?")


def test_a_table_has_means_differences_and_what_went_wrong(pages, tmp_path):
    record(tmp_path, FIRST, {**BETTER, "GROUP": [30.0, None], "MABN": [None, None, None]})
    text = made(pages, tmp_path)["evidence.md"]
    title = study(FIRST).title
    cells = row(text, title, "MBN-2")
    assert cells[:3] == ["MBN-2", "0.1", "31.12 ± 0.30 (n = 5)"]
    assert re.fullmatch(r"−2\.98 \(−3\.\d\d to −2\.\d\d, p < 0\.001\)", cells[3])
    assert row(text, title, "BN")[3] == "–"
    assert row(text, title, "GROUP")[2:] == [
        "30.00 (n = 1), 1 of 3 seeds not run yet",
        "−4.00 (one seed)",
        "–",
        "–",
        "1 of 2",
    ]
    assert row(text, title, "MABN")[2:] == ["–", "–", "–", "–", "3 of 3"]
    assert row(text, title, "BRN-2")[2] == "not run yet"
    assert "every run diverged: MABN; not run yet: MBN-1, BRN-2.** So far: 15 of 24 runs." in part(text, title)
    assert (
        "Commit 0123456789ab; Linux x86_64, 2 cores, Some Processor; 1 thread per run; torch 2.9.0; 2031-05-17." in text
    )


def test_recalibrated_errors_stand_beside_the_others(pages, tmp_path):
    record(tmp_path, FIRST, {"MBN-2": BETTER["MBN-2"]}, test_error_recalibrated=30.5)
    record(tmp_path, FIRST, {"BN": BETTER["BN"]}, test_error_recalibrated=31.0)
    text = made(pages, tmp_path)["evidence.md"]
    assert row(text, study(FIRST).title, "MBN-2")[4] == "30.50 ± 0.00 (n = 5)"
    assert re.match(r"−0\.62 \(−1\.\d\d to −0\.\d\d, p = ", row(text, study(FIRST).title, "MBN-2")[5])
    assert "Both with recalibrated statistics: MBN-2's" in part(text, "When does MBN help, and by how much?")
    assert "BN with recalibrated statistics beside MBN-2 as it is" in part(text, "When is something else better?")


def test_the_papers_number_stands_in_its_own_study_only(pages, short, tmp_path):
    record(tmp_path, HEADLINE, {"BN": [20.0], "MBN-2": [16.0]})
    record(tmp_path, FIRST, BETTER)
    text = made(pages, tmp_path)["evidence.md"]
    assert row(text, study(HEADLINE).title, "BN")[-1] == "19.64"
    assert row(text, study(HEADLINE).title, "MBN-2")[-1] == "15.37"
    assert text.count("19.64") == text.count("15.37") == 1
    assert "one seed, no claim: MBN-2's error is 4.00 points below BN's" in text
    told = short.readme(found(tmp_path))
    assert "BN 20.00 (n = 1) here, 19.64 in the paper" in told
    sentence = "MBN-2 minus BN is −4.00 points here and −4.27 in the paper: the same sign. "
    sentence += "BN has 0.36 points more and MBN-2 0.63 points more error than in the paper."
    assert sentence in told
    assert sentence in part(text, study(HEADLINE).title)
    assert text.count("in the paper: the") == 1


def test_a_sign_that_is_not_the_papers_is_said_to_be_the_opposite(pages, short, tmp_path):
    record(tmp_path, HEADLINE, {"BN": [18.0], "MBN-2": [18.5]})
    text = part(made(pages, tmp_path)["evidence.md"], study(HEADLINE).title)
    assert "MBN-2 minus BN is 0.50 points here and −4.27 in the paper: the opposite sign. " in text
    assert "BN has 1.64 points less and MBN-2 3.13 points more error than in the paper." in text
    record(tmp_path / "half", HEADLINE, {"BN": [18.0]})
    assert "sign" not in short.headline(found(tmp_path / "half"))


def test_what_comes_out_otherwise_than_in_the_paper_is_named_with_when_it_does(pages, tmp_path):
    title = "Where does it come out otherwise than in the paper?"
    told = part(made(pages, tmp_path)["evidence.md"], title)
    assert told.endswith("wherever it has both. Not run yet: 7 of 7.")
    record(tmp_path / "as printed", FIRST, BETTER)
    told = part(made(pages, tmp_path / "as printed")["evidence.md"], title)
    assert "Here it is lower as well: ResNet-20 at batch size 8, 20,000 iterations (−2.98 points, 95 % " in told
    assert "higher" not in told
    assert "A fault" not in told
    record(tmp_path / "otherwise", FIRST, WORSE, train_error=35.0, test_error_recalibrated=30.0)
    record(tmp_path / "otherwise", HEADLINE, {"BN": [20.0], "MBN-2": [16.0]})
    told = part(made(pages, tmp_path / "otherwise")["evidence.md"], title)
    assert "Here it is lower as well: ResNet-56 at batch size 8, 78,200 iterations (−4.00 points, n = 1). " in told
    assert "Here it is higher: ResNet-20 at batch size 8, 20,000 iterations (2.98 points, 95 % interval" in told
    assert "Not run yet: 5 of 7." in told
    (test,) = re.findall(r"`(tests/\S+)`", told)
    assert (ROOT / test).is_file()
    assert "ResNet-56, 78,200 iterations, learning rate 0.1, is not among those where MBN-2 has more error; " in told
    assert "there BN has 0.36 points more and MBN-2 0.63 points more error than in the paper)" in told
    assert "takes MBN-2 minus BN: ResNet-20 at batch size 8, 20,000 iterations: from 2.98 to 0.00 points (" in told
    cells = [line.strip("| ").split(" | ") for line in told.splitlines() if line.startswith("| ResNet-20")]
    assert [one[1:4] for one in cells] == [["8,000", "0.1", "5"], ["12,000", "0.5", "5"], ["20,000", "0.9", "5"]]
    assert cells[2][4:6] == ["0.00 (p = 1.00)", row_of_gap(told)]
    assert cells[2][6] == cells[2][5]


def row_of_gap(told: str) -> str:
    """The difference of the first sentence as a cell of a table."""
    (words,) = re.findall(r"higher: [^(]*\((.*?), n = 5\)", told)
    return words.replace(" points, 95 % interval ", " (") + ")"


def test_a_gap_between_training_and_test_is_read_only_where_it_is_everywhere(pages, tmp_path):
    for name, (ours, base) in {"everywhere": (30.0, 35.0), "not": (40.0, 35.0)}.items():
        root = tmp_path / name
        for study_name in (FIRST, LONG):
            errors = {"BN": [30.0, 31.0], "MBN-2": [31.0, 32.5]}
            record(root, study_name, {"BN": errors["BN"]}, train_error=base)
            record(root, study_name, {"MBN-2": errors["MBN-2"]}, train_error=ours)
        told = part(made(pages, root)["evidence.md"], "Where does it come out otherwise than in the paper?")
        assert ("understates its test error more than BN's does, everywhere, by 6.25 to 6.25" in told) == (ours < base)


def test_rivals_with_less_error_are_named_with_their_evidence(pages, tmp_path):
    record(tmp_path, FIRST, {**BETTER, "GROUP": [28.0, 28.4, 27.8], "MABN": [31.5, 29.5, 31.2], "BRN-2": [32.0]})
    line = part(made(pages, tmp_path)["evidence.md"], "When is something else better?").splitlines()[0]
    assert "GROUP's error is 3.00 points below MBN-2's, as a comparison by itself (95 % interval" in line
    assert "MABN's error is 0.33 points below MBN-2's, which may be chance (" in line
    assert line.endswith("; not below MBN-2's over the seeds that both have: BN, BRN-2.")


def test_a_comparison_in_which_one_arm_diverged_has_been_run(pages, tmp_path):
    record(tmp_path, HEADLINE, {"BN": [19.0], "MBN-2": [None]})
    text = made(pages, tmp_path)["evidence.md"]
    told = f"- **{study(HEADLINE).title}**: no claim; MBN-2 diverged in 1 of 1 seeds."
    for title in ("When does MBN help, and by how much?", "When is something else better?"):
        assert told in part(text, title)


def test_the_cost_is_that_of_the_bench_not_of_the_runs(pages, tmp_path):
    record(tmp_path, FIRST, BETTER)
    whole = made(pages, tmp_path)["evidence.md"]
    text = part(whole, "What does it cost?")
    assert "- A training step with MBN-2 takes, in steps of BN: resnet20 at batch size 128 1.30." in text
    assert "quiet machine: Some machine, 2 threads." in text
    assert "A layer in eval takes 1.00 times BN's time." in text
    assert "time per step" not in whole


def test_a_cheaper_second_forward_is_judged_against_the_full_one(pages, tmp_path):
    record(tmp_path, CHEAPER, {"MBN-2": [30.0, 31.0, 30.5], "MBN-2 every=4": [30.6, 31.5, 31.2]})
    text = part(made(pages, tmp_path)["evidence.md"], "What does it cost?")
    assert "MBN-2 every=4**: MBN-2 every=4's error is 0.60 points above MBN-2's (95 % interval" in text
    assert f"Not run yet: {study(CHEAPER).title}, MBN-2 fraction=0.25." in text


def test_chosen_rates_are_told_with_what_chose_them(pages, tmp_path):
    record(tmp_path, "small-batch-resnet20-tuned", {"GROUP": [30.0, 30.1, 30.2]})
    text = part(made(pages, tmp_path)["evidence.md"], study("small-batch-resnet20-tuned").title)
    assert "GROUP 0.1: 40.00 %, 0.03: 41.00 %, 0.01: 42.00 %" in text


def test_a_rate_at_the_end_of_the_range_is_said_to_be_there(pages, tmp_path):
    tuned = study("small-batch-resnet20-tuned")
    for label, errors in {"BN": (50.0, 40.0, 45.0), "MBN-2": (50.0, 45.0, 40.0), "GROUP": (40.0, 45.0, 50.0)}.items():
        (arm,) = [arm for arm in tuned.arms if arm.label == label]
        for trial, error in zip(arm.trials(tuned.holdout), errors, strict=True):
            write(tmp_path, trial, error)
    text = part(made(pages, tmp_path)["evidence.md"], tuned.title)
    assert "BN 0.1: 50.00 %, 0.03: 40.00 %, 0.01: 45.00 %" in text
    assert text.endswith("a rate beyond it may be better still: MBN-2, GROUP.")


def test_figures_are_learning_curves_seeds_and_error_against_batch_size(pages, tmp_path):
    record(tmp_path, FIRST, {**BETTER, "MABN": [None, None]})
    for size in (2, 4):
        errors = {"BN": [40.0 + size, 41.0 + size], "MBN-2": [38.0 + size, None], "GROUP": [50.0]}
        record(tmp_path, TINY, errors, size, test_error_recalibrated=30.0 + size)
    files = made(pages, tmp_path)
    drawn = {name for name in files if name.endswith(".svg")}
    names = {f"{TINY}-{one}.svg" for one in ("2", "4", "sizes", "sizes-recalibrated")}
    names |= {f"{FIRST}.svg", f"{FIRST}-seeds.svg"}
    assert drawn == {f"figures/{name}" for name in names}
    for name in drawn:
        assert f"]({name})" in files["evidence.md"]
        assert "prefers-color-scheme:dark" in files[name]
    assert (
        "test error (%) against batch size. BN 42.5 at 2, 44.5 at 4; MBN-2 40.0 at 2"
        in files[f"figures/{TINY}-sizes.svg"]
    )
    afresh = files[f"figures/{TINY}-sizes-recalibrated.svg"]  # group norm has no statistics: its error as it is
    told = "BN 32.0 at 2, 34.0 at 4; MBN-2 32.0 at 2, 34.0 at 4; GROUP 50.0 at 2, 50.0 at 4"
    assert f"test error, recalibrated (%) against batch size. {told}" in afresh
    seeds = files[f"figures/{FIRST}-seeds.svg"]
    assert (seeds.count("<circle"), seeds.count(">diverged<")) == (10, 1)


def test_a_seed_that_did_not_train_does_not_stretch_the_axis(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    figures = importlib.import_module("evidence_figures")
    drawn = figures.seeds({"BN": [34.0, 35.0], "MABN": [36.0, 90.0]})
    assert drawn.count("<circle") == 3
    assert drawn.count("<rect") == 1
    assert "did not train: 90.0 %" in drawn
    assert ">100<" not in drawn
    alone = figures.seeds({"MABN": [89.0, 90.0]})
    assert (alone.count("<circle"), alone.count("did not train")) == (2, 0)


def test_dots_of_seeds_lie_within_the_axis_which_begins_at_zero_unless_that_wastes_half(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    figures = importlib.import_module("evidence_figures")
    for values in ([0.0], [0.4, 3.9], [4.0, 4.0], [33.1, 36.2], [30.0, 31.0], [8.0, 99.0], [99.9, 100.0]):
        low, high, step = figures._axis(values)
        assert low <= min(values) <= max(values) < high
        assert (low == 0) == (min(values) < 0.45 * max(values) or min(values) < step)
        assert 1 <= (high - low) / step <= 10


def test_the_same_records_give_the_same_bytes(pages, tmp_path):
    record(tmp_path, FIRST, BETTER)
    record(tmp_path, LONG, {"BN": [20.0, 21.0], "MBN-2": [19.0], "MBN-2 shift=False": [19.5]})
    assert made(pages, tmp_path) == made(pages, tmp_path)


def test_the_report_is_on_the_runs_of_the_studies_and_no_others(pages, tmp_path):
    from helpers.reports import fabricate

    from memnorm.lab.spec import RunSpec

    record(tmp_path, FIRST, {**BETTER, "GROUP": [30.0, 31.0]})
    fabricate(tmp_path, RunSpec(model="small", data="digits", iterations=100))
    html = made(pages, tmp_path)["static/report.html"]
    assert "digits" not in html
    assert html.count("GROUP") > 1
    assert "<script" not in html
    assert str(tmp_path) not in html


def test_claims_are_sorted_by_how_they_stand(pages, tmp_path):
    record(tmp_path, FIRST, BETTER)
    text = made(pages, tmp_path)["claims.md"]
    headings = re.findall("^## (.*)$", text, re.MULTILINE)
    order = ["Held", "Held in part", "Not held", "Not held in our settings", "Undecided", "Not tested"]
    assert headings == sorted(headings, key=order.index)
    assert len(headings) > 2
    (claim,) = [one for one in text.split("\n- ") if one.startswith("**MBN beats BN at every batch size")]
    assert claim in text.split("## Undecided")[1].split("\n## ")[0]
    assert "line 389" in claim
    assert "Found (3 parts: 1 held, 2 not tested): MBN-2 − BN (ResNet-20" in claim
    assert "95 % interval" in claim
    found_lines = [line for line in text.splitlines() if line.startswith("  Found")]
    assert sum(line.count(" % interval ") for line in found_lines) > 3
    assert "of the 3 different comparisons" in text.replace("\n", " ")  # test error, training error, second drop


def test_a_difference_that_is_certain_only_by_itself_may_be_chance(pages, short, tmp_path):
    record(tmp_path, FIRST, {"BN": [34.0, 34.4, 33.8, 34.1, 34.2], "MBN-2": [33.0, 34.2, 32.6, 34.0, 33.3]})
    cells = cells_of(short.summary(found(tmp_path)), "ResNet-20 at batch size 8, 20,000 iterations")
    assert cells[1:] == ["−0.68", "−1.30 to −0.06", "about 1.3 points", "lower in 5 of 5 seeds", "may be chance"]
    helps = part(made(pages, tmp_path)["evidence.md"], "When does MBN help, and by how much?")
    assert "0.68 points below BN's, which may be chance once all comparisons of the study are counted (95 %" in helps


def test_numbers_that_are_left_out_are_said_to_be(pages, tmp_path):
    record(tmp_path, FIRST, {**BETTER, "BRN-2": [37.0, 38.0]}, test_error_recalibrated=41.0)
    assert "are left out" not in made(pages, tmp_path)["evidence.md"]
    (env,) = tmp_path.glob("*-brn-double-b8-s0-*/env.json")
    env.write_text(env.read_text().replace("0123456789ab", "f988411c379c"))
    text, title = made(pages, tmp_path)["evidence.md"], study(FIRST).title
    assert part(text, title).endswith("with a fault, since mended, are left out: BRN-2 (1 of 2 runs).")
    assert row(text, title, "BRN-2")[4] == "41.00 (n = 1)"


def test_it_is_said_which_runs_were_recalibrated_with_their_memory_and_what_that_matters(pages, tmp_path):
    record(tmp_path, FIRST, BETTER, test_error_recalibrated=30.5)
    assert "memory" not in part(made(pages, tmp_path)["evidence.md"], study(FIRST).title).partition("![")[2]
    (env,) = tmp_path.glob("*-mbn-double-b8-s0-*/env.json")
    env.write_text(env.read_text().replace("0123456789ab", "91bef383374b"))
    text = made(pages, tmp_path)["evidence.md"]
    told = "Recalibrated while the old memory still took part: MBN-2 (1 of 5 runs)."
    assert part(text, study(FIRST).title).endswith(told)
    assert "How much that matters has not been measured." in text
    runs = [{"with_memory": 30.2, "without": 30.0}, {"with_memory": 30.0, "without": 30.1}]
    measured = {"where": {"commit": "abc", "machine": "Some machine"}, "runs": runs}
    (tmp_path / "recalibration.json").write_text(json.dumps(measured))
    text = made(pages, tmp_path)["evidence.md"]
    assert "(trained networks: 2)" in text
    assert "without is 0.05 points on average, −0.10 to 0.20 (`benchmarks/" in text


def test_it_is_said_whether_trained_networks_went_on_as_they_are_written(pages, tmp_path):
    record(tmp_path, FIRST, WORSE)
    assert "later or with real data would escape it" in made(pages, tmp_path)["evidence.md"]
    runs = [
        {"network": network, "strength": strength, "apart": apart}
        | {"lab": {"test_error": 9.5}, "literal": {"test_error": 9.5}}
        for network, strength, apart in (("ResNet-8", 0.9, 3e-13), ("ResNet-56", 0.1, 2.4e-12))
    ]
    measured = {"where": {"commit": "abc", "machine": "Some machine"}, "steps": 60, "test_images": 1000, "runs": runs}
    path = tmp_path / "late_and_literal.json"
    path.write_text(json.dumps(measured))
    text = made(pages, tmp_path)["evidence.md"]
    assert "real data would escape it" not in text
    assert "to be trusted" not in text
    assert "2 trained networks (ResNet-56, ResNet-8) went on for 60 steps on the last batches of the run" in text
    assert "with λ = 0.1, 0.9, in the lab and written out" in text
    assert "2e-12 of the way that these steps had moved them, and the test errors on 1,000 images were equal (" in text
    runs[1]["literal"]["test_error"] = 9.6
    path.write_text(json.dumps(measured))
    text = made(pages, tmp_path)["evidence.md"]
    assert "images were not equal in 1 of 2 (" in text
    assert "there is a fault, and the runs are not to be trusted" in text
    runs[1] |= {"apart": 1e-3, "literal": {"test_error": 9.5}}
    path.write_text(json.dumps(measured))
    assert "there is a fault, and the runs are not to be trusted" in made(pages, tmp_path)["evidence.md"]


def test_the_report_has_the_tables_of_the_studies_and_claims_no_times(pages, tmp_path):
    record(tmp_path, FIRST, BETTER, test_error_recalibrated=30.5)
    html = made(pages, tmp_path)["static/report.html"]
    assert "30.50 ± 0.00 (n = 5)" in html
    assert "Times in this report are no measurements" in html
    assert "times the time per step" not in html
