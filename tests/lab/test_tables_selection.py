"""Scales, selection, and which runs can be made."""

import pytest

from memnorm.lab.errors import UsageError
from memnorm.lab.paper import FIGURES, TABLES
from memnorm.lab.spec import RunSpec
from memnorm.lab.tables import RULES, SCALES, at_scale, select, unique_specs

ALL = select(["all"])
SPECS = unique_specs(ALL)


def keys(items):
    return [f"{name} {part.key}" for name, part in items]


def table_spec(name, row, column):
    return TABLES[name].cell(row, column).spec


def differing(spec, other):
    ours, theirs = spec.as_dict(), other.as_dict()
    return {name for name in ours if ours[name] != theirs[name]}


def test_the_paper_scale_is_the_spec_itself():
    assert all(at_scale(part.spec, "paper") == part.spec for _, part in ALL if part.spec)


@pytest.mark.parametrize(("row", "column"), [("MBN", "ResNet-56"), ("BN", "NIN")])
def test_reduced_is_a_tenth_of_the_iterations_with_20_evaluations_and_nothing_else(row, column):
    spec = table_spec("cifar10", row, column)
    reduced = at_scale(spec, "reduced")
    assert (reduced.iterations, reduced.evaluations) == (7_820, 20)
    assert differing(reduced, spec) == {"iterations", "evaluations"}


def test_reduced_is_a_hundredth_on_imagenet():
    reduced = at_scale(table_spec("imagenet", "VGG", "top-1 BN"), "reduced")
    assert (reduced.iterations, reduced.evaluations, reduced.data) == (20_020, 20, "imagenet")


def test_reduced_keeps_the_iterations_equal_at_every_batch_size():
    assert {at_scale(one.spec, "reduced").iterations for one in TABLES["small-batch"].cells} == {7_820}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_smoke_keeps_the_model_the_norm_and_the_schedules(spec):
    smoke = at_scale(spec, "smoke")
    assert differing(smoke, spec) == {"data", "data_options", "batch_size", "iterations", "evaluations"}
    assert smoke.iterations <= 3
    assert smoke.evaluations == 1
    assert smoke.batch_size <= 6
    assert smoke.data == "synthetic"


@pytest.mark.parametrize(
    ("name", "key", "classes", "size"),
    [
        ("cifar10", ("BN", "VGG"), 10, 32),
        ("cifar100", ("BN", "VGG"), 100, 32),
        ("imagenet", ("VGG", "top-1 BN"), 1000, 64),
    ],
)
def test_smoke_has_as_many_classes_as_the_original_and_enough_images_for_its_batches(name, key, classes, size):
    smoke = at_scale(table_spec(name, *key), "smoke")
    options = smoke.data_options
    assert (options["classes"], options["image_size"]) == (classes, size)
    assert smoke.batch_size * smoke.iterations <= options["train"] <= 20
    assert 1 <= options["test"] <= 20


def test_smoke_keeps_the_batch_sizes_apart():
    sizes = [at_scale(table_spec("small-batch", row, "BN"), "smoke").batch_size for row in TABLES["small-batch"].rows]
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 2


@pytest.mark.parametrize("scale", SCALES)
def test_every_scale_has_as_many_different_runs_as_the_paper(scale):
    assert len(unique_specs(ALL, scale)) == len(SPECS) == 61


@pytest.mark.parametrize("scale", SCALES)
def test_every_run_survives_the_way_to_a_file_and_back_at_every_scale(scale):
    for spec in unique_specs(ALL, scale):
        assert RunSpec.from_yaml(spec.as_yaml()).digest == spec.digest


@pytest.mark.parametrize("scale", SCALES)
def test_a_scale_keeps_the_seed(scale):
    assert at_scale(SPECS[0].but(seed=7), scale).seed == 7


def test_each_scale_says_its_rule_and_the_reduced_ones_say_what_they_are_not():
    assert set(RULES) == set(SCALES)
    assert "7,820" in RULES["reduced"]
    assert "20,020" in RULES["reduced"]
    assert "not with the printed ones" in RULES["reduced"]
    assert "mean nothing" in RULES["smoke"]
    assert "2,002,000" in RULES["paper"]


def test_an_unknown_scale_names_the_ones_there_are():
    with pytest.raises(UsageError, match="smoke, reduced, paper; got 'tiny'"):
        at_scale(SPECS[0], "tiny")


def test_smoke_refuses_data_it_has_no_stand_in_for():
    with pytest.raises(UsageError, match="'digits'"):
        at_scale(RunSpec(data="digits"), "smoke")


