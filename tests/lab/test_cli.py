"""The command line: what it prints, what it accepts, and how it ends."""

import ast
import graphlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise, product
from pathlib import Path

import pytest
import yaml
from helpers.common import cpu_seconds
from helpers.lab import result_of, tiny
from rich.console import Console

import memnorm
from memnorm import norms
from memnorm.kernels import cpu
from memnorm.lab import checkpoint
from memnorm.lab.cli import COMMANDS
from memnorm.lab.cli import demo as demo_command
from memnorm.lab.console import LogLines, title
from memnorm.lab.listen import Outcome
from memnorm.lab.paper import TABLES
from memnorm.lab.spec import RunSpec, parse_arm
from memnorm.lab.training import Training

QUICK = ["--data", "digits", "--model", "small", "--batch-size", "4", "--iterations", "6", "--evaluations", "2"]
QUICK += ["--test-images", "50", "--threads", "1"]
COMPARE = ["compare", "--batch-sizes", "2,4", "--epochs", "0.02", "--test-images", "50", "--threads", "1"]


def test_help_without_a_command_names_every_command_and_begins_with_examples(call):
    code, out, _ = call("--help")
    assert code == 0
    assert all(f"  {name} " in out for name in COMMANDS)
    assert out.index("examples:") < out.index("commands:")


def test_an_unknown_command_is_wrong_usage_and_the_message_lists_the_commands(call):
    code, out, err = call("tran")
    assert (code, out) == (2, "")
    assert "train" in err


def test_help_shows_a_default_as_one_would_write_it(call):
    out = " ".join(call("train", "--help")[1].split())
    assert "or one constant (default: 0.1,0.5,0.9)" in out
    assert "the same for every norm (default: 0)" in out
    assert "augment the training images (default: true)" in out


def test_lists_of_numbers_are_written_with_commas(call):
    named = [
        result_of(call("train", *QUICK, "--norm", "mbn", "--strength", text, "--milestones", "0.5", "--json"))["name"]
        for text in ("0.1,0.9", "[0.1, 0.9]")
    ]
    assert named[0] == named[1]
    code, _, err = call("train", *QUICK, "--norm", "mbn", "--strength", "0.1,high")
    assert code == 2
    assert "strength" in err


PLACES = "data-root download json runs"
COMPUTED = "channels-last checkpoint-seconds device keep-weights tensorboard threads workers"
SHARED = """accumulate augment base-batch-size classes-per-batch config data data-options evaluations learning-rate
    milestones model model-options momentum optimizer precision pretrained pretrained-sha256 print-config
    recalibrate sampler scaling schedule strength task test-images
    train-images trust-config warmup weight-decay"""
