"""The paper's numbers and runs, their scales, and selecting from them."""

import pytest

from memnorm import norms
from memnorm.lab.errors import UsageError
from memnorm.lab.paper import FIGURES, TABLES
from memnorm.lab.spec import RunSpec, parse_arm, unsupported
from memnorm.lab.tables import SCALES, at_scale, select, unique_specs

# Typed from the paper, in its own rows and columns, and not from the package.
GOLDEN = {
    "cifar10": """
        method   | NIN  | ResNet-20 | ResNet-56 | VGG
        NormProp | 7.25 | -         | -         | 11.18
        BN       | 7.54 | 8.41      | 6.97      | 6.75
        BRN      | -    | 8.18      | 6.46      | 6.64
        MBN      | -    | 7.93      | 6.23      | 6.43""",
    "cifar100": """
        method   | NIN   | ResNet-20 | ResNet-56 | VGG
        NormProp | 29.24 | -         | -         | 39.55
        BN       | 30.26 | 32.28     | 29.27     | 27.80
        BRN      | -     | 32.04     | 29.17     | 27.44
        MBN      | -     | 31.75     | 28.97     | 26.79""",
    "imagenet": """
        network   | top-1 BN | top-1 MBN | top-5 BN | top-5 MBN
        GoogLeNet | 27.31    | -         | 9.15     | -
        PReLU-net | 24.27    | -         | 7.38     | -
        VGG       | 28.07    | 27.33     | 9.33     | 8.91
        ResNet-18 | 30.43    | 29.79     | 10.76    | 10.23
        ResNet-34 | 26.73    | 25.85     | 8.74     | 8.37
        ResNet-50 | 24.01    | 23.67     | 7.02     | 6.74""",
    "small-batch": """
        batch size | BN    | MBN
        8          | 19.64 | 15.37
        16         | 13.26 | 11.87
        32         | 10.45 | 9.37
        64         | 8.60  | 7.79
        128        | 6.97  | 6.23""",
    "strength": """
        λ           | ResNet-56
        0           | 6.97
        0.1         | 6.87
        0.5         | 6.45
        0.9         | 6.81
        1           | -
        0.1-0.5-0.9 | 6.23""",
    "memory-size": """
        memory size | ResNet-20
        10          | 7.87
        20          | 7.80
        40          | 7.83""",
    "double-forward": """
        arm   | ResNet-56 | ResNet-20
        BN-1  | 6.97      | 8.41
        BN-2  | 6.81      | -
        BRN-1 | 6.93      | -
        BRN-2 | 6.46      | 8.18
        MBN-1 | 6.53      | -
        MBN-2 | 6.23      | 7.93""",
}
MODELS = {"NIN": "nin", "ResNet-20": "resnet20", "ResNet-56": "resnet56", "VGG": "vgg16"}
ALL = select(["all"])


def lines(text):
    return [[part.strip() for part in line.split("|")] for line in text.strip().splitlines()]


def cell(name, key):
    row, column = key.split("/")
    return TABLES[name].cell(row, column)


@pytest.mark.parametrize("name", GOLDEN)
def test_every_printed_number_is_the_papers_in_reading_order(name):
    (_, *columns), *rows = lines(GOLDEN[name])
    golden = [
        (row, column, None if number == "-" else float(number))
        for row, *numbers in rows
        for column, number in zip(columns, numbers, strict=True)
    ]
    assert [(one.row, one.column, one.printed) for one in TABLES[name].cells] == golden


NORMS = {
    "NormProp": {"norm": "normprop"},
    "BN": {"norm": "bn"},
    "BRN": {"norm": "brn", "scheme": "double"},
    "MBN": {"norm": "mbn", "scheme": "double"},
}
IMAGENET = {
    "GoogLeNet": "googlenet",
    "PReLU-net": "prelu_net",
    "VGG": "vgg16_imagenet",
    "ResNet-18": "resnet18",
    "ResNet-34": "resnet34",
    "ResNet-50": "resnet50",
}
# What each cell changes of the defaults, by its row and column.
CHANGES = {
    "cifar10": lambda row, column: {"model": MODELS[column], **NORMS[row]},
    "cifar100": lambda row, column: {"data": "cifar100", "model": MODELS[column], **NORMS[row]},
    "imagenet": lambda row, column: {
        "data": "imagenet",
        "model": IMAGENET[row],
        "iterations": 200 * 10_010,
        **NORMS[column.split()[1]],
    },
    "small-batch": lambda row, column: {"model": "resnet56", "batch_size": int(row), **NORMS[column]},
    "strength": lambda row, column: {
        "model": "resnet56",
        "strength": tuple(float(one) for one in row.split("-")),
        **NORMS["MBN"],
    },
    "memory-size": lambda row, column: {
        "model": "resnet20",
        "norm_options": {"memory_size": int(row)} if row != "20" else {},
        **NORMS["MBN"],
    },
    "double-forward": lambda row, column: {
        "model": MODELS[column],
        "norm": row.split("-")[0].lower(),
        "scheme": "double" if row.endswith("2") else "single",
    },
}


