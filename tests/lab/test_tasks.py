"""Tasks: segmentation from a folder of images and masks, and a task of the user's own."""

import json

import numpy as np
import pytest
import torch
from helpers.lab import PLAIN, assert_ends_as_undisturbed, crash, result_of
from PIL import Image

from memnorm.lab import tasks
from memnorm.lab.data import Data
from memnorm.lab.errors import DataCorrupt, DataMissing, UsageError
from memnorm.lab.models import build
from memnorm.lab.runner import run
from memnorm.lab.spec import RunSpec
from memnorm.lab.tasks import Classification, Segmentation, Tally, Task
from memnorm.lab.training import load_data

pytestmark = pytest.mark.usefixtures("no_git")
VALUES = (0, 7, 200)  # of the masks


def write_pair(folder, name: str, seed: int, values=VALUES) -> None:
    """A noisy image with two stripes, and its mask."""
    draw = np.random.default_rng(seed)
    place = draw.integers(0, len(values), (4, 4)).repeat(4, 0).repeat(4, 1)
    pixels = (place[..., None] * 60 + draw.integers(0, 60, (16, 16, 3))).astype(np.uint8)
    for part, array in (("images", pixels), ("masks", np.array(values, np.uint8)[place])):
        (folder / part).mkdir(parents=True, exist_ok=True)
        Image.fromarray(array).save(folder / part / f"{name}.png")


@pytest.fixture
def folder(tmp_path):
    for number in range(20):
        write_pair(tmp_path / "pictures", f"{number:02}", number)
    return tmp_path / "pictures"


def segment(folder, **changes) -> RunSpec:
    spec = RunSpec(task="segmentation", data=str(folder), data_options={"image_size": 16}, model="fcn")
    spec = spec.but(model_options={"width": 4}, batch_size=4, iterations=12, evaluations=2, learning_rate=0.05)
    return spec.but(**changes)


def test_classes_are_the_values_of_the_masks_and_every_fifth_image_is_a_test_image(folder):
    data = load_data(segment(folder), None)
    assert (data.classes, data.shape, len(data.train), len(data.test)) == (3, (3, 16, 16), 16, 4)
    ((_, masks),) = data.test.batches([(torch.arange(4), None)])
    stored = np.asarray(Image.open(folder / "masks/04.png"))
    assert np.array_equal(np.array(VALUES)[masks[0]], stored)


def test_train_and_val_are_used_where_they_exist(tmp_path):
    for split, count in (("train", 3), ("val", 2)):
        for number in range(count):
            write_pair(tmp_path / "split" / split, str(number), number)
    data = load_data(segment(tmp_path / "split"), None)
    assert (len(data.train), len(data.test)) == (3, 2)


def test_an_image_and_its_mask_are_mirrored_together(folder):
    source = load_data(segment(folder), None).train
    ((plain, masks),) = source.batches([(torch.arange(16), None)])
    ((images, mirrored),) = source.batches([(torch.arange(16), 3)])
    turned = [not torch.equal(one, other) for one, other in zip(images, plain, strict=True)]
    assert 0 < sum(turned) < 16
    for place, flipped in enumerate(turned):
        assert torch.equal(images[place], plain[place].flip(-1) if flipped else plain[place])
        assert torch.equal(mirrored[place], masks[place].flip(-1) if flipped else masks[place])


def test_overlaps_are_means_over_the_classes_of_each_image():
    tally = Segmentation.tally()
    truth = torch.tensor([[[0, 0], [1, 1]], [[2, 2], [2, 2]]])
    predicted = torch.tensor([[[0, 1], [1, 1]], [[2, 2], [2, 2]]])
    answers = torch.nn.functional.one_hot(predicted, 3).movedim(-1, 1).float()
    tally.add(torch.tensor(3.0), answers, truth)
    found = tally.summary("test")
    first = (1 / 2 + 2 / 3) / 2  # classes 0 and 1; class 2 is in neither
    assert found["test_iou"] == pytest.approx(100 * (first + 1) / 2)
    assert found["test_error"] == pytest.approx(100 - 100 * (first + 1) / 2)
    assert found["test_dice"] == pytest.approx(100 * ((2 / 3 + 4 / 5) / 2 + 1) / 2)
    assert found["test_loss"] == 1.5


def test_training_lowers_the_error(folder, store):
    result = run(segment(folder, iterations=60), store, execution=PLAIN)
    first, last = (line["test_error"] for line in store.run(segment(folder, iterations=60)).metrics())
    assert last < first
    assert result["final"]["test_dice"] > result["final"]["test_iou"] > 60


def test_a_crashed_segmentation_resumes_bit_identically(folder, store):
    spec = segment(folder, norm="two_way", optimizer="adamw", learning_rate=0.003, batch_size=2, accumulate=2)
    crash(spec, store, at=5)
    assert_ends_as_undisturbed(spec, store, began=4)


def test_norms_are_compared_on_segmentation(call, folder, tmp_path):
    words = ["compare", "--task", "segmentation", "--data", str(folder), "--data-options", "{image_size: 16}"]
    words += ["--model", "fcn", "--norms", "bn,two_way:decay=0.9", "--batch-sizes", "2", "--accumulate", "2"]
    words += ["--recalibrate", "8", "--epochs", "2", "--seeds", "2", "--threads", "1"]
    code, out, err = call(*words)
    assert code == 0, err
    assert "segmentation: the error is 100 % minus the mean IoU of an image" in out
    assert "recalibrated %" in out
    assert "task segmentation" in (tmp_path / "compare/report.md").read_text()
    assert {row["n"] for row in result_of(call(*words, "--json"))["rows"]} == {2}


