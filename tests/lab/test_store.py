"""The store reads whatever lies in it, says what is damaged, and lets one process at a time work on a run."""

import json
import os
import random
import re
import signal
import time

import pytest
from helpers.lab import end, on_a_small_disk, python

from memnorm.lab.errors import LabError, RunHeld, UsageError
from memnorm.lab.spec import RunSpec
from memnorm.lab.store import RunFolder, Store, finite

SPEC = RunSpec(model="small", data="digits", iterations=1)
LINE = {"iteration": 1, "test_error": 50.0}
RESULT = {"status": "finished", "name": SPEC.name, "final": LINE}


@pytest.fixture
def folder(store) -> RunFolder:
    """A run with one evaluation."""
    folder = store.run(SPEC)
    folder.begin({"threads": 1})
    folder.add_metrics(LINE)
    return folder


def test_a_run_is_read_as_it_was_written(store, folder):
    folder.begin({"threads": 2})
    folder.finish(RESULT)
    (run,) = store.runs()
    assert (run.spec, run.path) == (SPEC, store.root / SPEC.name)
    assert (run.metrics, run.result, run.environment) == ([LINE], RESULT, {"threads": 2})
    assert run.status == "finished"
    assert store.problems == []
    assert [one["threads"] for one in folder.sessions()] == [1, 2]


def test_runs_come_by_name_and_other_folders_and_files_are_none(store, folder):
    for seed in (3, 1, 2):
        store.run(SPEC.but(seed=seed)).begin({})
    (store.root / "notes").mkdir()
    (store.root / "notes.txt").write_text("x")
    names = [run.path.name for run in store.runs()]
    assert names == sorted(names)
    assert len(names) == 4
    assert store.problems == []


def test_a_file_cannot_hold_runs(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file is a file; runs are kept in a folder"):
        Store(tmp_path / "file")


def test_a_folder_that_its_specification_does_not_name_is_a_problem_and_no_run(store, folder):
    folder.path.rename(store.root / "renamed")
    assert store.runs() == []
    assert store.problems == [f"renamed: spec.yaml describes {SPEC.name}: the file was changed, or the folder renamed"]


@pytest.mark.parametrize(
    "text", ['{"status": "fin', "", "\xff", "[1]", "null", '{"status": "done"}', '{"status": ["x"]}', "[" * 10**5]
)
def test_a_damaged_result_is_a_problem_that_says_what_to_do(store, folder, text):
    (folder.path / "result.json").write_text(text, encoding="latin-1")
    assert store.runs() == []
    (problem,) = store.problems
    assert re.search(rf"{SPEC.name}: .*result\.json is .*; delete it to run again", problem)
    with pytest.raises(LabError, match="delete it to run again"):
        folder.result()


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"name": "another"}, "it belongs to another"),
        ({"name": None}, "it belongs to None"),
        ({"final": {**LINE, "iteration": 7}}, "it ends at iteration 7, not 1"),
        ({"final": {**LINE, "test_error": -5.0}}, "its test error is -5.0"),
        ({"final": {**LINE, "test_error": 1e308}}, "its test error is 1e"),
        ({"final": {**LINE, "test_error": float("nan")}}, "its test error is nan"),
        ({"final": {**LINE, "test_error": True}}, "its test error is True"),
        ({"final": {**LINE, "test_error": "7"}}, "its test error is '7'"),
        ({"final": None}, "its test error is None"),
        ({"final": []}, "its test error is None"),
        ({"final": "text"}, "its test error is None"),
    ],
)
def test_a_result_that_cannot_be_of_this_run_is_refused(folder, changed, problem):
    (folder.path / "result.json").write_text(json.dumps({**RESULT, **changed}))
    with pytest.raises(LabError, match=f"is not a result of this run: {re.escape(problem)}.*; delete it to run again"):
        folder.result()


def test_a_result_without_its_specification_is_a_problem(store, folder):
    folder.finish(RESULT)
    (folder.path / "spec.yaml").unlink()
    assert store.runs() == []
    assert store.problems == [f"{SPEC.name}: a result without spec.yaml"]


