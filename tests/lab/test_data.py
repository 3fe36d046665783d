"""Data in memory: what the loaders give, hostile files, augmentation against a literal loop, the order of images."""

from __future__ import annotations

import functools
import gzip
import itertools
import os
import pickle
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers.data import cifar_batch, registered, small_cifar10, write

from memnorm.lab import data
from memnorm.lab.data.source import Augmentation, MemorySource, Normalization, crop, mix
from memnorm.lab.errors import DataCorrupt, UsageError


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def source(count: int = 40, *, padding: int = 4, mirror: bool = True, size: int = 12) -> MemorySource:
    normalization = Normalization((100.0, 110.0, 120.0), (50.0, 60.0, 70.0))
    return MemorySource(draw(count, 3, size, size), torch.arange(count), normalization, Augmentation(padding, mirror))


def batch(of: MemorySource, indices, seed):
    (found,) = of.batches([(torch.as_tensor(indices), seed)])
    return found


def literal(image, padding, fill, top, left, mirrored):
    """The crop, pixel by pixel."""
    channels, height, width = image.shape
    out = torch.empty_like(image)
    for channel in range(channels):
        for row in range(height):
            for column in range(width):
                y = row + top - padding
                x = (width - 1 - column if mirrored else column) + left - padding
                inside = 0 <= y < height and 0 <= x < width
                out[channel, row, column] = image[channel, y, x] if inside else fill
    return out


@pytest.mark.parametrize("padding", [1, 4])
@pytest.mark.parametrize("fill", [0.0, -0.5])
def test_every_crop_up_to_the_borders_equals_a_literal_loop(padding, fill):
    places = range(2 * padding + 1) if padding == 1 else (0, 1, 4, 7, 8)
    cases = [(top, left, mirrored) for top in places for left in places for mirrored in (False, True)]
    images = torch.randn(len(cases), 2, 5, 7, generator=torch.Generator().manual_seed(0))
    top_left = torch.tensor([case[:2] for case in cases]).T
    found = crop(images, padding, fill, top_left, torch.tensor([case[2] for case in cases]))
    for image, one, case in zip(images, found, cases, strict=True):
        torch.testing.assert_close(one, literal(image, padding, fill, *case), rtol=0, atol=0)


def test_the_padding_is_the_mean_colour():
    of = MemorySource(draw(300, 1, 2, 2).clamp(min=1), torch.zeros(300), Normalization((0.0,), (1.0,)), Augmentation(4))
    images, _ = batch(of, range(300), seed=1)
    outside = images == 0  # no pixel is: the smallest is 1
    assert outside.view(300, -1).all(1).any()
    assert not outside.all()


def test_every_shift_and_mirroring_comes_equally_often():
    plain = Augmentation(padding=1, mirror=True)
    marked = torch.arange(25.0).view(1, 1, 5, 5).repeat(9000, 1, 1, 1)
    centre, right = plain(marked, 7)[:, 0, 2, 2:4].unbind(1)
    kinds = torch.stack([centre, right]).T.unique(dim=0, return_counts=True)[1]
    assert len(kinds) == 18
    assert kinds.float().sub(500).abs().max() < 5 * 500**0.5


def test_the_global_generator_is_left_alone():
    state = torch.get_rng_state()
    batch(source(), range(20), seed=5)
    epochs(EVEN, sampler="few-classes")
    assert torch.equal(torch.get_rng_state(), state)


