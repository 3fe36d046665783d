"""recalibrate and adapt change nothing else, and can be undone."""

import copy

import pytest
import torch
from helpers.common import assert_same_state, images, randn, small_net
from helpers.estimation import (
    DATA,
    NORMS,
    TARGET,
    Keyword,
    assert_condition,
    batch_norms,
    condition,
    deep_net,
    each_norm,
    inputs_of_norms,
    mixed_net,
    moments,
    statistics,
)
from torch import nn

import memnorm
from memnorm import adapt, diagnose, recalibrate
from memnorm.errors import DTypeError, InputError, OptionError
from memnorm.functional import memorized_batch_norm


@pytest.mark.parametrize("passes", [1, "exact"])
def test_dropout_is_off(passes):
    with_dropout = nn.Sequential(nn.Dropout(0.9), deep_net(NORMS["plain"]))
    without = nn.Sequential(nn.Identity(), deep_net(NORMS["plain"]))
    for model in (with_dropout, without):
        recalibrate(model, [DATA], passes=passes)
    assert_same_state(with_dropout, without)


@each_norm
@pytest.mark.parametrize("passes", [1, "exact"])
def test_a_layer_frozen_by_the_user_is_unchanged(norm, passes):
    net = deep_net(norm)
    net[4].eval()
    before = copy.deepcopy(net[4])
    assert recalibrate(net, [DATA], passes=passes).layers == 2
    assert_same_state(net[4], before)


@each_norm
def test_a_layer_frozen_by_the_user_normalises_with_its_own_statistics_meanwhile(norm):
    net = deep_net(norm)
    net[1].eval(), net[4].eval()
    recalibrate(net, DATA.split(10))
    expected = moments(inputs_of_norms(copy.deepcopy(net).eval(), [DATA])["7"])
    torch.testing.assert_close(statistics(net)["7"], expected, rtol=0, atol=1e-10)


@each_norm
def test_in_a_model_in_eval_mode_every_layer_is_recalibrated(norm):
    assert recalibrate(deep_net(norm).eval(), [DATA]).layers == 3


def test_a_memory_is_emptied():
    net = deep_net(NORMS["memorized"])
    assert all(layer.memory_count.sum() > 0 for layer in batch_norms(net).values())
    recalibrate(net, [DATA])
    for layer in batch_norms(net).values():
        slots = (layer.memory_mean, layer.memory_var, layer.memory_count, layer.running_weight)
        assert all(not buffer.any() for buffer in slots)


def test_the_new_statistics_replace_the_memory():
    layer = memnorm.MemorizedBatchNorm1d(4, strength=0.5, dtype=torch.float64)
    recalibrate(layer, [DATA])
    x = randn(6, 4, seed=3)
    expected = memorized_batch_norm(x, layer.weight, layer.bias, *moments(DATA), 0.5 * 6, layer.eps)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("passes", [1, "exact"])
def test_modes_switches_hooks_and_buffer_identity_are_as_before(passes, training):
    net = mixed_net()
    if not training:
        net.eval()
    before = condition(net)
    recalibrate(net, [DATA], passes=passes)
    assert_condition(net, before, state=False)


@pytest.mark.parametrize("passes", [1, "exact"])
def test_only_the_statistics_change(passes):
    net = mixed_net()
    before = condition(net)["state"]
    recalibrate(net, [DATA], passes=passes)
    after = condition(net)["state"]
    changed = {name.rpartition(".")[2] for name in after if not torch.equal(after[name], before[name])}
    assert changed <= {
        "running_mean",
        "running_var",
        "running_weight",
        "num_batches_tracked",
        "memory_mean",
        "memory_var",
        "memory_count",
    }


