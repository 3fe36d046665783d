"""A run through interruptions and faults: killed, stopped, on a full disk, with damaged files."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.fork_server import ForkServer, eventually, session_of, shared_fork_server
from helpers.lab import (
    ARMS,
    EVERY_STEP,
    LONG,
    PLAIN,
    RESUMED,
    Crash,
    Crasher,
    Ear,
    assert_ends_as_undisturbed,
    checkpoints,
    crash,
    on_a_small_disk,
    timeless,
    tiny,
    undisturbed,
)
from PIL import Image

import memnorm
from memnorm.errors import MemnormError
from memnorm.lab import checkpoint
from memnorm.lab.disk import explained
from memnorm.lab.errors import Interrupted, LabError, RunHeld
from memnorm.lab.runner import run
from memnorm.lab.spec import RunSpec, unsupported
from memnorm.lab.store import Store

pytestmark = pytest.mark.usefixtures("no_git")


@pytest.fixture(scope="module")
def fork_server() -> ForkServer:
    return shared_fork_server()


def test_the_same_run_twice_is_bit_identical(store):
    """What the other tests rest on; threads and process are the same here."""
    assert_ends_as_undisturbed(LONG, store, began=0)


def kill_on_the_way(fork_server: ForkServer, spec: RunSpec, store: Store, draw: random.Random, **execution) -> bool:
    """Kill a run after a random step and a random time; whether it had not ended yet."""
    fork_server.begin(spec, store.root, **execution)
    if fork_server.hears(f"stepped {draw.randrange(1, spec.iterations - 6)}"):
        time.sleep(draw.uniform(0, 0.01))
        fork_server.kill(signal.SIGKILL)
        assert fork_server.ended()[0] in (-signal.SIGKILL, 0)
    return not (store.run(spec).path / "result.json").exists()


@pytest.mark.parametrize("arm", RESUMED.values(), ids=RESUMED.keys())
def test_a_run_killed_at_a_random_moment_is_bit_identical_to_an_uninterrupted_one(fork_server, store, arm):
    draw = random.Random(f"{arm}")
    spec = LONG.but(**arm)
    assert kill_on_the_way(fork_server, spec, store, draw, checkpoint_seconds=0)
    ear = assert_ends_as_undisturbed(spec, store)
    assert 0 < ear.all("began")[0] < 20


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 40))])
def test_a_run_killed_again_and_again_is_bit_identical_to_an_uninterrupted_one(fork_server, store, seed):
    draw = random.Random(seed)
    spec = LONG.but(
        **draw.choice(list(ARMS.values())),
        seed=draw.randrange(3),
        evaluations=draw.choice([1, 2, 7, 20]),
        precision=draw.choice(["float32", "float32", "float64", "bfloat16"]),
        sampler=draw.choice(["shuffle", "sorted"]),
        warmup=draw.choice([0, 10]),
        schedule=draw.choice(["step", "cosine"]),
    )
    for _ in range(draw.randrange(2, 5)):
        if not kill_on_the_way(fork_server, spec, store, draw, checkpoint_seconds=draw.choice([0, 0.02, 0.1])):
            break
    assert_ends_as_undisturbed(spec, store)


SHORT = tiny(norm="mbn", scheme="double", iterations=4, evaluations=2, model_options=LONG.model_options)
MOMENTS = range(1, 80)


@pytest.mark.parametrize(
    "moment", [one if one in (2, 12, 20, 29, 38, 55) else pytest.param(one, marks=pytest.mark.slow) for one in MOMENTS]
)
def test_a_run_killed_before_any_file_operation_is_bit_identical_to_an_uninterrupted_one(fork_server, store, moment):
    fork_server.begin(SHORT, store.root, die_at=moment, checkpoint_seconds=0)
    assert fork_server.ended()[0] in (-signal.SIGKILL, 0)
    assert store.runs() == [] or store.problems == []
    tidy = store.run(SHORT).result() is None  # killed between the result and the end, its last files stay
    assert_ends_as_undisturbed(SHORT, store, tidy=tidy)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("arm", ["bn", "mbn-2 now and then"])
def test_a_run_asked_to_stop_saves_and_is_bit_identical_to_an_uninterrupted_one(fork_server, store, number, arm):
    spec = LONG.but(**ARMS[arm])
    fork_server.begin(spec, store.root, pause=0.02)
    assert fork_server.hears("stepped 7")
    fork_server.kill(number)
    code, heard = fork_server.ended()
    assert code == 130
    assert heard[-1].startswith("Interrupted stopped at iteration ")
    assert heard[-1].endswith("of 20; everything is saved, and the same command resumes from here")
    assert len(checkpoints(store, spec)) == 1
    at = int(heard[-1].split()[4])
    assert 7 <= at < 20
    assert_ends_as_undisturbed(spec, store, began=at)


def test_a_second_interrupt_does_not_wait(fork_server, store):
    fork_server.begin(LONG, store.root, pause=5)
    assert fork_server.hears("stepped 1")
    start = time.monotonic()
    for _ in range(2):
        time.sleep(0.2)
        fork_server.kill(signal.SIGINT)
    assert fork_server.ended()[0] == 131
    assert time.monotonic() - start < 3
    assert_ends_as_undisturbed(LONG, store, began=0)


def test_a_second_termination_waits_for_the_saving(fork_server, store):
    fork_server.begin(LONG, store.root, pause=0.5)
    assert fork_server.hears("stepped 1")
    for _ in range(3):
        fork_server.kill(signal.SIGTERM)
        time.sleep(0.05)
    assert fork_server.ended()[0] == 130
    assert len(checkpoints(store, LONG)) == 1


def test_a_second_signal_within_the_handler_of_the_first_does_not_hang(tmp_path):
    """A signal at every line that the handler runs, and at every line of whatever it calls."""
    script = tmp_path / "twice.py"
    script.write_text(
        "import signal, sys\n"
        "from memnorm.lab.signals import stop_signals\n"
        "left = [200]\n"
        "def trace(frame, event, argument):\n"
        "    if frame.f_code.co_filename.endswith(('signals.py', 'threading.py')) and left[0]:\n"
        "        left[0] -= 1\n"
        "        signal.raise_signal(signal.SIGTERM)\n"
        "    return trace\n"
        "with stop_signals() as request:\n"
        "    sys.settrace(trace)\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    sys.settrace(None)\n"
        "    print('asked', request.made, left[0] < 200)\n"
    )
    told = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=20, check=True)
    assert told.stdout.split() == ["asked", "True", "True"]


def test_signal_handlers_are_restored(store):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run(tiny(), store, execution=PLAIN)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_after_the_last_step_does_not_undo_it(store):
    class Late(Ear):
        def stepped(self, spec, iteration):
            if iteration == 12:
                os.kill(os.getpid(), signal.SIGTERM)

    try:
        run(tiny(), store, execution=PLAIN, listener=Late())
    except Interrupted:
        assert store.run(tiny()).result() is not None
    assert timeless(store.run(tiny()).result()) == undisturbed(tiny())[0]


def test_a_finished_run_is_not_touched_again(store):
    result = run(tiny(), store, execution=PLAIN)
    folder = store.run(tiny()).path
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}
    ear = Ear()
    assert run(tiny(), store, execution=EVERY_STEP, listener=ear) == result
    assert ear.heard == []
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()} == before


def test_every_start_is_recorded_with_its_iteration(store):
    crash(LONG, store, at=5)
    crash(LONG, store, at=15)
    assert_ends_as_undisturbed(LONG, store, began=14)
    folder = store.run(LONG)
    assert [one["iteration"] for one in folder.sessions()] == [0, 4, 14]
    assert folder.result()["environment"] == folder.sessions()[-1]
    assert {one["threads"] for one in folder.sessions()} == {1}


def test_a_run_that_another_process_works_on_says_so(fork_server, store):
    child = fork_server.begin(LONG, store.root, pause=0.05)
    assert fork_server.hears("stepped 1")
    with pytest.raises(RunHeld, match=f"is being worked on by process {child} on "):
        run(LONG, store, execution=PLAIN)
    fork_server.kill()
    fork_server.ended()


def test_waiting_for_another_process_takes_over_what_it_finished(fork_server, store):
    fork_server.begin(LONG, store.root, pause=0.01)
    assert fork_server.hears("stepped 1")
    ear = Ear()
    result = run(LONG, store, execution=PLAIN, listener=ear, wait=True)
    assert fork_server.ended()[0] == 0
    assert ear.heard == []
    assert timeless(result) == undisturbed(LONG)[0]


def test_waiting_for_another_process_ends_when_it_dies(fork_server, store):
    fork_server.begin(LONG, store.root, pause=0.05, checkpoint_seconds=0)
    assert fork_server.hears("stepped 4")
    fork_server.kill()
    ear = Ear()
    run(LONG, store, execution=PLAIN, listener=ear, wait=True)
    fork_server.ended()
    assert ear.all("began")[0] >= 3
    assert_ends_as_undisturbed(LONG, store)


def test_the_weights_are_kept_where_that_is_asked_for(store):
    result = run(tiny(), store, execution=replace(PLAIN, keep_weights=True))
    weights = torch.load(store.run(tiny()).path / "weights.pt", weights_only=True)
    assert (
        sum(value.numel() for name, value in weights.items() if name.endswith(("weight", "bias")))
        == result["parameters"]
    )
    run(tiny(seed=1), store, execution=PLAIN)
    assert not (store.run(tiny(seed=1)).path / "weights.pt").exists()


@pytest.fixture
def pictures(tmp_path) -> RunSpec:
    """A run on an image folder, which processes of their own decode."""
    draw = np.random.default_rng(0)
    for split in ("train", "test"):
        for name in ("cats", "dogs"):
            (tmp_path / "images" / split / name).mkdir(parents=True)
            for number in range(10):
                pixels = draw.integers(0, 256, (300, 300, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "images" / split / name / f"{number}.jpg")
    return LONG.but(data=str(tmp_path / "images"), data_options={"image_size": 32})


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_with_workers_that_decode_images_is_bit_identical_to_an_uninterrupted_one(
    fork_server, store, pictures, number
):
    leader = fork_server.begin(pictures, store.root, workers=2, checkpoint_seconds=0)
    assert fork_server.hears("stepped 5")
    assert session_of(leader)
    os.killpg(leader, number) if number == signal.SIGINT else fork_server.kill(number)
    assert fork_server.ended()[0] == (-number if number == signal.SIGKILL else 130)
    ear = assert_ends_as_undisturbed(pictures, store, workers=1)
    assert 4 <= ear.all("began")[0] < 20
    assert eventually(lambda: session_of(leader) == [], seconds=15)


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


def test_a_checkpoint_of_another_run_is_not_resumed(store):
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
def test_a_full_disk_ends_the_run_with_a_message_and_loses_nothing(store, place, at):
    class Filler(Ear):
        def stepped(self, spec, iteration):
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
def test_a_really_full_disk_ends_the_run_with_a_message_and_loses_nothing(tmp_path):
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
            def stepped(self, spec, iteration):
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