@pytest.mark.parametrize("name", TABLES)
def test_a_cell_is_the_defaults_with_what_its_row_and_column_change_and_an_evaluation_per_epoch(name):
    for one in TABLES[name].cells:
        if one.spec is not None:
            assert one.spec == RunSpec(evaluations=200, **CHANGES[name](one.row, one.column)), one.key
        assert (one.spec is None) == (one.row == "NormProp" and "ResNet" in one.column)
        assert one.metric == ("test_error_top5" if one.column.startswith("top-5") else "test_error")


def test_the_omitted_memory_size_is_the_librarys_default():
    from memnorm.norms.mbn import OPTIONS

    assert OPTIONS["memory_size"] == 20


def test_only_the_quoted_rows_have_a_printed_number_that_is_not_comparable():
    printed = [item for item in ALL if getattr(item.part, "printed", None) is not None]
    apart = {f"{name} {part.key}" for name, part in printed if not part.comparable}
    models, tops = ("GoogLeNet", "PReLU-net"), ("top-1 BN", "top-5 BN")
    assert apart == {f"imagenet {model}/{top}" for model in models for top in tops}
    for model in models:
        assert "quotes" in cell("imagenet", f"{model}/top-1 BN").note
        assert cell("imagenet", f"{model}/top-1 MBN").note == "ours: not in the paper"
        assert not cell("imagenet", f"{model}/top-1 MBN").quoted


@pytest.mark.parametrize(
    ("name", "panels", "labels", "metrics"),
    [
        (
            "double-forward",
            ["ResNet-56 test", "ResNet-56 train", "ResNet-20 test", "ResNet-20 train"],
            ["BN-1", "BN-2", "BRN-1", "BRN-2", "MBN-1", "MBN-2"],
            {"test": ("test_error",), "train": ("train_error",)},
        ),
        (
            "convergence",
            ["ResNet-20", "ResNet-56", "VGG-16"],
            ["BN", "MBN"],
            {"": ("train_error", "test_error")},
        ),
        (
            "imagenet-curves",
            ["Testing error", "Training error"],
            [f"{model} {norm}" for model in ("VGG", "ResNet-18", "ResNet-34", "ResNet-50") for norm in ("BN", "MBN")],
            {"Testing error": ("test_error",), "Training error": ("train_error",)},
        ),
    ],
)
def test_a_figure_has_its_panels_curves_and_metrics(name, panels, labels, metrics):
    figure = FIGURES[name]
    assert list(figure.panels) == panels
    assert [(one.panel, one.label) for one in figure.curves] == [(panel, label) for panel in panels for label in labels]
    for one in figure.curves:
        assert one.metrics == next(value for ending, value in metrics.items() if one.panel.endswith(ending))


def test_a_curve_is_the_run_its_panel_and_label_say():
    for one in FIGURES["double-forward"].curves:
        assert one.spec == cell("double-forward", f"{one.label}/{one.panel.split()[0]}").spec
        assert one.style == one.spec.arm
    for one in FIGURES["convergence"].curves:
        assert one.spec == cell("cifar10", f"{one.label}/{one.panel.replace('VGG-16', 'VGG')}").spec
        assert one.style == one.spec.arm
    for one in FIGURES["imagenet-curves"].curves:
        model, norm = one.label.split()
        assert one.spec == cell("imagenet", f"{model}/top-1 {norm}").spec
        assert (one.style, one.dashed) == (model, norm == "BN")


SPECS = unique_specs(ALL)


def keys(items):
    return [f"{name} {part.key}" for name, part in items]


def differing(spec, other):
    ours, theirs = spec.as_dict(), other.as_dict()
    return {name for name in ours if ours[name] != theirs[name]}


@pytest.mark.parametrize(
    ("name", "key", "iterations"),
    [("cifar10", "MBN/ResNet-56", 7_820), ("cifar10", "BN/NIN", 7_820), ("imagenet", "VGG/top-1 BN", 20_020)],
)
def test_reduced_is_fewer_iterations_with_20_evaluations_and_nothing_else(name, key, iterations):
    spec = cell(name, key).spec
    reduced = at_scale(spec, "reduced")
    assert (reduced.iterations, reduced.evaluations) == (iterations, 20)
    assert differing(reduced, spec) == {"iterations", "evaluations"}


