"""diagnose: its numbers, its table and its verdict."""

import copy
import gc
import re
import weakref

import pytest
import torch
from helpers.common import randn
from helpers.estimation import (
    DATA,
    NORMS,
    Keyword,
    Partial,
    assert_condition,
    batch_norms,
    condition,
    deep_net,
    mixed_net,
    moments,
)
from torch import nn

import memnorm
from memnorm import diagnose, recalibrate
from memnorm.errors import NothingToRecord, OptionError


def rms(x):
    return float(x.square().mean().sqrt())


def layer_and_batches(build, *, size=5, count=4, **options):
    """One layer without affine map whose statistics differ from those of the batches."""
    layer = build(3, affine=False, eps=1e-3, dtype=torch.float64, **options)
    for step in range(3):
        layer(2 * randn(6, 3, seed=80 + step) + 1)
    return nn.Sequential(layer), list((randn(count * size, 3, seed=0) + torch.arange(3.0)).split(size))


BUILDS = {"plain": nn.BatchNorm1d, "memorized": memnorm.MemorizedBatchNorm1d}


each_build = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)


def distance(a, b, eps):
    """Shift in deviations and logarithm of the ratio of deviations, as one length per channel."""
    (mean_a, var_a), (mean_b, var_b) = a, b
    return torch.hypot((mean_a - mean_b) / (var_b + eps).sqrt(), ((var_a + eps) / (var_b + eps)).log() / 2)


@each_build
def test_batch_noise_is_the_distance_of_batch_moments_from_those_of_all_batches(build):
    model, batches = layer_and_batches(build)
    population = moments(torch.cat(batches))
    expected = rms(torch.stack([distance(moments(batch), population, 1e-3) for batch in batches]))
    assert diagnose(model, batches).layers[0].batch_noise == pytest.approx(expected, abs=1e-12)


@each_build
def test_staleness_is_the_distance_of_running_statistics_from_what_the_layer_sees(build):
    model, batches = layer_and_batches(build)
    expected = rms(distance((model[0].running_mean, model[0].running_var), moments(torch.cat(batches)), 1e-3))
    assert diagnose(model, batches).layers[0].staleness == pytest.approx(expected, abs=1e-12)


def outputs_in_both_modes(model, batches):
    model = copy.deepcopy(model)
    for layer in batch_norms(model).values():
        layer.recording = False
    trained = torch.cat([copy.deepcopy(model).train()(batch) for batch in batches])
    return trained, torch.cat([model.eval()(batch) for batch in batches])


@each_build
def test_disagreement_is_the_difference_of_normalised_values_in_both_modes(build):
    model, batches = layer_and_batches(build)
    trained, evaluated = outputs_in_both_modes(model, batches)
    expected = rms(trained - evaluated)
    assert diagnose(model, batches).layers[0].disagreement == pytest.approx(expected, abs=1e-12)


@each_build
def test_output_disagreement_is_relative_to_the_output_in_eval_mode(build):
    model, batches = layer_and_batches(build)
    trained, evaluated = outputs_in_both_modes(model, batches)
    expected = rms(trained - evaluated) / rms(evaluated)
    assert diagnose(model, batches).output_disagreement == pytest.approx(expected, abs=1e-12)


@each_build
def test_changed_predictions_are_a_share_of_all_rows(build):
    model, batches = layer_and_batches(build, size=2, count=10)
    trained, evaluated = outputs_in_both_modes(model, batches)
    expected = (trained.argmax(1) != evaluated.argmax(1)).double().mean().item()
    assert diagnose(model, batches).changed_predictions == expected
    assert 0 < expected < 1


def test_the_diagnosis_names_layers_kinds_and_sizes():
    net = nn.Sequential(deep_net(NORMS["plain"]), nn.Linear(3, 4).double(), deep_net(NORMS["memorized"]))
    result = diagnose(net, DATA.split([9, 20]))
    assert result.batches == 2
    assert [(d.name, d.kind, d.values_per_batch) for d in result.layers] == [
        (name, type(layer).__name__, 14.5) for name, layer in batch_norms(net).items()
    ]


@pytest.mark.parametrize(("limit", "taken"), [({}, 32), ({"max_batches": 3}, 3), ({"max_batches": 50}, 40)])
def test_at_most_max_batches_are_taken(limit, taken):
    drawn = []
    batches = (drawn.append(seed) or randn(4, 3, seed=seed) for seed in range(40))
    result = diagnose(nn.BatchNorm1d(3).double(), batches, **limit)
    assert (result.batches, len(drawn)) == (taken, taken)


def test_one_batch_at_a_time_is_in_memory():
    alive = []

    def batches():
        references = []
        for seed in range(5):
            batch = randn(4, 3, seed=seed)
            references.append(weakref.ref(batch))
            yield batch
            del batch
            gc.collect()
            alive.append(sum(one() is not None for one in references))

    diagnose(nn.BatchNorm1d(3).double(), batches())
    assert max(alive) <= 1  # the loop's variable


