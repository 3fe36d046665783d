"""Damaged checkpoints, full disks and runs that cannot be: each is said in words and costs nothing that was saved."""

import errno
import json

import pytest
from helpers.lab import (
    ARMS,
    EVERY_STEP,
    LONG,
    PLAIN,
    Crash,
    Crasher,
    Ear,
    assert_ends_as_undisturbed,
    checkpoints,
    crash,
    on_a_small_disk,
    tiny,
    undisturbed,
)

import memnorm
from memnorm.errors import MemnormError
from memnorm.lab import checkpoint
from memnorm.lab.arms import unsupported
from memnorm.lab.disk import explained
from memnorm.lab.errors import LabError
from memnorm.lab.runner import run

pytestmark = pytest.mark.usefixtures("no_git")


def test_checkpoints_come_as_often_as_asked_for(store):
    crash(LONG, store, at=6)
    assert [path.name[11:21] for path in checkpoints(store, LONG)] == ["0000000004", "0000000005"]
    with pytest.raises(Crash):
        run(LONG.but(seed=1), store, execution=PLAIN, listener=Crasher(6))
    assert checkpoints(store, LONG.but(seed=1)) == []


@pytest.mark.parametrize("arm", [ARMS["bn"], ARMS["mbn-2 now and then"]], ids=["bn", "mbn-2 now and then"])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(store, arm):
    spec = LONG.but(**arm)
    crash(spec, store, at=11)  # just after the evaluation at 10, whose line is measured again
    newest = checkpoints(store, spec)[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    ear = assert_ends_as_undisturbed(spec, store, began=9)
    (message,) = ear.all("message")
    assert message.startswith(f"{newest.name} cannot be read (")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["single", "double"])
@pytest.mark.parametrize("norm", memnorm.norms.available())
def test_a_run_of_any_norm_is_bit_identical_to_an_uninterrupted_one(store, norm, scheme):
    spec = LONG.but(norm=norm, scheme=scheme)
    if unsupported(spec):
        pytest.skip(unsupported(spec))
    crash(spec, store, at=7)
    crash(spec, store, at=14)
    assert_ends_as_undisturbed(spec, store, began=13)


def test_two_damaged_checkpoints_start_anew(store):
    crash(LONG, store, at=15)
    for path in checkpoints(store, LONG):
        path.write_bytes(b"")
    ear = assert_ends_as_undisturbed(LONG, store, began=0)
    assert len(ear.all("message")) == 2


def test_starting_anew_after_two_damaged_checkpoints_can_be_interrupted_too(store):
    crash(LONG, store, at=15)
    for path in checkpoints(store, LONG):
        path.write_bytes(b"")
    crash(LONG, store, at=5)
    assert_ends_as_undisturbed(LONG, store, began=4)


@pytest.mark.parametrize(
    "state",
    [{}, {"run": LONG.name}, {"run": LONG.name, "iteration": 18, "seconds": 1.0, "training": {"model": {}}}],
    ids=len,
)
def test_a_checkpoint_of_something_else_falls_back_to_the_one_before(store, state):
    crash(LONG, store, at=15)
    checkpoint.save(store.run(LONG).path, 18, state)
    ear = assert_ends_as_undisturbed(LONG, store, began=14)
    (message,) = ear.all("message")
    assert message.startswith("a checkpoint does not fit this run (")
    assert message.endswith("; using the one before")


@pytest.mark.parametrize("damage", [{"lines": [5]}, {"iteration": 0}, {"iteration": LONG.iterations}], ids=str)
def test_rejected_checkpoints_leave_no_trace_in_a_fresh_start(store, damage):
    crash(LONG, store, at=15)
    folder = store.run(LONG).path
    states = list(checkpoint.readable(folder, print))
    for path in checkpoints(store, LONG):
        path.unlink()
    for state in reversed(states):
        checkpoint.save(folder, state["iteration"], {**state, **damage})
    ear = assert_ends_as_undisturbed(LONG, store, began=0)
    assert len(ear.all("message")) == 2


def test_a_checkpoint_of_another_run_is_not_gone_on_from(store):
    other = LONG.but(seed=1)
    crash(LONG, store, at=15)
    crash(other, store, at=18)
    newest = checkpoints(store, other)[-1]
    newest.rename(store.run(LONG).path / newest.name)
    ear = assert_ends_as_undisturbed(LONG, store, began=14)
    assert ear.all("message") == [
        f"a checkpoint does not fit this run (it belongs to the run {other.name}); using the one before"
    ]


