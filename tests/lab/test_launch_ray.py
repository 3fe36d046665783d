"""A grid on a Ray cluster, a local one here, is the grid in processes."""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from helpers.fork_server import GridEar
from helpers.lab import EVERY_STEP, PLAIN, TESTS, timeless, tiny, undisturbed
from helpers.optional import library

from memnorm.lab import grid
from memnorm.lab.errors import DataMissing, Interrupted, UsageError
from memnorm.lab.store import Store

GOOD = [tiny(seed=seed, iterations=6) for seed in range(3)]
SLOW = [tiny(seed=seed, iterations=200, evaluations=2, model_options={"pause": 0.02}) for seed in range(2)]


def test_without_ray_the_launcher_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "memnorm.lab.launch_ray", raising=False)
    with pytest.raises(UsageError, match=r"needs the package ray: pip install ray"):
        grid.run_all(GOOD, Store(tmp_path), execution=PLAIN, launcher="ray")


@pytest.fixture(scope="module")
def token(tmp_path_factory):
    """What admits to a cluster; without a file like this Ray makes one in the user's home."""
    path = tmp_path_factory.mktemp("ray") / "token"
    path.write_text(secrets.token_hex(32))
    return path


@pytest.fixture(scope="module")
def cluster(token):
    """Ray on this machine, with two CPUs."""
    ray = library("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        patch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="warning")
        yield
        ray.shutdown()


@pytest.fixture
def store(cluster, tmp_path) -> Store:
    return Store(tmp_path / "runs")


def on_ray(specs, store, execution=PLAIN, **options):
    return grid.run_all(specs, store, execution=execution, launcher="ray", **options)


def statuses(outcomes):
    return [(outcome.spec, outcome.status) for outcome in outcomes]


def begun(ear):
    return [line.split()[1] for line in ear.heard if line.startswith("began ")]


def assert_alone(store, specs):
    """Every run ended as it does undisturbed and by itself."""
    for spec in specs:
        assert timeless(store.run(spec).result()) == undisturbed(spec)[0]


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [0, 1])
def test_runs_are_those_alone_in_the_order_asked_for_and_are_not_repeated(store, jobs):
    specs, ear = [GOOD[2], GOOD[0], GOOD[1], GOOD[0]], GridEar()
    outcomes = on_ray(specs, store, jobs=jobs, listener=ear)
    assert statuses(outcomes) == [(spec, "finished") for spec in specs]
    assert sorted(begun(ear)) == sorted(spec.name for spec in GOOD)
    assert {f"stepped {spec.name} 6" for spec in GOOD} <= set(ear.heard)
    assert [store.run(spec).sessions()[0]["threads"] for spec in GOOD] == [1, 1, 1]
    assert_alone(store, GOOD)
    again = GridEar()
    assert [one.result for one in on_ray(specs, store, jobs=jobs, listener=again)] == [one.result for one in outcomes]
    assert begun(again) == []


@pytest.mark.slow
def test_runs_that_fail_or_diverge_do_not_stop_the_others(store):
    failing, diverging = tiny(model="helpers.lab:refuse"), tiny(learning_rate=1e30)
    outcomes = on_ray([failing, GOOD[0], diverging, GOOD[1]], store)
    assert [outcome.status for outcome in outcomes] == ["failed", "finished", "diverged", "finished"]
    assert "this factory fails" in outcomes[0].message


class Killer(GridEar):
    """Kills the process of a run when it has evaluated once."""

    def __init__(self, store, spec):
        super().__init__()
        self.folder, self.spec = store.run(spec), spec

    def evaluated(self, spec, line):
        super().evaluated(spec, line)
        if spec == self.spec:
            os.kill(int(self.folder._holder().split()[1]), signal.SIGKILL)


@pytest.mark.slow
def test_a_process_that_is_killed_costs_its_run_only_and_the_same_command_resumes_it(store):
    specs = [*SLOW, GOOD[0]]
    outcomes = on_ray(specs, store, EVERY_STEP, listener=Killer(store, SLOW[0]))
    assert [outcome.status for outcome in outcomes] == ["failed", "finished", "finished"]
    assert outcomes[0].message.startswith("its task ended: ")
    assert outcomes[0].message.endswith("; the same command resumes it")
    ear = GridEar()
    assert statuses(on_ray(specs, store, listener=ear)) == [(spec, "finished") for spec in specs]
    (line,) = [line for line in ear.heard if line.startswith("began ")]
    assert line.split()[1] == SLOW[0].name
    assert int(line.split()[2]) >= 100
    assert_alone(store, specs)