def test_one_damaged_run_does_not_hide_the_others(store, folder):
    other = store.run(SPEC.but(seed=1))
    other.begin({})
    (folder.path / "spec.yaml").write_bytes(b"\xff\xfe\x00 not text")
    assert [run.path for run in store.runs()] == [other.path]
    assert len(store.problems) == 1
    folder.begin({})  # the next start of the run heals it
    assert len(store.runs()) == 2
    assert store.problems == []


@pytest.mark.parametrize(
    "torn",
    [
        '{"iteration": 2, "test_er',
        '{"iteration": 2',
        "{",
        "\x00\x00\xff",
        "nul",
        '"x"',
        "3",
        '{"a": 1}',
        '{"iteration": "2"}',
        '{"iteration": true}',
        "[" * 10**5,
        f'{{"iteration": {10**309}}}',
        f'{{"iteration": 2, "test_error": {10**309}}}',
    ],
)
def test_a_line_that_is_no_measurement_is_left_out(folder, torn):
    with (folder.path / "metrics.jsonl").open("a", encoding="latin-1") as file:
        file.write(torn)
    assert folder.metrics() == [LINE]
    folder.add_metrics({"iteration": 3})
    assert folder.metrics() == [LINE, {"iteration": 3}]


def test_what_is_not_finite_is_null(folder):
    folder.add_metrics({"iteration": 2, "test_loss": float("nan"), "deep": {"x": float("inf"), "y": -float("inf")}})
    text = (folder.path / "metrics.jsonl").read_text()
    assert json.loads(text.splitlines()[1], parse_constant=pytest.fail)["deep"] == {"x": None, "y": None}
    assert finite(1.5) == 1.5


def test_a_session_is_added_even_if_the_list_of_sessions_is_damaged(folder):
    for text in ("", "[]", "{}", '{"sessions": 3}', '{"sessions": [1, {"threads": 5}]}', "\xff", "[" * 10**5):
        (folder.path / "env.json").write_text(text, encoding="latin-1")
        folder.begin({"threads": 7})
        assert folder.sessions()[-1] == {"threads": 7}


def test_what_a_killed_process_left_half_written_is_removed(folder):
    (folder.path / ".spec.yaml.abc.tmp").touch()
    folder.begin({})
    assert not list(folder.path.glob(".*"))


def test_a_result_is_written_after_everything_and_checkpoints_go(folder):
    (folder.path / "checkpoint-0000000001-0123456789abcdef.pt").touch()
    (folder.path / "weights.pt").touch()
    assert folder.finish({**RESULT, "seconds": float("nan")}) == {**RESULT, "seconds": None}
    assert sorted(os.listdir(folder.path)) == ["env.json", "metrics.jsonl", "result.json", "spec.yaml", "weights.pt"]


FILES = ("spec.yaml", "env.json", "metrics.jsonl", "result.json", "holder.json")


def rubbish(draw: random.Random) -> bytes:
    """Random bytes, or JSON and YAML of random types."""
    values = [None, True, 3, -1.5, "x", [], {}, [[]], {"sessions": {}}, {"status": 3}, {"iteration": []}, {"seed": "x"}]
    kinds = [
        lambda: draw.randbytes(draw.randrange(200)),
        lambda: json.dumps(draw.choice(values)).encode(),
        lambda: ("\n".join(json.dumps(draw.choice(values)) for _ in range(5))).encode("utf-16"),
        lambda: SPEC.as_yaml().encode()[: draw.randrange(900)] + draw.randbytes(3),
        lambda: bytes(draw.choices(b"[]{}:,!&*\"'\n -#%@`|>?0e.", k=draw.randrange(60))),
    ]
    return draw.choice(kinds)()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