FLAGS = {
    "demo": "json out",
    "report": "json out runs",
    "data": "data-root json",
    "check": "device json",
    "info": "data-root json",
    "bench": "busy json models out scale threads",
    "reproduce": f"{PLACES} {COMPUTED} dry-run jobs launcher list only out scale seeds",
    "train": f"""{PLACES} {COMPUTED} {SHARED} batch-size every fraction holdout iterations norm norm-options
    processes scheme seed""",
    "compare": f"{PLACES} {COMPUTED} {SHARED} batch-sizes epochs jobs norms out rates seeds tune",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_shows_examples_first_and_these_flags(call, command):
    """A flag is a promise: this list changes on purpose only."""
    code, out, _ = call(command, "--help")
    assert code == 0
    assert out.index("examples:") < out.index("options:")
    assert not re.search(r"<class|Posix|type:|required|None|null|Literal|tuple", out)
    found = set(re.findall(r"^  (?:-\w, )?--([\w-]+)", out, re.MULTILINE)) - {"help"}
    assert sorted(found) == sorted(FLAGS[command].split())


def test_train_prints_its_result_to_stdout_and_progress_to_stderr(call):
    code, out, err = call("train", *QUICK, "--norm", "mbn", "--scheme", "double")
    assert code == 0
    assert "the headline number" in out
    assert "begins, 6 iterations" in err
    assert "begins" not in out


@pytest.mark.parametrize(
    ("words", "scheme"),
    [
        (["--norm", "mbn"], "double"),
        (["--norm", "mbn-2"], "double"),
        (["--norm", "mbn-1"], "single"),
        (["--norm", "mbn", "--scheme", "single"], "single"),
        (["--norm", "bn"], "single"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_norm_means_the_same_run_in_train_and_compare(call, words, scheme):
    name = result_of(call("train", *QUICK, *words, "--json"))["name"]
    norm = words[1].partition("-")[0]
    spec = RunSpec(data="digits", model="small", batch_size=4, iterations=6, evaluations=2, test_images=50)
    assert name == spec.but(norm=norm, scheme=scheme).name
    if "--scheme" not in words:
        assert parse_arm(words[1]) == {"norm": norm, "scheme": scheme}


def test_train_from_a_file_equals_train_from_flags_and_later_flags_override_it(call, tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"data": "digits", "model": "small", "batch_size": 4, "seed": 5}))
    rest = ["--iterations", "6", "--evaluations", "2", "--test-images", "50", "--threads", "1", "--json"]
    from_flags = result_of(call("train", *QUICK, "--seed", "7", "--json"))
    from_file = result_of(call("train", "--config", "run.yaml", *rest, "--seed", "7"))
    assert from_file == from_flags


def test_a_printed_configuration_can_be_read_back(call, tmp_path):
    code, out, _ = call("train", *QUICK, "--norm", "mbn", "--strength", "[0.5]", "--print-config")
    assert code == 0
    (tmp_path / "run.yaml").write_text(out)
    again = call("train", "--config", "run.yaml", "--print-config")[1]
    assert yaml.safe_load(again) == yaml.safe_load(out)
    assert yaml.safe_load(out)["strength"] == [0.5]


def test_underscores_in_flags_are_as_good_as_dashes(call):
    words = [word.replace("-", "_").replace("__", "--", 1) if word.startswith("--") else word for word in QUICK]
    assert result_of(call("train", *words, "--json")) == result_of(call("train", *QUICK, "--json"))


WRONG = {
    "train": [
        (["--batch-size", "x"], "Expected a whole number. Got value: x"),
        (["--optimizer", "adam"], "Expected one of sgd, adamw. Got value: adam"),
        (["--batch-size", "0"], "batch_size must be at least 1; got 0"),
        (["--batchsize", "4"], "--batchsize"),
        (["--norm", "foo"], "there is no norm 'foo'"),
        (["--norm", "group", "--scheme", "double"], "Double-Forward needs a norm that records"),
        (["--norm", "mbn", "--norm-options", "{memory: 3}"], "memory"),
        (["--norm", "bn", "--strength", "[0.5]"], "strength belongs to the norm mbn"),
        (["--model", "resnet21"], "resnet20"),
        (["--model", "nowhere.models:net"], "nowhere"),
        (["--data", "cifar-10"], "Did you mean"),
        (["--data-options", "{size: 3}"], "unknown option 'size'"),
        (["--batch-size", "5000"], "batch_size must be between 1 and the number of training images"),
        (["--device", "abacus"], "device 'abacus' cannot be used"),
        (["--config", "missing.yaml"], "missing.yaml"),
        (["--sampler", "sort"], "sampler"),
        (["--runs", __file__], "is a file; runs are kept in a folder"),
    ],
    "compare": [
        (["--norms", "bn,foo"], "there is no norm 'foo'"),
        (["--model", "nowhere.models:net"], "there is no module 'nowhere'"),
        (["--jobs", "-1"], "--jobs must not be negative"),
        (["--norms", ""], "--norms needs at least one"),
        (["--norms", "group-2"], "Double-Forward needs"),
        (["--norms", "two_way:decoy=1"], "unknown option decoy for norm 'two_way'; its options are decay, strength"),
        (["--norms", "bn:decay=1"], "unknown option decay; it has no options"),
        (["--norms", "two_way:decay=2"], "decay must lie in (0, 1]; got 2"),
        (["--norms", "two_way:decay"], "options are written as two_way:decay=0.75:warmup=20; got 'decay'"),
        (["--norms", "two_way:decay=1:decay=1"], "the option decay is given twice"),
        (["--norms", "two_way:decay={"], "the value of decay must be a number, a text, true, false or null"),
        (["--norms", "two_way:decay=nan"], "norm_options must be a mapping of names to plain values"),
        (["--norms", "mbn:strength=2"], "strength must lie in [0, 1]; got [2.0]"),
        (["--norms", "mbn:strength=high"], "strength must be a list of numbers"),
        (["--batch-sizes", "2,x"], "--batch-sizes needs positive numbers"),
        (["--batch-sizes", "0"], "--batch-sizes needs positive numbers"),
        (["--seeds", "0"], "--seeds needs at least one"),
        (["--tune", "--rates", "fast"], "--rates needs positive numbers"),
    ],
    "reproduce": [
        (["table9"], "no table or figure 'table9'"),
        (["memory-size", "--only", "11/*"], "matches nothing"),
        (["memory-size", "--scale", "huge"], "scale"),
        (["memory-size", "--seeds", "0"], "--seeds"),
        (["cifar10", "--only", "NormProp/ResNet-*", "--scale", "smoke"], "none of these cells can be run"),
        ([], "NAME"),
    ],
    "data": [(["get"], "name a data set"), (["get", "cifar-10"], "Did you mean"), (["fetch"], "fetch")],
}


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [pytest.param(name, *one, id=f"{name} {' '.join(one[0])}") for name, rows in WRONG.items() for one in rows],
)
def test_wrong_usage_exits_with_2_says_what_is_wrong_and_runs_nothing(call, tmp_path, command, words, message):
    code, out, err = call(command, *{"train": QUICK, "compare": COMPARE[1:]}.get(command, []), *words)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert not list(tmp_path.glob("runs/*/spec.yaml"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--data", "cifar10", "--iterations", "1"], "memnorm data get cifar10 --data-root {data}"),
        (["reproduce", "memory-size", "--scale", "reduced"], "memnorm data get cifar10 --data-root {data}"),
        (["data", "get", "imagenet"], "image-net.org"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_missing_data_exit_with_3_and_the_way_to_get_them(call, tmp_path, words, message):
    code, out, err = call(*words)
    assert (code, out) == (3, "")
    assert message.format(data=tmp_path / "data") in err


@pytest.mark.parametrize(
    "rate", [("--learning-rate", "1e30"), ("--learning-rate", "3.4e38"), ("--weight-decay", "3.4e38")]
)
def test_a_diverged_run_is_recorded_and_exits_with_1(call, rate):
    code, out, _ = call("train", *QUICK, *rate)
    assert code == 1
    assert "diverged" in out


def test_control_characters_in_a_record_do_not_reach_the_terminal(call, tmp_path):
    call("train", *QUICK)
    (path,) = tmp_path.glob("runs/*/result.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "name": "\x1b[2J\x9b2J"}))
    code, _, err = call("train", *QUICK)
    assert code == 1
    assert r"belongs to \x1b[2J\x9b2J;" in err


def test_tensorboard_writes_event_files(call, tmp_path):
    pytest.importorskip("tensorboard")
    assert call("train", *QUICK, "--tensorboard")[0] == 0
    assert list(tmp_path.glob("runs/*/tensorboard/events*"))


MINE = """
import pathlib
from torch import nn
pathlib.Path("imported").touch()
def net(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
"""


@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize("trust", [{}, {"trust_config": True}], ids=["plain", "the file trusts itself"])
def test_a_model_that_a_file_names_is_not_imported_without_trust(call, tmp_path, command, trust):
    (tmp_path / "mine_in_a_file.py").write_text(MINE)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"model": "mine_in_a_file:net", "data": "digits", **trust}))
    for words in ([], ["--model", "small"]):  # the file comes later and wins
        code, out, err = call(command, *words, "--config", "run.yaml")
        assert (code, out) == (2, "")
        assert "mine_in_a_file:net" in err
        assert "--trust-config" in err
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize("words", [["--trust-config"], ["--model", "mine_trusted:net"], ["--model=mine_trusted:net"]])
def test_a_model_that_a_file_names_is_used_where_the_command_line_trusts_it(call, tmp_path, words):
    (tmp_path / "mine_trusted.py").write_text(MINE)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"model": "mine_trusted:net"}))
    rest = [word for word in QUICK if word not in ("--model", "small")]
    assert result_of(call("train", "--config", "run.yaml", *rest, *words, "--json"))["parameters"] == 650