@pytest.mark.slow
def test_an_interrupt_saves_every_run_and_the_same_command_resumes(store):
    specs = [*SLOW, *GOOD]
    with pytest.raises(Interrupted, match="what was saved is kept"):
        on_ray(specs, store, listener=GridEar({"stepped": "interrupt"}))
    saved = [spec for spec in specs if list(store.run(spec).path.glob("checkpoint-*.pt"))]
    assert SLOW[0] in saved or SLOW[1] in saved
    assert all(store.run(spec).result() is None for spec in specs)
    ear = GridEar()
    assert statuses(on_ray(specs, store, listener=ear)) == [(spec, "finished") for spec in specs]
    begins = dict(line.split()[1:3] for line in ear.heard if line.startswith("began "))
    assert all(int(begins[spec.name]) > 0 for spec in saved)
    assert_alone(store, specs)


@pytest.mark.slow
def test_a_cpu_belongs_to_one_run_even_while_it_reports(store):
    """Ray lends a task's CPU to others while the task waits for an answer."""
    at_a_time = []

    class Counting(GridEar):
        def stepped(self, spec, iteration):
            at_a_time.append(len(list(store.root.glob("*/holder.json"))))

    specs = [tiny(seed=seed, iterations=100, evaluations=2, model_options={"pause": 0.02}) for seed in range(5)]
    assert statuses(on_ray(specs, store, listener=Counting())) == [(spec, "finished") for spec in specs]
    assert max(at_a_time) == 2


@pytest.mark.slow
def test_an_interrupt_does_not_wait_for_runs_that_the_cluster_has_no_room_for(store):
    """It has no GPU."""
    interrupt = threading.Timer(3.0, os.kill, [os.getpid(), signal.SIGINT])
    interrupt.start()
    with pytest.raises(Interrupted, match="what was saved is kept"):
        on_ray(GOOD, store, execution=replace(PLAIN, device="cuda:0"))
    assert statuses(on_ray(GOOD, store)) == [(spec, "finished") for spec in GOOD]


@pytest.mark.slow
def test_missing_data_stop_the_grid(store):
    with pytest.raises(DataMissing, match="there is no folder"):
        on_ray([tiny(data="./nowhere", data_options={}), *SLOW, *GOOD], store)
    assert all(store.run(spec).result() is None for spec in SLOW)


@pytest.mark.slow
def test_a_run_that_another_process_works_on_comes_last(store):
    with contextlib.ExitStack() as held:
        held.enter_context(store.run(GOOD[0]).held())

        class Releasing(GridEar):
            def message(self, spec, text):
                super().message(spec, text)
                held.close()

        ear = Releasing()
        assert statuses(on_ray(GOOD, store, jobs=1, listener=ear)) == [(spec, "finished") for spec in GOOD]
    assert begun(ear) == [GOOD[1].name, GOOD[2].name, GOOD[0].name]
    assert any(f"being worked on by process {os.getpid()}" in line for line in ear.heard)


@pytest.mark.slow
def test_a_result_that_is_not_in_the_folder_is_reported(store, monkeypatch):
    """As on a cluster whose machines share no files."""
    launch_ray = importlib.import_module("memnorm.lab.launch_ray")
    monkeypatch.setattr(launch_ray, "Store", lambda root: Store(root / "elsewhere"))
    cluster = launch_ray.RayLauncher(grid.RunContext(store.root, PLAIN, None), 0)
    cluster.context = grid.RunContext(store.root, PLAIN, None)
    (outcome,) = grid._supervise(grid._Queue(GOOD[:1], GridEar()), cluster, GridEar())
    assert outcome.status == "failed"
    assert "--runs must be a folder that all machines share" in outcome.message


@pytest.mark.slow
def test_reproduce_spreads_a_table_over_a_cluster_that_it_starts_itself(token, tmp_path):
    library("ray")
    words = ["reproduce", "memory-size", "--scale", "smoke", "--launcher", "ray"]
    environment = {**os.environ, "RAY_AUTH_TOKEN_PATH": str(token)}

    def reproduce():
        command = [sys.executable, "-m", "memnorm.lab", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)

    first = reproduce()
    assert first.stdout.count("done: ") == len(list(tmp_path.glob("runs/*/result.json"))) > 2
    assert first.stderr.count("begins") == first.stdout.count("done: ")
    assert (tmp_path / "report/report.html").exists()
    again = reproduce()
    assert again.stdout == first.stdout
    assert "begins" not in again.stderr
