"""What a run does: schedules, images, and what must be alike for every norm and seed."""

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from helpers.lab import ARMS, PLAIN, Spy, content, images_of, tiny
from torch import nn

import memnorm
from memnorm.errors import OptionError
from memnorm.lab.errors import UsageError
from memnorm.lab.runner import evaluation_due, run
from memnorm.lab.spec import Execution
from memnorm.lab.store import Store
from memnorm.lab.training import Training, choose_device, learning_rate, load_data, set_threads, sources, with_layout

pytestmark = pytest.mark.usefixtures("no_git")


@pytest.fixture
def spy(monkeypatch) -> Spy:
    return Spy(monkeypatch)


def test_the_step_schedule_divides_by_ten_at_the_milestones():
    spec = tiny(iterations=10, learning_rate=0.1)
    rates = [learning_rate(spec, iteration) for iteration in range(10)]
    assert rates == pytest.approx([0.1] * 4 + [0.01] * 2 + [0.001] * 4)


def test_the_step_schedule_is_the_papers_at_its_length():
    spec = tiny(iterations=78_200, learning_rate=0.1)
    at = {31_279: 0.1, 31_280: 0.01, 46_919: 0.01, 46_920: 0.001, 78_199: 0.001}
    assert {iteration: learning_rate(spec, iteration) for iteration in at} == pytest.approx(at)


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


def test_one_strength_holds_for_the_whole_run(store, spy):
    spec = tiny(norm="mbn", iterations=6, strength=(0.25,))
    run(spec, store, execution=PLAIN)
    assert set.union(*spy.strengths) == {0.25}
    assert {line["strength"] for line in store.run(spec).metrics()} == {0.25}


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


def test_another_seed_starts_with_other_weights():
    ours, theirs = (next(trained(tiny(seed=seed)).model.parameters()) for seed in (0, 1))
    assert not torch.equal(ours, theirs)


def test_the_norm_bn_is_the_model_as_it_is():
    layers = [type(module) for module in trained(tiny()).model.modules() if "Norm" in type(module).__name__]
    assert layers == [nn.BatchNorm2d] * 2


def test_the_options_of_the_norm_reach_its_layers():
    layers = [
        module
        for module in trained(tiny(norm="mbn", norm_options={"memory_size": 7})).model.modules()
        if isinstance(module, memnorm.MemorizedBatchNorm2d)
    ]
    assert [layer.memory_size for layer in layers] == [7, 7]


def test_an_option_that_the_norm_does_not_have_is_refused():
    with pytest.raises(OptionError, match="unknown option memory_size"):
        trained(tiny(norm_options={"memory_size": 3}))


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


def test_evaluations_leave_no_trace_in_the_training_of_a_real_network(store):
    data = {"classes": 3, "image_size": 8, "train": 8, "test": 4}
    specs = [tiny(model="nin", data_options=data, batch_size=4, iterations=2, evaluations=count) for count in (1, 2)]
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


def test_without_a_holdout_all_images_are_trained_on_and_the_test_set_is_evaluated(store, spy):
    spec = tiny(augment=False, evaluations=2)
    data = load_data(spec, None)
    run(spec, store, execution=PLAIN)
    assert set(content(spy.images)) == set(content([images_of(data.train)]))
    assert Counter(content(spy.evaluated)) == Counter(content([images_of(data.test)]) * 2)


def test_images_are_augmented_by_default(store, spy):
    run(tiny(iterations=6), store, execution=PLAIN)
    original = set(content([images_of(load_data(tiny(), None).train)]))
    assert not set(content(spy.images)) <= original


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


def test_a_smaller_subset_is_part_of_a_larger_one_and_leaves_the_holdout_alone():
    data = load_data(tiny(), None)
    small, holdout = (set(content([images_of(one)])) for one in sources(tiny(train_images=5, holdout=10), data))
    large, same = (set(content([images_of(one)])) for one in sources(tiny(train_images=20, holdout=10), data))
    assert small < large
    assert holdout == same
    assert len(holdout) == 10


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


def test_all_images_may_be_asked_for_by_number():
    data = load_data(tiny(), None)
    train, test = sources(tiny(train_images=44, test_images=20), data)
    assert content([images_of(train)]) == content([images_of(data.train)])
    assert content([images_of(test)]) == content([images_of(data.test)])


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


def test_channels_last_leaves_weights_of_other_ranks_alone():
    model = with_layout(nn.Sequential(nn.Conv1d(2, 2, 3), nn.Conv2d(2, 2, 3), nn.Conv3d(2, 2, 3)), torch.channels_last)
    assert [layer.weight.is_contiguous() for layer in model] == [True, False, True]


def test_threads_are_set_where_they_are_given():
    before = torch.get_num_threads()
    try:
        assert set_threads(Execution(threads=2)) == torch.get_num_threads() == 2
        assert set_threads(Execution(threads=0)) == torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


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


def test_accumulated_batch_norm_is_another_training(tmp_path):
    joint, parts = accumulated_run(tmp_path, "bn", 8, 1), accumulated_run(tmp_path, "bn", 2, 4)
    assert any((joint[name] - parts[name]).abs().max() > 1e-3 for name in joint)


def test_the_learning_rate_scales_with_the_images_of_a_step():
    spec = tiny(batch_size=2, accumulate=4, scaling="linear", base_batch_size=32, learning_rate=0.4)
    assert spec.base_learning_rate == pytest.approx(0.1)
    assert "b2x4" in spec.name
