"""A specification is checked when it is made, and its name depends on what it says and on nothing else."""

import dataclasses
import os
import random
import re

import pytest
import yaml

from memnorm.lab.errors import UsageError
from memnorm.lab.spec import Execution, RunSpec, arm_name

# Names of stored runs: they may never change, whatever is added to RunSpec.
GOLDEN = {
    "cifar10-resnet20-bn-single-b128-s0-44136fa355b3": RunSpec(),
    "digits-small-mbn-double-b4-s3-c38566204d8c": RunSpec(
        model="small",
        data="digits",
        norm="mbn",
        norm_options={"memory_size": 10},
        scheme="double",
        every=2,
        fraction=0.5,
        strength=(0.5,),
        batch_size=4,
        iterations=600,
        learning_rate=0.05,
        schedule="cosine",
        warmup=10,
        train_images=200,
        seed=3,
    ),
}

# What a stored run means by the fields that it leaves out: these may never change either.
DEFAULTS = """
    {model: resnet20, model_options: {}, data: cifar10, data_options: {}, train_images: null, test_images: null,
     holdout: 0, augment: true, sampler: shuffle, classes_per_batch: 2, norm: bn, norm_options: {}, scheme: single,
     every: 1, fraction: 1.0, strength: [0.1, 0.5, 0.9], batch_size: 128, iterations: 78200, learning_rate: 0.1,
     scaling: none, base_batch_size: 128, schedule: step, milestones: [0.4, 0.6], warmup: 0, momentum: 0.9,
     weight_decay: 0.0001, precision: float32, evaluations: 20, recalibrate: 0, seed: 0, optimizer: sgd,
     task: classification, pretrained: null, pretrained_sha256: null}"""