def test_measurements_that_were_cut_short_are_made_again(store):
    spec = LONG.but(evaluations=4)
    crash(spec, store, at=17)
    metrics = store.run(spec).path / "metrics.jsonl"
    checkpoints(store, spec)[-1].unlink()
    checkpoints(store, spec)[-1].unlink()
    metrics.write_bytes(metrics.read_bytes()[:-30])
    assert_ends_as_undisturbed(spec, store, began=0)


@pytest.mark.parametrize("damage", [lambda text: "", lambda text: text[5:]], ids=["gone", "torn"])
def test_measurements_before_the_checkpoint_are_not_lost_with_their_file(store, damage):
    spec = LONG.but(evaluations=4)
    crash(spec, store, at=17)
    metrics = store.run(spec).path / "metrics.jsonl"
    metrics.write_text(damage(metrics.read_text()))
    assert_ends_as_undisturbed(spec, store, began=16)


def no_space(*_arguments, **_options):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("place", ["torch.save", "pathlib.Path.replace", "os.fsync", "memnorm.lab.store.append_line"])
@pytest.mark.parametrize("at", [pytest.param(5, marks=pytest.mark.slow), 9, pytest.param(19, marks=pytest.mark.slow)])
def test_a_full_disk_ends_the_run_in_words_and_costs_nothing(store, place, at):
    class Filler(Ear):
        def stepped(self, iteration):
            if iteration == at:
                patch.setattr(place, no_space if place != "memnorm.lab.store.append_line" else refused_line)

    def refused_line(path, line):

        with path.open("a") as file:
            file.write(line[: len(line) // 2])
        with explained(path):
            no_space()

    with pytest.MonkeyPatch.context() as patch, pytest.raises(LabError, match="the disk is full: "):
        run(LONG, store, execution=EVERY_STEP, listener=Filler())
    last = at - 1 if "append" not in place else 9 if at < 10 else 19
    assert_ends_as_undisturbed(LONG, store, began=last)


@pytest.mark.slow
def test_a_really_full_disk_ends_the_run_in_words_and_costs_nothing(tmp_path):
    script = """
        import sys, json
        from pathlib import Path
        import torch
        from helpers.lab import *
        from memnorm.lab.errors import LabError

        torch.set_num_threads(1)
        root = Path(sys.argv[1])
        spec = RunSpec.from_dict(json.loads(sys.argv[2]))
        filler = root / "filler"

        class Filler(Ear):
            def stepped(self, iteration):
                if iteration == 15:
                    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                        while True:
                            file.write(bytes(4096))

        try:
            run(spec, Store(root / "runs"), execution=replace(PLAIN, checkpoint_seconds=0), listener=Filler())
        except LabError as error:
            print(json.dumps(str(error)))
        filler.unlink()
        ear = Ear()
        result = run(spec, Store(root / "runs"), execution=PLAIN, listener=ear)
        print(json.dumps([ear.heard[0], timeless(result), timeless(Store(root / "runs").run(spec).metrics())]))
        """
    output = on_a_small_disk(script, tmp_path / "disk", "1m", json.dumps(LONG.as_dict()))
    error, (began, *result) = map(json.loads, output.splitlines())
    assert error.startswith("the disk is full: ")
    assert began == ["began", 14]
    assert result == list(undisturbed(LONG))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "nope"}, "nope"),
        ({"norm": "group", "scheme": "double"}, "Double-Forward"),
        ({"model": "nope"}, "unknown model 'nope'"),
        ({"model": "helpers.lab:refuse"}, "this factory fails"),
        ({"data": "nope", "data_options": {}}, "unknown data set 'nope'"),
        ({"batch_size": 45}, "batch_size must be between 1 and the number of training images, 44; got 45"),
        ({"train_images": 100}, "44 training images"),
        ({"norm_options": {"memory_size": 3}}, "memory_size"),
    ],
    ids=str,
)
def test_a_run_that_cannot_be_leaves_nothing_in_the_store(store, changes, message):
    with pytest.raises(MemnormError, match=message):
        run(tiny(**changes), store, execution=PLAIN)
    assert store.runs() == []
