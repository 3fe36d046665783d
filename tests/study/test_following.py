"""The studies of two-way memory: their lists, their own networks, probes, pretraining and 3-D task, at a tiny size."""

import copy
import json
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import memnorm
from memnorm.lab import runner
from memnorm.lab.models import build
from memnorm.lab.spec import Execution, RunSpec, unsupported
from memnorm.lab.store import Store
from memnorm.lab.training import Training, load_data, sources
from memnorm.norms.two_way import TwoWayBatchNorm2d

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # behind the installed package
from study import brain, figures, networks, studies  # noqa: E402
from study.probe import probe, undone  # noqa: E402
from study.studies import STUDIES, Arm, Study  # noqa: E402
from study.tables import Values  # noqa: E402

FOLLOWING = dict(list(STUDIES.items())[list(STUDIES).index("micro-batches") :])
SYNTHETIC = {"data": "synthetic", "data_options": {"train": 192, "test": 40, "image_size": 32}}
EXECUTION = Execution(threads=1, device="cpu", workers=0)


def record(spec, error, **more):
    final = {"test_error": error, "test_error_recalibrated": error - 1, "iteration": spec.iterations, **more}
    return {"digest": spec.digest, "spec": spec.identity, "status": "finished", "final": final, "curve": [final]}


def finished(study, errors, seeds=9, **more):
    """Records of the trials of a study and of its runs with these seeds; `errors(arm, seed)`."""
    records = {spec.digest: record(spec, 50.0) for spec in study.before}
    records |= {trial.digest: record(trial, 50.0) for arm in study.arms for trial in arm.trials()}
    for arm in study.arms:
        records |= {one.digest: record(one, errors(arm, one.seed), **more) for one in arm.runs(records)[:seeds]}
    return records


def tiny(arm, iterations=8, evaluations=2):
    """The arm on synthetic images, short."""
    spec = arm.spec.but(**SYNTHETIC, iterations=iterations, evaluations=evaluations, recalibrate=16, train_images=None)
    return spec.but(recalibrate=0) if arm.spec.recalibrate == 0 else spec


# the lists


def test_a_study_runs_bn_and_two_way_first_seed_by_seed():
    study = STUDIES["micro-batches"]
    records = finished(study, lambda arm, seed: 40.0, seeds=0)
    runs = [spec for spec in study.specs(records) if spec.digest not in records]
    assert [(one.norm, one.batch_size, one.accumulate, one.seed) for one in runs[:2]] == [
        ("bn", 2, 16, 0),
        ("two_way", 2, 16, 0),
    ]
    assert [one.seed for one in runs] == [0] * 12 + [1] * 12 + [2] * 12 + [0] * 19 + [1] * 19 + [2] * 19
    assert {one.norm for one in runs[:36] if one.model == "resnet8"} == {"bn", "two_way"}
    assert {one.images_per_step for one in runs} == {32}


def test_arms_whose_trials_failed_do_not_hold_up_the_others():
    arms = [Arm("BN", RunSpec(norm="bn"), 1, rates=(0.1,)), Arm("MABN", RunSpec(norm="mabn"), 1, rates=(0.1,))]
    study, (good, bad) = Study(arms), [arm.trials()[0] for arm in arms]
    records = {good.digest: record(good, 50.0)}
    assert study.specs(records) == [good, bad]
    assert [spec.norm for spec in study.specs(records, {bad.digest})] == ["bn", "mabn", "bn"]


def test_other_processes_can_make_the_runs_of_every_study():
    for study in FOLLOWING.values():
        assert callable(pickle.loads(pickle.dumps(study.make)))


def test_pretraining_comes_before_everything_else():
    study = STUDIES["fine-tuning"]
    assert study.specs({}) == [studies.PRETRAINING]
    assert len(study.specs({studies.PRETRAINING.digest: {}})) == 1 + 8 * 3