BAD = [
    ({"model": 3}, "model must be a text; got 3"),
    (
        {"model_options": [1]},
        "model_options must be a mapping of names to plain values (numbers, texts, lists, mappings);",
    ),
    ({"norm_options": {1: 2}}, "norm_options must be a mapping of names to plain values"),
    ({"data": None}, "data must be a text; got None"),
    ({"augment": 1}, "augment must be true or false; got 1"),
    ({"train_images": 0}, "train_images must be at least 1; got 0"),
    ({"train_images": "all"}, "train_images must be int | null; got 'all'"),
    ({"test_images": -1}, "test_images must be at least 1; got -1"),
    ({"test_images": True}, "test_images must be int | null; got True"),
    ({"holdout": -1}, "holdout must not be negative; got -1"),
    ({"sampler": "random"}, "sampler must be one of shuffle, few-classes, sorted; got 'random'"),
    ({"classes_per_batch": 0}, "classes_per_batch must be at least 1; got 0"),
    ({"scheme": "triple"}, "scheme must be one of single, double; got 'triple'"),
    ({"scheme": []}, "scheme must be one of single, double; got"),
    ({"scheme": "double", "every": 0}, "every must be at least 1; got 0"),
    ({"scheme": "double", "fraction": 0}, "fraction must be above 0 and at most 1; got 0.0"),
    ({"scheme": "double", "fraction": 1.1}, "fraction must be above 0 and at most 1; got 1.1"),
    ({"every": 2}, "every and fraction belong to scheme: double"),
    ({"fraction": 0.5}, "every and fraction belong to scheme: double"),
    ({"norm": "mbn", "strength": [0.5, 1.5, 0.5]}, "strength must lie in [0, 1]; got [0.5, 1.5, 0.5]"),
    ({"norm": "mbn", "strength": [-0.1]}, "strength must lie in [0, 1]; got [-0.1]"),
    ({"norm": "mbn", "strength": [0.1, 0.5]}, "strength needs one value, or 3 for 2 milestones; got 2"),
    ({"norm": "mbn", "strength": []}, "strength needs one value, or 3 for 2 milestones; got 0"),
    ({"norm": "mbn", "strength": [0.1, "0.5", 0.9]}, "strength must be a list of numbers; got"),
    ({"norm": "mbn", "strength": [float("nan")]}, "strength must be a list of numbers; got"),
    ({"norm": "mbn", "strength": 0.5}, "strength must be a list of numbers; got 0.5"),
    ({"strength": [0.5]}, "strength belongs to the norm mbn; bn has none"),
    ({"norm": "mbn", "norm_options": {"strength": 0.5}}, "give strength as a field of its own, not in norm_options"),
    ({"model_options": {"classes": 5}}, "model_options cannot hold 'classes': the run sets it"),
    ({"data_options": {"root": "x"}}, "data_options cannot hold 'root': the run sets it"),
    ({"norm": "mbn", "norm_options": {"model": 1}}, "norm_options cannot hold 'model': the run sets it"),
    ({"batch_size": 0}, "batch_size must be at least 1; got 0"),
    ({"batch_size": 8.0}, "batch_size must be a whole number; got 8.0"),
    ({"base_batch_size": 0}, "base_batch_size must be at least 1; got 0"),
    ({"iterations": 0}, "iterations must be at least 1; got 0"),
    ({"iterations": True}, "iterations must be a whole number; got True"),
    ({"learning_rate": 0}, "learning_rate must be positive and finite; got 0.0"),
    ({"learning_rate": float("inf")}, "learning_rate must be positive and finite; got inf"),
    ({"learning_rate": float("nan")}, "learning_rate must be a number; got nan"),
    ({"learning_rate": "0.1"}, "learning_rate must be a number; got '0.1'"),
    ({"learning_rate": 10**400}, "learning_rate must be a number; got 1000"),
    ({"scaling": "cubic"}, "scaling must be one of none, linear, sqrt; got 'cubic'"),
    ({"schedule": "poly"}, "schedule must be one of step, cosine, constant; got 'poly'"),
    ({"milestones": [0.6, 0.4]}, "milestones must be increasing fractions between 0 and 1; got [0.6, 0.4]"),
    ({"milestones": [0.0, 0.4]}, "milestones must be increasing fractions between 0 and 1; got [0.0, 0.4]"),
    ({"milestones": [0.4, 1.0]}, "milestones must be increasing fractions between 0 and 1; got [0.4, 1.0]"),
    ({"warmup": -1}, "warmup must not be negative; got -1"),
    ({"warmup": 5, "iterations": 5}, "warmup must be shorter than the 5 iterations; got 5"),
    ({"momentum": -0.1}, "momentum must not be negative; got -0.1"),
    ({"momentum": 1}, "momentum must be below 1; got 1.0"),
    ({"weight_decay": -1e-4}, "weight_decay must not be negative; got -0.0001"),
    ({"weight_decay": float("inf")}, "weight_decay must be at most 3.4e+38; got inf"),
    ({"weight_decay": 1e308}, "weight_decay must be at most 3.4e+38; got 1e+308"),
    ({"learning_rate": 1e300}, "learning_rate must be at most 3.4e+38 after scaling; got 1e+300"),
    ({"learning_rate": 1e38, "scaling": "linear", "base_batch_size": 1}, "after scaling; got 1.28e+40"),
    ({"batch_size": -1, "scaling": "sqrt"}, "batch_size must be at least 1; got -1"),
    ({"precision": "float16"}, "precision must be one of float32, float64, bfloat16; got 'float16'"),
    ({"evaluations": 0}, "evaluations must be at least 1; got 0"),
    ({"task": "segmentation", "sampler": "sorted"}, "the sampler sorted needs a class per image, and segmentation has"),
    ({"optimizer": "adam"}, "optimizer must be one of sgd, adamw; got 'adam'"),
    ({"optimizer": "adamw", "momentum": 0.5}, "momentum belongs to the optimizer sgd; adamw has its own"),
    ({"pretrained_sha256": "1f"}, "pretrained and pretrained_sha256 belong together"),
    ({"recalibrate": -1}, "recalibrate must not be negative; got -1"),
    ({"recalibrate": 10, "processes": 2}, "recalibrate is for runs in one process"),
    ({"processes": 0}, "processes must be at least 1; got 0"),
    ({"processes": 3, "batch_size": 2}, "3 processes cannot share a batch of 2"),
    ({"seed": -1}, "seed must not be negative; got -1"),
    ({"seed": 0.5}, "seed must be a whole number; got 0.5"),
    ({"seed": 10**309}, "seed must be below 2**63; got 1000"),
    ({"train_images": 2**63}, "train_images must be below 2**63; got 9223"),
]


@pytest.mark.parametrize("name", GOLDEN)
def test_names_of_runs_never_change(name):
    assert GOLDEN[name].name == name