def test_report_reads_a_comma_list_of_folders(call, tmp_path):
    for folder, seed in (("here", "0"), ("there", "1")):
        call("train", *QUICK, "--runs", folder, "--seed", seed)
    assert call("report", "--runs", "here,there", "--out", "out")[0] == 0
    assert len((tmp_path / "out/csv/runs.csv").read_text().splitlines()) == 3


ALIAS_BOMB = "a: &a [x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in pairwise("abcdefghijklm")
)


@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize(
    ("text", "reason"),
    [(ALIAS_BOMB, "aliases"), (f"model: {'[' * 5000}{']' * 5000}", "nested")],
    ids=["aliases", "deep"],
)
def test_a_hostile_config_file_is_refused(call, tmp_path, command, text, reason):
    (tmp_path / "run.yaml").write_text(text)
    code, _, err = call(command, "--config", "run.yaml")
    assert code == 2
    assert reason in err
    assert len(err) < 1000


def test_report_lists_what_it_wrote(call, tmp_path):
    call("train", *QUICK)
    code, out, _ = call("report", "--out", "there", "--json")
    assert code == 0
    assert "there/report.html" in json.loads(out)
    assert all((tmp_path / name).exists() for name in json.loads(out))


def test_data_list_says_what_is_here(call, tmp_path):
    rows = {row["name"]: row for row in json.loads(call("data", "list", "--json")[1])["data"]}
    assert rows["digits"]["here"]
    assert not rows["cifar10"]["here"]


