"""A run that was interrupted, however, ends exactly as one that was not."""

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
    Ear,
    assert_ends_as_undisturbed,
    checkpoints,
    crash,
    timeless,
    tiny,
    undisturbed,
)
from PIL import Image

from memnorm.lab.errors import Interrupted, RunHeld
from memnorm.lab.runner import run
from memnorm.lab.spec import RunSpec
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


def test_those_moments_cover_the_whole_run(fork_server, store):
    fork_server.begin(SHORT, store.root, die_at=MOMENTS[-1], checkpoint_seconds=0)
    assert fork_server.ended()[0] == 0


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


def test_the_handlers_of_signals_are_given_back(store):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run(tiny(), store, execution=PLAIN)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_after_the_last_step_does_not_undo_it(store):
    class Late(Ear):
        def stepped(self, iteration):
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


def test_the_training_time_resumes_where_it_was(store):
    crash(LONG, store, at=15)
    (path,) = checkpoints(store, LONG)[1:]
    before = torch.load(path, weights_only=True)["seconds"]
    result = run(LONG, store, execution=PLAIN)
    first, last = store.run(LONG).metrics()
    assert 0 < first["seconds"] < before < last["seconds"] == result["seconds"]


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_event_files_are_written_where_that_is_asked_for(store):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tiny(), store, execution=replace(PLAIN, tensorboard=True))
    events = EventAccumulator(str(store.run(tiny()).path / "tensorboard")).Reload()
    lines = undisturbed(tiny())[1]
    for name in ("test_error", "train_loss", "learning_rate"):
        points = [(one.step, one.value) for one in events.Scalars(name)]
        assert points == [(line["iteration"], pytest.approx(line[name])) for line in lines]