def test_defaults_never_change():
    expected = yaml.safe_load(DEFAULTS)
    assert {name: RunSpec().as_dict()[name] for name in expected} == expected


def test_a_field_at_its_default_does_not_enter_the_digest():
    explicit = RunSpec(**{one.name: getattr(RunSpec(), one.name) for one in dataclasses.fields(RunSpec)})
    assert explicit.identity == {}
    assert explicit.digest == RunSpec().digest


OTHER = """
    {model: nin, model_options: {a: 1}, data: digits, data_options: {a: 1}, train_images: 5, test_images: 5, holdout: 1,
     augment: false, sampler: sorted, classes_per_batch: 3, norm: group, norm_options: {a: 1},
     strength: [0.2, 0.5, 0.9], scheme: double, every: 2, fraction: 0.5, batch_size: 64, accumulate: 2, iterations: 100,
     learning_rate: 0.2, scaling: linear, base_batch_size: 256, schedule: cosine, milestones: [0.5, 0.6], warmup: 3,
     task: segmentation, pretrained_sha256: 1f, optimizer: adamw, momentum: 0.8, weight_decay: 0.0, precision: float64,
     evaluations: 3, recalibrate: 10, processes: 2, seed: 1}"""


def test_every_field_enters_the_digest():
    other = yaml.safe_load(OTHER)
    base = RunSpec(norm="mbn", scheme="double", pretrained="weights.pt", pretrained_sha256="0e")
    assert other.keys() == {one.name for one in dataclasses.fields(RunSpec)} - {"pretrained"}  # its hash enters
    digests = [base.but(**{name: value}).digest for name, value in other.items() if name not in ("scheme", "norm")]
    digests += [RunSpec(norm="mbn").digest, RunSpec(norm="group").digest, base.digest]
    assert len(set(digests)) == len(other) + 1


def test_whole_floats_and_ints_name_the_same_run():
    ours = RunSpec(norm="mbn", learning_rate=1, momentum=0, strength=(0, 1, 1), weight_decay=0)
    theirs = RunSpec(norm="mbn", learning_rate=1.0, momentum=0.0, strength=[0.0, 1.0, 1.0], weight_decay=0.0)
    assert ours == theirs
    assert ours.digest == theirs.digest


def test_the_order_of_fields_and_options_does_not_matter():
    ours = RunSpec.from_yaml("{seed: 1, model_options: {a: 1, b: 2}}")
    theirs = RunSpec.from_yaml("{model_options: {b: 2, a: 1}, seed: 1}")
    assert ours.name == theirs.name


def test_a_specification_returns_from_yaml_as_it_was():
    draw = random.Random(0)
    for _ in range(20):
        spec = RunSpec(
            model=draw.choice(["nin", "a.b:c", "日本", "yes", "null", "1e3", " x: y "]),
            model_options=draw.choice([{}, {"width": 3, "deep": {"list": [1, 2.5, None, "no"]}}]),
            norm="mbn",
            learning_rate=10 ** draw.uniform(-12, 12),
            weight_decay=draw.choice([0, 1e-5, 1e-300]),
            strength=tuple(draw.random() for _ in range(3)),
            train_images=draw.choice([None, 5]),
            seed=draw.randrange(2**40),
        )
        again = RunSpec.from_yaml(spec.as_yaml())
        assert again == spec
        assert again.name == spec.name


def test_a_specification_does_not_change_with_the_options_it_was_made_from():
    options = {"width": 1}
    spec = RunSpec(model_options=options)
    before = spec.digest
    options["width"] = 2
    assert spec.digest == before


