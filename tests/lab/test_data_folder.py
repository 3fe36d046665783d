"""Image folders: the usual transforms, whatever the number of workers, and errors that name the file and the remedy."""

from __future__ import annotations

import io
import multiprocessing
import os
import random
import struct
import zlib

import numpy as np
import pytest
import torch
from helpers.data import image_folder, picture
from PIL import Image

from memnorm.lab import data
from memnorm.lab.data import pictures
from memnorm.lab.errors import DataCorrupt, DataMissing, LabError


@pytest.fixture
def root(tmp_path):
    return image_folder(tmp_path / "mine")


def every_batch(source, *, seed, workers=0, batch_size=3):
    plan = [(indices, None if seed is None else seed + i) for i, (indices, _) in enumerate(data.sweep(len(source), 3))]
    return list(source.batches(plan, workers=workers))


def test_a_folder_gives_normalised_images_and_labels_by_class_name(root):
    mine = data.load(str(root), image_size=16)
    assert (mine.classes, mine.shape, len(mine.train), len(mine.test)) == (2, (3, 16, 16), 8, 4)
    assert mine.train.labels.tolist() == [0] * 4 + [1] * 4
    assert mine.name == str(root)

    ((images, labels), *_) = every_batch(mine.test, seed=None)
    view = torch.tensor(pictures.evaluation_view(root / "val" / "bird" / "0.png", 16)).float()
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    expected = (view / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    torch.testing.assert_close(images[0], expected, rtol=0, atol=1e-5)
    assert images.dtype == torch.float32
    assert labels.tolist() == [0, 0, 1]


@pytest.mark.parametrize("seed", [None, 5])
def test_two_workers_give_what_none_gives(root, seed):
    train = data.load(str(root), image_size=16).train
    alone, together = (every_batch(train, seed=seed, workers=workers) for workers in (0, 2))
    assert len(alone) == len(together) == 3
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_each_image_of_a_batch_gets_its_own_view(root):
    train = data.load(str(root), image_size=16).train
    ((images, _),) = train.batches([(torch.zeros(12, dtype=torch.long), 1)])
    assert len({one.numpy().tobytes() for one in images}) == 12


@pytest.mark.parametrize("workers", [0, 2])
def test_the_global_generator_is_left_alone(root, workers):
    train = data.load(str(root), image_size=16).train
    state = torch.get_rng_state()
    every_batch(train, seed=1, workers=workers)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_subset_keeps_files_and_labels_together(root):
    train = data.load(str(root), image_size=16).train
    part = train.subset(torch.tensor([6, 1, 7])).subset(torch.tensor([2, 1]))
    assert part.labels.tolist() == [1, 0]
    ((images, labels),) = part.batches([(torch.tensor([0, 1]), None)])
    ((expected, _),) = train.batches([(torch.tensor([7, 1]), None)])
    assert torch.equal(images, expected)
    assert labels.tolist() == [1, 0]


def test_files_are_sorted_hidden_ones_and_other_kinds_left_out_and_links_followed(root):
    birds = root / "train" / "bird"
    (birds / ".hidden.png").write_bytes(b"")
    (birds / "notes.txt").write_text("no image")
    (birds / "sub.png").mkdir()
    (birds / "Z.JPEG").symlink_to(root / "val" / "bird" / "0.png")
    (root / "train" / ".git").mkdir()
    (root / "train" / "README").write_text("no class")
    mine = data.load(str(root))
    names = [path.rsplit("/", 1)[1] for path in mine.train.paths if "/bird/" in path]
    assert names == ["0.png", "1.png", "2.png", "3.png", "Z.JPEG"]
    assert mine.classes == 2


def test_a_loop_of_links_is_skipped_with_a_warning(root):
    before = data.load(str(root)).train.paths
    for loop in (root / "train" / "loop", root / "train" / "bird" / "loop.png"):
        loop.symlink_to(loop)
    with pytest.warns(UserWarning, match=r"skipped '.*/train/.*loop.*': Too many levels of symbolic links") as seen:
        assert data.load(str(root)).train.paths == before
    assert len(seen) == 2


def test_test_stands_in_for_val_and_val_comes_first(root):
    (root / "val").rename(root / "test")
    assert len(data.load(str(root)).test) == 4
    image_folder(root / "more", val=1)
    (root / "more" / "val").rename(root / "val")
    assert len(data.load(str(root)).test) == 2


def without(path):
    for child in sorted(path.rglob("*"), reverse=True):
        child.rmdir() if child.is_dir() else child.unlink()
    path.rmdir()


def empty(path):
    for child in path.iterdir():
        child.unlink()


@pytest.mark.parametrize(
    ("damage", "kind", "words"),
    [
        (lambda root: without(root / "train"), DataMissing, "has no folder train/"),
        (lambda root: without(root / "val"), DataMissing, "neither val/ nor test/"),
        (lambda root: without(root / "val" / "cat"), DataCorrupt, "differ, for example cat"),
        (lambda root: (root / "val" / "cat").rename(root / "val" / "dog"), DataCorrupt, "for example cat, dog"),
        (lambda root: empty(root / "train" / "cat"), DataCorrupt, "no images in 1 of 2 class folders: cat.*delete"),
        (lambda root: [without(root / "val" / name) for name in ("cat", "bird")], DataCorrupt, "no class folders"),
        (lambda root: without(root), DataMissing, "there is no folder"),
    ],
)
def test_a_folder_of_the_wrong_shape_is_refused_with_the_remedy(root, damage, kind, words):
    damage(root)
    with pytest.raises(kind, match=words):
        data.load(str(root))


def encoded(image, kind, **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


JPEG = encoded(picture(60, 50), "JPEG")
BROKEN = {
    "truncated": JPEG[: len(JPEG) // 2],
    "empty": b"",
    "text": b"not an image",
    "header only": JPEG[:25],
    "another format": encoded(picture(20, 20), "PCX"),
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_image_is_named_with_the_remedy(root, kind, workers):
    (root / "train" / "cat" / "bad.jpg").write_bytes(BROKEN[kind])
    train = data.load(str(root), image_size=16).train
    with pytest.raises(
        DataCorrupt, match=r"cat/bad\.jpg cannot be read as an image .*Replace it or delete it\.$"
    ) as caught:
        every_batch(train, seed=1, workers=workers)
    assert str(caught.value).startswith(str(root))  # no traceback of a worker before it


def test_verify_decodes_every_image_and_names_each_broken_one(root):
    (root / "train" / "cat" / "bad.jpg").write_bytes(BROKEN["truncated"])
    (root / "val" / "bird" / "worse.png").write_bytes(b"")
    first, second = data.verify(str(root))
    assert "cat/bad.jpg" in first
    assert "bird/worse.png" in second
    without(root / "val")
    assert "neither val/ nor test/" in data.verify(str(root))[0]


def png_of_claimed_size(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [10_000, 20_000])
def test_a_decompression_bomb_is_refused_by_name(tmp_path, side):
    (tmp_path / "bomb.png").write_bytes(png_of_claimed_size(side, side))
    with pytest.raises(DataCorrupt, match=r"bomb\.png is too large"):
        pictures.decode(tmp_path / "bomb.png")


def saved(tmp_path, image, kind="PNG", **options):
    path = tmp_path / "image"
    path.write_bytes(encoded(image, kind, **options))
    return path


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("L", "JPEG"), ("CMYK", "JPEG"), ("P", "PNG"), ("RGBA", "PNG"), ("LA", "PNG"), ("1", "PNG"), ("RGB", "WEBP")],
)
def test_every_kind_of_image_becomes_rgb(tmp_path, mode, kind):
    found = pictures.decode(saved(tmp_path, picture(20, 10, mode=mode), kind))
    assert (found.mode, found.size) == ("RGB", (20, 10))


def test_sixteen_bits_are_refused_rather_than_clipped_to_white(tmp_path):
    deep = Image.fromarray(np.full((10, 10), 30_000, np.uint16))
    with pytest.raises(DataCorrupt, match="8 bits per channel"):
        pictures.decode(saved(tmp_path, deep))


@pytest.mark.parametrize("shape", [(300, 200), (200, 300), (256, 256), (40, 31), (1, 1)])
def test_the_evaluation_view_is_the_centre_of_the_scaled_image(tmp_path, shape):
    image = picture(*shape)
    found = pictures.evaluation_view(saved(tmp_path, image), 224)
    width, height = (int(256 * side / min(shape)) for side in shape)
    left, top = round((width - 224) / 2), round((height - 224) / 2)
    literal = image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + 224, top + 224))
    assert (found == np.asarray(literal).transpose(2, 0, 1)).all()


