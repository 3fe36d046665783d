"""Many runs end as each would alone, and nothing that happens to one of them costs another."""

import os
import signal
import time
from dataclasses import replace

import pytest
from helpers.fork_server import ForkServer, GridEar, eventually, session_of, shared_fork_server
from helpers.lab import PLAIN, on_a_small_disk, timeless, tiny, undisturbed

from memnorm.lab import grid
from memnorm.lab.errors import DataMissing, Interrupted, UsageError
from memnorm.lab.listen import Relay
from memnorm.lab.runner import run
from memnorm.lab.spec import RunSpec
from memnorm.lab.store import Store

GOOD = [tiny(seed=seed, iterations=6) for seed in range(3)]
FAILING = tiny(model="helpers.lab:refuse")
DIVERGING = tiny(learning_rate=1e30)
SLOW = [tiny(seed=seed, iterations=60, evaluations=2, model_options={"pause": 0.02}) for seed in range(2)]
SLOWER = [spec.but(iterations=400) for spec in SLOW]  # spawned workers do not begin at the same time
MISSING = tiny(data="./nowhere", data_options={})

really = pytest.param(True, marks=pytest.mark.slow, id="spawned")  # workers that load torch anew, as for users
spawn = pytest.mark.parametrize("spawn", [pytest.param(False, id="forked"), really])
jobs = pytest.mark.parametrize("jobs", [0, 2])


pytestmark = pytest.mark.usefixtures("no_git")


@pytest.fixture(scope="module")
def fork_server() -> ForkServer:
    return shared_fork_server()


def alone(spec: RunSpec):
    """The result of a run by itself."""
    return undisturbed(spec)[0]


def run_all(fork_server: ForkServer, specs: list[RunSpec], store: Store, jobs: int = 2, **options) -> list[str]:
    """What a grid in a process of its own says; it must end well and leave no process behind."""
    leader = fork_server.begin_all(specs, store.root, jobs=jobs, **options)
    code, heard = fork_server.ended()
    assert code == 0, heard
    assert leaves_nothing(leader)
    return heard


def leaves_nothing(leader: int) -> bool:
    """Return True if every process that it started ends; multiprocessing's resource tracker takes a moment."""
    return eventually(lambda: session_of(leader) == [], seconds=5)


def statuses(heard: list[str]) -> list[tuple[str, str]]:
    return [tuple(line.split()[1:3]) for line in heard if line.startswith("outcome ")]


def begun(heard: list[str]) -> list[str]:
    return [line.split()[1] for line in heard if line.startswith("began ")]


def assert_resumes(fork_server: ForkServer, specs: list[RunSpec], store: Store) -> list[str]:
    """The same command finishes what was begun, and every run is what it is alone."""
    heard = run_all(fork_server, specs, store)
    assert statuses(heard) == [(spec.name, "finished") for spec in specs]
    for spec in specs:
        assert timeless(store.run(spec).result()) == alone(spec)
    return heard


@pytest.mark.parametrize(("jobs", "spawn"), [(0, False), (2, False), pytest.param(2, True, marks=pytest.mark.slow)])
def test_runs_of_a_grid_are_those_alone_and_come_in_the_order_asked_for(fork_server, store, jobs, spawn):
    specs = [GOOD[2], GOOD[0], GOOD[1], GOOD[0]]
    heard = run_all(fork_server, specs, store, jobs=jobs, spawn=spawn)
    assert statuses(heard) == [(spec.name, "finished") for spec in specs]
    assert sorted(begun(heard)) == sorted(spec.name for spec in GOOD)
    for spec in GOOD:
        assert timeless(store.run(spec).result()) == alone(spec)


@jobs
def test_what_is_done_is_skipped(fork_server, store, jobs):
    run(GOOD[1], store, execution=PLAIN)
    heard = run_all(fork_server, GOOD, store, jobs=jobs)
    assert sorted(begun(heard)) == [GOOD[0].name, GOOD[2].name]
    again = run_all(fork_server, GOOD, store, jobs=jobs)
    assert begun(again) == []
    assert statuses(again) == [(spec.name, "finished") for spec in GOOD]