def test_without_a_seed_images_are_only_normalised():
    of = source()
    images, labels = batch(of, [3, 1], None)
    mean, std = torch.tensor([100.0, 110, 120]), torch.tensor([50.0, 60, 70])
    expected = (draw(40, 3, 12, 12)[[3, 1]].float() - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    torch.testing.assert_close(images, expected, rtol=0, atol=1e-6)
    assert images.dtype == torch.float32
    assert labels.tolist() == [3, 1]


def test_the_stored_images_never_change():
    of = source()
    before, _ = batch(of, range(40), None)
    batch(of, range(40), 1)
    torch.testing.assert_close(batch(of, range(40), None)[0], before, rtol=0, atol=0)


def test_a_subset_of_a_subset_keeps_images_and_labels_together():
    of = source()
    part = of.subset(torch.tensor([10, 20, 30, 5])).subset(torch.tensor([3, 1]))
    assert len(part) == 2
    assert part.labels.tolist() == [5, 20]
    images, labels = batch(part, [1, 0], None)
    assert labels.tolist() == [20, 5]
    assert torch.equal(images, batch(of, [20, 5], None)[0])


def test_digits_are_the_demos_split_without_augmentation():
    from sklearn.datasets import load_digits

    digits = data.load("digits")
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    raw = load_digits()
    assert (len(digits.train), len(digits.test), digits.classes, digits.shape) == (1297, 500, 10, (1, 8, 8))
    assert digits.test.labels.tolist() == raw.target[order[:500]].tolist()
    images, _ = batch(digits.train, range(1297), 3)
    assert torch.equal(images, batch(digits.train, range(1297), None)[0])
    expected = (torch.tensor(raw.images[order[500:]]).unsqueeze(1) - 4.8947) / 6.0220
    torch.testing.assert_close(images, expected.float(), rtol=0, atol=1e-5)
    assert abs(images.mean()) < 1e-4
    assert abs(images.std(correction=0) - 1) < 1e-4


def test_synthetic_data_have_the_asked_size_and_are_the_same_every_time():
    options = {"classes": 7, "channels": 2, "image_size": 9, "train": 50, "test": 20}
    first, again = (data.load("synthetic", **options) for _ in range(2))
    assert (first.classes, first.shape, len(first.train), len(first.test)) == (7, (2, 9, 9), 50, 20)
    assert set(first.train.labels.tolist()) == set(range(7))
    assert torch.equal(batch(first.test, range(20), 1)[0], batch(again.test, range(20), 1)[0])
    assert not torch.equal(batch(first.test, range(20), None)[0], batch(first.train, range(20), None)[0])


def test_synthetic_classes_can_be_learned_from_the_training_images():
    made = data.load("synthetic")
    train, labels = batch(made.train, range(512), None)
    test, truth = batch(made.test, range(256), None)
    centres = torch.stack([train[labels == one].mean(0) for one in range(10)]).flatten(1)
    assert (torch.cdist(test.flatten(1), centres).argmin(1) == truth).float().mean() > 0.95
    assert abs(train.mean()) < 0.2
    assert abs(train.std() - 1) < 0.2


def test_cifar_images_are_planes_of_rows_and_all_batches_are_joined(tmp_path, monkeypatch):
    content = small_cifar10()
    registered(monkeypatch, "cifar10", content)
    write(tmp_path, content)
    loaded = data.load("cifar10", tmp_path)
    assert (len(loaded.train), len(loaded.test), loaded.classes, loaded.shape) == (20, 8, 10, (3, 32, 32))
    rows = np.random.default_rng(2).integers(0, 256, (4, 3072), dtype=np.uint8)  # of data_batch_2
    images, _ = batch(loaded.train, range(4, 8), None)
    red_row_1 = (torch.tensor(rows[:, 32:64]).float() - 125.3069) / 62.9932
    torch.testing.assert_close(images[:, 0, 1], red_row_1, rtol=0, atol=1e-5)


def test_cifar100_takes_the_fine_labels(tmp_path, monkeypatch):
    content = {
        f"cifar-100-python/{split}": cifar_batch(5, classes=100, key="fine_labels", coarse_labels=[0] * 5, seed=seed)
        for seed, split in enumerate(("train", "test"))
    }
    registered(monkeypatch, "cifar100", content)
    write(tmp_path, content)
    assert data.load("cifar100", tmp_path).train.labels.max() > 20


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": np.zeros((4, 3071), np.uint8)}, r"rows of 3,072 values; found uint8 \(4, 3071\)"),
        ({"data": np.zeros((4, 3072), np.int64)}, "found int64"),
        ({"data": [1, 2]}, "found list"),
        ({"data": None}, "no entry 'data'"),
        ({"labels": [0, 1, 2]}, "list of 4 labels"),
        ({"labels": [0, 1, 2, 10]}, "labels should be 0 to 9; found 10"),
        ({"labels": [0, 1, 2, -1]}, "found -1"),
        ({"labels": [0, 1, 2, "x"]}, "found 'x'"),
        ({"labels": [0, 1, 2, True]}, "found True"),
    ],
)
def test_a_cifar_file_with_the_wrong_content_is_corrupt(tmp_path, monkeypatch, changes, words):
    content = small_cifar10(**changes)
    registered(monkeypatch, "cifar10", content)
    write(tmp_path, content)
    with pytest.raises(DataCorrupt, match=f"data_batch_3.*{words}"):
        data.load("cifar10", tmp_path)


def idx(array) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def small_fashion(images=None, labels=None) -> dict[str, bytes]:
    pixels = np.arange(2 * 28 * 28, dtype=np.uint64).astype(np.uint8).reshape(2, 28, 28)
    parts = {"images-idx3": images or idx(pixels), "labels-idx1": labels or idx(np.array([3, 9], np.uint8))}
    return {f"fashion-mnist/{split}-{kind}-ubyte.gz": one for split in ("train", "t10k") for kind, one in parts.items()}


