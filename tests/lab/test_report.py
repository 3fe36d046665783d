"""Contents of a report before it is written: tables, states of runs, figures."""

import json
import shutil

import pytest
from helpers.reports import comparison, every_run, fabricate

from memnorm import norms
from memnorm.lab import tables
from memnorm.lab.errors import UsageError
from memnorm.lab.report import figures, present
from memnorm.lab.report.collect import NOT_RUN, UNAVAILABLE, collect
from memnorm.lab.report.plot import Line, Plot, draw, placed
from memnorm.lab.spec import RunSpec

CELL = tables.TABLES["cifar10"].cell("MBN", "ResNet-20")
CURVES = {curve.key: curve for curve in tables.FIGURES["convergence"].curves}
BN, MBN = CURVES["ResNet-20/BN"].spec, CURVES["ResNet-20/MBN"].spec
QUOTED = tables.TABLES["imagenet"].cell("GoogLeNet", "top-1 BN")


def page_of(*roots, **options):
    return collect(roots, title="A title", **options)


def grid_of(page, name):
    return present.paper_grid(next(view for view in page.tables if view.name == name))


def shown_cell(page, cell, name="cifar10"):
    """What stands in a cell of the shown table: at paper scale printed and ours, else ours."""
    shown = grid_of(page, name)
    row = next(row for row in shown.rows if row[0] == cell.row)
    found = [one for column, one in zip(shown.header, row, strict=True) if column.startswith(cell.column)]
    return found[0] if len(found) == 1 else found


def run_row(page):
    """The first run of the page by the names of the columns."""
    shown = present.runs_grid(page.groups[0])
    return dict(zip(shown.header, shown.rows[0], strict=True))


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    root = tmp_path_factory.mktemp("smoke")
    for spec in every_run("smoke"):
        fabricate(root, spec)
    return root


def test_after_a_smoke_run_of_everything_every_cell_and_curve_has_a_number(smoke):
    page = page_of(smoke)
    scale = next(one for one in page.chapters if one.anchor == "smoke")
    assert [view.table.name for view in scale.tables] == list(tables.TABLES)
    assert [view.figure.name for view in scale.figures] == list(tables.FIGURES)
    for view in scale.tables:
        assert [one.cell for one in view.cells] == list(view.table.cells)
        assert all(one.ours is not None for one in view.cells if one.cell.spec is not None)
    assert all(group for view in scale.figures for _, group in view.curves)


def test_smoke_numbers_are_never_next_to_the_printed_ones(smoke):
    page = page_of(smoke)
    assert not any(view.groups for view in page.tables if view.scale == "paper")
    shown = grid_of(page, "cifar10-smoke")
    assert "numbers mean nothing" in shown.caption
    assert not any(one.printed or one.text == str(CELL.printed) for _, *cells in shown.rows for one in cells)


def test_every_run_is_accounted_for_once(smoke):
    page = page_of(smoke)
    names = [run.spec.name for group in page.groups for run in group.runs]
    assert sorted(names) == sorted(path.name for path in smoke.iterdir())


def test_a_run_of_the_papers_protocol_is_next_to_the_printed_number(tmp_path):
    for seed, error in enumerate((7.81, 8.05, 7.93)):
        fabricate(tmp_path, CELL.spec.but(seed=seed), error=error)
    printed, ours = shown_cell(page_of(tmp_path), CELL)
    assert (printed.text, ours.plain) == ("7.93", "7.93 ± 0.12 (n = 3)")


@pytest.mark.parametrize(
    "change",
    [{"iterations": 78_199}, {"learning_rate": 0.05}, {"norm_options": {"memory_size": 21}}, {"train_images": 49_999}],
    ids=str,
)
def test_a_run_of_another_protocol_is_not_next_to_the_printed_number(tmp_path, change):
    fabricate(tmp_path, CELL.spec.but(**change))
    page = page_of(tmp_path)
    printed, ours = shown_cell(page, CELL)
    assert (printed.text, ours.text) == ("7.93", NOT_RUN)
    assert len(page.comparisons) == 1


