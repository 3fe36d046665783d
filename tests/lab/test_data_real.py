"""The real data sets, where MEMNORM_DATA has them."""

from __future__ import annotations

import functools

import pytest
import torch

from memnorm.lab import data

pytestmark = pytest.mark.data

SPLITS = {"cifar10": (50_000, 10_000), "cifar100": (50_000, 10_000), "fashion-mnist": (60_000, 10_000)}


@functools.lru_cache(maxsize=1)
def real(name):
    if not data.DATA_SETS[name].present(data.default_root()):
        pytest.skip(f"{name} is not in {data.default_root()}")
    return data.load(name)


def chunks(source):
    return (images for images, _ in source.batches(data.sweep(len(source), 5000)))


@pytest.mark.parametrize("name", SPLITS)
def test_the_official_files_are_read_whole_with_balanced_classes(name):
    found = real(name)
    assert (len(found.train), len(found.test)) == SPLITS[name]
    for source in (found.train, found.test):
        assert set(torch.bincount(source.labels).tolist()) == {len(source) // found.classes}


@pytest.mark.parametrize("name", SPLITS)
def test_the_constants_make_mean_0_and_deviation_1_of_the_training_images(name):
    moments = [torch.var_mean(chunk, dim=(0, 2, 3), correction=0) for chunk in chunks(real(name).train)]
    vars_KC, means_KC = (torch.stack(part).double() for part in zip(*moments, strict=True))
    mean = means_KC.mean(0)
    var = (vars_KC + (means_KC - mean).square()).mean(0)
    torch.testing.assert_close(mean, torch.zeros_like(mean), rtol=0, atol=2e-5)
    torch.testing.assert_close(var, torch.ones_like(var), rtol=0, atol=2e-5)


def test_the_first_images_of_cifar10_are_a_frog_and_two_trucks():
    assert real("cifar10").train.labels[:3].tolist() == [6, 9, 9]


def test_neighbouring_pixels_are_alike_so_rows_and_planes_are_where_they_belong():
    images = next(chunks(real("cifar10").test))
    along, across = (images.diff(dim=dim).square().mean().item() for dim in (2, 3))
    assert max(along, across) < 0.2


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
