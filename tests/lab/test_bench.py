"""The benchmark measures what it says, refuses a busy machine, and its exit code follows its bounds. No times here."""

import json
import time

import pytest

from memnorm.lab.bench import clock, layer, rest, step
from memnorm.lab.cli import bench
from memnorm.lab.cli import main as command
from memnorm.lab.errors import UsageError


def test_calls_take_turns_in_every_round(monkeypatch):
    monkeypatch.setattr(clock, "LEAST", 0)
    order = []
    seconds = clock.take_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3)
    assert order[4:] == ["a", "b"] * 3
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3}


def test_short_calls_are_repeated_within_a_turn(monkeypatch):
    monkeypatch.setattr(clock, "LEAST", 0.01)
    calls = []
    (seconds,) = clock.take_turns({"wait": lambda: (calls.append(1), time.sleep(0.002))}, rounds=1).values()
    assert 2 + 2 <= len(calls) <= 2 + 5
    assert 0.002 <= seconds[0] < 0.01


def test_a_ratio_compares_within_rounds_and_has_quartiles():
    first, second = clock.ratios({"BN": [1.0, 2.0, 4.0, 1.0], "MBN": [0.5, 1.0, 2.0, 3.0]})
    assert (first.ratio, second.ratio) == (1, 0.5)
    assert second.milliseconds == 1500
    assert second.low == 0.5
    assert second.high == pytest.approx(2.375)


def test_a_busy_machine_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setattr(clock, "busy", lambda: 0.4)
    with pytest.raises(UsageError, match=r"40 % of its CPU time.*--busy"):
        clock.require_quiet()
    monkeypatch.setattr(clock, "busy", lambda: 0.02)
    assert clock.require_quiet() == 0.02


def test_cpu_times_give_the_share_in_use(monkeypatch):
    times = iter([(100, 200), (150, 300)])
    monkeypatch.setattr(clock, "_cpu_times", lambda: next(times))
    assert clock.busy(0) == 0.5


@pytest.mark.parametrize(("value", "code"), [(0.7, 0), (0.9, 1)])
def test_the_exit_code_says_whether_every_bound_is_met(monkeypatch, capsys, tmp_path, value, code):
    target = {"what": "layer", "value": value, "must": 0.8, "good": None, "unit": "× BN"}
    monkeypatch.setattr(bench, "measure", lambda arguments: [("data", {"targets": [target]})])
    assert command(["bench", "data", "--out", str(tmp_path / "bench.json")]) == code
    assert ("missed" in capsys.readouterr().out) == bool(code)
    assert json.loads((tmp_path / "bench.json").read_text())["data"]["targets"] == [target]


def test_parts_that_are_measured_one_by_one_make_one_record(monkeypatch, tmp_path):
    out = tmp_path / "bench.json"
    for part in ("data", "rest"):
        monkeypatch.setattr(bench, "measure", lambda arguments: [(arguments.part, {"targets": []})])
        assert command(["bench", part, "--out", str(out)]) == 0
    assert json.loads(out.read_text()) == {"data": {"targets": []}, "rest": {"targets": []}}


def test_a_file_that_is_no_record_is_not_overwritten(capsys, tmp_path):
    out = tmp_path / "notes.txt"
    out.write_text("mine")
    assert command(["bench", "data", "--out", str(out)]) == 2
    assert "not a record" in capsys.readouterr().err
    assert out.read_text() == "mine"


def test_a_layer_is_measured_in_training_forward_and_eval(monkeypatch):
    monkeypatch.setattr(clock, "LEAST", 0)
    row = layer._shape((2, 3, 4, 4), "channels_last", 2, bandwidth=1e9)
    assert {"train", "forward", "eval", "noise", "of bandwidth"} <= row.keys()
    least = 5 * 96 * 4 / 1e9
    assert row["of bandwidth"] == pytest.approx(1000 * least / row["train"]["milliseconds"])


def test_steps_have_phases_that_make_up_the_step():
    record = step.network_costs("small", 2, step.ARMS, rounds=2)
    assert [arm["name"] for arm in record["arms"]] == list(step.ARMS)
    for arm in record["arms"]:
        assert set(arm["milliseconds of"]) == {"forward", "backward", "update"}
        assert 0 < max(arm["milliseconds of"].values()) <= 2 * arm["milliseconds"]


def test_every_bound_of_a_step_names_its_network():
    ratios = {"BN": 1.0, "two-way": 1.0, step.ALONE: 0.98, "MBN-1": 0.97, "MBN-2": 1.31}
    arms = [{"name": name, "ratio": ratio} for name, ratio in ratios.items()]
    found = step.targets({"model": "resnet20", "batch_size": 8, "arms": arms})
    assert [(one.what, one.unit, one.verdict) for one in found] == [
        ("resnet20, batch 8, two-way, not centred", "× BN", "reached"),
        ("resnet20, batch 8, two-way, not centred", "× MBN-1", "reached"),
        ("resnet20, batch 8, centred gradients", "× not centred", "missed"),
        ("resnet20, batch 8, MBN-1", "× BN", "reached"),
        ("resnet20, batch 8, MBN-2", "× BN", "missed"),
    ]


def test_bytes_kept_for_backward_are_the_input_and_vectors():
    channels, values = layer.CURVE[0], 8 * layer.CURVE[0] * layer.CURVE[1] * layer.CURVE[2]
    assert rest.saved_bytes("MBN") == 4 * (values + channels + 6 * channels + 2)
    assert rest.saved_bytes("MBN") <= rest.saved_bytes("BN") + rest.memory_bytes()


def test_a_fresh_process_reports_its_peak_memory():
    assert rest.peak("bn", "single") > 50