def test_bn_with_recalibrated_statistics_chooses_its_rate_by_its_own_error():
    by_label = {arm.key: arm for arm in STUDIES["fine-tuning"].arms}
    own, other = by_label["BN, recalibrated/all images"], by_label["BN/all images"]
    records = {trial.digest: record(trial, 50.0) for arm in (own, other) for trial in arm.trials()}
    records[own.trials()[1].digest]["final"]["test_error_recalibrated"] = 10.0
    assert (other.rate(records), own.rate(records)) == (0.01, 0.003)
    assert all(trial.holdout and trial.recalibrate for trial in own.trials())


def test_every_planned_run_of_the_lab_can_be_built(tmp_path, monkeypatch):
    """Names of models, norms and options are right."""
    monkeypatch.setenv(networks.RUNS, str(tmp_path))
    (tmp_path / studies.PRETRAINING.name).mkdir()
    torch.save(
        build("resnet20", classes=100, image_shape=(3, 32, 32)).state_dict(),
        tmp_path / studies.PRETRAINING.name / "weights.pt",
    )
    specs = {}
    for name in FOLLOWING:
        if name not in ("segmentation", "resnet56"):
            for arm in STUDIES[name].arms:
                different = json.dumps([arm.spec.model, arm.spec.model_options, arm.spec.norm, arm.spec.norm_options])
                specs[different, arm.spec.scheme] = arm.spec
    assert len(specs) == 22
    for spec in specs.values():
        assert unsupported(spec) is None
        Training(spec, 10, (3, 32, 32), "cpu")


# the halves of the memory


