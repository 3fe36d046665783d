"""The studies are what they say, and the queue made of them has every run once, in rounds."""

import dataclasses
import itertools
import pkgutil
import subprocess
import sys

import pytest

from memnorm.lab import evidence, models
from memnorm.lab.arms import registered
from memnorm.lab.errors import LabError
from memnorm.lab.evidence import MINIATURE, STUDIES, Arm, Records, Study, chosen_rate, plan
from memnorm.lab.listen import Outcome
from memnorm.lab.spec import RunSpec
from memnorm.lab.tables import unsupported

EVERY = pytest.mark.parametrize("study", [*STUDIES, *MINIATURE], ids=lambda study: study.name)
BY_NAME = {study.name: study for study in STUDIES}


def finished(error: float) -> dict:
    return {"status": "finished", "final": {"test_error": error}}


DIVERGED = {"status": "diverged", "final": None}


class Book(dict):
    """Results by digest."""

    def result(self, spec: RunSpec):
        return self.get(spec.digest)

    def enter(self, *specs: RunSpec, result=None) -> None:
        self.update({spec.digest: result or finished(10.0) for spec in specs})


def tuned(rates=(0.1, 0.03, 0.01), **changes) -> Study:
    return Study("tuned", "", "", (Arm("BN", RunSpec(iterations=400, **changes), 2, rates),), holdout=50)


@EVERY
def test_every_run_of_every_study_can_be_made(study):
    for spec in (*plan([study], Book().result).ready, *plan([study], Book().result).locked):
        assert unsupported(spec, registered()) is None
        models.get(spec.model)


@EVERY
def test_arms_differ_in_the_norm_and_what_belongs_to_it_alone(study):
    own = {"norm", "scheme", "every", "fraction", "norm_options", "strength", "recalibrate"}
    if study.name in ("miniature",):
        own.add("learning_rate")  # of the arm that is to diverge
    for size in study.batch_sizes:
        shared = [
            {name: value for name, value in arm.spec.as_dict().items() if name not in own} for arm in study.at(size)
        ]
        assert all(one == shared[0] for one in shared)


@EVERY
def test_an_arm_is_known_by_its_label_and_batch_size_and_starts_at_seed_0(study):
    assert len({arm.key for arm in study.arms}) == len(study.arms)
    assert {arm.spec.seed for arm in study.arms} == {0}
    assert all(study.baseline in [arm.label for arm in study.at(size)] for size in study.batch_sizes)


def test_the_seeds_of_an_arm_are_those_that_the_baseline_has_as_well():
    for study in STUDIES:
        for arm in study.arms:
            (base,) = [one for one in study.at(arm.spec.batch_size) if one.label == study.baseline]
            assert arm.seeds <= base.seeds


def test_what_can_be_recalibrated_is():
    for arm in (arm for study in STUDIES for arm in study.arms):
        assert arm.spec.recalibrate == (0 if arm.spec.norm == "group" else 10_000)


def test_a_number_of_the_paper_stands_beside_the_same_model_and_protocol_only():
    known = [arm for study in STUDIES for arm in study.arms if arm.cell is not None]
    assert [arm.cell.printed for arm in known] == [19.64, 15.37]
    for arm in known:
        measured_otherwise = {"evaluations": arm.cell.spec.evaluations, "recalibrate": 0}
        assert arm.spec.but(**measured_otherwise) == arm.cell.spec


def test_equal_samples_are_equal_and_the_rate_is_proportional_to_the_batch():
    for arm in BY_NAME["tiny-batch-resnet8"].arms:
        assert arm.spec.batch_size * arm.spec.iterations == 160_000
        assert arm.spec.base_learning_rate == pytest.approx(0.1 * arm.spec.batch_size / 8)


def test_a_queue_has_every_run_once():
    ready = plan(STUDIES, Book().result).ready
    assert len({spec.digest for spec in ready}) == len(ready)


@EVERY
def test_a_study_goes_in_rounds_of_seeds_after_the_trials(study):
    book = Book()
    for arm in study.arms:
        book.enter(*arm.trials(study.holdout))
    seeds = [spec.seed for spec in plan([study], book.result).ready]
    assert seeds == sorted(seeds)
    trials = [spec for arm in study.arms for spec in arm.trials(study.holdout)]
    assert list(plan([study], Book().result).ready[: len(trials)]) == trials


def test_a_trial_is_a_quarter_as_long_with_a_seed_and_images_of_its_own():
    (arm,) = tuned(recalibrate=100).arms
    for rate, trial in zip(arm.rates, arm.trials(50), strict=True):
        assert (trial.learning_rate, trial.iterations, trial.holdout, trial.seed) == (rate, 100, 50, 1000)
        assert (trial.evaluations, trial.recalibrate) == (1, 0)


def test_runs_wait_for_the_choice_of_their_learning_rate():
    study, book = tuned(), Book()
    trials = study.arms[0].trials(50)
    first = plan([study], book.result)
    assert list(first.ready) == trials
    assert [spec.seed for spec in first.locked] == [0, 1]
    book.enter(*trials[:2])
    assert list(plan([study], book.result).ready) == trials[2:]
    book.enter(trials[2], result=finished(5.0))
    then = plan([study], book.result)
    assert [(spec.seed, spec.learning_rate, spec.holdout) for spec in then.ready] == [(0, 0.01, 0), (1, 0.01, 0)]
    assert then.locked == ()
    assert list(then.done) == trials