def test_all_is_every_cell_and_every_curve_once():
    cells = sum(len(table.cells) for table in TABLES.values())
    curves = sum(len(figure.curves) for figure in FIGURES.values())
    assert len(ALL) == cells + curves
    assert select(["all", "cifar10", "all"]) == ALL


@pytest.mark.parametrize("name", ["cifar10", "convergence"])
def test_a_name_selects_its_cells_or_curves(name):
    parts = TABLES[name].cells if name in TABLES else FIGURES[name].curves
    assert [(item.name, item.part) for item in select([name])] == [(name, part) for part in parts]


def test_a_name_that_a_table_and_a_figure_share_selects_both():
    parts = [part for _, part in select(["double-forward"])]
    assert parts == [*TABLES["double-forward"].cells, *FIGURES["double-forward"].curves]


def test_the_order_is_ours_whatever_the_order_of_the_names():
    assert select(["memory-size", "cifar10"]) == select(["cifar10", "memory-size"])


@pytest.mark.parametrize("name", ["CIFAR10", " cifar10 "])
def test_names_are_read_in_any_case(name):
    assert select([name]) == select(["cifar10"])


def test_an_underscore_is_as_good_as_a_hyphen():
    assert select(["small_batch"]) == select(["small-batch"])


@pytest.mark.parametrize(
    ("wrong", "guess"), [("cifar", "cifar10 or cifar100"), ("lambda-strength", "strength"), ("imagnet", "imagenet")]
)
def test_an_unknown_name_gets_the_near_ones_and_the_whole_list(wrong, guess):
    with pytest.raises(UsageError) as caught:
        select([wrong])
    assert f"Did you mean {guess}" in str(caught.value)
    assert all(name in str(caught.value) for name in [*TABLES, *FIGURES])


def test_a_name_like_no_other_gets_the_list_without_a_guess():
    with pytest.raises(UsageError) as caught:
        select(["xyz"])
    assert "Did you mean" not in str(caught.value)
    assert "cifar10" in str(caught.value)


def test_no_name_at_all_is_an_error_that_lists_them():
    with pytest.raises(UsageError, match="all, or some of cifar10, cifar100"):
        select([])


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        (["MBN/ResNet-20"], ["cifar10 MBN/ResNet-20"]),
        (["mbn/resnet-20"], ["cifar10 MBN/ResNet-20"]),
        (["mbn/*"], ["cifar10 MBN/NIN", "cifar10 MBN/ResNet-20", "cifar10 MBN/ResNet-56", "cifar10 MBN/VGG"]),
        (["MBN/VGG", "BN/VGG"], ["cifar10 BN/VGG", "cifar10 MBN/VGG"]),
    ],
)
def test_only_keeps_what_matches_a_pattern_in_any_case(only, expected):
    assert keys(select(["cifar10"], only)) == expected


def test_only_means_panel_and_label_in_a_figure():
    assert keys(select(["convergence"], ["vgg-16/mbn"])) == ["convergence VGG-16/MBN"]


@pytest.mark.parametrize("pattern", ["LN/*", "MBN", "MBN/ResNet-200"])
def test_a_pattern_that_matches_nothing_gets_the_rows_and_columns(pattern):
    with pytest.raises(UsageError) as caught:
        select(["cifar10", "convergence"], ["MBN/VGG", pattern])
    message = str(caught.value)
    assert repr(pattern) in message
    assert "table cifar10: rows NormProp, BN, BRN, MBN; columns NIN, ResNet-20, ResNet-56, VGG" in message
    assert "figure convergence: panels ResNet-20, ResNet-56, VGG-16; labels BN, MBN" in message
    assert "cifar100" not in message


def test_no_label_holds_a_character_that_a_pattern_would_take_for_its_own():
    for _, part in ALL:
        assert part.key.count("/") == 1
        assert not set(part.key) & set("*?[],")


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("cifar10", 14),
        ("cifar100", 14),
        ("imagenet", 12),
        ("small-batch", 10),
        ("strength", 6),
        ("memory-size", 3),
        ("double-forward", 12),
        ("convergence", 6),
        ("imagenet-curves", 8),
    ],
)
def test_a_run_that_stands_in_several_places_is_made_once(name, count):
    specs = unique_specs(select([name]))
    assert len(specs) == len({spec.digest for spec in specs}) == count


def test_seeds_multiply_the_runs_and_stand_side_by_side():
    specs = unique_specs(select(["memory-size"]), "smoke", seeds=iter([3, 4]))
    assert [spec.seed for spec in specs] == [3, 4, 3, 4, 3, 4]
    assert specs[0].norm_options == specs[1].norm_options == {"memory_size": 10}
    assert all(spec.data == "synthetic" for spec in specs)