def values(seed):
    return torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def trained(cls):
    """A layer after three updates, with memory."""
    layer = cls(3, warmup=0, dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for seed in range(3):
        optimizer.zero_grad()
        layer(values(seed) + seed).backward(values(seed + 10))
        optimizer.step()
    return layer


def test_forward_memory_alone_is_two_way_in_forward_and_its_derivative_in_backward():
    ours, x = trained(networks.ForwardMemory2d), values(5).requires_grad_()
    both = TwoWayBatchNorm2d(3, warmup=0, dtype=torch.float64)
    both.load_state_dict(ours.state_dict())
    assert ours.running_weight > 0
    torch.testing.assert_close(copy.deepcopy(ours)(x), both(x), rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: copy.deepcopy(ours)(x), (x,))


def test_backward_memory_alone_is_batch_norm_in_forward_and_subtracts_remembered_means_in_backward():
    ours, x, g = trained(networks.BackwardMemory2d), values(5).requires_grad_(), values(6)
    weight, bias, past_mean, past_product, past_weight = (
        getattr(ours, name).detach().clone()
        for name in ("weight", "bias", "backward_mean", "backward_product", "backward_weight")
    )
    assert past_weight > 0
    y = ours(x)
    torch.testing.assert_close(y, nn.functional.batch_norm(x, None, None, weight, bias, True), rtol=0, atol=1e-12)
    var, mean = torch.var_mean(x.detach(), (0, 2, 3), correction=0, keepdim=True)
    scale = 1 / torch.sqrt(var + ours.eps)
    x_hat, share = (x.detach() - mean) * scale, 32 / (32 + past_weight)
    a = torch.lerp(past_mean, g.mean((0, 2, 3)), share).view_as(mean)
    q = torch.lerp(past_product, (g * x_hat).mean((0, 2, 3)), share).view_as(mean)
    expected = weight.view_as(mean) * scale * (g - a - x_hat * q)
    torch.testing.assert_close(torch.autograd.grad(y, x, g)[0], expected, rtol=0, atol=1e-12)


# probes


def train(spec, folder, **options):
    return runner.run(spec, Store(folder), execution=EXECUTION, **options)


@pytest.mark.parametrize("number", [1, *(pytest.param(one, marks=pytest.mark.slow) for one in (0, 2, 3, 4, 5, 6))])
def test_a_run_with_probes_ends_with_the_weights_of_one_without(tmp_path, number):
    spec = tiny(STUDIES["parts"].arms[number], iterations=4)
    plain, probed = train(spec, tmp_path / "plain"), train(spec, tmp_path / "probed", probe=probe)
    assert probed["digest_of_weights"] == plain["digest_of_weights"]
    assert probed["final"]["test_loss"] == plain["final"]["test_loss"]
    lines = Store(tmp_path / "probed").run(spec).metrics()
    assert len(lines) == 2
    for line in lines:
        assert -1 <= line["probe_cosine"] <= 1
        assert line["probe_drift"] > 0
        assert line["probe_norm"] > 0


@pytest.mark.parametrize("number", [1, 6], ids=["two-way", "Double-Forward"])
def test_a_probe_restores_everything_bit_for_bit(number):
    spec = tiny(STUDIES["parts"].arms[number])
    data = load_data(spec, None)
    training, (source, _) = Training(spec, data.classes, data.shape, "cpu"), sources(spec, data)
    images, labels = next(source.batches([(torch.arange(32), None)]))
    training.step(0, images, labels)
    torch.rand(3)  # a random state that no step begins with
    before, random = copy.deepcopy(training.state()), torch.get_rng_state()
    gradients = [one.grad.clone() for one in training.model.parameters()]
    with undone(training):
        training.step(1, images, labels)
        assert training.digest() != digest_of(training, before)
    probe(training, source, 1)
    torch.testing.assert_close(training.state(), before, rtol=0, atol=0)
    torch.testing.assert_close([one.grad for one in training.model.parameters()], gradients, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)


def digest_of(training, state):
    other = copy.copy(training)
    other.model = copy.deepcopy(training.model)
    other.model.load_state_dict(state["model"])
    return other.digest()


def test_the_cosine_of_a_joint_batch_with_itself_is_one():
    spec = tiny(STUDIES["parts"].arms[0]).but(batch_size=32, accumulate=1)
    data = load_data(spec, None)
    training = Training(spec, data.classes, data.shape, "cpu")
    found = probe(training, sources(spec, data)[0], 1)
    assert found["probe_cosine"] == pytest.approx(1, abs=1e-5)


def test_drift_is_the_change_of_channel_means_in_their_standard_deviations():
    """Without a step there is none; a larger learning rate gives more."""
    spec = tiny(STUDIES["parts"].arms[0])
    data, found = load_data(spec, None), {}
    for rate in (1e-12, 0.01, 0.1):
        training = Training(spec.but(learning_rate=rate), data.classes, data.shape, "cpu")
        found[rate] = probe(training, sources(spec, data)[0], 1)["probe_drift"]
    assert found[1e-12] == pytest.approx(0, abs=1e-6)
    assert found[0.1] > 3 * found[0.01] > 0


# fine-tuning


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a pretraining run, made by the lab."""
    folder = tmp_path_factory.mktemp("runs")
    spec = RunSpec(model="resnet8", **SYNTHETIC, batch_size=32, iterations=6, evaluations=1)
    options = {**spec.data_options, "classes": 7}
    spec = spec.but(data_options=options)
    train_once = replace(EXECUTION, keep_weights=True)
    runner.run(spec, Store(folder), execution=train_once)
    return folder, spec


def started(runs, monkeypatch, **options):
    folder, spec = runs
    monkeypatch.setenv(networks.RUNS, str(folder))
    return networks.pretrained(10, 3, "resnet8", spec.name, **options)


def test_a_network_starts_from_the_pretrained_weights_with_a_fresh_classifier(runs, monkeypatch):
    folder, spec = runs
    kept = torch.load(folder / spec.name / "weights.pt", weights_only=True)
    network = started(runs, monkeypatch)
    assert network.fc.weight.shape == (10, 64)
    for name, value in network.state_dict().items():
        assert name.startswith("fc.") or torch.equal(value, kept[name])
    assert not torch.equal(network.bn1.running_mean, torch.zeros(16))


def test_missing_weights_are_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv(networks.RUNS, str(tmp_path))
    with pytest.raises(FileNotFoundError, match="folder in which its pretraining was run"):
        networks.pretrained(10, 3, "resnet8", "nothing")


def test_frozen_bn_keeps_its_statistics_and_trains_its_affine_map(runs, monkeypatch, tmp_path):
    folder, spec = runs
    monkeypatch.setenv(networks.RUNS, str(folder))
    options = {"network": "resnet8", "run": spec.name, "frozen": True}
    tuned = RunSpec(model="study.networks:pretrained", model_options=options, **SYNTHETIC, batch_size=2, iterations=6)
    before = started(runs, monkeypatch, frozen=True)
    runner.run(tuned, Store(tmp_path), execution=replace(EXECUTION, keep_weights=True))
    after = torch.load(tmp_path / tuned.name / "weights.pt", weights_only=True)
    assert torch.equal(after["bn1.running_mean"], before.bn1.running_mean)
    assert torch.equal(after["bn1.running_var"], before.bn1.running_var)
    assert not torch.equal(after["bn1.weight"], before.bn1.weight)


def test_two_way_begins_with_the_pretrained_statistics_and_centres_gradients_only(runs, monkeypatch):
    arm = next(arm for arm in STUDIES["fine-tuning"].arms if arm.label == "two-way")
    plain, network = started(runs, monkeypatch), started(runs, monkeypatch)
    network.load_state_dict(plain.state_dict())
    memnorm.convert(network, arm.spec.norm, **arm.spec.norm_options)
    for name, value in plain.state_dict().items():
        assert torch.equal(network.state_dict()[name], value)
    memory = network.bn1._read(8.0)
    assert network.bn1._weight_now(8.0) == 8
    assert torch.equal(memory.mean, plain.bn1.running_mean)


# segmentation


@pytest.fixture
def volume(monkeypatch):
    """A small hemisphere: two nested balls of tissue along the axis that is cut into slabs, and nothing around them."""
    grid = torch.stack(torch.meshgrid(torch.arange(20), torch.arange(240), torch.arange(20), indexing="ij"))
    distance = (grid[[0, 2]] - 10).square().sum(0).sqrt() + 20 * ((grid[1] < 20) | (grid[1] >= 220))
    labels = (distance < 7).long() + (distance < 4).long()
    made = torch.tensor([0.0, 0.65, 0.85])[labels], labels
    monkeypatch.setattr(brain, "hemisphere", lambda: made)
    return made


def test_no_voxel_of_the_evaluated_slab_is_trained_on_and_every_fold_has_another_one(volume):
    slabs, whole = [], int((volume[1] > 0).sum())
    for spec in [*(RunSpec(seed=fold) for fold in range(5)), RunSpec(seed=1000, holdout=1)]:
        blocks, (t1, labels) = brain.split(volume, spec)
        trained, tested = sum(int((block[1] > 0).sum()) for block in blocks), int((labels > 0).sum())
        assert trained + tested == whole
        assert tested == pytest.approx(whole / 6, rel=0.05)
        slabs.append(t1.storage_offset())
    assert len(set(slabs)) == 6


def test_patches_are_the_same_for_every_norm_and_lie_inside_a_block(volume):
    blocks, _ = brain.split(volume, RunSpec(seed=1))
    centers = brain.tissue_of(blocks)
    one, other = (brain.patches(blocks, centers, 4, seed=7) for _ in range(2))
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    for t1, labels in one:
        assert t1.shape == (1, 1, 16, 16, 16)
        assert labels.shape == (1, 16, 16, 16)
        assert (labels > 0).any()
        assert (t1[0][(labels == 0)] == 0).all()  # noise in the brain only


def test_a_perfect_segmentation_has_no_error(volume):
    class Perfect(nn.Module):
        def forward(self, x):
            levels = torch.tensor([0.0, 0.65, 0.85]).view(1, 3, 1, 1, 1)
            return -(x - levels).abs()

    found = brain.evaluate(Perfect(), (volume[0], volume[1]), seed=0)
    assert found["test_error"] > 0  # noise
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(brain, "NOISE", 0.0)
        found = brain.evaluate(Perfect(), volume, seed=0)
    assert found == {"test_error": 0, "dice_grey": 100, "dice_white": 100}


@pytest.mark.parametrize("number", [1, *(pytest.param(one, marks=pytest.mark.slow) for one in (0, 2, 3))])
def test_every_arm_of_the_segmentation_learns(volume, tmp_path, number):
    spec = STUDIES["segmentation"].arms[number].spec.but(iterations=12, evaluations=2, learning_rate=0.1)
    result = brain.run(spec, Store(tmp_path), execution=EXECUTION)
    first, last = Store(tmp_path).run(spec).metrics()
    assert last["test_error"] < first["test_error"]
    assert result["final"] == last
    assert brain.run(spec, Store(tmp_path), execution=EXECUTION) == result


@pytest.mark.data
def test_the_template_is_one_hemisphere_with_two_tissues():
    pytest.importorskip("nilearn")
    t1, labels = brain.hemisphere()
    assert t1.shape == labels.shape == (98, 233, 189)
    assert 0 <= t1.min() < t1.max() <= 1
    assert t1[labels == 1].mean() + 0.1 < t1[labels == 2].mean()
    for fold in range(5):
        assert min(brain.split((t1, labels), RunSpec(seed=fold))[1][0].shape) >= brain.PATCH


# the program

PROGRAM = f"""
import sys
from dataclasses import replace
from pathlib import Path
sys.path.append({str(ROOT)!r})
import torch
from study import brain, run, studies

run.RESULTS, studies.HELD_OUT = Path("results"), 8
data = dict(data="synthetic", data_options=dict(train=192, test=40, image_size=32))
studies.PRETRAINING = studies.PRETRAINING.but(**data, model="resnet8", batch_size=32, iterations=4, evaluations=1)
labels = torch.randint(3, (16, 240, 16), generator=torch.Generator().manual_seed(0))
brain.hemisphere = lambda: (labels / 2, labels)

def shortened(arm):
    spec = arm.spec.but(iterations=4, evaluations=1, recalibrate=min(arm.spec.recalibrate, 8))
    if spec.data != brain.DATA:
        spec = spec.but(**data, train_images=None)
    if "network" in spec.model_options:
        spec = spec.but(model_options={{**spec.model_options, "network": "resnet8"}})
    return replace(arm, spec=spec, seeds=1, rates=arm.rates[:1])

again = studies.Study(studies.fine_tuning(), before=(studies.PRETRAINING,))
for name, study in (studies.STUDIES | {{"fine-tuning": again}}).items():
    chosen = study.arms[:4] if study.before else study.arms[:4:3] if name == "parts" else study.arms[:2]
    arms = [shortened(arm) for arm in chosen]
    studies.STUDIES[name] = replace(study, arms=arms)
run.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("parts", 4), ("fine-tuning", 1 + 4 + 3), ("segmentation", 4)])
def test_a_study_that_was_killed_resumes_and_has_one_record_per_run(tmp_path, name, count):
    def start():
        with (tmp_path / "log").open("a") as log:
            words = [sys.executable, "-c", PROGRAM, name, "--jobs", "0"]
            return subprocess.Popen(words, cwd=tmp_path, stdout=log, stderr=log)

    file, begun = tmp_path / f"results/{name}.jsonl", ""
    process = start()
    while not begun.endswith("\n") and process.poll() is None:
        time.sleep(0.01)
        begun = file.read_text() if file.exists() else ""
    process.kill()
    assert process.wait() == -signal.SIGKILL, (tmp_path / "log").read_text()
    assert start().wait() == 0, (tmp_path / "log").read_text()
    text = file.read_text()
    assert text.startswith(begun)
    records = [json.loads(line) for line in text.splitlines()]
    assert len({one["digest"] for one in records}) == len(records) == count
    for one in records:
        assert one["digest"] == RunSpec.from_dict(one["spec"]).digest
        assert one["status"] == "finished"
        assert 0 <= one["final"]["test_error"] <= 100
        assert {"commit", "machine", "threads"} <= one["environment"].keys()
    assert all(("probe_cosine" in one["final"]) == (name == "parts") for one in records)


