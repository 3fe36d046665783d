"""Which lines a figure has, and where its labels and limits are."""

import itertools

import pytest
from helpers.reports import comparison, fabricate

from memnorm.lab import tables
from memnorm.lab.report import figures
from memnorm.lab.report.collect import collect
from memnorm.lab.report.plot import COLOURS, LONGEST, Line, Plot, draw, legible, placed, spread, standing_alone
from memnorm.lab.spec import RunSpec

CURVES = {curve.key: curve for curve in tables.FIGURES["convergence"].curves}
BN, MBN = CURVES["ResNet-20/BN"].spec, CURVES["ResNet-20/MBN"].spec


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
    view = next(one for one in page.scales[0].figures if one.name == "convergence")
    assert [panel.title for panel in picture_of(tmp_path, "convergence").panels] == ["ResNet-20"]
    assert view.absent == ["ResNet-20: MBN", "ResNet-56: BN", "ResNet-56: MBN", "VGG-16: BN", "VGG-16: MBN"]


def test_seeds_are_drawn_as_their_mean_with_a_band(tmp_path, drawn):
    for seed, error in enumerate((7.0, 8.0, 9.0)):
        fabricate(tmp_path, BN.but(seed=seed), error=error)
    picture = picture_of(tmp_path, "convergence")
    test = next(line for line in drawn[-1].lines if line.bold)
    assert test.points[-1] == (pytest.approx(200.192), 8.0)
    assert test.band[-1][1:] == (7.0, 9.0)
    assert "means of 3 seeds" in picture.caption


def test_a_diverged_run_is_a_faint_line_with_a_cross_beside_the_mean(tmp_path, drawn):
    fabricate(tmp_path, BN)
    fabricate(tmp_path, BN.but(seed=1), status="diverged", stop_at=0.5)
    picture = picture_of(tmp_path, "convergence")
    found = [(line.faint, line.cross, line.label) for line in drawn[-1].lines if line.bold]
    assert found == [(True, True, ""), (False, False, "BN")]
    assert "diverged (×)" in picture.caption


def test_an_unfinished_run_alone_has_the_label(tmp_path, drawn):
    fabricate(tmp_path, BN, status="unfinished", stop_at=0.5)
    picture_of(tmp_path, "convergence")
    assert [(line.label, line.faint) for line in drawn[-1].lines] == [("", True), ("BN", True)]


def test_on_imagenet_batch_norm_is_dashed_and_a_model_has_one_colour(tmp_path, drawn):
    curves = [curve for curve in tables.FIGURES["imagenet-curves"].curves if curve.metrics == ("test_error",)]
    for curve in curves:
        fabricate(tmp_path, curve.spec)
    picture_of(tmp_path, "imagenet-curves")
    test = next(plot for plot in drawn if plot.y_title == "test error (%)")
    assert {line.label: line.dashed for line in test.lines} == {c.label: c.label.endswith(" BN") for c in curves}
    by_model = {line.label.split()[0]: line.colour for line in test.lines}
    assert len(set(by_model.values())) == 4
    assert all(by_model[line.label.split()[0]] == line.colour for line in test.lines)


def test_one_forward_is_dashed_beside_two(tmp_path, drawn):
    for curve in tables.FIGURES["double-forward"].curves:
        if curve.panel == "ResNet-20 test":
            fabricate(tmp_path, curve.spec)
    picture = picture_of(tmp_path, "double-forward")
    test = next(plot for plot in drawn if len(plot.lines) == 6)
    assert [(line.label, line.dashed) for line in test.lines] == [
        (f"{norm}-{forwards}", forwards == 1) for norm in ("BN", "BRN", "MBN") for forwards in (1, 2)
    ]
    assert "Dashed: one forward" in picture.caption


def test_vertical_lines_mark_where_the_learning_rate_changes(tmp_path, drawn):
    fabricate(tmp_path, BN)
    picture_of(tmp_path, "convergence")
    assert drawn[-1].marks == pytest.approx([0.4 * 200.192, 0.6 * 200.192])


def test_the_axis_shows_all_but_the_steep_beginning(tmp_path, drawn):
    fabricate(tmp_path, BN, error=8.0)
    picture_of(tmp_path, "convergence")
    points = next(line.points for line in drawn[-1].lines if line.bold)
    low, high = drawn[-1].y_limits
    assert low == 0.0
    assert all(low <= y <= high for x, y in points if x > 21)
    assert high < max(y for _, y in points)


@pytest.mark.parametrize(
    ("low", "high", "expected"), [(1.0, 30.0, (0.0, 30.0)), (80.0, 90.0, (78.8, 91.2)), (99.0, 100.0, (98.5, 100.5))]
)
def test_the_axis_starts_at_zero_unless_half_of_it_would_be_empty(low, high, expected):
    assert figures._limits(low, high) == pytest.approx(expected)


