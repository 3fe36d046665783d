"""The written report: the same bytes every time, one HTML file that needs nothing else, and no run can slip code in."""

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from helpers.reports import comparison, every_run, fabricate

from memnorm.lab import report, tables
from memnorm.lab.report.markdown import plain
from memnorm.lab.report.tables_csv import written
from memnorm.lab.spec import RunSpec

HOSTILE = "pkg:<script>alert('x')</script>&\"`$x_1$"
FORMULA = "=HYPERLINK(1)|[a](b)"
VOID = {"meta", "link", "br", "hr", "img", "input", "wbr"}
CELL = tables.TABLES["cifar10"].cell("MBN", "ResNet-20")
SECTION = report.Section("A <b>part</b> of the caller's", ["It says <i>this</i>."], ["a", "b"], [["=1", "<td>"]])


def fill(root, *, backwards=False):
    """Some of everything: a paper cell in three states, a reduced one, smoke ones, a comparison, hostile names."""
    wanted = [(CELL.spec.but(seed=seed), {"error": 7.5 + seed / 10}) for seed in range(3)]
    wanted += [(CELL.spec.but(seed=3), {"status": "diverged", "stop_at": 0.3})]
    wanted += [(CELL.spec.but(seed=4), {"status": "unfinished", "stop_at": 0.3})]
    wanted += [(tables.at_scale(CELL.spec, "reduced"), {}), (tables.at_scale(CELL.spec, "smoke"), {})]
    wanted += [(spec, {}) for spec in comparison() if spec.norm != "group"]
    hostile = RunSpec(model=HOSTILE, data=FORMULA, iterations=40, evaluations=4)
    options = {"machine": "<img src=x onerror=alert(1)>", "commit": "+1"}
    wanted += [(hostile, {"environment": options})]
    wanted += [(hostile.but(norm="mbn", norm_options={HOSTILE: size}), {"environment": options}) for size in (1, 2)]
    for spec, how in reversed(wanted) if backwards else wanted:
        fabricate(root, spec, **how)
    (root / "damaged<i>").mkdir()
    (root / "damaged<i>" / "spec.yaml").write_text("model: [")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A report written in this process."""
    root = tmp_path_factory.mktemp("store")
    fill(root)
    out = tmp_path_factory.mktemp("report")
    return out, report.write(report.collect([root], title="A <title>", sections=[SECTION]), out)


@pytest.fixture(scope="module")
def made_again(tmp_path_factory):
    """The same from runs written in the opposite order, in a process with another working folder, hash seed, time zone
    and matplotlib settings; with the names of the modules it loaded.
    """
    root, elsewhere = tmp_path_factory.mktemp("another"), tmp_path_factory.mktemp("elsewhere")
    fill(root, backwards=True)
    (elsewhere / "matplotlibrc").write_text("lines.linewidth: 9\nfont.size: 30\nsvg.fonttype: path\n")
    shutil.copytree(root, elsewhere / "runs")
    program = """
import json, sys
from memnorm.lab import report
section = report.Section("A <b>part</b> of the caller's", ["It says <i>this</i>."],
                         ["a", "b"], [["=1", "<td>"]])
