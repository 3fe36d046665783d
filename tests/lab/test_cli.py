"""The command line: what it prints, what it accepts, and how it ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import yaml
from helpers.lab import result_of

import memnorm
from memnorm.kernels import cpu
from memnorm.lab.arms import parse_arm
from memnorm.lab.cli import COMMANDS
from memnorm.lab.cli import demo as demo_command
from memnorm.lab.spec import RunSpec

QUICK = ["--data", "digits", "--model", "small", "--batch-size", "4", "--iterations", "6", "--evaluations", "2"]
QUICK += ["--test-images", "50", "--threads", "1"]


def test_help_without_a_command_names_every_command_and_begins_with_examples(call):
    code, out, _ = call("--help")
    assert code == 0
    assert all(f"  {name} " in out for name in COMMANDS)
    assert out.index("examples:") < out.index("commands:")


def test_no_command_is_wrong_usage(call):
    assert call()[0] == 2


def test_an_unknown_command_is_wrong_usage_and_the_message_lists_the_commands(call):
    code, out, err = call("tran")
    assert (code, out) == (2, "")
    assert "train" in err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_shows_examples_before_options(call, command):
    code, out, _ = call(command, "--help")
    assert code == 0
    assert f"memnorm {command}" in out
    assert out.index("examples:") < out.index("options:")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_no_types_and_calls_nothing_required(call, command):
    _, out, _ = call(command, "--help")
    assert not re.search(r"<class|Posix|type:|required|None|null|Literal|tuple", out)


def test_help_shows_a_default_as_one_would_write_it(call):
    out = " ".join(call("train", "--help")[1].split())
    assert "or one constant (default: 0.1,0.5,0.9)" in out
    assert "the same for every norm (default: 0)" in out
    assert "augment the training images (default: true)" in out


@pytest.mark.parametrize("flag", ["--list", "--dry-run"])
def test_help_says_that_a_listing_times_steps(call, flag):
    out = " ".join(call("reproduce", "--help")[1].split())
    assert re.search(rf"{flag} show the [\w ]+; makes no run, but times a few steps of each kind", out)


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
    milestones model model-options momentum precision print-config sampler scaling schedule strength test-images
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
    processes recalibrate scheme seed""",
    "compare": f"{PLACES} {COMPUTED} {SHARED} batch-sizes epochs jobs norms out rates seeds tune",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_flags_of_a_command_are_these(call, command):
    """A flag is a promise: this list changes on purpose only."""
    _, out, _ = call(command, "--help")
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


def test_train_again_shows_the_same_result_without_training(call):
    first = result_of(call("train", *QUICK, "--json"))
    _, out, err = call("train", *QUICK, "--json")
    assert json.loads(out) == first
    assert "begins" not in err


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch-size", "x"], "batch_size"),
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
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_usage_of_train_exits_with_2_and_says_what_is_wrong(call, words, message):
    code, out, err = call("train", *QUICK, *words)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_missing_data_exit_with_3_and_the_command_that_gets_them(call, tmp_path):
    code, out, err = call("train", "--data", "cifar10", "--iterations", "1")
    assert (code, out) == (3, "")
    assert f"memnorm data get cifar10 --data-root {tmp_path / 'data'}" in err


def test_a_diverged_run_is_recorded_and_exits_with_1(call):
    code, out, _ = call("train", *QUICK, "--learning-rate", "1e30", "--iterations", "20")
    assert code == 1
    assert "diverged" in out


@pytest.mark.parametrize("flag", ["--learning-rate", "--weight-decay"])
def test_the_largest_rates_diverge_without_a_traceback(call, flag):
    code, out, _ = call("train", *QUICK, flag, "3.4e38")
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


def test_tensorboard_without_its_package_says_how_to_get_it(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    code, _, err = call("train", *QUICK, "--tensorboard")
    assert code == 1
    assert "pip install" in err


def test_a_user_s_own_model_trains(call, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def net(num_classes):\n"
        "    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, num_classes))\n"
    )
    result = result_of(call("train", *QUICK, "--model", "mine:net", "--norm", "mbn", "--json"))
    assert result["parameters"] == 4 * 9 + 4 + 8 + 144 * 10 + 10


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


def test_report_of_an_empty_store_says_which_command_makes_runs(call):
    code, _, err = call("report")
    assert code == 2
    assert "memnorm train" in err


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


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["data", "get"], 2, "name a data set"),
        (["data", "get", "cifar-10"], 2, "Did you mean"),
        (["data", "get", "imagenet"], 3, "image-net.org"),
        (["data", "fetch"], 2, "fetch"),
    ],
    ids=str,
)
def test_wrong_usage_of_data(call, words, code, message):
    answer = call(*words)
    assert answer[0] == code
    assert message in answer[2]


def test_verify_of_missing_data_exits_with_1_and_names_the_files(call):
    code, out, _ = call("data", "verify", "cifar10", "digits")
    assert code == 1
    assert "data_batch_1" in out
    assert "digits: all well" in out


def test_info_tells_versions_threads_kernels_and_data_root(call, tmp_path):
    facts = json.loads(call("info", "--json")[1])
    assert facts["data root"] == str(tmp_path / "data")
    assert facts["norms"][:1] == ["bn"]
    assert {"memnorm", "torch", "threads", "device", "machine"} <= facts.keys()
    assert facts["kernels"] == cpu.description()
    assert "torch" in call("info")[1]


def test_demo_reports_equations_cost_and_comparison(call, tmp_path, monkeypatch):
    monkeypatch.setattr(demo_command, "SEEDS", 2)
    monkeypatch.setattr(demo_command, "IMAGES", 24)
    monkeypatch.setattr(demo_command, "cores", lambda: 0)
    code, out, _ = call("demo")
    assert code == 0
    difference = float(re.search(r"Largest difference found: (\S+)\.\s", out)[1])
    assert difference < 1e-12
    assert re.search(r"^MBN-2 +[\d.]+ +[\d.]+ +[\d.]+ to [\d.]+$", out, re.MULTILINE)
    assert re.search(r"^MBN-2 +4 .*\(n = 2\)", out, re.MULTILINE)
    assert "memnorm compare" in out
    page = (tmp_path / "demo/report.html").read_text()
    assert "<svg" in page
    first = page[page.index('id="section-1"') : page.index('id="section-2"')]
    assert "Live comparison" in first
    assert re.search(r"\(n = 2\)", first)
    assert page.index("(n = 2)") < page.index("<dt>Software</dt>")
    markdown = (tmp_path / "demo/report.md").read_text()
    assert markdown.index("(n = 2)") < markdown.index("- Software: ")


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
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
