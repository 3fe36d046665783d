"""A training: schedules, data, measurements, recalibration, and the same run written literally."""

import copy
import json
import math
import mmap
import os
import platform
import random
import subprocess
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import torch
from helpers import lab
from helpers.lab import ARMS, PLAIN, Ear, Spy, content, images_of, timeless, tiny
from literal import LiteralTraining
from torch import nn

import memnorm
from memnorm.lab import environment
from memnorm.lab.data import EVALUATION_BATCH, Data, Source
from memnorm.lab.errors import UsageError
from memnorm.lab.models import build
from memnorm.lab.runner import evaluation_due, run
from memnorm.lab.spec import Execution, RunSpec
from memnorm.lab.store import Store
from memnorm.lab.training import (
    Training,
    choose_device,
    learning_rate,
    load_data,
    recalibration_source,
    sources,
)

pytestmark = pytest.mark.usefixtures("no_git")


@pytest.fixture
def spy(monkeypatch) -> Spy:
    return Spy(monkeypatch)


def test_the_learning_rate_falls_where_the_strength_rises():
    draw = random.Random(0)
    for _ in range(200):
        milestones = sorted(round(draw.uniform(0.01, 0.99), draw.choice([1, 2, 5])) for _ in range(3))
        if len(set(milestones)) < 3 or min(milestones) == 0 or max(milestones) == 1:
            continue
        spec = tiny(iterations=draw.randrange(1, 500), milestones=milestones, learning_rate=1.0)
        schedule = memnorm.StrengthSchedule(
            memnorm.convert(nn.BatchNorm1d(1)), spec.iterations, milestones=milestones, values=(0.0, 0.1, 0.2, 0.3)
        )
        for iteration in range(spec.iterations):
            assert learning_rate(spec, iteration) == pytest.approx(0.1 ** (schedule.get_last_strength() * 10))
            schedule.step()


def test_the_cosine_schedule_falls_to_nothing_after_the_warmup():
    spec = tiny(iterations=13, warmup=3, schedule="cosine", learning_rate=0.4)
    expected = [0.1, 0.2, 0.3] + [0.2 * (1 + math.cos(math.pi * done / 10)) for done in range(10)]
    assert [learning_rate(spec, iteration) for iteration in range(13)] == pytest.approx(expected)
    assert learning_rate(spec, 3) == 0.4
    assert learning_rate(spec, 8) == pytest.approx(0.2)


@pytest.mark.parametrize("schedule", ["step", "constant"])
def test_warmup_rises_in_equal_steps_to_the_full_rate(schedule):
    spec = tiny(iterations=10, warmup=3, schedule=schedule, learning_rate=0.4)
    assert [learning_rate(spec, iteration) for iteration in range(4)] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert learning_rate(spec, 9) == pytest.approx(0.4 if schedule == "constant" else 0.004)


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1), ("linear", 8 / 128), ("sqrt", 0.25)])
def test_every_rate_is_scaled_with_the_batch(scaling, factor):
    for changes in ({}, {"schedule": "cosine", "warmup": 2}, {"schedule": "constant", "warmup": 2}):
        plain, scaled = tiny(**changes), tiny(**changes, scaling=scaling)
        for iteration in range(plain.iterations):
            assert learning_rate(scaled, iteration) == pytest.approx(factor * learning_rate(plain, iteration))


def test_each_step_uses_the_learning_rate_and_the_strength_of_its_iteration(store, spy):
    spec = tiny(norm="mbn", iterations=10, evaluations=10)
    run(spec, store, execution=PLAIN)
    assert spy.rates == [learning_rate(spec, iteration) for iteration in range(10)]
    lines = store.run(spec).metrics()
    assert [line["learning_rate"] for line in lines] == spy.rates
    expected = [0.1] * 4 + [0.5] * 2 + [0.9] * 4
    assert [strength for (strength,) in spy.strengths] == expected
    assert [line["strength"] for line in lines] == expected


def trained(spec, device="cpu") -> Training:
    data = load_data(spec, None)
    return Training(spec, data.classes, data.shape, device)


@pytest.mark.parametrize("model", ["helpers.lab:net", "small"])
def test_every_norm_starts_with_the_same_weights(model):
    plain = dict(trained(tiny(model=model)).model.named_parameters())
    for changes in list(ARMS.values())[1:]:
        other = dict(trained(tiny(model=model, **changes)).model.named_parameters())
        assert plain.keys() == other.keys()
        for name, value in plain.items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=0)


