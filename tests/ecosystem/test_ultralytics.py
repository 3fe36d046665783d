"""A YOLO built from its YAML and trained by its own trainer, which accumulates micro-batches to a nominal batch of 64.

Converted in a callback, the trainer's averaged copy and its checkpoints stay plain. Converted in `get_model`, they have
a memory as well.
"""

import copy
import os
import tempfile

import pytest
import torch
from helpers.optional import library

import memnorm
from memnorm.norms.two_way import TwoWayBatchNorm

os.environ |= {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false", "YOLO_CONFIG_DIR": tempfile.gettempdir()}
ultralytics = library("ultralytics")
Image, ImageDraw = library("PIL.Image"), library("PIL.ImageDraw")
DetectionTrainer = library("ultralytics.models.yolo.detect").DetectionTrainer
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.filterwarnings("error::memnorm.MemnormWarning")]


class ConvertingTrainer(DetectionTrainer):
    def get_model(self, *args, **kwargs):
        return memnorm.convert(super().get_model(*args, **kwargs), "two_way")


def squares(folder, count):
    """Write images with a filled square on noise, and its box."""
    generator = torch.Generator().manual_seed(0)
    (folder / "images").mkdir(parents=True)
    (folder / "labels").mkdir()
    for number in range(count):
        noise = torch.randint(0, 100, (64, 64, 3), generator=generator, dtype=torch.uint8)
        left, top = torch.randint(0, 32, (2,), generator=generator).tolist()
        image = Image.fromarray(noise.numpy())
        ImageDraw.Draw(image).rectangle([left, top, left + 31, top + 31], fill=(255, 200, 50))
        image.save(folder / f"images/{number}.png")
        (folder / f"labels/{number}.txt").write_text(f"0 {(left + 16) / 64} {(top + 16) / 64} 0.5 0.5\n")


def train(folder, how):
    """A trained YOLO, and after each micro-batch the number of updates and the weight of the first norm's memory."""
    squares(folder / "data", 64)
    (folder / "data.yaml").write_text(f"path: {folder}/data\ntrain: images\nval: images\nnames: [square]\n")
    yolo, seen = ultralytics.YOLO("yolov8n.yaml"), []

    def look(trainer):
        norm = next(one for one in trainer.model.modules() if isinstance(one, TwoWayBatchNorm))
        seen.append((trainer.ema.updates, float(norm.running_weight)))

    if how == "callback":
        yolo.add_callback("on_pretrain_routine_end", lambda trainer: memnorm.convert(trainer.model, "two_way"))
    yolo.add_callback("on_train_batch_end", look)
    yolo.train(
        trainer=ConvertingTrainer if how == "get_model" else None,
        data=str(folder / "data.yaml"),
        project=str(folder),
        epochs=3,
        imgsz=32,
        batch=2,
        warmup_epochs=0,
        device="cpu",
        workers=0,
        plots=False,
    )
    return yolo, seen


@pytest.fixture(scope="module", params=["callback", "get_model"])
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("yolo")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return request.param, *train(folder, request.param)


def test_the_memory_ages_once_with_each_update_of_the_trainer(trained):
    _, _, seen = trained
    expected, weight, images, updates = [], 0.0, 0, 0
    for counted, _ in seen:
        weight, images = weight + 2 * 16 * 16, images + 2  # the first convolution halves images of 32×32
        if counted > updates:
            decay = max(0.5, 1 - (images / 32) ** 0.5 / 4)
            weight, images, updates = decay * weight, 0, counted
        expected.append(weight)
    assert (len(seen), updates) == (96, 3)
    torch.testing.assert_close([one for _, one in seen], expected)


def test_the_checkpoint_is_plain_if_the_averaged_copy_is(trained):
    how, yolo, _ = trained
    kept = {type(one) for one in yolo.model.modules() if type(one).__module__.startswith("memnorm")}
    assert kept == (set() if how == "callback" else {memnorm.norms.two_way.TwoWayBatchNorm2d})


def test_the_trained_network_fuses_returns_and_predicts(trained):
    how, yolo, _ = trained
    x = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = copy.deepcopy(yolo.model).double().eval()
    with torch.no_grad():
        expected = model(x)[0]
        torch.testing.assert_close(copy.deepcopy(model).fuse(verbose=False)(x)[0], expected, rtol=1e-6, atol=1e-6)
        if how == "get_model":
            torch.testing.assert_close(memnorm.to_batchnorm(model)(x)[0], expected, rtol=0, atol=0)
    (found,) = yolo.predict(x[:1].float(), conf=1e-6, verbose=False)
    assert len(found.boxes) > 0