def family_name(root):
    return collect([root], title="A title").families[0].name


def test_a_comparison_is_drawn_against_the_batch_size(tmp_path, drawn):
    for spec in comparison():
        diverges = (spec.norm, spec.batch_size, spec.seed) == ("group", 2, 1)
        fabricate(tmp_path, spec, **({"status": "diverged", "stop_at": 0.5} if diverges else {}))
    picture = picture_of(tmp_path, family_name(tmp_path))
    plot = drawn[-1]
    assert [text for _, text in plot.ticks] == ["2", "4", "8"]
    assert [line.label for line in plot.lines if line.label] == ["BN", "GROUP", "MBN-2"]
    assert [line.points[0][0] for line in plot.lines if line.cross] == [0.0]
    assert "GROUP diverged in 1 of 3 seeds at batch size 2." in picture.caption


def test_a_single_batch_size_is_drawn_over_the_run(tmp_path, drawn):
    fabricate(tmp_path, RunSpec(model="small", data="digits", iterations=100, evaluations=4))
    assert picture_of(tmp_path, family_name(tmp_path)).title == "Error over the run"


def test_runs_of_one_evaluation_have_no_curve(tmp_path, drawn):
    fabricate(tmp_path, RunSpec(model="small", data="digits", iterations=100, evaluations=1))
    assert figures.pictures(collect([tmp_path], title="A title")) == {}


def test_arms_without_a_colour_of_their_own_get_different_ones():
    found = figures.colours(["BN", "BRN", "MBN-1", "MBN-2", "GROUP", "LAYER", "MBN-2 memory_size=5"])
    assert (found["BN"], found["MBN-1"], found["MBN-2"]) == ("orange", "blue", "blue")
    assert len({found[name] for name in ("BN", "BRN", "MBN-2", "GROUP", "LAYER", "MBN-2 memory_size=5")}) == 6


def test_an_arm_has_one_colour_in_all_comparisons(tmp_path, drawn):
    base = RunSpec(model="small", data="digits", iterations=100, evaluations=4)
    for spec in (
        base,
        base.but(norm="group"),
        base.but(norm="layer", augment=False),
        base.but(norm="group", augment=False),
    ):
        fabricate(tmp_path, spec)
    figures.pictures(collect([tmp_path], title="A title"))
    found = {(line.label, line.colour) for plot in drawn for line in plot.lines if line.label}
    assert len(found) == len({label for label, _ in found}) == 3


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ([10.0, 50.0], [10.0, 50.0]),
        ([20.0, 20.0], [15.0, 25.0]),
        ([22.0, 20.0, 21.0], [31.0, 11.0, 21.0]),
        ([0.0, 1.0], [0.0, 10.0]),
        ([99.0, 100.0], [90.0, 100.0]),
        ([], []),
    ],
    ids=str,
)
def test_labels_are_moved_apart_in_their_order(wanted, expected):
    assert spread(wanted, 10.0, (0.0, 100.0)) == pytest.approx(expected)


@pytest.mark.parametrize("count", range(1, 9))
def test_labels_never_overlap(count):
    places = sorted(spread([50 + (7919 * i % 13) for i in range(count)], 10.0, (0.0, 100.0)))
    assert all(after - before >= 10 - 1e-9 for before, after in itertools.pairwise(places))


def test_a_label_is_text_whatever_it_holds():
    svg = draw(Plot([Line([(0, 1), (1, 2)], "blue", label="$x_{1}$ <b> 0.123456 漢")], "x", "y", (0.0, 3.0)))
    assert "$x_{1}$ &lt;b&gt; 0.123456 漢" in svg


def test_a_label_is_one_line_of_printable_characters_and_not_too_long():
    assert legible("a\n\x00b") == "a b"
    assert len(legible("x" * 100)) == LONGEST


def test_ids_of_two_drawings_differ():
    svg = draw(Plot([Line([(0, 1), (1, 2)], "blue")], "x", "y", (0.0, 3.0)))
    assert 'id="one-' in placed(svg, "one", "d")
    assert placed(svg, "one", "d").count("#one-") == placed(svg, "two", "d").count("#two-") > 0


def test_a_description_cannot_leave_its_attribute():
    assert 'aria-label="&quot;&gt;&lt;b&gt;"' in placed("<svg viewBox></svg>", "n", '"><b>')


def test_a_drawing_alone_brings_colours_for_light_and_dark():
    text = standing_alone(draw(Plot([Line([(0, 1), (1, 2)], "blue")], "x", "y", (0.0, 3.0))), "d")
    assert all(one in text for pair in COLOURS.values() for one in pair)
    assert "prefers-color-scheme:dark" in text