def test_every_norm_is_given_the_same_images_and_drops_the_same_values(store):
    spies = []
    for changes in (*ARMS.values(), {"seed": 1}):
        with pytest.MonkeyPatch.context() as patch:
            spies.append(Spy(patch))
            run(tiny(model_options={"dropout": 0.5}, **changes), store, execution=PLAIN)
    *every_norm, another_seed = spies
    for other in every_norm[1:]:
        assert other.iterations == every_norm[0].iterations == list(range(12))
        for ours, theirs in ((every_norm[0].images, other.images), (every_norm[0].dropped, other.dropped)):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert 0.4 < torch.cat(every_norm[0].dropped).double().mean() < 0.6
    assert content(every_norm[0].images) != content(another_seed.images)
    assert not torch.equal(torch.cat(every_norm[0].dropped), torch.cat(another_seed.dropped))


@pytest.mark.parametrize("arm", ARMS.values(), ids=ARMS.keys())
def test_evaluations_leave_no_trace_in_the_training(store, arm):
    specs = [tiny(model_options={"dropout": 0.5}, iterations=7, evaluations=count, **arm) for count in (1, 7)]
    assert len({run(spec, store, execution=PLAIN)["digest_of_weights"] for spec in specs}) == 1


def test_an_evaluation_that_fails_leaves_the_model_in_training_mode():
    spec = tiny()
    training = trained(spec)
    test = load_data(spec, None).test
    test.batches = lambda *_arguments, **_options: iter([(torch.zeros(1, 99, 8, 8), torch.zeros(1, dtype=torch.long))])
    with pytest.raises(RuntimeError, match="channels"):
        training.evaluate(test, workers=0)
    assert all(module.training for module in training.model.modules())


def test_images_held_out_are_never_trained_on_and_the_test_set_is_never_touched(store, spy):
    spec = tiny(holdout=12, augment=False)
    data = load_data(spec, None)
    run(spec, store, execution=PLAIN)
    trained_on, evaluated_on = set(content(spy.images)), set(content(spy.evaluated))
    assert (len(trained_on), len(evaluated_on)) == (32, 12)
    assert trained_on | evaluated_on == set(content([images_of(data.train)]))
    assert not (trained_on | evaluated_on) & set(content([images_of(data.test)]))


def test_the_sampler_is_the_one_asked_for(store, spy):
    run(tiny(sampler="sorted", iterations=6), store, execution=PLAIN)
    assert min(len(labels.unique()) for labels in spy.labels) == 1
    spy.labels.clear()
    run(tiny(sampler="few-classes", classes_per_batch=1, iterations=6), store, execution=PLAIN)
    assert {len(labels.unique()) for labels in spy.labels} == {1}


def test_subsets_are_the_same_for_every_seed_and_norm():
    changes = [{"seed": seed, "norm": norm} for seed in (0, 1) for norm in ("bn", "mbn")]
    specs = [tiny(train_images=15, test_images=9, holdout=10, **change) for change in changes]
    data = load_data(specs[0], None)
    chosen = [[content([images_of(source)]) for source in sources(spec, data)] for spec in specs]
    assert all(one == chosen[0] for one in chosen)
    assert [len(one) for one in chosen[0]] == [15, 9]
    assert not set(chosen[0][0]) & set(chosen[0][1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_images": 45}, "synthetic has 44 training images; cannot train on 45 with 0 held out"),
        ({"train_images": 40, "holdout": 5}, "synthetic has 44 training images; cannot train on 40 with 5 held out"),
        ({"holdout": 44}, "synthetic has 44 training images; cannot train on 1 with 44 held out"),
        ({"holdout": 99}, "synthetic has 44 training images; cannot train on 1 with 99 held out"),
        ({"test_images": 21}, "there are 20 images to evaluate on; cannot take 21"),
        ({"test_images": 6, "holdout": 5}, "there are 5 images to evaluate on; cannot take 6"),
    ],
    ids=str,
)
def test_more_images_than_there_are_is_refused(changes, message):
    spec = tiny(**changes)
    with pytest.raises(UsageError, match=message):
        sources(spec, load_data(spec, None))


