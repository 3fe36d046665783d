"""The tables hold the paper's numbers and the runs behind them."""

from decimal import Decimal

import pytest

from memnorm.lab.paper import FIGURES, TABLES, Cell
from memnorm.lab.spec import RunSpec
from memnorm.lab.tables import select

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
MODELS = {
    "NIN": "nin",
    "ResNet-20": "resnet20",
    "ResNet-56": "resnet56",
    "VGG": "vgg16",
}
ALL = select(["all"])


def lines(text):
    return [[part.strip() for part in line.split("|")] for line in text.strip().splitlines()]


def cell(name, key):
    row, column = key.split("/")
    return TABLES[name].cell(row, column)


def test_there_is_a_golden_for_every_table():
    assert list(TABLES) == list(GOLDEN)


@pytest.mark.parametrize("name", GOLDEN)
def test_every_printed_number_is_the_papers(name):
    (_, *columns), *rows = lines(GOLDEN[name])
    golden = {
        (row, column): None if number == "-" else float(number)
        for row, *numbers in rows
        for column, number in zip(columns, numbers, strict=True)
    }
    assert {(one.row, one.column): one.printed for one in TABLES[name].cells} == golden


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_every_row_and_column_once_in_reading_order(name):
    table = TABLES[name]
    keys = [(one.row, one.column) for one in table.cells]
    assert keys == [(row, column) for row in table.rows for column in table.columns]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
@pytest.mark.parametrize(
    ("row", "norm", "scheme"),
    [("NormProp", "normprop", "single"), ("BN", "bn", "single"), ("BRN", "brn", "double"), ("MBN", "mbn", "double")],
)
def test_a_cifar_cell_is_the_defaults_with_its_model_norm_scheme_and_an_evaluation_per_epoch(name, row, norm, scheme):
    for one in TABLES[name].cells:
        if one.row == row and one.spec is not None:
            expected = RunSpec(data=name, model=MODELS[one.column], norm=norm, scheme=scheme, evaluations=200)
            assert one.spec == expected


def test_the_defaults_the_cells_rely_on_are_the_papers_protocol():
    spec = cell("cifar10", "MBN/ResNet-20").spec
    assert (spec.iterations, spec.batch_size, spec.learning_rate, spec.scaling) == (78_200, 128, 0.1, "none")
    assert (spec.schedule, spec.milestones, spec.warmup) == ("step", (0.4, 0.6), 0)
    assert (spec.momentum, spec.weight_decay, spec.strength) == (0.9, 1e-4, (0.1, 0.5, 0.9))
    assert (spec.augment, spec.sampler, spec.precision, spec.seed) == (True, "shuffle", "float32", 0)
    assert (spec.every, spec.fraction, spec.holdout, spec.train_images, spec.test_images) == (1, 1.0, 0, None, None)


def test_two_hundred_epochs_of_imagenet_are_two_million_iterations():
    for one in TABLES["imagenet"].cells:
        assert one.spec.data == "imagenet"
        assert one.spec.iterations == 200 * 10_010
        assert (one.spec.batch_size, one.spec.evaluations) == (128, 200)


@pytest.mark.parametrize(
    ("row", "model"),
    [
        ("GoogLeNet", "googlenet"),
        ("PReLU-net", "prelu_net"),
        ("VGG", "vgg16_imagenet"),
        ("ResNet-18", "resnet18"),
        ("ResNet-34", "resnet34"),
        ("ResNet-50", "resnet50"),
    ],
)
@pytest.mark.parametrize(("norm", "name", "scheme"), [("BN", "bn", "single"), ("MBN", "mbn", "double")])
def test_top_1_and_top_5_on_imagenet_are_two_metrics_of_one_run(row, model, norm, name, scheme):
    top1, top5 = (cell("imagenet", f"{row}/{top} {norm}") for top in ("top-1", "top-5"))
    assert top1.spec == top5.spec
    assert (top1.spec.model, top1.spec.norm, top1.spec.scheme) == (model, name, scheme)
    assert (top1.metric, top5.metric) == ("test_error", "test_error_top5")