def test_a_long_thin_strip_is_not_scaled_up_whole(tmp_path, monkeypatch):
    path, asked, resize = saved(tmp_path, picture(2000, 3)), [], Image.Image.resize

    def noted(image, size, *options):
        asked.append(size)
        return resize(image, size, *options)

    monkeypatch.setattr(Image.Image, "resize", noted)
    assert pictures.evaluation_view(path, 224).shape == (3, 224, 224)
    assert asked == [(8 * 256, 256)]


def test_the_training_view_is_the_drawn_box_scaled_and_half_the_time_mirrored(tmp_path):
    image = picture(90, 70)
    path = saved(tmp_path, image)
    mirrored = 0
    for seed in range(60):
        found = pictures.training_view(path, 32, random.Random(seed))
        box = pictures.random_box(90, 70, random.Random(seed))
        straight = np.asarray(image.crop(box).resize((32, 32), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
        flipped = straight[:, :, ::-1]
        assert (found == straight).all() or (found == flipped).all()
        mirrored += (found == flipped).all()
    assert 15 < mirrored < 45


def test_random_boxes_have_the_usual_areas_and_aspects_and_reach_the_borders():
    draw = random.Random(0)
    boxes = np.array([pictures.random_box(400, 300, draw) for _ in range(4000)])
    wide, high = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    area, aspect = wide * high / 120_000, wide / high
    assert boxes[:, :2].min() == 0
    assert boxes[:, 2].max() == 400
    assert boxes[:, 3].max() == 300
    assert area.min() == pytest.approx(0.08, abs=0.01)
    assert area.max() > 0.9
    assert 0.74 < aspect.min() < 0.76
    assert 1.31 < aspect.max() < 1.35
    assert abs(np.log(aspect).mean()) < 0.05


@pytest.mark.parametrize(("size", "expected"), [((1000, 10), (493, 0, 506, 10)), ((10, 1000), (0, 494, 10, 507))])
def test_where_no_box_fits_the_largest_centred_one_is_taken(size, expected):
    left, top, right, bottom = pictures.random_box(*size, random.Random(0))
    assert (right - left, bottom - top) == (expected[2] - expected[0], expected[3] - expected[1])
    assert abs(left + right - size[0]) <= 1
    assert abs(top + bottom - size[1]) <= 1


def test_a_worker_that_dies_ends_in_an_error_that_says_so(root, monkeypatch):
    if multiprocessing.get_start_method() != "fork":
        pytest.skip("the sabotage reaches forked workers only")
    monkeypatch.setattr(pictures, "evaluation_view", lambda *_: os._exit(1))
    train = data.load(str(root), image_size=16).train
    with pytest.raises(LabError, match="a process that decodes images died"):
        every_batch(train, seed=None, workers=1)