def test_evaluations_are_as_many_as_asked_for_evenly_spaced_and_one_at_the_end():
    for iterations in range(1, 40, 3):
        for count in range(1, 45, 4):
            spec = tiny(iterations=iterations, evaluations=count)
            due = [iteration for iteration in range(1, iterations + 1) if evaluation_due(spec, iteration)]
            assert len(due) == min(count, iterations)
            assert due[-1] == iterations
            gaps = {later - earlier for earlier, later in zip([0, *due], due, strict=False)}
            assert max(gaps) - min(gaps) <= 1


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(UsageError, match="device 'cuda:99' cannot be used here"):
        choose_device("cuda:99")
    with pytest.raises(UsageError, match="device 'toaster' cannot be used here"):
        choose_device("toaster")
    assert choose_device("cpu") == "cpu"
    assert choose_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("arm", ARMS.values(), ids=ARMS.keys())
def test_channels_last_computes_the_same_run(store, tmp_path, arm):
    spec = tiny(iterations=5, precision="float64", recalibrate=16, **arm)
    planes = run(spec, store, execution=PLAIN)
    rows = run(spec, Store(tmp_path / "rows"), execution=replace(PLAIN, channels_last=True))
    for name in ("train_loss", "test_loss", "test_loss_recalibrated"):
        assert rows["final"][name] == pytest.approx(planes["final"][name], rel=1e-9)
    assert (planes["environment"]["channels_last"], rows["environment"]["channels_last"]) == (False, True)


@pytest.mark.parametrize("channels_last", [False, True])
def test_channels_last_is_the_layout_of_weights_and_images(channels_last):
    spec = tiny(model="resnet8", data_options={"channels": 3})
    data = load_data(spec, None)
    training = Training(spec, data.classes, data.shape, "cpu", channels_last)
    images, _ = training.place(*next(data.train.batches(iter([(torch.arange(4), 0)]), workers=0)))
    wide = [module.weight for module in training.model.modules() if isinstance(module, nn.Conv2d)]
    for tensor in (images, *(one for one in wide if one.shape[-1] > 1)):
        assert tensor.is_contiguous(memory_format=torch.channels_last) == channels_last
        assert tensor.is_contiguous() != channels_last


def accumulated_run(tmp_path, norm, batch_size, accumulate):
    spec = tiny(norm=norm, batch_size=batch_size, accumulate=accumulate, precision="float64", iterations=12)
    assert run(spec, Store(tmp_path), execution=replace(PLAIN, keep_weights=True))["status"] == "finished"
    return torch.load(Store(tmp_path).run(spec).path / "weights.pt", weights_only=True)


@pytest.mark.parametrize(("batch_size", "accumulate"), [(1, 8), (2, 4), (4, 2)])
def test_accumulated_micro_batches_make_the_step_of_the_joint_batch(tmp_path, batch_size, accumulate):
    """With a norm that does not see the batch; the last step of an epoch has four images only."""
    joint = accumulated_run(tmp_path, "group", 8, 1)
    parts = accumulated_run(tmp_path, "group", batch_size, accumulate)
    torch.testing.assert_close(parts, joint, rtol=0, atol=1e-12)


KEEPING = Execution(threads=1, device="cpu", workers=0, keep_weights=True)
DATA = {**tiny().data_options, "classes": 8, "test": 301}
arms = pytest.mark.parametrize("arm", ARMS)


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


def test_the_digest_covers_every_bit_of_the_state():
    training = trained(tiny(norm="mbn"))
    digests = {training.digest()}
    with torch.no_grad():
        for value in training.model.state_dict().values():
            flat = value.view(-1)
            flat[-1] = torch.nextafter(flat[-1], torch.tensor(9e9)) if value.is_floating_point() else flat[-1] + 1
            digests.add(training.digest())
    assert len(digests) == 1 + len(training.model.state_dict())


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


def test_adamw_takes_the_steps_of_torch_s_with_the_rates_of_the_run():
    spec = tiny(optimizer="adamw", learning_rate=0.01, weight_decay=0.1, scaling="linear", base_batch_size=4)
    training = Training(spec, 4, (1, 8, 8), "cpu")
    twin = copy.deepcopy(training.model)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.02, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    for iteration in range(4):
        images, labels = torch.rand(8, 1, 8, 8, generator=generator), torch.arange(8) % 4
        training.step(iteration, images, labels)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(twin(images), labels).backward()
        optimizer.step()
    for ours, torchs in zip(training.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, torchs, rtol=0, atol=1e-7)


