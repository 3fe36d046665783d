"""What a run measures: against the same computed by hand from the weights it kept and the scores it saw."""

import json
import mmap
import os
import platform
import subprocess
from datetime import datetime
from pathlib import Path

import pytest
import torch
from helpers import lab
from helpers.lab import ARMS, PLAIN, Ear, Spy, images_of, tiny
from torch import nn

import memnorm
from memnorm.lab import environment
from memnorm.lab.models import build
from memnorm.lab.runner import run
from memnorm.lab.spec import Execution
from memnorm.lab.store import Store
from memnorm.lab.training import Tally, Training, load_data

KEEPING = Execution(threads=1, device="cpu", workers=0, keep_weights=True)
DATA = {**tiny().data_options, "classes": 8, "test": 301}
arms = pytest.mark.parametrize("arm", ARMS)


pytestmark = pytest.mark.usefixtures("no_git")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run of every arm with all that it saw: spy, specification, metrics, weights, result."""
    store = Store(tmp_path_factory.mktemp("runs"))
    found = {}
    for name, arm in ARMS.items():
        spec = tiny(data_options=DATA, evaluations=4, **arm)
        with pytest.MonkeyPatch.context() as patch:
            spy = Spy(patch)
            result = run(spec, store, execution=KEEPING)
        folder = store.run(spec)
        found[name] = spy, spec, folder.metrics(), torch.load(folder.path / "weights.pt", weights_only=True), result
    return found


def trained(spec) -> Training:
    data = load_data(spec, None)
    return Training(spec, data.classes, data.shape, "cpu")


def by_hand(scores, labels):
    """Loss, error and top-5 error in percent, by ranks instead of topk."""
    scores = scores.double()
    own = scores.gather(1, labels[:, None])
    ranks = (scores > own).sum(1)
    loss = (scores.logsumexp(1) - own[:, 0]).mean().item()
    return [loss, *(100 * (ranks >= count).double().mean().item() for count in (1, 5))]


def measured(line, prefix):
    return [line[f"{prefix}_{name}"] for name in ("loss", "error", "error_top5")]


@arms
def test_test_loss_and_errors_are_those_of_the_final_weights(recorded, arm):
    _, spec, lines, weights, result = recorded[arm]
    data = load_data(spec, None)
    model = build(spec.model, classes=8, image_shape=data.shape)
    model = memnorm.convert(model) if spec.norm == "mbn" else model
    model.load_state_dict(weights)
    with torch.no_grad():
        scores = model.eval()(images_of(data.test))
    assert measured(lines[-1], "test") == pytest.approx(by_hand(scores, data.test.labels), rel=1e-5)
    assert result["final"] == lines[-1]


@arms
def test_train_loss_and_errors_are_means_over_the_images_since_the_last_evaluation(recorded, arm):
    spy, _, lines, _, _ = recorded[arm]
    assert [line["iteration"] for line in lines] == [3, 6, 9, 12]
    assert {len(scores) for scores in spy.scores} == {4, 8}
    for number, line in enumerate(lines):
        part = slice(3 * number, 3 * number + 3)
        expected = by_hand(torch.cat(spy.scores[part]), torch.cat(spy.labels[part]))
        assert measured(line, "train") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("arm", list(ARMS)[1:])
def test_every_batch_enters_the_memory_once(recorded, arm):
    _, spec, _, weights, _ = recorded[arm]
    tracked = [value.item() for name, value in weights.items() if name.endswith("num_batches_tracked")]
    filled = [(value > 0).sum().item() for name, value in weights.items() if name.endswith("memory_count")]
    assert tracked == [spec.iterations] * 2
    assert filled == [min(spec.iterations, 20)] * 2


def test_every_arm_is_another_run(recorded):
    assert len({result["digest_of_weights"] for *_, result in recorded.values()}) == len(ARMS)


@pytest.mark.parametrize("classes", [1, 4, 5, 6])
def test_top5_is_for_more_than_five_classes(classes):
    tally = Tally()
    scores, labels = torch.arange(classes).double().expand(3, -1), torch.tensor([0, 0, classes - 1])
    tally.add(torch.tensor(6.0), scores, labels)
    error = 0 if classes == 1 else pytest.approx(200 / 3)
    top5 = pytest.approx(200 / 3) if classes == 6 else None
    assert measured(tally.summary("x"), "x") == [2.0, error, top5]


def test_a_line_says_when_and_how_fast_it_was_measured(recorded):
    _, _, lines, _, result = recorded["bn"]
    assert [line["epoch"] for line in lines] == [0.5, 1.0, 1.5, 2.0]
    assert {line["strength"] for line in lines} == {None}
    assert [line["strength"] for line in recorded["mbn-1"][2]] == [0.1, 0.5, 0.9, 0.9]
    seconds = [0, *(line["seconds"] for line in lines)]
    for number, (line, images) in enumerate(zip(lines, (24, 20, 24, 20), strict=True)):
        part = seconds[number + 1] - seconds[number]
        assert part > 0
        assert line["step_ms"] == pytest.approx(1000 * part / 3, abs=1)
        assert line["images_per_second"] * line["step_ms"] * 3 / 1000 == pytest.approx(images, rel=1e-3)
        assert 10 < line["peak_memory_mb"] < 10_000
    assert result["seconds"] == seconds[-1]


def test_the_headline_is_the_last_evaluation_and_the_best_is_stored_as_well(store):
    for seed in range(20):
        spec = tiny(evaluations=12, seed=seed, learning_rate=0.5)
        result = run(spec, store, execution=PLAIN)
        lines = store.run(spec).metrics()
        errors = [line["test_error"] for line in lines]
        assert result["final"] == lines[-1]
        assert result["best"] == {"test_error": min(errors), "iteration": errors.index(min(errors)) + 1}
        if result["best"]["test_error"] < result["final"]["test_error"]:
            return
    pytest.fail("in none of these runs was the best evaluation another than the last")


def test_a_run_that_diverges_is_recorded_as_diverged_and_not_repeated(store):
    spec = tiny(learning_rate=1e30, evaluations=12)
    ear = Ear()
    result = run(spec, store, execution=PLAIN, listener=ear)
    steps = ear.all("stepped")
    assert result["status"] == "diverged"
    assert result["diverged_at"] == result["iteration"] == len(steps) < 12
    assert result["final"] == (store.run(spec).metrics() or [None])[-1]
    again = Ear()
    assert run(spec, store, execution=PLAIN, listener=again) == result
    assert again.heard == []
    assert store.runs()[0].status == "diverged"


def test_a_run_whose_last_step_diverges_is_recorded_as_diverged(store):
    result = run(tiny(learning_rate=1e30, iterations=1), store, execution=PLAIN)
    assert result["status"] == "diverged"


def test_a_run_that_diverges_at_once_has_no_final_line(store, monkeypatch):
    monkeypatch.setattr(lab, "net", lambda num_classes, in_channels: Broken(num_classes, in_channels))
    result = run(tiny(), store, execution=PLAIN)
    assert (result["status"], result["diverged_at"], result["final"], result["best"]) == ("diverged", 0, None, None)


class Broken(nn.Module):
    """Says nothing that is a number while it trains."""

    def __init__(self, num_classes, in_channels):
        super().__init__()
        self.norm = nn.BatchNorm2d(in_channels)
        self.linear = nn.Linear(in_channels * 64, num_classes)

    def forward(self, x):
        y = self.linear(self.norm(x).flatten(1))
        return y * float("nan") if self.training else y


def test_a_step_without_a_finite_loss_leaves_the_weights_as_they_were(monkeypatch):
    monkeypatch.setattr(lab, "net", lambda num_classes, in_channels: Broken(num_classes, in_channels))
    training = trained(tiny())
    before = [parameter.clone() for parameter in training.model.parameters()]
    assert not training.step(0, torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.long))
    assert all(map(torch.equal, before, training.model.parameters()))
    assert training.tally.images == 0


@pytest.mark.parametrize("arm", ["bn", "mbn-2"])
@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
def test_other_precisions_train(store, recorded, arm, precision):
    _, spec, lines, _, single = recorded[arm]
    with pytest.MonkeyPatch.context() as patch:
        spy = Spy(patch)
        result = run(spec.but(precision=precision), store, execution=KEEPING)
    assert {scores.dtype for scores in spy.scores} == {getattr(torch, precision)}
    weights = torch.load(store.run(spec.but(precision=precision)).path / "weights.pt", weights_only=True)
    assert weights["1.weight"].dtype == (torch.float64 if precision == "float64" else torch.float32)
    assert result["final"]["train_loss"] == pytest.approx(lines[-1]["train_loss"], rel=0.05)
    assert result["digest_of_weights"] != single["digest_of_weights"]


def test_evaluation_computes_in_the_precision_of_the_run():
    spec = tiny(precision="bfloat16")
    training = trained(spec)
    seen = []
    training.model.register_forward_hook(lambda _model, _args, scores: seen.append(scores.dtype))
    training.evaluate(load_data(spec, None).test, workers=0)
    assert seen == [torch.bfloat16]


def test_the_digest_covers_every_bit_of_the_state():
    training = trained(tiny(norm="mbn"))
    digests = {training.digest()}
    with torch.no_grad():
        for value in training.model.state_dict().values():
            flat = value.view(-1)
            flat[-1] = torch.nextafter(flat[-1], torch.tensor(9e9)) if value.is_floating_point() else flat[-1] + 1
            digests.add(training.digest())
    assert len(digests) == 1 + len(training.model.state_dict())


def test_weights_of_every_parameter_decay(store):
    """Also of norms and biases, as in the paper."""
    (group,) = trained(tiny(weight_decay=0.01, momentum=0.7)).optimizer.param_groups
    assert (group["weight_decay"], group["momentum"], len(group["params"])) == (0.01, 0.7, 10)


def test_the_number_of_parameters_is_in_the_result(store):
    assert run(tiny(), store, execution=PLAIN)["parameters"] == 40 + 8 + 222 + 12 + 28


def test_peak_memory_is_that_since_it_was_asked_for():
    """Where the system says so; a large block that is gone before counts no more."""
    size = 60 * 2**20
    with mmap.mmap(-1, size) as block:  # goes back to the system when closed, unlike an allocator's memory
        block.write(b"1" * size)
        before = environment.PeakMemory("cpu").read()
    after = environment.PeakMemory("cpu").read()
    assert before is None or before > after + 30 > 40


def test_a_session_says_where_it_was_computed_and_names_neither_person_nor_place():
    session = environment.session("cpu", 3, 5)
    assert (session["iteration"], session["threads"], session["device"]) == (5, 3, "cpu")
    assert (session["memnorm"], session["torch"]) == (memnorm.__version__, torch.__version__)
    assert datetime.fromisoformat(session["started"]).tzinfo is not None
    text = json.dumps(session)
    for private in (platform.node(), os.getcwd(), str(Path.home())):
        assert private not in text


def test_the_commit_is_that_of_the_clone_the_package_stands_in(tmp_path, monkeypatch):
    monkeypatch.undo()
    commit = environment.commit.__wrapped__  # not the answer that is kept for the process
    module = tmp_path / "memnorm/lab/environment.py"
    module.parent.mkdir(parents=True)
    module.touch()
    monkeypatch.setattr(environment, "__file__", str(module))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit() is None

    def git(*words):
        identity = ("-c", "user.name=x", "-c", "user.email=x")
        return subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True, text=True)

    git("init")
    git("add", ".")
    git("commit", "-m", "x")
    name = git("rev-parse", "HEAD").stdout[:12]
    assert commit() == name
    (tmp_path / "notes").touch()
    assert commit() == name
    module.write_text("changed")
    assert commit() == f"{name}+changes"
    installed = tmp_path / "venv/site-packages/memnorm/lab/environment.py"
    installed.parent.mkdir(parents=True)
    monkeypatch.setattr(environment, "__file__", str(installed))
    assert commit() is None  # an installed copy inside the clone is not the clone
    for text, recorded in (("0123456789ab\n", "0123456789ab"), ("\n", None)):
        installed.with_name("COMMIT").write_text(text)
        assert commit() == recorded
    monkeypatch.setattr(environment, "__file__", str(module))
    monkeypatch.setenv("PATH", "")
    assert commit() is None


def test_the_commit_is_asked_once_because_what_is_committed_later_is_not_what_runs(monkeypatch):
    monkeypatch.undo()
    environment.commit.cache_clear()
    first = environment.commit()
    monkeypatch.setenv("PATH", "")
    assert environment.commit() == first