def test_smoke_keeps_the_model_the_norm_and_the_schedules():
    for spec in SPECS:
        smoke = at_scale(spec, "smoke")
        assert differing(smoke, spec) == {"data", "data_options", "batch_size", "iterations", "evaluations"}
        assert (smoke.data, smoke.iterations, smoke.evaluations) == ("synthetic", 2, 1)
        assert smoke.batch_size <= 6


@pytest.mark.parametrize(
    ("name", "key", "classes", "size"),
    [
        ("cifar10", "BN/VGG", 10, 32),
        ("cifar100", "BN/VGG", 100, 32),
        ("imagenet", "VGG/top-1 BN", 1000, 64),
    ],
)
def test_smoke_has_as_many_classes_as_the_original_and_enough_images_for_its_batches(name, key, classes, size):
    smoke = at_scale(cell(name, key).spec, "smoke")
    options = smoke.data_options
    assert (options["classes"], options["image_size"]) == (classes, size)
    assert smoke.batch_size * smoke.iterations <= options["train"] <= 20
    assert 1 <= options["test"] <= 20


@pytest.mark.parametrize("scale", SCALES)
def test_every_scale_has_as_many_different_runs_as_the_paper(scale):
    assert len(unique_specs(ALL, scale)) == len(SPECS) == 61


def test_all_is_every_cell_and_every_curve_once():
    cells = sum(len(table.cells) for table in TABLES.values())
    curves = sum(len(figure.curves) for figure in FIGURES.values())
    assert len(ALL) == cells + curves
    assert select(["all", "cifar10", "all"]) == ALL


@pytest.mark.parametrize(
    ("wrong", "guess"), [("cifar", "cifar10 or cifar100"), ("lambda-strength", "strength"), ("imagnet", "imagenet")]
)
def test_an_unknown_name_gets_the_near_ones_and_the_whole_list(wrong, guess):
    with pytest.raises(UsageError) as caught:
        select([wrong])
    assert f"Did you mean {guess}" in str(caught.value)
    assert all(name in str(caught.value) for name in [*TABLES, *FIGURES])


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


@pytest.mark.parametrize("pattern", ["LN/*", "MBN", "MBN/ResNet-200"])
def test_a_pattern_that_matches_nothing_gets_the_rows_and_columns(pattern):
    with pytest.raises(UsageError) as caught:
        select(["cifar10", "convergence"], ["MBN/VGG", pattern])
    message = str(caught.value)
    assert repr(pattern) in message
    assert "table cifar10: rows NormProp, BN, BRN, MBN; columns NIN, ResNet-20, ResNet-56, VGG" in message
    assert "figure convergence: panels ResNet-20, ResNet-56, VGG-16; labels BN, MBN" in message
    assert "cifar100" not in message


def test_seeds_multiply_the_runs_and_stand_side_by_side():
    specs = unique_specs(select(["memory-size"]), "smoke", seeds=iter([3, 4]))
    assert [spec.seed for spec in specs] == [3, 4, 3, 4, 3, 4]
    assert specs[0].norm_options == specs[1].norm_options == {"memory_size": 10}
    assert all(spec.data == "synthetic" for spec in specs)


@pytest.mark.parametrize(
    ("word", "given", "norm", "scheme"),
    [
        ("bn", None, "bn", "single"),
        ("bn-1", None, "bn", "single"),
        ("bn", "double", "bn", "double"),
        ("mbn", None, "mbn", "double"),
        ("mbn", "single", "mbn", "single"),
        ("mbn-1", None, "mbn", "single"),
        ("mbn-1", "single", "mbn", "single"),
        (" MBN-2 ", None, "mbn", "double"),
    ],
)
def test_arms_are_read_as_users_write_them(word, given, norm, scheme):
    assert parse_arm(word, given) == {"norm": norm, "scheme": scheme}


def test_a_scheme_that_contradicts_the_number_is_refused():
    with pytest.raises(UsageError, match="mbn-2 means the scheme double; got single"):
        parse_arm("mbn-2", "single")


@pytest.mark.parametrize("word", ["", "-", "-1", "mbn-3", "mbn_2", "batchnorm", "1"])
def test_an_arm_that_is_none_is_refused_with_those_that_are(word):
    with pytest.raises(UsageError, match=rf"there is no norm {word!r}; there are bn, .*mbn"):
        parse_arm(word)


def test_double_forward_with_a_norm_that_records_nothing_is_refused():
    silent = [name for name in norms.available() if not norms.get(name).records]
    assert silent
    for name in silent:
        with pytest.raises(UsageError, match=rf"{name}-2: Double-Forward needs a norm that .*{name}"):
            parse_arm(f"{name}-2")
        assert f"{name!r} has none" in unsupported(RunSpec(norm=name, recalibrate=10))
    assert "nope" in unsupported(RunSpec(norm="nope"))
    assert unsupported(RunSpec(norm="mbn", scheme="double")) is None
