"""Our evidence: the pages equal the records, and the runner resumes."""

import copy
import json
import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from memnorm.lab.spec import RunSpec

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # behind the installed package
from study import pages, run  # noqa: E402
from study.studies import STUDIES, Arm, Study  # noqa: E402
from study.tables import Values  # noqa: E402

FIRST, TUNED = "small-batch-resnet20", "small-batch-resnet20-tuned"

UNFINISHED = list(STUDIES)[list(STUDIES).index("defaults") + 1 :]  # take out what has all its records


@pytest.fixture(scope="module")
def stored():
    return run.load()


@pytest.fixture
def records(stored):
    return copy.deepcopy(stored)


def row(table, arm):
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return next(dict(zip(cells[0], one, strict=True)) for one in cells[2:] if one[0] == arm)


def run_of(records, study, label, seed=0):
    arm = next(one for one in STUDIES[study].arms if one.label == label)
    return records[arm.runs(records)[seed].digest]


def test_tables_figures_and_numbers_are_those_of_the_records():
    made = pages.render()
    assert {path.name for path in made} >= {"README.md", "evidence.md", "claims.md", "which-norm.md", "digits.svg"}
    for path, text in made.items():
        assert path.read_text() == text, f"{path.name} is out of date: run python -m study.pages"


def test_a_changed_record_changes_the_pages(records):
    run_of(records, FIRST, "MBN-2")["final"]["test_error"] += 5
    page = (ROOT / "docs/evidence.md").read_text()
    assert pages.fill(page, Values(records, pages.values()._measured)) != page