ADDED = ("test_error_recalibrated", "test_loss_recalibrated")


@pytest.fixture
def last(monkeypatch) -> list[Training]:
    """The trainings of runs, as they were left."""
    found = []
    evaluate = Training.evaluate_recalibrated

    def watched(training, *arguments):
        found.append(training)
        return evaluate(training, *arguments)

    monkeypatch.setattr(Training, "evaluate_recalibrated", watched)
    return found


@pytest.mark.parametrize("arm", ARMS)
def test_nothing_but_the_two_numbers_is_added(store, arm):
    plain, more = (run(tiny(**ARMS[arm], recalibrate=count), store, execution=PLAIN) for count in (0, 30))
    assert more["digest_of_weights"] == plain["digest_of_weights"]
    lines = store.run(tiny(**ARMS[arm], recalibrate=30)).metrics()
    assert [ADDED[0] in line for line in lines] == [False, False, True]
    assert {name: more["final"].pop(name) for name in ADDED}.keys() == set(ADDED)
    assert {**timeless(more), "name": ""} == {**timeless(plain), "name": ""}


@pytest.mark.parametrize("arm", ARMS)
def test_the_numbers_are_those_of_a_recalibrated_copy(store, last, arm):
    spec = tiny(**ARMS[arm], recalibrate=30)
    final = run(spec, store, execution=PLAIN)["final"]
    data = load_data(spec, None)
    model = copy.deepcopy(last[0].model)
    memnorm.recalibrate(model, [images_of(recalibration_source(spec, data))])
    with torch.no_grad():
        scores = model.eval()(images_of(data.test))
    loss = torch.nn.functional.cross_entropy(scores, data.test.labels).item()
    wrong = (scores.argmax(1) != data.test.labels).double().mean().item()
    assert final[ADDED[0]] == pytest.approx(100 * wrong, abs=1e-9)
    assert final[ADDED[1]] == pytest.approx(loss, rel=1e-5)
    assert final[ADDED[1]] != pytest.approx(final["test_loss"], rel=5e-5)


def test_the_images_are_the_same_for_every_seed_and_norm_and_never_held_out():
    data = load_data(tiny(), None)
    base = tiny(holdout=10, train_images=30, recalibrate=20)
    measured = recalibration_source(base, data)
    others = [base.but(seed=3), base.but(norm="mbn"), base.but(batch_size=2, augment=False)]
    for spec in others:
        assert torch.equal(images_of(recalibration_source(spec, data)), images_of(measured))
    trained_on, held_out = sources(base, data)
    assert set(content([images_of(measured)])) <= set(content([images_of(trained_on)]))
    assert not set(content([images_of(measured)])) & set(content([images_of(held_out)]))
    assert len(measured) == 20 <= EVALUATION_BATCH
    assert recalibration_source(tiny(), data) is None


class Numbered:
    """Images that are known by their place alone."""

    def __len__(self):
        return 100

    def subset(self, indices):
        return indices.tolist()


def test_the_images_are_in_random_order_so_that_a_batch_is_a_sample_of_all():
    data = Data("numbered", 2, (1, 1, 1), Numbered(), Numbered())
    chosen = recalibration_source(tiny(recalibrate=40), data)
    assert chosen != sorted(chosen)
    assert recalibration_source(tiny(recalibrate=20), data) == chosen[:20]


def test_more_images_than_are_trained_on_are_refused_before_anything_is_written(store):
    with pytest.raises(UsageError, match=r"recalibrate: there are 30 training images; got 31"):
        run(tiny(train_images=30, recalibrate=31), store, execution=PLAIN)
    assert not store.runs()


def test_a_norm_without_running_statistics_is_refused(store):
    with pytest.raises(UsageError, match=r"recalibrate needs running statistics, and 'group' has none"):
        run(tiny(norm="group", recalibrate=10), store, execution=PLAIN)


def test_a_model_that_blew_up_has_no_such_numbers_and_says_why(store, monkeypatch):
    ear = Ear()

    def blow_up(training, *_arguments):
        with torch.no_grad():
            next(training.model.parameters()).fill_(float("nan"))
        return evaluate(training, *_arguments)

    evaluate = Training.evaluate_recalibrated
    monkeypatch.setattr(Training, "evaluate_recalibrated", blow_up)
    result = run(tiny(recalibrate=30), store, execution=PLAIN, listener=ear)
    assert [result["final"][name] for name in ADDED] == [None, None]
    assert "not recalibrated: no input of a batch norm is finite" in ear.all("message")[0]