@pytest.mark.parametrize("size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize(("column", "norm", "scheme"), [("BN", "bn", "single"), ("MBN", "mbn", "double")])
def test_small_batches_change_the_batch_size_and_nothing_else(size, column, norm, scheme):
    at_128 = RunSpec(model="resnet56", norm=norm, scheme=scheme, evaluations=200)
    assert cell("small-batch", f"{size}/{column}").spec == at_128.but(batch_size=size)


@pytest.mark.parametrize(
    ("row", "strength"),
    [("0", [0]), ("0.1", [0.1]), ("0.5", [0.5]), ("0.9", [0.9]), ("1", [1]), ("0.1-0.5-0.9", [0.1, 0.5, 0.9])],
)
def test_the_strength_table_changes_the_strength_of_mbn_2_on_resnet_56(row, strength):
    expected = RunSpec(model="resnet56", norm="mbn", scheme="double", evaluations=200, strength=tuple(strength))
    assert cell("strength", f"{row}/ResNet-56").spec == expected


@pytest.mark.parametrize(("row", "options"), [("10", {"memory_size": 10}), ("20", {}), ("40", {"memory_size": 40})])
def test_the_memory_table_changes_the_memory_of_mbn_2_on_resnet_20(row, options):
    expected = RunSpec(model="resnet20", norm="mbn", scheme="double", evaluations=200, norm_options=options)
    assert cell("memory-size", f"{row}/ResNet-20").spec == expected


def test_the_omitted_memory_size_is_the_librarys_default():
    from memnorm.norms.mbn import OPTIONS

    assert OPTIONS["memory_size"] == 20


@pytest.mark.parametrize("model", ["ResNet-56", "ResNet-20"])
@pytest.mark.parametrize("norm", ["BN", "BRN", "MBN"])
@pytest.mark.parametrize(("forwards", "scheme"), [(1, "single"), (2, "double")])
def test_the_double_forward_table_has_each_norm_with_one_and_two_forwards(model, norm, forwards, scheme):
    expected = RunSpec(model=MODELS[model], norm=norm.lower(), scheme=scheme, evaluations=200)
    assert cell("double-forward", f"{norm}-{forwards}/{model}").spec == expected


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("small-batch", {"128/BN": "BN/ResNet-56", "128/MBN": "MBN/ResNet-56"}),
        ("strength", {"0.1-0.5-0.9/ResNet-56": "MBN/ResNet-56"}),
        ("memory-size", {"20/ResNet-20": "MBN/ResNet-20"}),
        (
            "double-forward",
            {
                f"{arm}/{model}": f"{norm}/{model}"
                for arm, norm in [("BN-1", "BN"), ("BRN-2", "BRN"), ("MBN-2", "MBN")]
                for model in ("ResNet-56", "ResNet-20")
            },
        ),
        ("imagenet", {}),
        ("cifar100", {}),
    ],
)
def test_cells_that_are_one_run_share_its_digest_and_no_others_do(name, same):
    main = {one.spec.digest: one.key for one in TABLES["cifar10"].cells if one.spec}
    shared = {one.key: main[one.spec.digest] for one in TABLES[name].cells if one.spec and one.spec.digest in main}
    assert shared == same


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_what_the_paper_left_out_is_ours_and_what_cannot_be_says_why(name):
    for key in ("BRN/NIN", "MBN/NIN"):
        one = cell(name, key)
        assert one.spec.scheme == "double"
        assert (one.source, one.note) == ("not printed", "ours: not in the paper")
    for key in ("NormProp/ResNet-20", "NormProp/ResNet-56"):
        assert cell(name, key).spec is None
        assert "does not apply" in cell(name, key).note


def test_only_the_quoted_rows_have_a_printed_number_that_is_not_comparable():
    printed = [item for item in ALL if getattr(item.part, "printed", None) is not None]
    apart = {f"{name} {part.key}" for name, part in printed if not part.comparable}
    models, tops = ("GoogLeNet", "PReLU-net"), ("top-1 BN", "top-5 BN")
    assert apart == {f"imagenet {model}/{top}" for model in models for top in tops}
    for model in models:
        assert "quotes" in cell("imagenet", f"{model}/top-1 BN").note
        assert cell("imagenet", f"{model}/top-1 MBN").note == "ours: not in the paper"
        assert not cell("imagenet", f"{model}/top-1 MBN").quoted


def test_a_cell_without_a_run_or_without_a_number_is_not_comparable():
    assert not Cell("row", "column", None, 6.97).comparable
    assert not cell("cifar10", "MBN/NIN").comparable
    assert cell("cifar10", "MBN/ResNet-20").comparable


def test_numbers_that_stand_only_in_the_text_are_marked():
    sources = {one.key: one.source for one in TABLES["double-forward"].cells}
    assert sources["BN-2/ResNet-56"] == sources["MBN-1/ResNet-56"] == sources["BN-1/ResNet-56"] == "text"
    assert sources["BRN-1/ResNet-56"] == "derived"
    assert sources["BRN-1/ResNet-20"] == "not printed"
    assert cell("strength", "1/ResNet-56").source == "text"
    assert "0.9 in its place" in cell("strength", "1/ResNet-56").note