class Counter(nn.Module):
    """Counts its forwards in a buffer, in every mode."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return x


class ReplacingCounter(Counter):
    """The same with a new tensor each time."""

    def forward(self, x):
        self.calls = self.calls + 1
        return x


@pytest.mark.parametrize("counter", [Counter, ReplacingCounter])
@pytest.mark.parametrize("call", [recalibrate, diagnose])
def test_buffers_of_other_modules_are_as_before(call, counter):
    model = nn.Sequential(counter(), nn.BatchNorm1d(4).double())
    before = model[0].calls
    call(model, [DATA])
    assert model[0].calls is before
    assert before == 0


class Failing:
    """Batches that end in an exception, in the n-th round."""

    def __init__(self, error, round_):
        self.error, self.round, self.rounds = error, round_, 0

    def __iter__(self):
        self.rounds += 1
        yield DATA[:10]
        if self.rounds == self.round:
            raise self.error
        yield DATA[10:]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize(("passes", "round_"), [(1, 1), ("exact", 1), ("exact", 2)])
def test_after_an_exception_everything_is_restored(passes, round_, error):
    net = mixed_net()
    before = condition(net)
    with pytest.raises(error):
        recalibrate(net, Failing(error, round_), passes=passes)
    assert_condition(net, before)


def test_after_a_batch_the_model_cannot_take_everything_is_restored():
    net = mixed_net()
    before = condition(net)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        recalibrate(net, [DATA, DATA[:, :3]])
    assert_condition(net, before)


def test_gradients_are_neither_needed_nor_left():
    net = deep_net(NORMS["memorized"])
    seen = []
    recalibrate(net, [DATA], forward=lambda model, batch: seen.append(model(batch).requires_grad))
    assert seen == [False]
    assert all(parameter.grad is None for parameter in net.parameters())


def test_double_forward_does_not_record_the_batches():
    net = deep_net(NORMS["memorized"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    memnorm.double_forward(net, optimizer)
    net(DATA).sum().backward()
    recalibrate(net, [DATA[:7], DATA[7:]])
    optimizer.step()
    assert [int((layer.memory_count > 0).sum()) for layer in batch_norms(net).values()] == [2, 2, 2]  # prior and batch


@each_norm
def test_adapt_gives_the_statistics_of_the_target(norm):
    net, expected = deep_net(norm), deep_net(norm)
    target = 3 * DATA + 1
    adaptation = adapt(net, target.split(10))
    recalibrate(expected, target.split(10))
    assert_same_state(net, expected)
    assert adaptation.result.batches == 3


def test_adapt_takes_the_arguments_of_recalibrate():
    net, expected = Keyword(deep_net(NORMS["plain"])), deep_net(NORMS["plain"])
    adapt(net, [(TARGET, DATA)], passes="exact", forward=lambda model, batch: model(batch[1]))
    recalibrate(expected, [DATA], passes="exact")
    assert_same_state(net.net, expected)


@pytest.mark.parametrize("passes", [1, "exact"])
def test_revert_brings_every_buffer_back_memory_included(passes):
    net = mixed_net()
    before = condition(net)
    adaptation = adapt(net, [3 * DATA + 1], passes=passes)
    assert not torch.equal(net[2][1].memory_count, before["state"]["2.1.memory_count"])
    adaptation.revert()
    assert_condition(net, before)


def test_the_with_statement_reverts_at_its_end():
    net = mixed_net()
    before = condition(net)
    with adapt(net, [3 * DATA + 1]):
        assert not torch.equal(net[0][1].running_mean, before["state"]["0.1.running_mean"])
    assert_condition(net, before)


def test_the_with_statement_reverts_after_an_exception_and_lets_it_through():
    net = mixed_net()
    before = condition(net)
    with pytest.raises(KeyError, match="mine"), adapt(net, [3 * DATA + 1]):
        raise KeyError("mine")
    assert_condition(net, before)


def test_reverting_twice_is_harmless():
    net = deep_net(NORMS["memorized"])
    adaptation = adapt(net, [3 * DATA + 1])
    adaptation.revert()
    net(DATA)
    after_training = condition(net)
    adaptation.revert()
    assert_condition(net, after_training)


def test_adapt_that_fails_leaves_everything_as_before():
    net = mixed_net()
    before = condition(net)
    with pytest.raises(ValueError, match="lost"):
        adapt(net, Failing(ValueError("lost"), 1))
    assert_condition(net, before)


def test_one_value_per_channel_is_an_error_again_after_reverting_to_an_untrained_layer():
    layer = memnorm.MemorizedBatchNorm1d(4, dtype=torch.float64)
    with adapt(layer, [DATA]):
        layer(DATA[:1])
    with pytest.raises(InputError, match="Expected more than 1 value per channel"):
        layer(DATA[:1])


def test_adapt_reverts_in_a_model_that_was_cast_meanwhile():
    model = memnorm.convert(small_net())
    model(images(8, seed=0))
    before = {name: value.double() for name, value in model.state_dict().items()}
    with memnorm.adapt(model, [images(8, seed=1) + 3]):
        model.double()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.double(), before[name], rtol=0, atol=0)


@pytest.mark.parametrize("tool", [memnorm.recalibrate, memnorm.diagnose, memnorm.adapt], ids=lambda tool: tool.__name__)
@pytest.mark.parametrize("batches", [images(4, seed=0), None], ids=["tensor", "None"])
def test_what_is_no_collection_of_batches_is_an_error(tool, batches):
    with pytest.raises(OptionError, match="expected an iterable of batches"):
        tool(small_net(), batches)


@pytest.mark.parametrize(
    "call",
    [memnorm.convert, memnorm.to_batchnorm, memnorm.summary, lambda model: memnorm.recalibrate(model, [])],
    ids=["convert", "to_batchnorm", "summary", "recalibrate"],
)
@pytest.mark.parametrize("model", [nn.BatchNorm2d, "net", None], ids=str)
def test_what_is_no_module_is_an_error(call, model):
    with pytest.raises(DTypeError, match=r"expected a torch.nn.Module, got"):
        call(model)
