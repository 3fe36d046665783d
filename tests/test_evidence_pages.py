"""The pages of our evidence from made-up records: every direction, any part missing, the same bytes each time."""

import importlib
import re
from pathlib import Path

import pytest
from evidencekit import BENCH, found, record, study

ROOT = Path(__file__).resolve().parent.parent
FIRST, HEADLINE, LONG, TINY = "small-batch-resnet20", "headline-resnet56", "ablation-resnet8", "tiny-batch-resnet8"
BETTER = {"BN": [34.0, 34.4, 33.8, 34.1, 34.2], "MBN-2": [31.0, 31.5, 30.7, 31.3, 31.1]}
WORSE = {"BN": BETTER["MBN-2"], "MBN-2": BETTER["BN"]}
EQUAL = {"BN": [34.0, 33.0, 34.5, 33.5, 34.0], "MBN-2": [33.6, 33.5, 34.0, 34.0, 33.8]}


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("evidence_pages")


def made(pages, root) -> dict[str, str]:
    return pages.render(found(root), BENCH, "digits", root)


def part(text: str, title: str) -> str:
    """A section, from its heading to the next."""
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0].strip()


def row(text: str, title: str, label: str) -> list[str]:
    (line,) = [line for line in part(text, title).splitlines() if line.startswith(f"| {label} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_without_a_record_everything_is_said_to_be_missing(pages, tmp_path):
    files = made(pages, tmp_path)
    assert files.keys() == {"evidence.md", "claims.md"}
    text = files["evidence.md"]
    helps = part(text, "When does MBN help, and by how much?")
    assert helps.startswith(f"- Not run yet: {study(FIRST).title}; ")
    assert helps.count(";") == 6
    assert f"{study(TINY).title}, batch size 4" in helps
    assert part(text, "When is something else better?") == helps
    assert row(text, study(FIRST).title, "BN")[2:] == ["not run yet", "–", "–", "–"]
    assert row(text, study("small-batch-resnet20-tuned").title, "BN")[1:3] == ["to be chosen", "not run yet"]
    assert "0.1: not run yet, 0.03: not run yet" in text
    assert pages.readme(found(tmp_path)) is None
    assert "BN not run yet here, 19.64 in the paper; MBN-2 not run yet here, 15.37" in pages.headline(found(tmp_path))
    assert "no certain gain" in pages.summary(found(tmp_path))


@pytest.mark.parametrize(
    ("errors", "sentence", "rival"),
    [
        (BETTER, "MBN-2's error is 2.98 points below BN's", "of BN, none was found to have less error than MBN-2"),
        (WORSE, "MBN-2's error is 2.98 points above BN's", "BN's error is 2.98 points below MBN-2's"),
        (EQUAL, "MBN-2's error is 0.02 points below BN's, which may be chance", "of BN, none was found to have less"),
    ],
    ids=["better", "worse", "equal"],
)
def test_the_answers_follow_the_records(pages, tmp_path, errors, sentence, rival):
    record(tmp_path, FIRST, errors)
    text = made(pages, tmp_path)["evidence.md"]
    where = f"**{study(FIRST).title}**"
    assert f"- {where}: {sentence}" in part(text, "When does MBN help, and by how much?")
    assert f"- {where}: {rival}" in part(text, "When is something else better?")
    assert sentence in pages.readme(found(tmp_path)) or "MBN-2" in pages.readme(found(tmp_path))
    assert sentence in pages.summary(found(tmp_path))


def test_a_table_has_means_differences_and_what_went_wrong(pages, tmp_path):
    record(tmp_path, FIRST, {**BETTER, "GROUP": [30.0, None], "MABN": [None, None, None]})
    text = made(pages, tmp_path)["evidence.md"]
    title = study(FIRST).title
    cells = row(text, title, "MBN-2")
    assert cells[:3] == ["MBN-2", "0.1", "31.12 ± 0.30 (n = 5)"]
    assert re.fullmatch(r"−2\.98 \(−3\.\d\d to −2\.\d\d, p < 0\.001\)", cells[3])
    assert row(text, title, "BN")[3] == "–"
    assert row(text, title, "GROUP")[2:6] == [
        "30.00 (n = 1), 1 of 3 seeds not run yet",
        "−4.00 (one seed)",
        "–",
        "1 of 2",
    ]
    assert row(text, title, "MABN")[2:6] == ["–", "–", "–", "3 of 3"]
    assert row(text, title, "BRN-2")[2] == "not run yet"
    assert "MABN diverged in 3 of 3 seeds" in part(text, title)
    assert "has no result" not in text
    assert (
        "Commit 0123456789ab; Linux x86_64, 2 cores, Some Processor; 1 thread per run; torch 2.9.0; 2031-05-17." in text
    )


def test_recalibrated_errors_stand_beside_the_others(pages, tmp_path):
    record(tmp_path, FIRST, {"MBN-2": BETTER["MBN-2"]}, test_error_recalibrated=30.5)
    record(tmp_path, FIRST, {"BN": BETTER["BN"]}, test_error_recalibrated=31.0)
    text = made(pages, tmp_path)["evidence.md"]
    assert row(text, study(FIRST).title, "MBN-2")[4] == "30.50 ± 0.00 (n = 5)"
    assert "With recalibrated statistics: " in part(text, "When does MBN help, and by how much?")
    assert "BN with recalibrated statistics beside MBN-2 as it is" in part(text, "When is something else better?")


def test_the_papers_number_stands_in_its_own_study_only(pages, tmp_path):
    record(tmp_path, HEADLINE, {"BN": [20.0], "MBN-2": [16.0]})
    record(tmp_path, FIRST, BETTER)
    text = made(pages, tmp_path)["evidence.md"]
    assert row(text, study(HEADLINE).title, "BN")[-1] == "19.64"
    assert row(text, study(HEADLINE).title, "MBN-2")[-1] == "15.37"
    assert text.count("19.64") == text.count("15.37") == 1
    assert "one seed, no claim: MBN-2's error is 4.00 points below BN's" in text
    told = pages.readme(found(tmp_path))
    assert "BN 20.00 (n = 1) here, 19.64 in the paper" in told
    sentence = "MBN-2 minus BN is −4.00 points here and −4.27 in the paper: the same sign."
    assert sentence in told
    assert sentence in part(text, study(HEADLINE).title)
    assert text.count("in the paper: the") == 1


def test_a_sign_that_is_not_the_papers_is_said_to_be_the_opposite(pages, tmp_path):
    record(tmp_path, HEADLINE, {"BN": [18.0], "MBN-2": [18.5]})
    text = part(made(pages, tmp_path)["evidence.md"], study(HEADLINE).title)
    assert "MBN-2 minus BN is 0.50 points here and −4.27 in the paper: the opposite sign." in text
    record(tmp_path / "half", HEADLINE, {"BN": [18.0]})
    assert "sign" not in pages.headline(found(tmp_path / "half"))


def test_rivals_are_named_only_if_they_are_found_better(pages, tmp_path):
    record(tmp_path, FIRST, {**BETTER, "GROUP": [28.0, 28.4, 27.8], "MABN": [31.5, 30.5, 31.2]})
    line = part(made(pages, tmp_path)["evidence.md"], "When is something else better?").splitlines()[0]
    assert "GROUP's error is 3.00 points below MBN-2's" in line
    assert "MABN" not in line


def test_the_cost_is_that_of_the_bench_not_of_the_runs(pages, tmp_path):
    record(tmp_path, FIRST, BETTER)
    whole = made(pages, tmp_path)["evidence.md"]
    text = part(whole, "What does it cost?")
    assert "- MBN-2: a step in steps of BN, measured on a quiet machine" in text
    assert "resnet20 at batch size 128 1.30." in text
    assert "A layer in eval takes 1.00 times BN's time." in text
    assert "time per step" not in whole


def test_the_summary_tells_what_there_is_before_the_first_study_is_run(pages, tmp_path):
    record(tmp_path, "cheaper-second-forward", {"BN": [30.0, 31.0, 30.5], "MBN-2": [33.0, 34.2, 33.4]})
    text = pages.summary(found(tmp_path))
    assert "no certain gain over BN. On CIFAR-10 (" in text
    assert "MBN-2's error is 3.03 points above BN's" in text
    record(tmp_path / "other", "cheaper-second-forward", {"BN": [33.0, 34.2, 33.4], "MBN-2": [30.0, 31.0, 30.5]})
    text = pages.summary(found(tmp_path / "other"))
    assert "no certain gain" not in text
    assert "MBN-2's error is 3.03 points below BN's" in text


def test_a_cheaper_second_forward_is_judged_against_the_full_one(pages, tmp_path):
    record(tmp_path, "cheaper-second-forward", {"MBN-2": [30.0, 31.0, 30.5], "MBN-2, every 4th": [30.6, 31.5, 31.2]})
    text = part(made(pages, tmp_path)["evidence.md"], "What does it cost?")
    assert "MBN-2, every 4th**: MBN-2, every 4th's error is 0.60 points above MBN-2's" in text
    assert f"Not run yet: {study('cheaper-second-forward').title}, MBN-2, a quarter." in text


def test_chosen_rates_are_told_with_what_chose_them(pages, tmp_path):
    record(tmp_path, "small-batch-resnet20-tuned", {"GROUP": [30.0, 30.1, 30.2]})
    text = part(made(pages, tmp_path)["evidence.md"], study("small-batch-resnet20-tuned").title)
    assert "GROUP 0.1: 40.00 %, 0.03: 41.00 %, 0.01: 42.00 %" in text


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
    record(tmp_path, LONG, {"BN": [20.0, 21.0], "MBN-2": [19.0], "MBN-2, no shift": [19.5]})
    assert made(pages, tmp_path) == made(pages, tmp_path)


def test_the_report_is_on_the_runs_of_the_studies_and_no_others(pages, tmp_path):
    from reportkit import fabricate

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
    order = ["Held", "Not held", "Undecided", "Not tested"]
    assert headings == sorted(headings, key=order.index)
    assert len(headings) > 2
    held = text.split("## Held")[1].split("## ")[0]
    (claim,) = [one for one in held.split("\n- ") if one.startswith("**MBN beats BN at every batch size")]
    assert "line 389" in claim
    assert "95 % interval" in claim


def test_readme_waits_for_two_seeds_of_both(pages, tmp_path):
    record(tmp_path, FIRST, {"BN": [34.0, 34.4], "MBN-2": [31.0]})
    assert pages.readme(found(tmp_path)) is None
    record(tmp_path, FIRST, {"MBN-2": [31.0, 31.5]})
    text = pages.readme(found(tmp_path))
    assert "| MBN-2 | 31.25 ± 0.35 (n = 2), 3 of 5 seeds not run yet |" in text
    assert f"docs/figures/{FIRST}-seeds.svg" in text