def load_fashion(content, tmp_path, monkeypatch):
    registered(monkeypatch, "fashion-mnist", content)
    write(tmp_path, {path: gzip.compress(one) for path, one in content.items()})
    return data.load("fashion-mnist", tmp_path)


def test_fashion_mnist_is_read_from_idx_files(tmp_path, monkeypatch):
    loaded = load_fashion(small_fashion(), tmp_path, monkeypatch)
    assert (loaded.shape, loaded.classes, loaded.train.labels.tolist()) == ((1, 28, 28), 10, [3, 9])
    images, _ = batch(loaded.train, [1], None)
    assert images[0, 0, 0, 0].item() == pytest.approx((784 % 256 - 72.9404) / 90.0212, abs=1e-5)


def test_fashion_mnist_is_padded_with_black(tmp_path, monkeypatch):
    black = small_fashion(images=idx(np.zeros((2, 28, 28), np.uint8)))
    images, _ = batch(load_fashion(black, tmp_path, monkeypatch).train, [0, 1], 1)
    assert (images.max() - images.min()).abs() < 1e-6


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (small_fashion(images=b"\x00\x00\x08\x01abc"), "not an IDX file"),
        (small_fashion(images=b"\x00\x00\x08\x03ab"), "not an IDX file"),
        (small_fashion(images=idx(np.zeros((2, 28, 28), np.uint8))[:-1]), "should hold"),
        (small_fashion(images=idx(np.zeros((3, 28, 28), np.uint8))), "3 images and 2 labels"),
        (small_fashion(labels=idx(np.array([3, 10], np.uint8))), "labels should be 0 to 9; found 10"),
    ],
)
def test_a_damaged_idx_file_is_corrupt(tmp_path, monkeypatch, content, words):
    with pytest.raises(DataCorrupt, match=words):
        load_fashion(content, tmp_path, monkeypatch)


def test_an_unknown_name_gets_near_matches_and_the_hint_at_folders():
    with pytest.raises(UsageError, match=r"unknown data set 'cifar'.*Did you mean cifar10.*path of an image folder"):
        data.load("cifar")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("digits", {"image_size": 8}, "unknown option 'image_size' for digits; it takes none"),
        ("synthetic", {"size": 8}, "it takes classes, channels, image_size, train, test"),
        ("synthetic", {"train": 0}, "train must be a whole number of at least 1; got 0"),
        ("synthetic", {"train": 2.5}, "got 2.5"),
        ("synthetic", {"train": True}, "got True"),
    ],
)
def test_a_wrong_option_is_a_usage_error(name, options, words):
    with pytest.raises(UsageError, match=words):
        data.load(name, **options)


class Calls:
    """An object whose pickle says: call this with that."""

    def __init__(self, function, *arguments):
        self.reduced = (function, arguments)

    def __reduce__(self):
        return self.reduced


HOSTILE = {
    "os.system": lambda mark: Calls(os.system, f"touch {mark}"),
    "builtins.eval": lambda mark: Calls(eval, f"open({str(mark)!r}, 'w')"),
    "subprocess.Popen": lambda mark: Calls(subprocess.Popen, ["touch", str(mark)]),
    "nested": lambda mark: {"data": [1, (2, {"deep": Calls(os.system, f"touch {mark}")})]},
    "inside an array": lambda mark: np.array([{}, Calls(os.system, f"touch {mark}")], dtype=object),
    "numpy.load": lambda mark: Calls(np.load, str(mark)),
    "numpy.memmap": lambda mark: Calls(np.memmap, str(mark), "u1", "w+", 0, (4,)),
}