STEPS, EVALUATED_EVERY = 25, 5
RATES = [0.1] * 10 + [0.01] * 5 + [0.001] * 10
STRENGTHS = [0.1] * 10 + [0.5] * 5 + [0.9] * 10
CLASSES = 10
LITERAL_ARMS = [("bn", "single"), ("mbn", "single"), ("mbn", "double")]


class Noise(Source):
    """Images whose class can be learned, but not easily."""

    def __init__(self, count: int, shape: tuple[int, int, int], seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(CLASSES, (count,), generator=draw)
        self.images = torch.randn(count, *shape, generator=draw) + self.labels.view(-1, 1, 1, 1) / CLASSES

    def subset(self, indices):
        raise NotImplementedError

    def batches(self, plan, *, workers=0):
        for indices, _ in plan:
            yield self.images[indices], self.labels[indices]


def told(lab: Training, unseen: Noise) -> dict[str, float]:
    """What the lab says at an evaluation."""
    found = lab.tally.summary("train") | lab.evaluate(unseen, workers=0)
    lab.tally = type(lab.tally)()
    return {name: found[name] for name in ("train_loss", "train_error", "test_loss", "test_error")}


@pytest.mark.parametrize(("norm", "scheme"), LITERAL_ARMS)
def test_the_lab_trains_and_evaluates_a_network_as_it_is_written(norm, scheme):
    options, shape = {"memory_size": 5} if norm == "mbn" else {}, (3, 8, 8)
    spec = RunSpec(
        model="resnet8", norm=norm, norm_options=options, scheme=scheme, iterations=STEPS, precision="float64"
    )
    lab, literal = Training(spec, CLASSES, shape, "cpu"), LiteralTraining(spec, CLASSES, shape)
    unseen = Noise(50, shape, seed=1000)
    for step in range(STEPS):
        batch = Noise(4, shape, seed=step)
        assert lab.step(step, batch.images, batch.labels)
        literal.step(batch.images, batch.labels, learning_rate=RATES[step], strength=STRENGTHS[step])
        ours, theirs = list(lab.model.parameters()), list(literal.network.parameters())
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
        if (step + 1) % EVALUATED_EVERY == 0:
            assert told(lab, unseen) == pytest.approx(
                literal.training_error() | literal.test_error(unseen.images, unseen.labels), rel=1e-8
            )


@pytest.mark.parametrize(
    "channels_last",
    [pytest.param(False, id="planes"), pytest.param(True, id="channels last", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(("norm", "scheme"), LITERAL_ARMS)
def test_in_float32_a_step_differs_by_rounding(norm, scheme, channels_last):
    """With the batch size, image size and memory of our runs. Both sides begin each step with the same weights, for
    training makes much of little. In few steps rounding takes a value across the zero of a ReLU, which is seen.
    """
    shape = (3, 32, 32)
    spec = RunSpec(model="resnet8", norm=norm, scheme=scheme, iterations=STEPS)
    lab, literal = Training(spec, CLASSES, shape, "cpu", channels_last), LiteralTraining(spec, CLASSES, shape)
    unseen, off = Noise(50, shape, seed=1000), []
    for step in range(STEPS):
        batch = Noise(8, shape, seed=step)
        assert lab.step(step, batch.images, batch.labels)
        literal.step(batch.images, batch.labels, learning_rate=RATES[step], strength=STRENGTHS[step])
        ours = list(lab.model.parameters())
        velocities = [lab.optimizer.state[one]["momentum_buffer"] for one in ours]
        pairs = list(zip(velocities, literal.velocity, strict=True))
        off.append(max(((mine.double() - wanted).norm() / wanted.norm()).item() for mine, wanted in pairs))
        with torch.no_grad():
            for mine, wanted in [*pairs, *zip(ours, literal.network.parameters(), strict=True)]:
                mine.copy_(wanted)
        if (step + 1) % EVALUATED_EVERY == 0:
            wanted = literal.training_error() | literal.test_error(unseen.images, unseen.labels)
            assert told(lab, unseen) == pytest.approx(wanted, rel=1e-5)
    assert sorted(off)[STEPS // 2] < 1e-5
    assert max(off) < 2e-2