@pytest.mark.parametrize("limit", [0, -1, 2.5, "a", None, True])
def test_max_batches_is_a_positive_number(limit):
    with pytest.raises(OptionError, match="max_batches must be a positive number of batches; got"):
        diagnose(nn.BatchNorm1d(3), [DATA], max_batches=limit)


NOISY = [*((norm, True) for norm in ("plain", "bn", "ghost")), *((norm, False) for norm in ("mbn", "two_way", "brn"))]


@pytest.mark.parametrize(("norm", "advised"), NOISY)
def test_two_way_memory_is_the_advice_for_noisy_layers_that_read_the_batch_alone(norm, advised):
    model = nn.Sequential(nn.BatchNorm1d(4).double())
    if norm != "plain":
        memnorm.convert(model, norm)
    verdict = diagnose(model, LOTS[:64].split(4)).verdict
    assert "Batch statistics are noisy" in verdict
    assert ('memnorm.convert(model, "two_way")' in verdict) == advised


def test_a_printed_diagnosis_is_a_table_and_the_verdict():
    result = diagnose(deep_net(NORMS["plain"]), [DATA])
    lines = str(result).splitlines()
    assert repr(result) == str(result)
    first = result.layers[0]
    assert [line.split()[0] for line in lines[2:5]] == ["1", "4", "7"]
    assert lines[2].split() == [
        "1",
        "BatchNorm1d",
        "29",
        *(f"{number:.3f}" for number in (first.batch_noise, first.staleness, first.disagreement)),
    ]
    assert lines[-1] == result.verdict


class Damped(nn.Module):
    """A norm whose output hardly matters."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)

    def forward(self, x):
        return x + 1e-3 * self.norm(x)


class Averaged(Damped):
    """A norm of which only the average is used: exactly zero in training mode, not so in eval mode."""

    def forward(self, x):
        return self.norm(x).mean(0)


def settled(model, data):
    recalibrate(model, [data], passes="exact")
    return model


LOTS = randn(4096, 4, seed=8)


VERDICTS = {
    "nothing": (lambda: settled(Damped(), LOTS), LOTS.split(1024), set()),
    "noisy": (lambda: settled(Damped(), LOTS[:64]), LOTS[:64].split(4), {"noisy"}),
    "stale": (lambda: settled(Damped(), LOTS + 1), LOTS.split(1024), {"stale"}),
    "disagree": (lambda: settled(Averaged(), LOTS), LOTS.split(1024), {"disagree"}),
    "everything": (lambda: settled(nn.BatchNorm1d(4).double(), LOTS + 1), LOTS[:64].split(4), None),
}


@pytest.mark.parametrize(("build", "batches", "words"), VERDICTS.values(), ids=VERDICTS)
def test_the_verdict_says_what_is_wrong_and_nothing_else(build, batches, words):
    words = {"noisy", "stale", "disagree"} if words is None else words
    verdict = diagnose(build(), batches).verdict
    assert {word for word in ("noisy", "stale", "disagree") if re.search(rf"\b{word}\b", verdict)} == words
    assert verdict.startswith("Nothing unusual") == (not words)


def test_the_verdict_names_the_worst_layer():
    net = settled(deep_net(NORMS["plain"]), DATA)
    net[4].running_mean.add_(1000)
    verdict = diagnose(net, [DATA]).verdict
    assert re.search(r"Running statistics are stale: in 4 they differ by \d{2,}\.\d\d standard deviations", verdict)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_diagnosis_changes_nothing(training):
    net = mixed_net()
    if not training:
        net.eval()
    before = condition(net)
    diagnose(net, DATA.split(10))
    assert_condition(net, before)


@pytest.mark.parametrize(
    "wrap",
    [lambda y: {"logits": y, "steps": 3}, lambda y: (y, None), lambda y: [{"a": (y,)}, torch.tensor(1)]],
    ids=["dict", "tuple", "nested"],
)
def test_outputs_may_be_nested(wrap):
    class Wrapped(Keyword):
        def forward(self, x):
            return wrap(self.net(x))

    net = deep_net(NORMS["plain"])
    expected = diagnose(net, DATA.split(10))
    result = diagnose(Wrapped(net), DATA.split(10))
    assert result.output_disagreement == expected.output_disagreement > 0
    assert result.changed_predictions == expected.changed_predictions


def test_layers_that_were_not_reached_are_not_diagnosed():
    assert [d.name for d in diagnose(Partial(), [DATA]).layers] == ["used"]


def test_layers_that_run_in_training_mode_only_are_not_diagnosed():
    class Auxiliary(Partial):
        def forward(self, x):
            return self.used(self.unused(x) if self.used.training else x)

    assert [d.name for d in diagnose(Auxiliary(), [DATA]).layers] == ["used"]


def test_a_diagnosis_without_batches_is_an_error():
    with pytest.raises(NothingToRecord, match="diagnose: there is no batch; pass a few of the training size"):
        diagnose(deep_net(NORMS["plain"]), [])