# tables and figures


def test_the_tables_of_an_unfinished_study_have_gaps():
    for name in FOLLOWING:
        empty = Values({}, {})
        rows = empty.arms(name).splitlines()[2:]
        assert len(rows) == len(STUDIES[name].arms)
        assert all("| – |" in row for row in rows)
        if name != "resnet56":
            assert "–" in empty.rates(name)
    assert "| BN | – | – | – | – |" in Values({}, {}).probes("parts")
    assert "| INSTANCE | – | – | – | – | – | – |" in Values({}, {}).dice("segmentation")


def test_arms_are_compared_with_the_baseline_of_their_setting():
    errors = {"BN": 40.0, "two-way": 30.0, "frozen BN": 35.0, "BN, recalibrated": 40.0}  # the last are runs of BN

    def error(arm, seed):
        return errors[arm.label] + seed + (20 if arm.setting == "10 % of them" else 0)

    records = finished(STUDIES["fine-tuning"], error)
    found = Values(records, {})
    assert found.points("fine-tuning", "two-way/10 % of them", "BN/10 % of them") == "−10.00"
    row = next(line for line in found.arms("fine-tuning").splitlines() if line.startswith("| two-way | 10 %"))
    assert row.split(" | ")[2:5] == ["0.01", "52.00 ± 1.58 (n = 5)", "−10.00 (n = 5)"]


