"""`recalibrate`: a second number beside the headline, which changes nothing else."""

import copy

import pytest
import torch
from helpers.lab import ARMS, PLAIN, Ear, content, images_of, timeless, tiny

import memnorm
from memnorm.lab.data import EVALUATION_BATCH, Data
from memnorm.lab.errors import UsageError
from memnorm.lab.runner import run
from memnorm.lab.training import Training, load_data, recalibration_source, sources

ADDED = ("test_error_recalibrated", "test_loss_recalibrated")


pytestmark = pytest.mark.usefixtures("no_git")


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
    assert {name: more["final"].pop(name) for name in ADDED}.keys() == set(ADDED)
    assert {**timeless(more), "name": ""} == {**timeless(plain), "name": ""}


def test_the_numbers_stand_in_the_line_of_the_last_evaluation_only(store):
    spec = tiny(recalibrate=30)
    result = run(spec, store, execution=PLAIN)
    lines = store.run(spec).metrics()
    assert [ADDED[0] in line for line in lines] == [False, False, True]
    assert lines[-1][ADDED[0]] == result["final"][ADDED[0]]


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
    data = Data("numbered", 2, (1, 1, 1), Numbered(), Numbered(), "")
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