def load_batch(content, tmp_path, monkeypatch):
    content = {**small_cifar10(), "cifar-10-batches-py/data_batch_3": content}
    registered(monkeypatch, "cifar10", content)
    write(tmp_path, content)
    return data.load("cifar10", tmp_path)


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_hostile_pickle_runs_nothing(kind, protocol, tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    with pytest.raises(DataCorrupt, match=r"data_batch_3 is not a pickle of arrays .*nothing was run"):
        load_batch(pickle.dumps(HOSTILE[kind](mark), protocol), tmp_path, monkeypatch)
    assert not mark.exists()


@pytest.mark.parametrize("content", [b"", b"\x00\xff rubbish", pickle.dumps(np.zeros(50), 2)[:40], b"\x82\x01."])
def test_a_damaged_pickle_is_corrupt(content, tmp_path, monkeypatch):
    with pytest.raises(DataCorrupt, match="data_batch_3 is not a pickle of arrays"):
        load_batch(content, tmp_path, monkeypatch)


def test_reading_does_not_import_what_a_pickle_names(tmp_path, monkeypatch):
    sys.modules.pop("antigravity", None)
    with pytest.raises(DataCorrupt, match=r"antigravity\.geohash"):
        load_batch(b"cantigravity\ngeohash\n.", tmp_path, monkeypatch)
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("module", [b"numpy.core.multiarray", b"numpy._core.multiarray"])
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_both_generations_of_numpy_are_read(module, protocol, tmp_path, monkeypatch):
    content = pickle.dumps(pickle.loads(cifar_batch(4, seed=3), encoding="bytes"), protocol)
    if protocol < 4:  # where names are not preceded by their length
        content = content.replace(b"numpy.core.multiarray", module).replace(b"numpy._core.multiarray", module)
    assert len(load_batch(content, tmp_path, monkeypatch).train) == 20


SAMPLERS = ("shuffle", "few-classes", "sorted")
EVEN = torch.arange(120).remainder(6)[torch.randperm(120, generator=torch.Generator().manual_seed(1))]
UNEVEN = torch.cat([torch.full((count,), label) for label, count in enumerate((50, 3, 0, 21, 8, 1))])


def epochs(labels, count=1, **settings):
    """The batches of the first epochs, epoch by epoch."""
    settings = {"sampler": "shuffle", "batch_size": 8, "seed": 0} | settings
    known = {key: settings[key] for key in ("sampler", "batch_size", "classes_per_batch") if key in settings}
    length = data.epoch_length(labels, **known)
    plan = list(data.order(labels, iterations=count * length, **settings))
    assert len(plan) == count * length
    return [[indices for indices, _ in plan[start : start + length]] for start in range(0, len(plan), length)]


@pytest.mark.parametrize("labels", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("batch_size", [1, 2, 8, 32])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_image_comes_once_per_epoch_in_batches_of_at_most_the_size(sampler, batch_size, labels):
    for epoch in epochs(labels, 3, sampler=sampler, batch_size=batch_size):
        assert torch.cat(epoch).sort().values.tolist() == list(range(len(labels)))
        assert all(1 <= len(one) <= batch_size for one in epoch)


@pytest.mark.parametrize("sampler", ["shuffle", "sorted"])
def test_the_last_batch_of_an_epoch_is_kept(sampler):
    (sizes,) = [[len(one) for one in epoch] for epoch in epochs(EVEN[:50], sampler=sampler)]
    assert sizes == [8] * 6 + [2]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_epochs_differ_and_seeds_differ(sampler):
    first, second = epochs(EVEN, 2, sampler=sampler)
    (other,) = epochs(EVEN, sampler=sampler, seed=1)
    assert not torch.equal(torch.cat(first), torch.cat(second))
    assert not torch.equal(torch.cat(first), torch.cat(other))


@pytest.mark.parametrize("start", [0, 1, 14, 15, 16, 37, 44])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_plan_begun_anywhere_is_the_rest_of_the_whole_plan(sampler, start):
    settings = {"sampler": sampler, "batch_size": 8, "iterations": 45, "seed": 3}
    whole = list(data.order(EVEN, **settings))
    rest = list(data.order(EVEN, start=start, **settings))
    assert len(rest) == 45 - start
    for (indices, seed), (expected, expected_seed) in zip(rest, whole[start:], strict=True):
        assert torch.equal(indices, expected)
        assert seed == expected_seed


@pytest.mark.parametrize("labels", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize(("batch_size", "classes"), [(8, 1), (8, 2), (8, 4), (6, 3), (2, 2), (2, 4), (1, 3)])
def test_few_classes_means_at_most_so_many_in_every_batch(labels, batch_size, classes):
    for epoch in epochs(labels, 3, sampler="few-classes", batch_size=batch_size, classes_per_batch=classes):
        assert max(len(labels[one].unique()) for one in epoch) <= classes


def test_few_classes_fills_its_batches_evenly_where_the_classes_allow_it():
    for epoch in epochs(EVEN, 3, sampler="few-classes", classes_per_batch=2):
        for one in epoch:
            assert EVEN[one].unique(return_counts=True)[1].tolist() == [4, 4]


def test_few_classes_mixes_the_pairs_within_an_epoch():
    (epoch,) = epochs(EVEN, sampler="few-classes", classes_per_batch=2, batch_size=2)
    pairs = {tuple(sorted(EVEN[one].tolist())) for one in epoch}
    assert len(pairs) > 6


def test_the_sorted_sampler_finishes_one_class_before_the_next():
    for epoch in epochs(UNEVEN, 3, sampler="sorted"):
        runs = [label for label, _ in itertools.groupby(UNEVEN[torch.cat(epoch)].tolist())]
        assert sorted(runs) == [0, 1, 3, 4, 5]


def test_augmentation_seeds_are_all_different_and_not_shifted_between_runs():
    seeds = {run: [seed for _, seed in data.order(EVEN, batch_size=8, iterations=500, seed=run)] for run in range(3)}
    together = [seed for run in seeds.values() for seed in run]
    assert len(set(together)) == 1500
    assert all(0 <= seed < 2**63 for seed in together)


def test_without_augmentation_there_are_no_seeds_and_the_order_is_the_same():
    plain, augmented = (
        list(data.order(EVEN, batch_size=8, iterations=20, seed=0, augment=augment)) for augment in (False, True)
    )
    assert {seed for _, seed in plain} == {None}
    assert all(torch.equal(one, other) for (one, _), (other, _) in zip(plain, augmented, strict=True))


def test_a_mixed_seed_is_fixed_forever():
    assert mix(0, "order", 0) == 3471081512423777433
    assert mix(1, 23) != mix(12, 3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch_size": 121}, "between 1 and the number of training images, 120; got 121"),
        ({"batch_size": 0}, "got 0"),
        ({"sampler": "few-classes", "classes_per_batch": 3}, "multiple of classes_per_batch; got 8 and 3"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_when_asked_for(settings, words):
    with pytest.raises(UsageError, match=words):
        data.order(EVEN, **({"batch_size": 8, "iterations": 1, "seed": 0} | settings))


def test_a_sweep_is_every_image_once_in_order():
    plan = list(data.sweep(10, 4))
    assert [indices.tolist() for indices, _ in plan] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert {seed for _, seed in plan} == {None}


SPLITS = {"cifar10": (50_000, 10_000), "cifar100": (50_000, 10_000), "fashion-mnist": (60_000, 10_000)}


@functools.lru_cache(maxsize=1)
def real(name):
    if not data.DATA_SETS[name].present(data.default_root()):
        pytest.skip(f"{name} is not in {data.default_root()}")
    return data.load(name)


def chunks(source):
    return (images for images, _ in source.batches(data.sweep(len(source), 5000)))


@pytest.mark.data
@pytest.mark.parametrize("name", SPLITS)
def test_the_official_files_are_read_whole_with_balanced_classes(name):
    found = real(name)
    assert (len(found.train), len(found.test)) == SPLITS[name]
    for source in (found.train, found.test):
        assert set(torch.bincount(source.labels).tolist()) == {len(source) // found.classes}


@pytest.mark.data
@pytest.mark.parametrize("name", SPLITS)
def test_the_constants_make_mean_0_and_deviation_1_of_the_training_images(name):
    moments = [torch.var_mean(chunk, dim=(0, 2, 3), correction=0) for chunk in chunks(real(name).train)]
    vars_KC, means_KC = (torch.stack(part).double() for part in zip(*moments, strict=True))
    mean = means_KC.mean(0)
    var = (vars_KC + (means_KC - mean).square()).mean(0)
    torch.testing.assert_close(mean, torch.zeros_like(mean), rtol=0, atol=2e-5)
    torch.testing.assert_close(var, torch.ones_like(var), rtol=0, atol=2e-5)


@pytest.mark.data
def test_the_first_images_of_cifar10_are_a_frog_and_two_trucks():
    assert real("cifar10").train.labels[:3].tolist() == [6, 9, 9]


@pytest.mark.data
def test_neighbouring_pixels_are_alike_so_rows_and_planes_are_where_they_belong():
    images = next(chunks(real("cifar10").test))
    along, across = (images.diff(dim=dim).square().mean().item() for dim in (2, 3))
    assert max(along, across) < 0.2


@pytest.mark.data
def test_real_photographs_go_through_the_imagenet_pipeline():
    root = data.default_root() / "imagenette-mini"
    if not root.is_dir():
        pytest.skip(f"no {root}")
    found = data.load(str(root))
    assert (found.classes, len(found.train), len(found.test)) == (10, 400, 150)
    plan = list(data.order(found.train.labels, batch_size=50, iterations=2, seed=0))
    alone, together = (list(found.train.batches(plan, workers=workers)) for workers in (0, 2))
    for (images, labels), (others, same) in zip(alone, together, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, same)
        assert images.shape == (50, 3, 224, 224)
        assert 0.7 < images.std() < 1.5
    assert data.verify(str(root)) == []