def test_no_rubbish_in_the_store_raises(store, seed):
    draw = random.Random(seed)
    folders = [store.run(SPEC.but(seed=number)) for number in range(10)]
    for folder in folders:
        folder.path.mkdir(parents=True)
    for _ in range(10):
        for folder in folders:
            (folder.path / "spec.yaml").write_text(folder.spec.as_yaml())
            (folder.path / draw.choice(FILES)).write_bytes(rubbish(draw))
        runs = store.runs()
        assert len(runs) + len(store.problems) == len(folders)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["folder", "loop", "nothing", "pipe", "endless device"])
def test_no_strange_file_in_the_store_raises(store, folder, name, kind):
    path = folder.path / name
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless device":
        path.symlink_to("/dev/zero")
    other = store.run(SPEC.but(seed=1))
    other.begin({})
    assert other.path in [run.path for run in store.runs()]


def test_measurements_that_are_no_file_are_a_problem(store, folder):
    (folder.path / "metrics.jsonl").unlink()
    os.mkfifo(folder.path / "metrics.jsonl")
    assert store.runs() == []
    (problem,) = store.problems
    assert problem.startswith(f"{SPEC.name}: its metrics cannot be read")


HOLD = """
    import sys, time
    from memnorm.lab.spec import RunSpec
    from memnorm.lab.store import Store
    with Store(sys.argv[1]).run(RunSpec(model="small", data="digits", iterations=1)).held(wait=True):
        print("held", flush=True)
        sys.stdin.read()
    """


@pytest.fixture
def holder(store):
    process = python(HOLD, store.root)
    try:
        assert process.stdout.readline() == "held\n", process.stderr.read()
        yield process
    finally:
        end(process)


def holds(folder: RunFolder, wait: bool = False) -> bool:
    with folder.held(wait):
        return True


def test_the_second_process_says_who_holds_the_run(store, holder):
    with pytest.raises(RunHeld, match=rf"{SPEC.name} is being worked on by process {holder.pid} on \S+ since \d{{4}}-"):
        holds(store.run(SPEC))


def test_a_killed_process_frees_its_run(store, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert holds(store.run(SPEC))


def test_waiting_ends_when_the_holder_ends(store, holder):
    second = python(HOLD, store.root)
    try:
        time.sleep(0.5)
        with pytest.raises(RunHeld, match=f"process {holder.pid} "):
            holds(store.run(SPEC))  # the second waits, and does not claim to be the holder
        holder.stdin.close()
        assert second.stdout.readline() == "held\n"
        with pytest.raises(RunHeld, match=f"process {second.pid} "):
            holds(store.run(SPEC))
    finally:
        end(second)


def test_a_run_does_not_work_in_a_linked_folder(store, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "checkpoint-best.pt").write_text("somebody's")
    store.root.mkdir()
    store.run(SPEC).path.symlink_to(kept)
    with pytest.raises(LabError, match="is a symbolic link"):
        holds(store.run(SPEC))
    assert [path.name for path in kept.iterdir()] == ["checkpoint-best.pt"]


def test_a_run_is_free_after_an_exception(store):
    folder = store.run(SPEC)

    def fail():
        with folder.held():
            assert json.loads((folder.path / "holder.json").read_text())["pid"] == os.getpid()
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail()
    assert not (folder.path / "holder.json").exists()
    assert holds(folder)


def test_a_full_disk_refuses_the_run_with_a_message_and_releases_the_lock(tmp_path):
    script = """
        import sys
        from pathlib import Path
        from memnorm.lab.errors import LabError
        from memnorm.lab.spec import RunSpec
        from memnorm.lab.store import Store
        folder = Store(sys.argv[1]).run(RunSpec())
        folder.path.mkdir()
        (folder.path / "lock").touch()
        filler = Path(sys.argv[1]) / "filler"
        try:
            filler.write_bytes(bytes(10**6))
        except OSError:
            pass
        try:
            with folder.held():
                print("held")
        except LabError as error:
            print(error)
        filler.unlink()
        with folder.held():
            print("held")
        """
    first, second = on_a_small_disk(script, tmp_path / "disk", "64k").splitlines()
    assert first.startswith("the disk is full: ")
    assert second == "held"