@jobs
def test_runs_that_fail_or_diverge_do_not_stop_the_others(fork_server, store, jobs):
    specs = [FAILING, GOOD[0], DIVERGING, GOOD[1]]
    heard = run_all(fork_server, specs, store, jobs=jobs)
    assert [status for _, status in statuses(heard)] == ["failed", "finished", "diverged", "finished"]
    (ended,) = [line for line in heard if line.startswith(f"ended {FAILING.name} failed ")]
    assert "this factory fails" in ended
    assert run_all(fork_server, specs, store, jobs=jobs)[-4].startswith(f"outcome {FAILING.name} failed")


def test_an_unexpected_error_is_an_outcome_with_its_traceback(store, monkeypatch):
    def stumble(spec, *_arguments, **_options):
        if spec == GOOD[0]:
            raise ZeroDivisionError("what now")
        return run(spec, *_arguments, **_options)

    monkeypatch.setattr(grid, "run", stumble)
    ear = GridEar()
    first, second = grid.run_all(GOOD[:2], store, execution=PLAIN, listener=ear)
    assert (first.status, first.message) == ("failed", "ZeroDivisionError: what now")
    assert second.status == "finished"
    (trace,) = [line for line in ear.heard if line.startswith("message ")]
    assert "in stumble" in trace


def test_a_damaged_result_is_an_outcome_that_says_what_to_do(store):
    run(GOOD[0], store, execution=PLAIN)
    (store.run(GOOD[0]).path / "result.json").write_text("{")
    first, second = grid.run_all(GOOD[:2], store, execution=PLAIN)
    assert first.status == "failed"
    assert "delete it to run again" in first.message
    assert second.status == "finished"


@jobs
def test_a_grid_reports_the_progress_of_its_runs(fork_server, store, jobs):
    heard = run_all(fork_server, GOOD[:1], store, jobs=jobs)
    name = GOOD[0].name
    assert heard[0] == f"began {name} 0"
    assert [line for line in heard if line.startswith("evaluated")] == [f"evaluated {name} {at}" for at in (2, 4, 6)]
    assert f"stepped {name} 6" in heard
    assert heard[-2].split() == ["ended", name, "finished"]