def test_probes_and_dice_are_averaged_over_seeds():
    study, lines = STUDIES["parts"], []
    for iteration in (500, 2000, 5000):
        lines.append({"iteration": iteration, "probe_cosine": iteration / 5000, "probe_norm": 3.0})
        lines[-1]["probe_drift"] = 0.02 if iteration <= 2000 else 9.0
    records = {key: {**one, "curve": lines} for key, one in finished(study, lambda arm, seed: 40.0).items()}
    assert "| BN | 0.1 | 0.50 ± 0.00 (n = 3) | 2.00 ± 0.00 (n = 3) | 3.00 ± 0.00 (n = 3) |" in Values(
        records, {}
    ).probes("parts")
    records = finished(STUDIES["segmentation"], lambda arm, seed: 10.0 + seed, dice_grey=88.0, dice_white=92.0)
    assert "| BN | 0.1 | 88.00 ± 0.00 (n = 5) | 92.00 ± 0.00 (n = 5) | 12.00 ± 1.58 (n = 5) | – | – |" in Values(
        records, {}
    ).dice("segmentation")


def error_of(arm, seed):
    """Synthetic errors: BN fails at small micro-batches, two-way does not; MBN-2 at 1 does not train."""
    worse = {"BN": 14, "two-way": 0.6, "GROUP": 0.2, "MABN": 3, "BN, centred gradients": 9, "MBN-2": 12}[arm.label]
    base = {"GROUP": 24, "MBN-2": 21}.get(arm.label, 19)
    if (arm.label, arm.spec.batch_size) == ("MBN-2", 1):
        return 90.0
    return base + worse * (1 / arm.spec.batch_size) ** 0.7 + 0.4 * seed