def test_a_reduced_run_has_a_table_of_its_own(tmp_path):
    fabricate(tmp_path, tables.at_scale(CELL.spec, "reduced"), error=12.34)
    page = page_of(tmp_path)
    assert shown_cell(page, CELL)[1].text == NOT_RUN
    assert shown_cell(page, CELL, "cifar10-reduced").plain == "12.34 (n = 1)"
    assert [one.rules for one in page.chapters] == [tables.RULES["reduced"], tables.RULES["paper"]]


def test_one_run_fills_every_cell_it_stands_for(tmp_path):
    fabricate(tmp_path, tables.TABLES["cifar10"].cell("MBN", "ResNet-56").spec, error=6.5)
    page = page_of(tmp_path)
    filled = [view.table.name for view in page.tables if view.groups]
    assert filled == ["cifar10", "small-batch", "strength", "double-forward"]


def test_a_top_5_cell_takes_the_top_5_error(tmp_path):
    cell = tables.TABLES["imagenet"].cell("ResNet-18", "top-5 MBN")
    fabricate(tmp_path, cell.spec, error=30.0, test_error_top5=11.11)
    assert shown_cell(page_of(tmp_path), cell, name="imagenet")[1].text == "11.11"


def test_a_quoted_number_gets_no_run_next_to_it(tmp_path):
    fabricate(tmp_path, QUOTED.spec, error=26.66)
    page = page_of(tmp_path)
    printed, ours = shown_cell(page, QUOTED, name="imagenet")
    assert printed.text == "27.31"
    assert "26.66" not in ours.plain
    apart = grid_of(page, "imagenet").remarks
    assert apart[0].startswith(
        "GoogLeNet, top-1 BN, ours: 26.66 (n = 1). Not comparable with the printed number: the paper quotes"
    )


def test_a_cell_the_paper_left_empty_is_filled_as_ours(tmp_path):
    cell = tables.TABLES["cifar10"].cell("MBN", "NIN")
    fabricate(tmp_path, cell.spec, error=7.1)
    page = page_of(tmp_path)
    printed, ours = shown_cell(page, cell)
    notes = dict(grid_of(page, "cifar10").notes)
    assert (printed.text, ours.text, notes[ours.mark]) == ("–", "7.10", "ours: not in the paper")


def test_cells_of_a_norm_that_is_not_registered_say_so(tmp_path, monkeypatch):
    monkeypatch.delitem(norms._REGISTRY, "brn")
    fabricate(tmp_path, CELL.spec)
    page = page_of(tmp_path)
    states = {key: shown_cell(page, tables.TABLES["cifar10"].cell(key, "VGG"))[1].text for key in ("BN", "BRN", "MBN")}
    assert states == {"BN": NOT_RUN, "BRN": UNAVAILABLE, "MBN": NOT_RUN}


@pytest.mark.parametrize(
    ("status", "words"),
    [("diverged", "diverged at iteration 39,100"), ("unfinished", "unfinished, 39,100 of 78,200 iterations")],
)
def test_a_run_without_a_result_is_named_where_its_number_would_be(tmp_path, status, words):
    fabricate(tmp_path, CELL.spec, status=status, stop_at=0.5)
    assert shown_cell(page_of(tmp_path), CELL)[1].plain == words


def test_only_finished_runs_are_averaged_and_the_others_named(tmp_path):
    fabricate(tmp_path, CELL.spec, error=8.0)
    fabricate(tmp_path, CELL.spec.but(seed=1), status="diverged", stop_at=0.5)
    fabricate(tmp_path, CELL.spec.but(seed=2), status="unfinished", stop_at=0.5)
    expected = "8.00 (n = 1) (seed 1 diverged at iteration 39,100; seed 2 unfinished, 39,100 of 78,200 iterations)"
    assert shown_cell(page_of(tmp_path), CELL)[1].plain == expected


def test_the_headline_is_the_last_evaluation_and_the_best_is_labelled(tmp_path):
    path = fabricate(tmp_path, CELL.spec, error=8.0)
    result = json.loads((path / "result.json").read_text())
    result["best"] = {"test_error": 7.5, "iteration": 50_000}
    (path / "result.json").write_text(json.dumps(result))
    page = page_of(tmp_path)
    row = run_row(page)
    assert shown_cell(page, CELL)[1].text == "8.00"
    assert (row["last error"], row["best error"]) == ("8.00", "7.50 at 50,000")