def test_steps_are_passed_on_no_more_often_than_an_eye_can_follow(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    sent = []
    relay = Relay(lambda kind, spec, iteration: sent.append(iteration))
    for iteration in range(1, 101):
        now[0] += 0.03
        relay.stepped(tiny(iterations=100), iteration)
    assert sent == [*range(1, 100, 7), 100] or sent == [*range(1, 101, 7), 100]
    assert sent[-1] == 100


def test_workers_have_one_thread(fork_server, store):
    run_all(fork_server, GOOD[:1], store, jobs=1, threads=2)
    run_all(fork_server, GOOD[1:2], store, jobs=0, threads=2)
    assert [store.run(spec).sessions()[0]["threads"] for spec in GOOD[:2]] == [1, 2]


@spawn
def test_a_worker_that_is_killed_costs_its_run_only_and_is_replaced(fork_server, store, spawn):
    slow = SLOWER if spawn else SLOW
    specs = [*slow, GOOD[0]]
    leader = fork_server.begin_all(specs, store.root, jobs=2, spawn=spawn, checkpoint_seconds=0)
    assert fork_server.hears(f"evaluated {slow[0].name}")
    holder = store.run(slow[0])._holder()
    os.kill(int(holder.split()[1]), signal.SIGKILL)
    code, heard = fork_server.ended()
    assert code == 0
    assert statuses(heard) == [(slow[0].name, "failed"), (slow[1].name, "finished"), (GOOD[0].name, "finished")]
    (ended,) = [line for line in heard if line.startswith(f"ended {slow[0].name} ")]
    assert ended.endswith(
        "failed its process ended: killed by signal 9 (often: out of memory; try fewer --jobs); the same command "
        "resumes it"
    )
    assert leaves_nothing(leader)
    again = assert_resumes(fork_server, specs, store)
    assert begun(again) == [slow[0].name]
    assert int(next(line for line in again if line.startswith("began ")).split()[2]) >= slow[0].iterations // 2 - 1


def test_a_worker_that_is_killed_between_two_runs_is_replaced(fork_server, store):
    heard = run_all(fork_server, GOOD, store, jobs=1, at={"ended": "kill the workers"})
    found = dict(statuses(heard))
    assert found[GOOD[0].name] == found[GOOD[2].name] == "finished"
    assert statuses(run_all(fork_server, GOOD, store, jobs=1)) == [(spec.name, "finished") for spec in GOOD]


@jobs
def test_a_run_that_another_process_works_on_comes_last(fork_server, store, jobs):
    with store.run(GOOD[0]).held():
        leader = fork_server.begin_all(GOOD, store.root, jobs=jobs)
        assert fork_server.hears(
            f"message {GOOD[0].name} the run {GOOD[0].name} is being worked on by process {os.getpid()}"
        )
        assert fork_server.hears(f"ended {GOOD[2].name} finished")
        assert session_of(leader) or jobs == 0
    code, heard = fork_server.ended()
    assert code == 0
    assert statuses(heard) == [(spec.name, "finished") for spec in GOOD]
    assert begun(heard)[-1] == GOOD[0].name  # GOOD[1] may begin after GOOD[2] when two work
    assert timeless(store.run(GOOD[0]).result()) == alone(GOOD[0])


@spawn
def test_ctrl_c_saves_every_run_and_leaves_no_process(fork_server, store, spawn):
    slow = SLOWER if spawn else SLOW
    specs = [*slow, *GOOD]
    leader = fork_server.begin_all(specs, store.root, jobs=2, spawn=spawn)
    for spec in slow:
        assert fork_server.hears(f"stepped {spec.name}")
    os.killpg(leader, signal.SIGINT)  # as a terminal does: to all of them
    code, heard = fork_server.ended()
    assert code == 130
    assert heard[-1] == "Interrupted stopped; what was saved is kept, and the same command resumes from there"
    assert begun(heard) == []
    assert leaves_nothing(leader)
    for spec in slow:
        assert len(list(store.run(spec).path.glob("checkpoint-*.pt"))) == 1
    again = assert_resumes(fork_server, specs, store)
    assert sorted(begun(again)) == sorted(spec.name for spec in specs)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_for_the_parent_alone_saves_every_run(fork_server, store, number):
    leader = fork_server.begin_all(SLOW, store.root, jobs=2)
    for spec in SLOW:
        assert fork_server.hears(f"stepped {spec.name}")
    fork_server.kill(number)
    assert fork_server.ended()[0] == 130
    assert leaves_nothing(leader)
    for spec in SLOW:
        assert len(list(store.run(spec).path.glob("checkpoint-*.pt"))) == 1


@pytest.mark.slow
def test_ctrl_c_while_workers_start_leaves_no_process(fork_server, store):
    for delay in (0.0, 0.02, 0.1, 0.5, 1.0, 2.0, 3.0, 4.0):
        leader = fork_server.begin_all(SLOWER, store.root, jobs=2, spawn=True)
        time.sleep(delay)
        os.killpg(leader, signal.SIGINT)
        assert fork_server.ended()[0] in (130, 131, -signal.SIGINT)  # the last: before Python could handle it
        assert leaves_nothing(leader)


@spawn
def test_workers_of_a_parent_that_was_killed_save_and_end_by_themselves(fork_server, store, spawn):
    slow = SLOWER if spawn else SLOW
    leader = fork_server.begin_all(slow, store.root, jobs=2, spawn=spawn)
    for spec in slow:
        assert fork_server.hears(f"stepped {spec.name}")
    fork_server.kill(signal.SIGKILL)
    assert fork_server.ended()[0] == -signal.SIGKILL
    assert leaves_nothing(leader)
    for spec in slow:
        assert len(list(store.run(spec).path.glob("checkpoint-*.pt"))) == 1
    assert_resumes(fork_server, slow, store)


def test_a_listener_that_fails_ends_the_grid_at_once_and_saves_every_run(fork_server, store):
    longer = [spec.but(iterations=1000) for spec in SLOW]
    start = time.monotonic()
    leader = fork_server.begin_all(longer, store.root, jobs=2, at={"stepped": "fail"})
    fork_server.ended()
    assert time.monotonic() - start < 8
    assert leaves_nothing(leader)
    for spec in longer:
        assert store.run(spec).result() is None


@jobs
def test_missing_data_stop_the_grid(fork_server, store, jobs):
    fork_server.begin_all([MISSING, SLOW[0], *GOOD], store.root, jobs=jobs)
    code, heard = fork_server.ended()
    assert code == DataMissing.exit_code == 3
    assert "there is no folder nowhere" in heard[-1]
    assert begun(heard) == ([SLOW[0].name] if jobs else [])


@jobs
def test_a_full_disk_stops_the_grid(tmp_path, jobs):
    script = """
        import sys
        from pathlib import Path
        from helpers.lab import PLAIN, tiny
        from memnorm.lab import grid
        from memnorm.lab.errors import DiskFull
        from memnorm.lab.store import Store
        from helpers.fork_server import GridEar

        if __name__ == "__main__":
            with open(Path(sys.argv[1]) / "rest", "wb", buffering=0) as file:
                try:
                    while file.write(bytes(1024)):
                        pass
                except OSError:
                    pass
            try:
                specs = [tiny(seed=seed) for seed in range(9)]
                ear = GridEar({})
                grid.run_all(specs, Store(Path(sys.argv[1])), execution=PLAIN, jobs=int(sys.argv[2]), listener=ear)
            except DiskFull as error:
                print(error)
            print(sum(line.startswith("ended") for line in ear.heard), "ended")
        """
    *_said, last, count = on_a_small_disk(script, tmp_path / "disk", "64k", jobs).splitlines()
    assert last.startswith("the disk is full: ")
    assert count == "0 ended"


@pytest.mark.parametrize("jobs", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_device_that_is_not_there_is_refused_once(store, jobs):
    ear = GridEar({})
    with pytest.raises(UsageError, match="device 'toaster' cannot be used here"):
        grid.run_all(GOOD, store, execution=replace(PLAIN, device="toaster"), jobs=jobs, listener=ear)
    assert ear.heard == []
    grid.run_all(GOOD, store, execution=PLAIN)
    done = grid.run_all(GOOD, store, execution=replace(PLAIN, device="toaster"), jobs=jobs)
    assert [outcome.status for outcome in done] == ["finished"] * 3  # what is done needs no device


def test_an_interrupt_stops_the_grid_in_this_process_too(store):
    ear = GridEar({"evaluated": "interrupt"})
    with pytest.raises(Interrupted, match="stopped at iteration 2 of 6"):
        grid.run_all(GOOD, store, execution=PLAIN, listener=ear)
    assert begun(ear.heard) == [GOOD[0].name]
    assert len(grid.run_all(GOOD, store, execution=PLAIN)) == 3


def test_an_interrupt_in_the_last_step_of_a_run_stops_the_grid_too(store):
    one_evaluation = [spec.but(evaluations=1) for spec in GOOD]
    ear = GridEar({"evaluated": "interrupt"})
    with pytest.raises((Interrupted, KeyboardInterrupt)):
        grid.run_all(one_evaluation, store, execution=PLAIN, listener=ear)
    assert begun(ear.heard) == [one_evaluation[0].name]
    assert store.run(one_evaluation[0]).result()["status"] == "finished"