@pytest.mark.parametrize(("page", "columns"), [("evidence", slice(0, None)), ("claims", slice(2, None))])
def test_measured_numbers_stand_between_markers(page, columns):
    """Hand-written numbers with decimals are settings or printed in the paper."""
    text = pages.MARKER.sub("", (ROOT / f"docs/{page}.md").read_text())
    known = {"0.1", "0.5", "0.9", "0.25", "15.37", "19.64"}
    if page == "claims":
        text = "".join("|".join(line.split("|")[columns]) for line in text.splitlines() if line.startswith("| "))
    assert set(re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", text)) <= known


def test_the_tests_that_the_claims_name_exist():
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`", (ROOT / "docs/claims.md").read_text())
    assert len(named) == 6
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<!-- found all -->7<!-- end --> settings", "begins a line"),
        ("- In\n  <!-- found all -->7<!-- end --> settings", "begins a line"),
        ("In <!-- fuond all -->7<!-- end --> settings", "no such value"),
        ("By <!-- gap tiny-batch-resnet8; MABN; BN -->7<!-- end --> points", "3 arms MABN"),
    ],
)
def test_a_marker_that_cannot_be_filled_is_an_error(stored, text, problem):
    with pytest.raises(SystemExit, match=problem):
        pages.fill(text, Values(stored, {}))


def test_every_record_belongs_to_its_study_and_studies_are_finished_in_order(stored):
    files = {path.stem: run.load(path.stem) for path in run.RESULTS.glob("*.jsonl")}
    assert sum(map(len, files.values())) == len(stored)
    assert files.keys() <= {*STUDIES, "checks", "digits-norms"}
    for name, study in STUDIES.items():
        planned = {spec.digest for spec in study.specs(stored)}
        assert files.get(name, {}).keys() <= planned
        assert name in UNFINISHED or planned <= stored.keys()


def test_a_faulty_recalibration_is_left_out_and_one_with_the_old_memory_is_marked(records):
    def cell(arm):
        return row(Values(records, {}).arms(TUNED), arm)["recalibrated"]

    assert cell("BN").endswith("(n = 5)")
    run_of(records, TUNED, "BN")["recalibrated_with"] = "outdated statistics"
    assert cell("BN").endswith("(n = 4)")
    assert cell("MBN-2").endswith("(n = 5) †")
    del run_of(records, TUNED, "MBN-2")["recalibrated_with"]
    assert cell("MBN-2").endswith("(n = 5) † in 4 of 5")


def test_diverged_and_stuck_runs_count_as_failed(records):
    run_of(records, FIRST, "BN", 0).update(status="diverged", final=None)
    run_of(records, FIRST, "BN", 1)["final"]["test_error"] = 90.0
    cells = row(Values(records, {}).arms(FIRST), "BN")
    assert cells["failed"] == "2 of 5"
    assert cells["test error in %"].endswith("(n = 4)")


def test_p_values_are_corrected_for_planned_comparisons_that_have_not_been_run(records):
    before = row(Values(records, {}).arms(TUNED), "MBN-2")["p after Holm"]
    for seed in range(3):
        del records[next(a for a in STUDIES[TUNED].arms if a.label == "GROUP").runs(records)[seed].digest]
    after = row(Values(records, {}).arms(TUNED), "MBN-2")["p after Holm"]
    assert before == after == "p = 0.0054"


@pytest.mark.parametrize(
    ("errors", "rate"),
    [
        ((30.0, 20.0, 25.0), 0.03),
        ((20.0, 25.0, 20.0), 0.1),
        ((None, 90.0, 95.0), 0.03),
        ((None, None, None), 0.01),
        ((30.0, 20.0), None),
    ],
)
def test_the_rate_with_the_lowest_held_out_error_is_chosen(errors, rate):
    arm = Arm("BN", RunSpec(norm="bn"), seeds=2, rates=(0.1, 0.03, 0.01))
    finals = [error if error is None else {"test_error": error} for error in errors]
    records = {trial.digest: {"final": final} for trial, final in zip(arm.trials(), finals, strict=False)}
    assert arm.rate(records) == rate
    assert [spec.learning_rate for spec in arm.runs(records)] == ([] if rate is None else [rate, rate])
    assert len(Study([arm]).specs(records)) == (3 if rate is None else 5)


@pytest.mark.parametrize("line", ["{", "[]", '{"digest": "1"}', '{"digest": "0123456789ab", "spec": {"seed": 1}}'])
def test_a_damaged_record_is_an_error_that_names_the_file(tmp_path, monkeypatch, line):
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    (tmp_path / "some.jsonl").write_text(line + "\n")
    with pytest.raises(SystemExit, match=r"some\.jsonl.*restore"):
        run.load()


def test_the_package_does_not_contain_the_study():
    assert not [path for path in metadata.files("memnorm") or [] if path.parts[0] == "study"]


PROGRAM = f"""
import sys
from pathlib import Path
sys.path.append({str(ROOT)!r})
from memnorm.lab.spec import RunSpec
from study import run, studies
run.RESULTS, studies.HELD_OUT = Path("results"), 200
base = RunSpec(model="small", data="digits", batch_size=8, iterations=40, evaluations=2)
arms = [studies.Arm("BN", base.but(norm="bn"), 2), studies.Arm("GROUP", base.but(norm="group"), 1, rates=(0.1, 1e30))]
studies.STUDIES["miniature"] = studies.Study(arms)
run.main()
"""


def test_a_study_that_was_killed_resumes(tmp_path):
    def start():
        with (tmp_path / "log").open("a") as log:
            words = [sys.executable, "-c", PROGRAM, "miniature", "--jobs", "0"]
            return subprocess.Popen(words, cwd=tmp_path, stdout=log, stderr=log)

    file, begun = tmp_path / "results/miniature.jsonl", ""
    process = start()
    while not begun and process.poll() is None:
        time.sleep(0.01)
        begun = file.read_text() if file.exists() else ""
    process.kill()
    assert process.wait() == -signal.SIGKILL, (tmp_path / "log").read_text()
    assert start().wait() == 0, (tmp_path / "log").read_text()
    text = file.read_text()
    assert text.startswith(begun)
    specs = [RunSpec.from_dict(json.loads(line)["spec"]) for line in text.splitlines()]
    assert [(one.norm, one.holdout, one.learning_rate, one.seed) for one in specs] == [
        ("group", 200, 0.1, 1000),
        ("group", 200, 1e30, 1000),
        ("bn", 0, 0.1, 0),
        ("bn", 0, 0.1, 1),
        ("group", 0, 0.1, 0),
    ]


def test_the_first_table_of_readme_has_bn_and_two_way_and_becomes_the_figure_with_its_study(stored):
    found = Values(stored, {})
    lines = found.shown("defaults", "decay 0.9, weights").splitlines()
    assert lines[0] == "| images × micro-batches per update | 2 | 2 × 16 | 8 | 32 |"
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| BN", "| two-way"]
    settings = {line.split(" | ")[0]: line.split(" | ") for line in found.settings().splitlines()}
    assert [cell.split()[0] for cell in lines[3].split(" | ")[1:]] == [
        settings["| decay 0.9, weights"][index].split()[0] for index in (2, 1, 3, 4)
    ]
    switched = pages.fill("<!-- shown micro-batches; two-way -->\n<!-- end -->\n", found)
    assert "](docs/figures/micro-batches.svg)\n\n| images × micro-batches per update | 1 × 32 | 2 × 16 |" in switched