@pytest.mark.parametrize(
    ("results", "wanted"),
    [
        ((finished(9.0), finished(8.0), finished(8.5)), 0.03),
        ((finished(8.0), finished(8.0), finished(8.0)), 0.1),
        ((DIVERGED, finished(90.0), finished(90.0)), 0.03),
        ((DIVERGED, DIVERGED, finished(99.0)), 0.01),
        ((DIVERGED, DIVERGED, DIVERGED), 0.01),
    ],
    ids=["lowest", "the larger of equals", "diverged is worst", "one left", "all diverged"],
)
def test_the_rate_with_the_lowest_error_is_chosen(results, wanted):
    study, book = tuned(), Book()
    for trial, result in zip(study.arms[0].trials(50), results, strict=True):
        book.enter(trial, result=result)
    assert chosen_rate(study, study.arms[0], book.result) == wanted


def test_an_arm_whose_best_rate_is_the_papers_shares_the_runs_of_the_study_before():
    book = Book()
    first, second = BY_NAME["small-batch-resnet20"], BY_NAME["small-batch-resnet20-tuned"]
    for arm in second.arms:
        book.enter(*arm.trials(second.holdout))  # all alike: the largest
    assert not plan([first, second], book.result).locked
    assert plan([first, second], book.result).ready == plan([first], book.result).ready


def test_what_is_done_is_not_in_the_queue_diverged_or_not():
    study, book = BY_NAME["headline-resnet56"], Book()
    bn, mbn = plan([study], book.result).ready
    book.enter(bn, result=DIVERGED)
    assert plan([study], book.result).ready == (mbn,)
    assert plan([study], book.result).done == (bn,)


def test_the_number_of_runs_is_the_one_asked_for():
    book = Book()
    counts = {study.name: len(plan([study], book.result).ready) for study in STUDIES}
    assert counts == {
        "small-batch-resnet20": 24,
        "small-batch-resnet20-tuned": 18,
        "headline-resnet56": 2,
        "ablation-resnet8": 9 + 6 + 3,
        "tiny-batch-resnet8": 24,
        "cheaper-second-forward": 15,
    }


def done(store, spec, error: float) -> dict:
    """A run that is done, in a store; its result."""
    folder = store.run(spec)
    folder.begin({"threads": 1})
    line = {"iteration": spec.iterations, "test_error": error}
    folder.write_metrics([line])
    return folder.finish({"status": "finished", "name": spec.name, "final": line})


@pytest.fixture
def records(tmp_path) -> Records:
    return Records(tmp_path / "runs", tmp_path / "records")


def test_a_record_is_whole_or_none_and_holds_no_checkpoint(records):
    spec = RunSpec()
    folder = records.work.run(spec)
    folder.begin({"threads": 1})
    (folder.path / "checkpoint-1.pt").write_text("")
    records.keep(spec)
    assert not records.kept.run(spec).path.exists()
    result = done(records.work, spec, 3.0)
    (folder.path / "checkpoint-2.pt").write_text("")
    records.ended(Outcome(spec, "finished"))
    kept = records.kept.run(spec).path
    assert sorted(path.name for path in kept.iterdir()) == ["env.json", "metrics.jsonl", "result.json", "spec.yaml"]
    assert records.kept.runs()[0].spec == spec
    assert records.result(spec) == result


def test_a_record_alone_counts_as_done_and_is_never_overwritten(records):
    spec = RunSpec()
    first = done(records.kept, spec, 3.0)
    done(records.work, spec, 4.0)
    records.keep(spec)
    assert records.result(spec) == first


@pytest.mark.parametrize("name", ["spec.yaml", "metrics.jsonl", "env.json"])
def test_a_damaged_record_is_mended_from_the_run_or_refused(records, name):
    spec = RunSpec()
    result = done(records.kept, spec, 3.0)
    path = records.kept.run(spec).path / name
    path.write_text("")
    with pytest.raises(LabError, match=r"the record .* is damaged .*restore it, or delete it to run it again"):
        records.result(spec)
    done(records.work, spec, 3.0)
    assert records.result(spec) == result
    records.keep(spec)
    assert path.read_text() == (records.work.run(spec).path / name).read_text() != ""


def test_a_damaged_run_makes_no_record(records):
    spec = RunSpec()
    done(records.work, spec, 3.0)
    (records.work.run(spec).path / "metrics.jsonl").write_bytes(b"\xff")
    with pytest.raises(LabError, match=r"is damaged .*delete its result.json to run it again"):
        records.keep(spec)
    assert not records.kept.run(spec).path.exists()


def test_a_record_that_cannot_be_written_is_noticed_first_and_its_run_is_safe(records):
    spec = RunSpec()
    records.kept.root.write_text("a file where the folder should be")
    with pytest.raises(LabError):
        records.prepare()
    done(records.work, spec, 3.0)
    with pytest.raises(LabError, match=r"done and safe in .*the same command copies it later"):
        records.ended(Outcome(spec, "finished"))
    records.kept.root.unlink()
    records.prepare()
    assert list(records.kept.root.iterdir()) == []


def test_a_failed_run_leaves_no_record(records):
    spec = RunSpec()
    records.ended(Outcome(spec, "failed", "why"))
    assert not records.kept.root.exists()


def test_studies_cannot_be_changed_by_accident():
    with pytest.raises(dataclasses.FrozenInstanceError):
        STUDIES[0].name = "other"
    assert len({study.name for study in itertools.chain(STUDIES, MINIATURE)}) == len(STUDIES) + len(MINIATURE)


def test_what_reads_records_does_without_torch():
    names = [f"memnorm.lab.evidence.{one.name}" for one in pkgutil.iter_modules(evidence.__path__)]
    program = f"import sys, {', '.join(names)}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.split() == ["False"]