def test_a_damaged_run_is_listed_and_the_others_are_reported(tmp_path):
    fabricate(tmp_path, CELL.spec)
    broken = fabricate(tmp_path, CELL.spec.but(seed=1))
    (broken / "result.json").write_text('{"status": ')
    page = page_of(tmp_path)
    assert len(page.problems) == 1
    assert broken.name in page.problems[0]
    assert str(tmp_path) not in page.problems[0]
    assert shown_cell(page, CELL)[1].plain.endswith("(n = 1)")


@pytest.mark.parametrize("strange", [None, [], "text"], ids=str)
def test_other_strange_fields_are_left_out(tmp_path, strange):
    path = fabricate(tmp_path, CELL.spec, error=8.0)
    result = {**json.loads((path / "result.json").read_text()), "best": strange, "seconds": "long"}
    (path / "result.json").write_text(json.dumps(result))
    page = page_of(tmp_path)
    assert shown_cell(page, CELL)[1].plain == "8.00 (n = 1)"
    assert run_row(page)["best error"] == "–"


def test_a_store_of_damaged_runs_says_what_is_wrong_with_them(tmp_path):
    path = fabricate(tmp_path, CELL.spec)
    (path / "spec.yaml").write_text("model: [")
    with pytest.raises(UsageError, match=r"What is there cannot be read: .*not a YAML file"):
        page_of(tmp_path)


def test_a_run_in_two_stores_counts_once_and_the_finished_copy_wins(tmp_path):
    fabricate(tmp_path / "a", CELL.spec, status="unfinished", stop_at=0.5)
    fabricate(tmp_path / "b", CELL.spec, error=7.0)
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    page = page_of(tmp_path / "a", tmp_path / "b", tmp_path / "c")
    assert shown_cell(page, CELL)[1].plain == "7.00 (n = 1)"
    assert page.problems == ()


def test_copies_of_a_run_that_disagree_are_a_problem(tmp_path):
    fabricate(tmp_path / "a", CELL.spec, error=7.0)
    fabricate(tmp_path / "b", CELL.spec, error=8.0)
    page = page_of(tmp_path / "b", tmp_path / "a")
    assert "different results" in page.problems[0]
    assert shown_cell(page, CELL)[1].text == "7.00"


def test_chapters_with_results_come_first_and_the_smoke_check_after_them(smoke, tmp_path):
    fabricate(tmp_path, tables.at_scale(CELL.spec, "reduced"))
    fabricate(tmp_path, RunSpec(model="small", data="digits"))
    titles = [chapter.anchor for chapter in page_of(smoke, tmp_path).chapters]
    assert titles == ["reduced", "others", "smoke", "paper"]
    fabricate(tmp_path, CELL.spec)
    titles = [chapter.anchor for chapter in page_of(smoke, tmp_path).chapters]
    assert titles == ["paper", "reduced", "others", "smoke"]


def test_the_facts_tell_states_days_versions_and_machines(tmp_path):
    fabricate(tmp_path, CELL.spec)
    other = {"started": "2031-06-01T00:00:00Z", "torch": "2.10.0", "commit": None}
    fabricate(tmp_path, CELL.spec.but(seed=1), status="diverged", environment=other)
    assert dict(page_of(tmp_path).facts) == {
        "Runs": "1 finished, 1 diverged",
        "Started": "2031-05-17 to 2031-06-01",
        "Software": "memnorm 0.1.0, torch 2.10.0, python 3.11.9; memnorm 0.1.0, torch 2.9.0, python 3.11.9",
        "Commit": "0123456789ab",
        "Machine": "Linux x86_64, 2 cores, Some Processor",
    }


def test_a_run_without_an_environment_is_reported_without_one(tmp_path):
    path = fabricate(tmp_path, CELL.spec)
    (path / "env.json").unlink()
    page = page_of(tmp_path)
    assert [name for name, _ in page.facts] == ["Runs"]
    assert page.groups[0].places == ["not recorded"]


