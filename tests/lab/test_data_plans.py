"""The order of the training images: what each sampler promises, and that only seed and iteration matter."""

from __future__ import annotations

import itertools

import pytest
import torch

from memnorm.lab import data
from memnorm.lab.data.source import mix
from memnorm.lab.errors import UsageError

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


def test_fifty_thousand_images_make_391_batches_of_128():
    assert data.epoch_length(torch.zeros(50_000, dtype=torch.long), batch_size=128) == 391


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


def test_a_start_at_the_end_leaves_nothing():
    assert list(data.order(EVEN, batch_size=8, iterations=5, seed=0, start=5)) == []


def test_a_plan_does_not_touch_the_global_generator():
    state = torch.get_rng_state()
    epochs(EVEN, sampler="few-classes")
    assert torch.equal(torch.get_rng_state(), state)


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


def test_few_classes_keeps_the_last_short_run_of_a_class():
    labels = torch.tensor([0] * 5 + [1] * 5)
    (epoch,) = epochs(labels, sampler="few-classes", batch_size=8, classes_per_batch=2)
    assert sorted(len(one) for one in epoch) in ([2, 8], [5, 5])


def test_the_sorted_sampler_finishes_one_class_before_the_next():
    for epoch in epochs(UNEVEN, 3, sampler="sorted"):
        runs = [label for label, _ in itertools.groupby(UNEVEN[torch.cat(epoch)].tolist())]
        assert sorted(runs) == [0, 1, 3, 4, 5]


def test_the_sorted_sampler_shuffles_classes_and_images_inside_them():
    first, second = (torch.cat(epoch) for epoch in epochs(EVEN, 2, sampler="sorted"))
    assert EVEN[first].unique_consecutive().tolist() != EVEN[second].unique_consecutive().tolist()
    assert first[EVEN[first] == 0].tolist() != second[EVEN[second] == 0].tolist()
    assert first[EVEN[first] == 0].tolist() != sorted(first[EVEN[first] == 0].tolist())


def test_shuffle_draws_every_image_equally_often_in_the_first_batch():
    labels = torch.zeros(10, dtype=torch.long)
    counts = torch.zeros(10)
    for seed in range(600):
        indices, _ = next(data.order(labels, batch_size=5, iterations=1, seed=seed))
        counts[indices] += 1
    assert (counts - 300).abs().max() < 5 * 150**0.5


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