def test_verify_of_missing_data_exits_with_1_and_names_the_files(call):
    code, out, _ = call("data", "verify", "cifar10", "digits")
    assert code == 1
    assert "data_batch_1" in out
    assert "digits: no problems" in out


def test_no_command_loads_a_heavy_library_before_it_needs_it():
    program = f"""
import importlib, sys
for name in {list(COMMANDS)}:
    importlib.import_module(f"memnorm.lab.cli.{{name}}")
print(*{{"jinja2", "matplotlib", "pandas", "PIL", "scipy", "sklearn"}} & {{*sys.modules}})
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_imports_of_the_lab_go_one_way():
    """TopologicalSorter raises CycleError, with the cycle."""
    root = Path(memnorm.__file__).parent.parent
    paths = {".".join(path.relative_to(root).with_suffix("").parts): path for path in root.glob("memnorm/lab/**/*.py")}
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    graph = {name: set() for name in paths}
    for name, path in paths.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("memnorm.lab"):
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                graph[name] |= {one if one in paths else node.module for one in inner}
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(paths)


def test_a_loop_of_links_is_skipped_with_a_sentence(tmp_path):
    (tmp_path / "images/train/a").mkdir(parents=True)
    (tmp_path / "images/val").mkdir()
    (tmp_path / "images/train/a/loop.png").symlink_to("loop.png")
    command = [sys.executable, "-m", "memnorm.lab", "data", "verify", "images"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.stderr.startswith("memnorm: skipped 'images/train/a/loop.png'")
    assert result.returncode == 1


def test_info_tells_versions_threads_kernels_and_data_root(call, tmp_path):
    facts = json.loads(call("info", "--json")[1])
    assert facts["data root"] == str(tmp_path / "data")
    assert facts["norms"][:1] == ["bn"]
    assert {"memnorm", "torch", "threads", "device", "machine"} <= facts.keys()
    assert facts["kernels"] == cpu.description()
    assert "torch" in call("info")[1]


def test_demo_shows_the_plot_first_then_equations_and_cost(call, tmp_path, monkeypatch):
    monkeypatch.setattr(demo_command, "SEEDS", 2)
    monkeypatch.setattr(demo_command, "IMAGES", 32)
    monkeypatch.setattr(demo_command, "cores", lambda: 0)
    code, out, _ = call("demo")
    assert code == 0
    difference = float(re.search(r"Largest difference found: (\S+)\.\s", out)[1])
    assert difference < 1e-12
    assert re.search(r"^MBN-2 +[\d.]+ +[\d.]+ +[\d.]+ to [\d.]+$", out, re.MULTILINE)
    assert re.search(r"^two-way +[\d.]+ +[\d.]+ +[\d.]+ to [\d.]+$", out, re.MULTILINE)
    for norm, size in product(("BN", "TWO-WAY"), (1, 2, 4, 16)):
        assert re.search(rf"^{norm} +{size} .*\(n = 2\)", out, re.MULTILINE)
    bars = re.findall(r"^(?:\d+)? +(BN|TWO-WAY) +(█*) ([\d.]+) %$", out, re.MULTILINE)
    assert [norm for norm, _, _ in bars] == ["BN", "TWO-WAY"] * 4
    longest = max(float(error) for _, _, error in bars)
    assert all(abs(len(bar) - 50 * float(error) / longest) < 1 for _, bar, error in bars)
    assert f"micro-batches of 1: BN {bars[0][2]} %, TWO-WAY {bars[1][2]} %; " in out
    assert out.index("█") < out.index("Largest difference found") < out.index("ms per step", out.index("Largest"))
    assert "docs/evidence.md" in out
    page = (tmp_path / "demo/report.html").read_text()
    assert page.count("<svg") == 1
    first = page[page.index('id="section-1"') : page.index('id="section-2"')]
    assert first.index("<svg") < first.index("Mean test error with micro-batches of 1")
    assert "micro-batch size" in first
    assert re.search(r"\(n = 2\)", first)
    assert page.index("(n = 2)") < page.index("<dt>Software</dt>")
    markdown = (tmp_path / "demo/report.md").read_text()
    assert markdown.index(".svg)") < markdown.index("Mean test error") < markdown.index("- Software: ")
    assert markdown.count(".svg)") == 1
    specs = [RunSpec.from_yaml(path.read_text()) for path in (tmp_path / "demo/runs").glob("*/spec.yaml")]
    assert {(one.batch_size, one.images_per_step, one.iterations) for one in specs} == {
        (size, 16, 2) for size in (1, 2, 4, 16)
    }


def without_the_lab_s_packages(*words):
    lab = ("filelock", "jinja2", "jsonargparse", "matplotlib", "PIL", "rich", "scipy", "sklearn", "yaml")
    program = f"import sys; sys.modules.update(dict.fromkeys({lab})); from memnorm.lab.cli import main; "
    command = [sys.executable, "-c", f"{program} sys.exit(main(sys.argv[1:]))", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_without_the_lab_s_packages_the_command_says_how_to_get_them():
    result = without_the_lab_s_packages("train")
    assert result.returncode == 1
    assert "in a clone with: pip install '.[lab]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_info_works_without_the_lab_s_packages():
    result = without_the_lab_s_packages("info", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["memnorm"] == memnorm.__version__


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupted_command_exits_with_130_after_saving_and_resumes_later(tmp_path, number):
    words = [sys.executable, "-m", "memnorm.lab", "train", *QUICK, "--iterations", "3000", "--evaluations", "3"]
    words[words.index("6")] = "3000"
    environment = {**os.environ, "MEMNORM_DATA": str(tmp_path)}
    process = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment)
    assert "begins" in process.stderr.readline()
    time.sleep(0.5)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "everything is saved" in err
    again = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment)
    assert "resumes at iteration" in again.stderr.readline()
    again.kill()
    again.communicate()


def test_compare_prints_a_table_and_a_verdict_and_writes_a_report(call, tmp_path):
    code, out, _ = call(*COMPARE, "--norms", "bn,mbn", "--seeds", "2")
    assert code == 0
    for arm, size in (("BN", 2), ("BN", 4), ("MBN-2", 2), ("MBN-2", 4)):
        assert re.search(rf"^{arm} +{size} .*\(n = 2\)", out, re.MULTILINE)
    assert "batch size" in out.lower()
    assert (tmp_path / "compare/report.html").exists()


def test_compare_gives_every_batch_size_the_same_number_of_images(call, tmp_path):
    rows = result_of(call(*COMPARE, "--norms", "bn", "--seeds", "1", "--json"))["rows"]
    assert [row["batch_size"] for row in rows] == [2, 4]
    specs = [yaml.safe_load(path.read_text()) for path in tmp_path.glob("runs/*/spec.yaml")]
    assert {spec["batch_size"] * spec["iterations"] for spec in specs} == {28}
    assert {spec["train_images"] for spec in specs} == {1296}  # no short last batch


def test_compare_with_one_seed_claims_nothing(call):
    answer = result_of(call(*COMPARE, "--norms", "bn,mbn", "--seeds", "1", "--json"))
    assert answer["verdict"]["use"] == []
    assert "no claim" in answer["verdict"]["headline"]


def test_tuning_looks_at_held_out_training_images_only(call, tmp_path):
    rows = result_of(call(*COMPARE, "--norms", "bn", "--seeds", "2", "--tune", "--rates", "0.1,1e-6", "--json"))["rows"]
    assert all(row["tuned"] for row in rows)
    specs = [yaml.safe_load(path.read_text()) for path in tmp_path.glob("runs/*/spec.yaml")]
    tuning, counted = [s for s in specs if s["seed"] == 1000], [s for s in specs if s["seed"] != 1000]
    assert len(tuning) == 4
    assert all(spec["holdout"] == 129 for spec in tuning)
    assert all(spec["holdout"] == 0 for spec in counted)
    assert {spec["train_images"] for spec in specs} == {1297 - 129}


def test_compare_takes_options_per_norm_and_shows_them(call, tmp_path):
    words = ["--norms", "bn,two_way:decay=0.75,two_way:decay=9e-1:warmup=3:center=null", "--seeds", "1"]
    code, out, err = call(*COMPARE, *words)
    assert code == 0, err
    for label in ("BN", "TWO-WAY decay=0.75", "TWO-WAY center=None decay=0.9 warmup=3"):
        assert re.search(rf"^{label} +2 ", out, re.MULTILINE)
    specs = [yaml.safe_load(path.read_text()) for path in tmp_path.glob("runs/*-b2-*/spec.yaml")]
    found = sorted((spec["norm_options"] for spec in specs), key=len)
    assert found == [{}, {"decay": 0.75}, {"decay": 0.9, "warmup": 3, "center": None}]


def test_the_strength_of_a_comparison_is_that_of_the_arms_that_have_one(call, tmp_path):
    result_of(call(*COMPARE, "--norms", "bn,mbn,mbn:strength=0.3", "--strength", "0.5", "--seeds", "1", "--json"))
    specs = [yaml.safe_load(path.read_text()) for path in tmp_path.glob("runs/*-b2-*/spec.yaml")]
    assert sorted((spec["norm"], spec["strength"]) for spec in specs) == [
        ("bn", [0.1, 0.5, 0.9]),
        ("mbn", [0.3]),
        ("mbn", [0.5]),
    ]


def test_train_reads_a_norm_with_options(call):
    mixed = ["--norm", "two_way:decay=0.75", "--norm-options", "{warmup: 3}"]
    own = result_of(call("train", *QUICK, *mixed, "--json"))["name"]
    both = ["--norm", "two_way", "--norm-options", "{decay: 0.75, warmup: 3}"]
    assert result_of(call("train", *QUICK, *both, "--json"))["name"] == own


def test_compare_shows_recalibrated_errors_of_the_norms_that_have_statistics(call, tmp_path):
    words = [*COMPARE, "--norms", "bn,two_way:decay=0.9,group", "--accumulate", "2", "--seeds", "2"]
    code, out, err = call(*words, "--recalibrate", "20")
    assert code == 0, err
    assert re.search(r"^norm .*recalibrated %", out, re.MULTILINE)
    rows = result_of(call(*words, "--recalibrate", "20", "--json"))["rows"]
    assert {row["norm"] for row in rows if row["test_error_recalibrated"] is None} == {"GROUP"}
    stored = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*-bn-*-b2x2-*/result.json")]
    mean = sum(one["final"]["test_error_recalibrated"] for one in stored) / 2
    (bn,) = [row for row in rows if (row["norm"], row["batch_size"]) == ("BN", 2)]
    assert bn["test_error_recalibrated"] == pytest.approx(mean)
    assert "recalibrated (%)" in (tmp_path / "compare/report.html").read_text()
    assert "recalibrated (%)" in (tmp_path / "compare/report.md").read_text()
    assert any(f",{mean}," in path.read_text() for path in tmp_path.glob("compare/csv/*.csv"))
    assert "recalibrated" not in call(*words)[1]


def test_tuning_does_not_recalibrate(call, tmp_path):
    words = ["--norms", "bn", "--seeds", "1", "--tune", "--rates", "0.1", "--recalibrate", "20", "--json"]
    result_of(call(*COMPARE, *words))
    specs = [yaml.safe_load(path.read_text()) for path in tmp_path.glob("runs/*/spec.yaml")]
    assert {(spec["holdout"] > 0, spec["recalibrate"]) for spec in specs} == {(True, 0), (False, 20)}


@pytest.mark.parametrize("kind", ["pipe", "endless device"])
def test_compare_leaves_out_a_run_whose_metrics_are_no_file(call, tmp_path, kind):
    words = [*COMPARE, "--norms", "bn", "--seeds", "2", "--json"]
    result_of(call(*words))
    path = min(tmp_path.glob("runs/*-b2-s1-*/metrics.jsonl"))
    path.unlink()
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    code, out, err = call(*words)
    found = json.loads(out)
    assert code == 1
    assert [(row["n"], row["failed"]) for row in found["rows"]] == [(1, 1), (2, 0)]
    assert "not a regular file" in found["failed"][0]["message"]
    assert "Traceback" not in err


@pytest.fixture
def no_steps(monkeypatch):
    def refuse(*_arguments):
        raise AssertionError("a network was trained")

    monkeypatch.setattr(Training, "__init__", refuse)


def test_reproduce_list_shows_cells_with_the_paper_s_number_and_runs_nothing(call, tmp_path, no_steps):
    code, out, _ = call("reproduce", "small-batch", "cifar10", "--list")
    assert code == 0
    assert re.search(r"small-batch +8/MBN +15\.37 +7,820 +to do", out)
    assert re.search(r"cifar10 +BRN/ResNet-20 +8\.18 +7,820 +to do", out)
    assert re.search(r"cifar10 +NormProp/ResNet-20 .*does not apply", out)
    assert not (tmp_path / "runs").exists()


def test_reproduce_dry_run_shows_the_queue_and_runs_nothing(call, tmp_path, no_steps):
    code, out, _ = call("reproduce", "memory-size", "--scale", "smoke", "--dry-run")
    assert code == 0
    assert "3 runs to do" in out
    assert not (tmp_path / "runs").exists()


def test_reproduce_dry_run_shows_how_far_a_run_came(call, tmp_path, no_steps):
    words = ["reproduce", "memory-size", "--scale", "smoke", "--only", "10/*", "--dry-run", "--json"]
    (whole,) = json.loads(call(*words)[1])
    folder = tmp_path / "runs" / whole["run"]
    folder.mkdir(parents=True)
    checkpoint.save(folder, 1, {})
    assert json.loads(call(*words)[1]) == [{**whole, "iterations": 2, "done": 1}]


def test_reproduce_runs_the_chosen_cells_skips_them_the_second_time_and_reports(call, tmp_path):
    words = ["reproduce", "memory-size", "--scale", "smoke", "--only", "1*/*", "--threads", "1"]
    code, out, err = call(*words)
    assert code == 0
    assert "7.87" not in out  # smoke numbers are never next to printed ones
    assert len(list(tmp_path.glob("runs/*/result.json"))) == 1
    assert "begins" in err
    assert "smoke" in (tmp_path / "report/report.html").read_text()
    assert call(*words)[1] == out
    assert "begins" not in call(*words)[2]
    listing = call("reproduce", "memory-size", "--scale", "smoke", "--list", "--threads", "1")[1]
    assert re.search(r"10/ResNet-20 .*done", listing)
    assert re.search(r"40/ResNet-20 .*to do", listing)


def test_cells_whose_norm_is_not_registered_are_listed_as_such(call, monkeypatch):
    monkeypatch.delitem(norms._REGISTRY, "brn")
    out = call("reproduce", "cifar10", "--scale", "smoke", "--only", "B*/ResNet-20", "--list", "--threads", "1")[1]
    assert re.search(r"cifar10 +BRN/ResNet-20 +8\.18 .*'brn' is not registered", out)
    assert re.search(r"cifar10 +BN/ResNet-20 +8\.41 .*to do", out)


@pytest.mark.slow
def test_every_cell_of_the_paper_runs_at_smoke_scale_within_90_seconds(call, tmp_path):
    before = cpu_seconds()
    code, out, err = call("reproduce", "all", "--scale", "smoke", "--jobs", "2")
    assert code == 0, err
    assert cpu_seconds() - before < 2 * 90  # in two processes
    assert "to do" not in out
    assert "FAILED" not in err
    page = (tmp_path / "report/report.html").read_text()
    done = len(list(tmp_path.glob("runs/*/result.json")))
    assert done == 61
    smoke = page[page.index("smoke scale") :]
    for table in TABLES.values():
        assert all(row in smoke and column in smoke for row in table.rows for column in table.columns)


def test_every_registered_norm_runs_in_a_comparison(call, tmp_path):
    words = ["compare", "--norms", ",".join(norms.available()), "--batch-sizes", "2", "--epochs", "0.01", "--json"]
    rows = result_of(call(*words, "--seeds", "1", "--test-images", "20", "--threads", "1"))["rows"]
    assert {row["norm"].removesuffix("-2").lower().replace("-", "_") for row in rows} == set(norms.available())
    for row in rows:
        assert (row["n"], row["failed"], row["diverged"]) == (1, 0, 0), row
        assert 0 <= row["test_error"] <= 100
    assert (tmp_path / "compare/report.html").exists()


PLAIN_TITLE = "MBN-2 helpers.lab:net synthetic batch 8 seed 0"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"strength": (0.5,)}, " strength=[0.5]"),
        ({"norm_options": {"decay": 0.5}}, " decay=0.5"),
        ({"every": 4}, " every=4"),
        ({"learning_rate": 0.03, "holdout": 4}, " learning_rate=0.03 holdout=4"),
    ],
)
def test_the_title_of_a_run_has_the_settings_that_differ_from_the_defaults(changes, words):
    spec = tiny(**{"norm": "mbn", "scheme": "double", "learning_rate": 0.1, **changes})
    assert title(spec) == PLAIN_TITLE.replace("MBN-2", f"MBN-2{words}")


def test_a_log_has_a_line_when_a_run_begins_and_when_it_ends():
    spec = tiny(learning_rate=0.1)
    console = Console(file=io.StringIO(), width=200)
    lines = LogLines(console, 2)
    lines.began(spec, 0)
    lines.began(spec, 1_234)
    lines.ended(Outcome(spec, "finished", result={"final": {"test_error": 12.345}}))
    lines.ended(Outcome(spec, "diverged", result={"diverged_at": 7}))
    lines.ended(Outcome(spec, "failed", "[out] of luck"))
    name = "BN helpers.lab:net synthetic batch 8 seed 0"
    assert console.file.getvalue().splitlines() == [
        f"{name} begins, 12 iterations",
        f"{name} resumes at iteration 1,234, 12 iterations",
        f"[1/2] {name}: test error 12.35 %",
        f"[2/2] {name} diverged at iteration 7",
        f"[3/2] {name} FAILED: [out] of luck",
    ]


def test_control_characters_in_a_message_do_not_reach_the_terminal():
    console = Console(file=io.StringIO(), width=200)
    LogLines(console, 1).message(tiny(learning_rate=0.1), "is being worked on by \x1b[2Jsomeone")
    assert r"worked on by \x1b[2Jsomeone" in console.file.getvalue()