@pytest.fixture
def drawn(monkeypatch):
    """What would be drawn, without the time it takes."""
    plots = []
    monkeypatch.setattr(figures, "draw", lambda plot: plots.append(plot) or "<svg></svg>")
    return plots


def picture_of(root, name):
    return figures.pictures(collect([root], title="A title"))[name]


def test_thin_is_train_bold_is_test_and_each_arm_has_one_colour(tmp_path, drawn):
    for spec in (BN, MBN):
        fabricate(tmp_path, spec)
    picture_of(tmp_path, "convergence")
    lines = [(line.label, line.bold, line.colour) for line in drawn[-1].lines]
    assert lines == [("", False, "orange"), ("BN", True, "orange"), ("", False, "blue"), ("MBN", True, "blue")]


def test_a_panel_without_runs_is_left_out_and_what_is_missing_is_counted(tmp_path, drawn):
    fabricate(tmp_path, BN)
    page = collect([tmp_path], title="A title")
    view = next(one for one in page.figures if one.name == "convergence")
    assert [panel.title for panel in picture_of(tmp_path, "convergence").panels] == ["ResNet-20"]
    missing = "ResNet-20: MBN, ResNet-56: BN, ResNet-56: MBN, VGG-16: BN, VGG-16: MBN"
    assert view.absent == f"Not run: {missing}."


def test_seeds_are_drawn_as_their_mean_with_a_band(tmp_path, drawn):
    for seed, error in enumerate((7.0, 8.0, 9.0)):
        fabricate(tmp_path, BN.but(seed=seed), error=error)
    picture = picture_of(tmp_path, "convergence")
    test = next(line for line in drawn[-1].lines if line.bold)
    assert test.points[-1] == (pytest.approx(200.192), 8.0)
    assert test.band[-1][1:] == (7.0, 9.0)
    assert "means of 3 seeds" in picture.caption


def test_a_diverged_run_is_a_faint_line_with_a_cross(tmp_path, drawn):
    fabricate(tmp_path, BN)
    fabricate(tmp_path, BN.but(seed=1), status="diverged", stop_at=0.5)
    picture = picture_of(tmp_path, "convergence")
    found = [(line.faint, line.cross, line.label) for line in drawn[-1].lines if line.bold]
    assert found == [(True, True, ""), (False, False, "BN")]
    assert "diverged (×)" in picture.caption


def comparison_name(root):
    return collect([root], title="A title").comparisons[0].name


def test_a_comparison_is_drawn_against_the_batch_size(tmp_path, drawn):
    for spec in comparison():
        diverges = (spec.norm, spec.batch_size, spec.seed) == ("group", 2, 1)
        fabricate(tmp_path, spec, **({"status": "diverged", "stop_at": 0.5} if diverges else {}))
    picture = picture_of(tmp_path, comparison_name(tmp_path))
    plot = drawn[-1]
    assert [text for _, text in plot.ticks] == ["2", "4", "8"]
    assert [line.label for line in plot.lines if line.label] == ["BN", "GROUP", "MBN-2"]
    assert [line.points[0][0] for line in plot.lines if line.cross] == [0.0]
    assert "GROUP diverged in 1 of 3 seeds at batch size 2." in picture.caption


def test_a_single_batch_size_is_drawn_over_the_run(tmp_path, drawn):
    fabricate(tmp_path, RunSpec(model="small", data="digits", iterations=100, evaluations=4))
    assert picture_of(tmp_path, comparison_name(tmp_path)).title == "Error over the run"


def test_a_label_is_text_whatever_it_holds():
    svg = draw(Plot([Line([(0, 1), (1, 2)], "blue", label="$x_{1}$ <b> 0.123456 漢")], "x", "y", (0.0, 3.0)))
    assert "$x_{1}$ &lt;b&gt; 0.123456 漢" in svg


def test_a_description_cannot_leave_its_attribute():
    assert 'aria-label="&quot;&gt;&lt;b&gt;"' in placed("<svg viewBox></svg>", "n", '"><b>')