@pytest.mark.parametrize(("values", "message"), BAD, ids=[f"{values}"[:60] for values, _ in BAD])
def test_a_wrong_value_is_refused_with_what_was_required_and_what_arrived(values, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        RunSpec(**values)


def test_unknown_names_are_refused_by_name():
    with pytest.raises(UsageError, match=r"unknown name in the specification: 7, batchsize, lr"):
        RunSpec.from_yaml("{lr: 0.1, batchsize: 4, 7: 1, seed: 1}")


@pytest.mark.parametrize("text", ["", "[1, 2]", "seed", "3"])
def test_a_file_that_is_no_mapping_is_refused(text):
    with pytest.raises(UsageError, match="is a mapping of names to values; got"):
        RunSpec.from_yaml(text)


NOT_YAML = {
    "broken": "seed: [1",
    "date that is none": "model: 2020-99-99",
    "number that is none": "seed: !!int x",
    "deep": "model_options: " + "[" * 1000,
    "control character": "seed: \x01",
    "endless number": "seed: " + "9" * 5000,
    "truth that is none": "augment: !!bool x",
    "time that is none": "model: !!timestamp x",
    "alias": "model_options: {a: &a [1], b: *a}",
    "alias of itself": "model_options: &a {x: *a}",
    "aliases that fill the memory": "model_options:\n  a0: &a0 [x, x]\n"
    + "".join(f"  a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)),
}


@pytest.mark.parametrize("text", NOT_YAML.values(), ids=NOT_YAML.keys())
def test_a_file_that_is_not_yaml_is_refused(text):
    with pytest.raises(UsageError, match="not a YAML file"):
        RunSpec.from_yaml(text)


NOT_PLAIN = {
    "date": "model_options: {a: 2020-01-01}",
    "set": "model_options: {a: !!set {x, y}}",
    "bytes": "model_options: {a: !!binary aGVsbG8=}",
    "keys of several kinds": "model_options: {a: {1: 2, b: 3}}",
    "infinity": "model_options: {a: .inf}",
    "no number": "model_options: {a: .nan}",
}


@pytest.mark.parametrize("text", NOT_PLAIN.values(), ids=NOT_PLAIN.keys())
def test_options_that_json_cannot_hold_are_refused(text):
    with pytest.raises(UsageError, match="model_options must be a mapping of names to plain values"):
        RunSpec.from_yaml(text)


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['touch {}']",
        "model: !!python/object/apply:os.system ['touch {}']",
        "model_options: {{x: !!python/object/apply:os.system ['touch {}']}}",
        "model: !!python/name:os.system",
        "model: !!python/object/new:subprocess.Popen [['touch', '{}']]",
    ],
)
def test_hostile_yaml_executes_nothing(text, tmp_path):
    sentinel = tmp_path / "executed"
    with pytest.raises(UsageError, match="not a YAML file"):
        RunSpec.from_yaml(text.format(sentinel))
    assert not sentinel.exists()


def test_the_yaml_of_a_run_needs_no_tags():
    text = RunSpec(norm="mbn", model_options={"a": [1, [2, 3]]}).as_yaml()
    assert "!!" not in text
    assert text.startswith("model: resnet20\nmodel_options:\n")
    assert "model: 日本\n" in RunSpec(model="日本").as_yaml()
    assert yaml.safe_load(text)["strength"] == [0.1, 0.5, 0.9]


STRANGE = ["a/b:c", "../x", "..", ".", "/etc/passwd", "日本語", "a\nb", "a\0b", "C:\\x", "-rf", "~", "x" * 500, ""]


@pytest.mark.parametrize("value", STRANGE)
@pytest.mark.parametrize("field", ["model", "data", "norm"])
def test_names_are_safe_as_names_of_folders(field, value):
    name = RunSpec(**{field: value}).name
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]*", name)
    assert len(os.fsencode(name)) <= 80 + 13
    assert ".." != name != "."


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"threads": -1}, "threads must not be negative; got -1"),
        ({"threads": 1.5}, "threads must be a whole number; got 1.5"),
        ({"workers": -2}, "workers must not be negative; got -2"),
        ({"checkpoint_seconds": -0.5}, "checkpoint_seconds must not be negative; got -0.5"),
        ({"checkpoint_seconds": float("nan")}, "checkpoint_seconds must be a number; got nan"),
        ({"device": 0}, "device must be a text; got 0"),
        ({"keep_weights": "yes"}, "keep_weights must be true or false; got 'yes'"),
    ],
    ids=str,
)
def test_a_wrong_way_to_compute_is_refused(values, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        Execution(**values)


@pytest.mark.parametrize(
    ("norm", "scheme", "arm"),
    [
        ("bn", "single", "BN"),
        ("bn", "double", "BN-2"),
        ("mbn", "single", "MBN-1"),
        ("mbn", "double", "MBN-2"),
        ("layer_norm", "single", "LAYER-NORM"),
    ],
)
def test_arms_are_written_as_in_the_paper(norm, scheme, arm):
    assert arm_name(norm, scheme) == RunSpec(norm=norm, scheme=scheme).arm == arm