report.write(report.collect(["runs"], title="A <title>", sections=[section]), "out")
print(json.dumps(sorted(sys.modules)))
"""
    environment = {**os.environ, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=elsewhere, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return elsewhere / "out", json.loads(done.stdout)


@pytest.fixture(scope="module")
def page(made):
    return (made[0] / "report.html").read_text(encoding="utf-8")


class Reader(HTMLParser):
    """Keeps what a test asks about, and fails at a tag that is not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.links, self.loads, self.text = [], [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self._note(tag, dict(attrs))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self._note(tag, dict(attrs))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes something else at {self.getpos()}"

    def handle_data(self, data):
        self.text.append(data)

    def _note(self, tag, attrs):
        self.tags.append((tag, attrs))
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.links += [attrs[name] for name in ("href", "xlink:href") if name in attrs]
        self.loads += [attrs[name] for name in ("src", "srcset", "data", "action") if name in attrs]


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_same_runs_give_the_same_bytes_wherever_and_in_whatever_order(made, made_again):
    first, again = files(made[0]), files(made_again[0])
    assert list(first) == list(again)
    assert [name for name in first if first[name] != again[name]] == []


def test_neither_the_store_nor_the_time_of_writing_is_in_the_files(made, tmp_path_factory):
    today = time.strftime("%Y-%m-%d")
    for content in files(made[0]).values():
        assert str(tmp_path_factory.getbasetemp()).encode() not in content
        assert today.encode() not in content


def test_every_tag_is_closed_and_every_id_is_unique(page):
    ids = Reader(page).ids
    assert len(ids) == len(set(ids))


def test_every_link_leads_to_a_place_in_the_page(page):
    read = Reader(page)
    outside = [link for link in read.links if not link.startswith("#") and link != "data:,"]
    assert outside == []
    assert {link[1:] for link in read.links if link.startswith("#")} <= set(read.ids)


def test_the_page_loads_nothing(page):
    assert Reader(page).loads == []
    assert re.findall(r"@import|url\((?!#)", page) == []
    assert "http" not in page


def test_nothing_of_a_run_is_markup(page):
    read = Reader(page)
    kinds = {tag for tag, _ in read.tags}
    assert not kinds & {"script", "img", "iframe", "b>", "i", "object", "embed"}
    assert not [name for _, attrs in read.tags for name in attrs if name.startswith("on")]
    assert any(HOSTILE in text for text in read.text)
    assert any("<img src=x onerror=alert(1)>" in text for text in read.text)
    assert any("damaged<i>" in text for text in read.text)


def test_drawings_of_the_markdown_are_whole_svg_files(made):
    drawings = sorted((made[0] / "figures").iterdir())
    assert drawings
    for drawing in drawings:
        root = ElementTree.fromstring(drawing.read_text(encoding="utf-8"))
        assert root.tag == "{http://www.w3.org/2000/svg}svg"


def test_markdown_links_to_every_drawing_and_starts_no_markup_of_a_runs_own(made):
    text = (made[0] / "report.md").read_text(encoding="utf-8")
    linked = re.findall(r"!\[.*?\]\((.*?)\)", text)
    assert sorted(linked) == sorted(str(path.relative_to(made[0])) for path in (made[0] / "figures").iterdir())
    assert "<script" not in text
    assert "<img" not in text
    assert "[a](b)" not in text


@pytest.mark.parametrize(
    ("text", "escaped"),
    [("a_b*c", r"a\_b\*c"), ("# x", r"\# x"), ("1. x", r"1\. x"), ("1.5", "1.5"), ("a\n\n- b", "a - b"), ("-1", "-1")],
)
def test_markdown_text_stays_text(text, escaped):
    assert plain(text) == escaped


def test_footnotes_are_in_html_and_markdown(made, page):
    assert CELL.note
    assert CELL.note in "".join(Reader(page).text)
    assert plain(CELL.note) in (made[0] / "report.md").read_text(encoding="utf-8")


def rows_of(made, name):
    return list(csv.DictReader(io.StringIO((made[0] / "csv" / name).read_text(encoding="utf-8"))))


def test_a_table_reads_back_from_csv(made):
    rows = {(row["row"], row["column"]): row for row in rows_of(made, "cifar10.csv")}
    assert set(rows) == {(cell.row, cell.column) for cell in tables.TABLES["cifar10"].cells}
    row = rows["MBN", "ResNet-20"]
    assert (float(row["printed"]), float(row["mean"]), int(row["n"])) == (7.93, pytest.approx(7.6), 3)
    assert float(row["sd"]) == pytest.approx(0.1)
    assert "seed 3 diverged" in row["status"]
    assert rows["BN", "VGG"]["status"] == "not run"
    assert rows["BN", "VGG"]["mean"] == ""
    assert {row["printed"] for row in rows_of(made, "cifar10-smoke.csv")} == {""}


def test_every_run_reads_back_from_csv(made):
    rows = {row["run"]: row for row in rows_of(made, "runs.csv")}
    row = rows[CELL.spec.name]
    assert (row["status"], float(row["headline_test_error"]), row["seed"]) == ("finished", 7.5, "0")
    assert json.loads(row["strength"]) == [0.1, 0.5, 0.9]
    unfinished = rows[CELL.spec.but(seed=4).name]
    assert (unfinished["status"], unfinished["headline_test_error"], unfinished["iteration"]) == (
        "unfinished",
        "",
        "23460",
    )


def test_a_comparison_is_the_same_in_all_formats(tmp_path):
    for spec in comparison():
        fabricate(tmp_path / "runs", spec)
    content = report.collect([tmp_path / "runs"])
    out = report.write(content, tmp_path)[0].parent
    (found,) = content.comparisons
    html_text = "".join(Reader((out / "report.html").read_text(encoding="utf-8")).text)
    markdown_text = (out / "report.md").read_text(encoding="utf-8")
    rows = rows_of((out,), f"{found.name}.csv")
    for (label, group), row in zip(found.groups, rows, strict=True):
        assert (row["norm"], float(row["mean"])) == (label, pytest.approx(group.sample().mean))
        assert float(row["step_ms"]) == pytest.approx(group.cost.step_ms)
        assert f"{group.sample().mean:.2f}" in html_text
        assert f"{group.sample().mean:.2f}" in markdown_text
    tests = rows_of((out,), f"{found.name}-tests.csv")
    assert [float(row["p_holm"]) for row in tests] == pytest.approx([one.p for one in found.verdict.tests])
    for line in (found.verdict.headline, *found.verdict.details):
        assert line in html_text
        assert plain(line) in markdown_text


def test_numbers_and_names_that_no_file_can_hold_do_not_stop_the_report(tmp_path):
    runs, strange = tmp_path / "runs", os.fsdecode(b"pictures-\xff")
    fabricate(runs, CELL.spec)
    fabricate(runs, RunSpec(model="small", data=strange, iterations=40, evaluations=4))
    large = fabricate(runs, CELL.spec.but(seed=1))
    result = (large / "result.json").read_text()
    (large / "result.json").write_text(result.replace('"iteration": ', f'"iteration": {10**309}', 1))
    (runs / strange).mkdir()
    (runs / strange / "spec.yaml").write_text("model: [")
    found = report.collect([runs])
    assert [problem.partition(":")[0] for problem in found.problems] == sorted([large.name, "pictures-\\udcff"])
    (written, *_) = report.write(found, tmp_path / "out")
    assert "pictures-\\udcff" in written.read_text(encoding="utf-8")


def test_texts_that_a_spreadsheet_would_compute_are_defused(made):
    row = next(row for row in rows_of(made, "runs.csv") if row["model"] == HOSTILE)
    assert row["data"] == f"'{FORMULA}"
    assert row["environment_commit"] == "'+1"


def test_negative_numbers_stay_numbers_in_csv():
    text = written([{"a": -1.5, "b": "-1.5", "c": "@x"}])
    assert text == "a,b,c\n-1.5,'-1.5,'@x\n"


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The report of a smoke run of everything."""
    root = tmp_path_factory.mktemp("smoke")
    for spec in every_run("smoke"):
        fabricate(root / "runs", spec)
    report.write(report.collect([root / "runs"]), root / "out")
    return root / "out"


@pytest.mark.parametrize("name", tables.TABLES)
def test_every_cell_of_a_smoke_run_is_in_the_page(smoke, name):
    text = (smoke / "report.html").read_text(encoding="utf-8")
    shown = text[text.index(f'id="table-{name}-smoke"') :]
    shown = shown[: shown.index("</table>")]
    assert shown.count('class="value"') == sum(cell.spec is not None for cell in tables.TABLES[name].cells)


def test_the_name_of_a_folder_brings_no_escape_sequence_into_the_report(tmp_path):
    fabricate(tmp_path / "runs", CELL.spec)
    (tmp_path / "runs" / "\x1b[2Jred").mkdir()
    (tmp_path / "runs" / "\x1b[2Jred" / "spec.yaml").write_text("model: [")
    for file in report.write(report.collect([tmp_path / "runs"]), tmp_path / "out"):
        assert b"\x1b" not in file.read_bytes(), file.name
