"""`memnorm evidence` from an empty folder to records, through an interruption."""

import hashlib
import os
import re
import signal
import time

import pytest
from helpers.lab import end, python

from memnorm.lab import checkpoint
from memnorm.lab.cli import main
from memnorm.lab.evidence import MINIATURE, Records, chosen_rate, plan
from memnorm.lab.training import Training

FILES = ["env.json", "metrics.jsonl", "result.json", "spec.yaml"]
COMMAND = """
    import sys
    from memnorm.lab.cli import evidence, main
    evidence.seconds_here = lambda *_, **__: {}
    sys.exit(main(sys.argv[1:]))
    """


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Run the miniature queue in an empty folder, without timing the machine before: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("memnorm.lab.environment.commit", lambda: None)
    monkeypatch.setattr("memnorm.lab.cli.evidence.seconds_here", lambda *_, **__: {})

    def run(*words):
        code = main(["evidence", "--miniature", "--records", "results", "--workers", "0", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


class Watched:
    """A whole queue in this process: what every step began with."""

    def __init__(self, root, patch):
        self.weights, self.images, self.step = {}, {}, Training.step
        patch.setattr("memnorm.lab.environment.commit", lambda: None)
        patch.setattr("memnorm.lab.cli.evidence.seconds_here", lambda *_, **__: {})
        patch.setattr(Training, "step", lambda *arguments: self.watch(*arguments))
        places = ["--runs", str(root / "runs"), "--records", str(root / "results")]
        self.code = main(["evidence", "--miniature", "--workers", "0", *places])
        self.records = Records(root / "runs", root / "results")

    def watch(self, training, iteration, batch, labels):
        spec = training.spec
        if iteration == 0:
            parameters = sorted(training.model.named_parameters())
            text = b"".join(name.encode() + value.detach().numpy().tobytes() for name, value in parameters)
            self.weights.setdefault(spec.seed, set()).add(hashlib.sha256(text).digest())
        seen = batch.numpy().tobytes() + labels.numpy().tobytes()
        self.images.setdefault((spec.seed, iteration), set()).add(hashlib.sha256(seen).digest())
        return self.step(training, iteration, batch, labels)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Watched:
    with pytest.MonkeyPatch.context() as patch:
        return Watched(tmp_path_factory.mktemp("whole"), patch)


def records() -> Records:
    return Records("runs", "results")


def assert_complete(kept: Records) -> None:
    """Every run of every arm has a record of four files, and nothing is left to do."""
    now = plan(MINIATURE, kept.result)
    assert (now.ready, now.locked) == ((), ())
    for spec in now.done:
        folder = kept.kept.run(spec)
        assert sorted(os.listdir(folder.path)) == FILES
        assert folder.result()["name"] == spec.name
    assert len(kept.kept.runs()) == len(now.done)


@pytest.mark.parametrize("jobs", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_queue_killed_and_resumed_leaves_every_record_and_is_then_done(call, tmp_path, jobs):
    words = ["evidence", "--miniature", "--jobs", jobs, "--runs", tmp_path / "runs", "--records", tmp_path / "results"]
    process = python(COMMAND, *words)
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("results/*/result.json")):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        end(process)
    before = {run.spec.digest for run in records().kept.runs()}
    assert 0 < len(before) < 14

    code, out, err = call()
    assert code == 0, err
    assert_complete(records())
    begun = re.findall(r"\] (.*?): test error|\] (.*?) diverged", err)
    assert len(begun) <= 14 - len(before)

    code, out, err = call()
    assert code == 0
    assert "0 runs to do, 14 done" in out
    assert "begins" not in err


def test_every_arm_of_a_seed_starts_alike_and_sees_the_same_images(whole):
    assert whole.code == 0
    assert {seed: len(found) for seed, found in whole.weights.items()} == {0: 1, 1: 1, 1000: 1}
    assert {len(found) for found in whole.images.values()} == {1}
    assert {seed for seed, _ in whole.images} == {0, 1, 1000}


def test_results_are_those_asked_for(whole):
    assert_complete(whole.records)
    result = whole.records.result
    study, tuned = MINIATURE
    *good, diverging = study.arms
    for arm in good:
        assert result(arm.run(0))["final"]["test_error_recalibrated"] is not None
    assert result(diverging.run(0))["status"] == "diverged"
    assert len({result(arm.run(0))["digest_of_weights"] for arm in good}) == len(good)
    assert chosen_rate(tuned, tuned.arms[0], result) == 0.1
    assert tuned.arms[0].run(0, 0.1) == good[0].run(0)
    assert chosen_rate(tuned, tuned.arms[1], result) in tuned.arms[1].rates


def test_what_has_a_record_is_not_run_again_though_its_folder_is_gone(call, tmp_path):
    call("miniature", "--only", "BN")
    for path in sorted((tmp_path / "runs").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    code, out, err = call("miniature", "--only", "BN")
    assert (code, "begins" in err) == (0, False)
    assert "0 runs to do, 2 done" in out


def test_a_run_that_was_done_but_not_copied_is_copied(call):
    call("miniature", "--only", "BN")
    for path in sorted(records().kept.root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    code, _, err = call("miniature", "--only", "BN")
    assert (code, "begins" in err) == (0, False)
    assert len(records().kept.runs()) == 2


def test_the_list_shows_arms_and_what_waits_and_runs_nothing(call):
    code, out, _ = call("--list")
    assert code == 0
    assert re.search(r"miniature-tuned +GROUP +8 +to be chosen +0 of 2, 2 trials to do", out)
    assert "12 runs to do, 0 done" in out
    assert "then up to 4 runs whose learning rate is chosen first" in out
    assert not records().work.root.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["miniatur"], "no study 'miniatur'. Did you mean miniature"),
        (["--only", "XBN*"], "--only xbn*: no such arm. Did you mean"),
        (["--only", "BN,GRUOP"], "--only gruop: no such arm. Did you mean GROUP"),
        (["--jobs", "-1"], "--jobs must not be negative"),
    ],
)
def test_what_there_is_not_is_refused(call, words, message):
    code, _, err = call(*words)
    assert code == 2
    assert message in err


def test_the_miniature_does_not_touch_the_records_of_the_studies(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("memnorm.lab.environment.commit", lambda: None)
    monkeypatch.setattr("memnorm.lab.cli.evidence.seconds_here", lambda *_, **__: {})
    assert main(["evidence", "--miniature", "miniature", "--only", "MBN-2", "--workers", "0"]) == 0
    assert not (tmp_path / "results").exists()
    assert len(list((tmp_path / "runs/miniature-records").iterdir())) == 2


def test_arms_are_chosen_by_label_or_batch_size_in_any_case(call):
    assert "4 runs to do" in call("miniature", "--list", "--only", "mbn*")[1]
    assert "2 runs to do" in call("miniature", "--list", "--only", "mbn-2")[1]
    assert "8 runs to do" in call("miniature", "--list", "--only", "*/8")[1]


def test_the_queue_is_told_with_its_time_here_side_by_side(call, monkeypatch):
    asked = []

    def seconds(specs, stored, threads):
        asked.append((len(specs), threads))
        return {spec.digest: 7200.0 for spec in specs}

    monkeypatch.setattr("memnorm.lab.cli.evidence.seconds_here", seconds)
    out = call("--list", "--jobs", "2")[1]
    assert asked == [(16, 1)]
    assert "12 runs to do, 0 done; ≈ 12 h on this machine" in out
    assert "at most ≈ 4 h more" in out
    assert re.search(r"digits-small-bn-single-b8-s0-\w+ +40 +≈ 2 h", out)
    assert re.search(r"miniature +BN +8 +0\.1 +0 of 2 +≈ 4 h", out)


def test_the_time_of_a_run_that_was_begun_is_that_of_what_is_left(call, monkeypatch, tmp_path):
    monkeypatch.setattr(
        "memnorm.lab.cli.evidence.seconds_here", lambda specs, *_, **__: {spec.digest: 7200.0 for spec in specs}
    )
    begun = plan(MINIATURE, lambda spec: None).ready[0]
    folder = tmp_path / "runs" / begun.name
    folder.mkdir(parents=True)
    for iteration in (5, 10):  # of 40
        checkpoint.save(folder, iteration, {})
    out = call("--list")[1]
    assert re.search(rf"{begun.name} +40 +≈ 90 min", out)
    assert "12 runs to do, 0 done; ≈ 23 h 30 min on this machine" in out