def test_cells_that_print_two_numbers_for_one_run_say_so():
    assert "7.93" in cell("memory-size", "20/ResNet-20").note
    assert "7.80" in cell("cifar10", "MBN/ResNet-20").note
    assert "BN's" in cell("strength", "0/ResNet-56").note


def test_a_number_is_missing_exactly_where_the_source_is_not_a_number():
    for _, part in ALL:
        if hasattr(part, "printed") and part.printed is None:
            assert part.source in ("not printed", "text")
            assert part.note
        elif hasattr(part, "printed"):
            assert part.source in ("table", "text", "derived")


@pytest.mark.parametrize(
    ("name", "kind", "panels", "labels", "metrics"),
    [
        (
            "double-forward",
            "one-metric",
            ["ResNet-56 test", "ResNet-56 train", "ResNet-20 test", "ResNet-20 train"],
            ["BN-1", "BN-2", "BRN-1", "BRN-2", "MBN-1", "MBN-2"],
            {"test": ("test_error",), "train": ("train_error",)},
        ),
        (
            "convergence",
            "train-and-test",
            ["ResNet-20", "ResNet-56", "VGG-16"],
            ["BN", "MBN"],
            {"": ("train_error", "test_error")},
        ),
        (
            "imagenet-curves",
            "one-metric",
            ["Testing error", "Training error"],
            [f"{model} {norm}" for model in ("VGG", "ResNet-18", "ResNet-34", "ResNet-50") for norm in ("BN", "MBN")],
            {"Testing error": ("test_error",), "Training error": ("train_error",)},
        ),
    ],
)
def test_a_figure_has_its_panels_curves_and_metrics(name, kind, panels, labels, metrics):
    figure = FIGURES[name]
    assert (figure.kind, list(figure.panels)) == (kind, panels)
    assert [(one.panel, one.label) for one in figure.curves] == [(panel, label) for panel in panels for label in labels]
    for one in figure.curves:
        assert one.metrics == next(value for ending, value in metrics.items() if one.panel.endswith(ending))


def test_the_curves_are_runs_of_the_tables():
    in_tables = {one.spec.digest for table in TABLES.values() for one in table.cells if one.spec}
    assert {one.spec.digest for figure in FIGURES.values() for one in figure.curves} <= in_tables


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


@pytest.mark.parametrize(
    ("table", "worse", "better", "said"),
    [
        ("cifar10", "BN/ResNet-20", "MBN/ResNet-20", "0.48"),
        ("cifar10", "BN/ResNet-56", "MBN/ResNet-56", "0.74"),
        ("cifar10", "BN/ResNet-56", "BRN/ResNet-56", "0.51"),
        ("cifar10", "BN/VGG", "MBN/VGG", "0.32"),
        ("cifar100", "BN/ResNet-20", "MBN/ResNet-20", "0.53"),
        ("cifar100", "BN/ResNet-56", "MBN/ResNet-56", "0.30"),
        ("cifar100", "BN/VGG", "MBN/VGG", "1.01"),
        ("imagenet", "VGG/top-1 BN", "VGG/top-1 MBN", "0.74"),
        ("imagenet", "ResNet-34/top-1 BN", "ResNet-34/top-1 MBN", "0.88"),
        ("small-batch", "8/BN", "8/MBN", "4.27"),
        ("double-forward", "MBN-1/ResNet-56", "MBN-2/ResNet-56", "0.30"),
        ("double-forward", "BRN-1/ResNet-56", "BRN-2/ResNet-56", "0.47"),
        ("double-forward", "BN-1/ResNet-56", "BRN-1/ResNet-56", "0.04"),
        ("double-forward", "BN-1/ResNet-56", "BN-2/ResNet-56", "0.16"),
        ("strength", "0.5/ResNet-56", "0.1-0.5-0.9/ResNet-56", "0.22"),
        ("memory-size", "10/ResNet-20", "20/ResNet-20", "0.07"),
    ],
)
def test_differences_that_the_paper_or_our_pages_state_follow_from_the_printed_cells(table, worse, better, said):
    assert Decimal(str(cell(table, worse).printed)) - Decimal(str(cell(table, better).printed)) == Decimal(said)


@pytest.mark.parametrize("size", TABLES["small-batch"].rows)
def test_the_paper_prints_less_error_for_mbn_than_for_bn_at_every_batch_size(size):
    assert cell("small-batch", f"{size}/MBN").printed < cell("small-batch", f"{size}/BN").printed