def test_train_shows_iou_and_dice(call, folder):
    words = ["--task", "segmentation", "--data", str(folder), "--data-options", "{image_size: 16}", "--model", "fcn"]
    code, out, err = call("train", *words, "--batch-size", "4", "--iterations", "4", "--threads", "1")
    assert code == 0, err
    assert "iou  " in out
    assert "dice  " in out


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda folder: (folder / "masks/03.png").unlink(), DataCorrupt, "03.png has no partner"),
        (lambda folder: (folder / "masks/03.png").write_bytes(b"no"), DataCorrupt, "03.png cannot be read as a mask"),
        (lambda folder: (folder / "images/03.png").write_bytes(b"no"), DataCorrupt, "cannot be read as an image"),
        (lambda folder: Image.new("RGB", (16, 16)).save(folder / "masks/03.png"), DataCorrupt, "pixels of kind RGB"),
        (lambda folder: Image.new("L", (8, 16)).save(folder / "masks/03.png"), DataCorrupt, "they must be equal"),
        (lambda folder: (folder / "masks").rename(folder / "labels"), DataMissing, "has no folder masks/"),
        (lambda folder: folder.rename(folder.with_name("gone")), DataMissing, "there is no folder"),
        (lambda folder: [one.unlink() for one in folder.glob("*/*")], DataCorrupt, "has too few images"),
    ],
)
def test_a_folder_with_a_fault_is_refused_with_a_sentence(folder, change, error, words):
    change(folder)
    with pytest.raises(error, match=words):
        load_data(segment(folder), None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "resnet20", "model_options": {}}, "model resnet20 gives a value per class for an image"),
        ({"model": "helpers.lab:net", "model_options": {}}, r"must return a tensor of shape \(2, 3, 16, 16\)"),
        ({"data_options": {"image_size": 15}}, r"shape \(2, 3, 15, 15\), a value per class; got shape"),
        ({"data_options": {"size": 16}}, "unknown option 'size'"),
        ({"task": "detection"}, "unknown task 'detection'; there are classification, segmentation, or your own"),
        ({"task": "helpers.lab:Ear"}, "it must be a memnorm.lab.tasks.Task; got Ear"),
        ({"task": "helpers.lab:refuse"}, "making it raised TypeError"),
        ({"task": "helpers.lab:nothing"}, "task helpers.lab:nothing: helpers.lab has no 'nothing'"),
        ({"task": "nowhere:task"}, "task nowhere:task: there is no module 'nowhere'"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_task_is_refused(folder, store, changes, words):
    with pytest.raises(UsageError, match=words):
        run(segment(folder, **changes), store, execution=PLAIN)


def test_a_network_for_segmentation_does_not_classify():
    with pytest.raises(UsageError, match=r"must return a tensor of shape \(2, 5\)"):
        build("fcn", classes=5, image_shape=(3, 16, 16))


class Parity(Tally):
    def __init__(self) -> None:
        super().__init__()
        self.odd = 0

    def count(self, answers, targets):
        self.odd += int((answers.argmax(1) % 2 != targets % 2).sum())

    def metrics(self, images):
        return {"error": 100 * self.odd / images}


class OwnTask(Task):
    """Digits, counted as right if the parity is."""

    error = "digits of the wrong parity"
    tally = Parity

    def load(self, name, root, **options) -> Data:
        return Classification().load(name, root, **options)

    def outputs(self, classes, shape):
        return (classes,)

    def loss(self, answers, targets, reduction="mean"):
        return torch.nn.functional.cross_entropy(answers, targets, reduction=reduction)


def test_a_task_of_one_s_own_is_compared_by_its_own_error(call):
    words = ["compare", "--task", f"{__name__}:OwnTask", "--norms", "bn", "--batch-sizes", "4", "--epochs", "0.1"]
    words += ["--seeds", "1", "--test-images", "50", "--threads", "1"]
    code, out, err = call(*words)
    assert code == 0, err
    assert "the error is digits of the wrong parity" in out
    plain = [word for word in words if word not in ("--task", f"{__name__}:OwnTask")]
    errors = [result_of(call(*one, "--json"))["rows"][0]["test_error"] for one in (words, plain)]
    assert errors[0] < errors[1]


def test_a_task_that_a_file_names_is_not_imported_without_trust(call, tmp_path):
    (tmp_path / "run.yaml").write_text(json.dumps({"task": "helpers.lab:refuse"}))
    code, _, err = call("train", "--config", "run.yaml")
    assert code == 2
    assert "the config file names the task helpers.lab:refuse" in err


def test_the_state_of_a_classification_s_tally_is_that_of_older_checkpoints():
    old = {"loss": 3.0, "wrong": 2, "wrong_top5": 1, "images": 4, "has_top5": True}
    tally = tasks.get("classification").tally()
    tally.load_state(old)
    assert tally.state() == old
    assert tally.summary("train") == {"train_loss": 0.75, "train_error": 50.0, "train_error_top5": 25.0}