def figure(records):
    return figures.means(figures.errors_by_size(Values(records, {}), "micro-batches"))


def test_the_figure_of_micro_batches_has_a_line_per_arm_and_bn_at_32():
    study = STUDIES["micro-batches"]
    records = finished(study, error_of)
    arm = next(arm for arm in study.arms if arm.key == "MABN/4")
    records[arm.runs(records)[1].digest].update(status="diverged", final=None)
    text = figure(records)
    assert text.count("<polyline") == 4 * 5 + 4 + 1  # GROUP is the same at every size
    assert text.count("<circle") == 4 * 6 + 5 + 1
    assert "stroke-dasharray" in text
    assert "seeds that did not train are left out: MABN at 4; MBN-2 at 1" in text


def test_the_figure_of_micro_batches_can_be_drawn_from_the_first_runs():
    study = STUDIES["micro-batches"]
    records = finished(study, error_of, seeds=0)
    assert "<polyline" not in figure(records)
    for spec, count in zip([one for one in study.specs(records) if one.digest not in records], range(4), strict=False):
        arm = next(one for one in study.arms if spec.digest in {run.digest for run in one.runs(records)})
        records[spec.digest] = record(spec, error_of(arm, spec.seed))
        assert figure(records).count("<circle") == count + 1
    assert "BN at 32" in figure(records)
    assert "<polyline" not in figure(records)  # 2 and 32 are not neighbours
    assert "micro-batches.svg" in figures.figures(values_with(records))


def values_with(records):
    """All committed records and these."""
    from study import pages, run

    return Values({**run.load(), **records}, pages.values()._measured)
