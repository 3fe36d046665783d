"""`memnorm evidence` from an empty folder to records, through an interruption."""

import hashlib
import os
import re
import signal
import time

import pytest
from labkit import end, python, timeless

from memnorm.lab.cli import main
from memnorm.lab.evidence import MINIATURE, Records, chosen_rate, plan
from memnorm.lab.training import Training

COMMAND = "import sys; from memnorm.lab.cli import main; sys.exit(main(sys.argv[1:]))"
FILES = ["env.json", "metrics.jsonl", "result.json", "spec.yaml"]


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Run the miniature queue in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("memnorm.lab.environment.commit", lambda: None)

    def run(*words):
        code = main(["evidence", "--miniature", "--workers", "0", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def quick(monkeypatch):
    """Nothing is timed beforehand."""
    monkeypatch.setattr("memnorm.lab.cli.evidence.seconds_here", lambda *_, **__: {})


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


def test_a_queue_killed_and_resumed_leaves_every_record_and_is_then_done(call, tmp_path):
    words = ["evidence", "--miniature", "--jobs", "2", "--runs", tmp_path / "runs", "--records", tmp_path / "results"]
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
    assert "measuring" not in err


def test_every_arm_of_a_seed_starts_alike_and_sees_the_same_images(call, quick, monkeypatch):
    weights, images = {}, {}
    step = Training.step

    def watched(training, iteration, batch, labels):
        spec = training.spec
        if iteration == 0:
            parameters = sorted(training.model.named_parameters())
            text = b"".join(name.encode() + value.detach().numpy().tobytes() for name, value in parameters)
            weights.setdefault(spec.seed, set()).add(hashlib.sha256(text).digest())
        seen = batch.numpy().tobytes() + labels.numpy().tobytes()
        images.setdefault((spec.seed, iteration), set()).add(hashlib.sha256(seen).digest())
        return step(training, iteration, batch, labels)

    monkeypatch.setattr(Training, "step", watched)
    code, out, err = call()
    assert code == 0, err
    assert "11 finished, 3 diverged; records: results" in out
    assert {seed: len(found) for seed, found in weights.items()} == {0: 1, 1: 1, 1000: 1}
    assert {len(found) for found in images.values()} == {1}
    assert {seed for seed, _ in images} == {0, 1, 1000}
    assert_complete(records())


def test_results_are_those_asked_for(call, quick):
    call()
    kept = records()
    study, tuned = MINIATURE
    plain, memory, without_shift, diverging = study.arms
    for arm in (plain, memory, without_shift):
        assert kept.result(arm.run(0))["final"]["test_error_recalibrated"] is not None
    assert kept.result(diverging.run(0))["status"] == "diverged"
    final = [timeless(kept.result(arm.run(0)))["digest_of_weights"] for arm in (plain, memory, without_shift)]
    assert len(set(final)) == 3
    assert chosen_rate(tuned, tuned.arms[0], kept.result) == 0.1
    assert tuned.arms[0].run(0, 0.1) == plain.run(0)
    assert chosen_rate(tuned, tuned.arms[1], kept.result) in tuned.arms[1].rates


def test_what_has_a_record_is_not_run_again_though_its_folder_is_gone(call, quick, tmp_path):
    call("miniature", "--only", "BN")
    for path in sorted((tmp_path / "runs").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    code, out, err = call("miniature", "--only", "BN")
    assert (code, "begins" in err) == (0, False)
    assert "0 runs to do, 2 done" in out


def test_a_run_that_was_done_but_not_copied_is_copied(call, quick):
    call("miniature", "--only", "BN")
    for path in sorted(records().kept.root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    code, _, err = call("miniature", "--only", "BN")
    assert (code, "begins" in err) == (0, False)
    assert len(records().kept.runs()) == 2


def test_the_list_shows_arms_and_what_waits_and_runs_nothing(call, quick):
    code, out, _ = call("--list")
    assert code == 0
    assert re.search(r"miniature-tuned +GROUP +8 +to be chosen +0 of 2, 2 trials to do", out)
    assert "12 runs to do, 0 done" in out
    assert "then up to 4 runs whose learning rate is chosen first" in out
    assert not records().work.root.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["miniatur"], "no study 'miniatur'; Did you mean miniature"),
        (["--only", "XBN*"], "--only matches no arm; there are BN/8, MBN-2/8"),
        (["--jobs", "-1"], "--jobs must not be negative"),
    ],
)
def test_what_there_is_not_is_refused(call, words, message):
    code, _, err = call(*words)
    assert code == 2
    assert message in err


def test_arms_are_chosen_by_label_or_batch_size_in_any_case(call, quick):
    assert "4 runs to do" in call("miniature", "--list", "--only", "mbn*")[1]
    assert "2 runs to do" in call("miniature", "--list", "--only", "mbn-2")[1]
    assert "8 runs to do" in call("miniature", "--list", "--only", "*/8")[1]
