"""recalibrate and adapt: the computed statistics, what stays unchanged, and how to revert."""

import copy
import math

import pytest
import torch
from helpers.common import assert_same_state, images, randn, small_net
from helpers.estimation import (
    DATA,
    NORMS,
    TARGET,
    Keyword,
    Partial,
    assert_condition,
    batch_norms,
    condition,
    deep_net,
    each_norm,
    inputs_of_norms,
    mixed_net,
    moments,
    not_finite,
    statistics,
)
from torch import nn

import memnorm
from memnorm import MemnormWarning, adapt, diagnose, recalibrate
from memnorm.errors import DTypeError, InputError, NothingToRecord, OptionError
from memnorm.functional import memorized_batch_norm

SPLITS = [[29], [1, 28], [10, 10, 9], [2, 3, 5, 7, 11, 1], [1] * 28 + [1]]


@each_norm
def test_one_pass_gives_deeper_layers_the_moments_of_what_single_batches_make_of_them(norm):
    net = deep_net(norm)
    batches = DATA.split([3, 8, 2, 11, 5])
    twin = deep_net(NORMS["plain"])
    expected = {name: moments(x) for name, x in inputs_of_norms(twin, batches).items()}
    recalibrate(net, batches)
    torch.testing.assert_close(statistics(net), expected, rtol=0, atol=1e-10)


def test_one_pass_reads_the_memory_for_single_values_only():
    net = deep_net(memnorm.MemorizedBatchNorm1d)
    batches = DATA.split([1, 8, 1, 19])
    twin = copy.deepcopy(net)
    for layer in batch_norms(twin).values():
        layer.recording = False

    def strength_for(layer, args):
        layer.set_strength(0.5 if len(args[0]) == 1 else 0.0)

    for layer in batch_norms(twin).values():
        layer.register_forward_pre_hook(strength_for)
    expected = {name: moments(x) for name, x in inputs_of_norms(twin, batches).items()}
    recalibrate(net, batches)
    torch.testing.assert_close(statistics(net), expected, rtol=0, atol=1e-10)
    assert {float(layer.strength) for layer in batch_norms(net).values()} == {0.5}


@each_norm
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_exact_statistics_are_the_moments_of_what_each_layer_sees_in_eval_mode(norm, training):
    net = deep_net(norm).train(training)
    recalibrate(net, DATA.split([3, 8, 2, 11, 5]), passes="exact")
    seen = inputs_of_norms(copy.deepcopy(net).eval(), [DATA])
    expected = {name: moments(x) for name, x in seen.items()}
    torch.testing.assert_close(statistics(net), expected, rtol=0, atol=1e-9)


@each_norm
@pytest.mark.parametrize("sizes", SPLITS[1:], ids=str)
def test_exact_statistics_do_not_depend_on_the_split(norm, sizes):
    whole, split = deep_net(norm), deep_net(norm)
    recalibrate(whole, [DATA], passes="exact")
    recalibrate(split, DATA.split(sizes), passes="exact")
    torch.testing.assert_close(statistics(split), statistics(whole), rtol=0, atol=1e-9)


@each_norm
def test_exact_statistics_need_a_pass_for_each_layer_and_one_to_see_it(norm):
    assert recalibrate(deep_net(norm), [DATA], passes="exact").passes == 4


@pytest.mark.parametrize(
    ("dtype", "offset"),
    [(torch.float32, 1e3), (torch.float16, 1.0), (torch.bfloat16, 1.0)],
    ids=["float32 far from zero", "float16", "bfloat16"],
)
def test_exact_statistics_settle_in_narrow_precision(dtype, offset):
    layer = nn.Sequential(nn.BatchNorm1d(3, dtype=dtype))
    batches = (randn(50, 3, seed=0) + offset).to(dtype).split([17, 33])
    assert recalibrate(layer, batches, passes="exact").passes <= 2


def test_exact_statistics_of_a_layer_called_twice_settle():
    norm, linear = nn.BatchNorm1d(4), nn.Linear(4, 4)
    net = nn.Sequential(norm, linear, nn.ReLU(), norm).double()
    with torch.no_grad():
        linear.weight.copy_(0.5 * randn(4, 4, seed=1))
        linear.bias.zero_()
    recalibrate(net, [DATA], passes="exact")
    expected = moments(inputs_of_norms(copy.deepcopy(net).eval(), [DATA])["0"])
    torch.testing.assert_close(statistics(net)["0"], expected, rtol=0, atol=1e-5)


class Shuffled:
    """Different data in every round, as from a loader with random augmentation."""

    def __init__(self):
        self.rounds = 0

    def __iter__(self):
        self.rounds += 1
        yield randn(16, 4, seed=self.rounds)


@each_norm
def test_data_that_differs_in_every_pass_gives_the_statistics_of_one_pass_and_a_warning(norm):
    """Passes in eval mode would not settle: a small change of the first layer grows from layer to layer."""
    net, wanted, batches = deep_net(norm), deep_net(norm), Shuffled()
    with pytest.warns(MemnormWarning, match="batches differ from pass to pass"):
        assert recalibrate(net, batches, passes="exact").passes == 1
    assert batches.rounds == 3
    recalibrate(wanted, [randn(16, 4, seed=3)])
    torch.testing.assert_close(statistics(net), statistics(wanted), rtol=0, atol=1e-12)


def test_max_passes_stops_earlier():
    with pytest.warns(MemnormWarning, match=r"still changed by .* standard deviations in pass 2"):
        assert recalibrate(deep_net(NORMS["plain"]), [DATA], passes="exact", max_passes=2).passes == 2


def test_the_result_has_the_largest_change_in_standard_deviations():
    layer = nn.BatchNorm1d(2, eps=1e-15, dtype=torch.float64)
    x = torch.tensor([[1.0, 0.0], [5.0, 0.5]], dtype=torch.float64)  # means 3 and 0.25, deviations 2 and 0.25
    result = recalibrate(layer, [x])
    assert result.largest_change == pytest.approx(15.0, abs=1e-10)  # of the second variance: |1 − 1/16| / (1/16)
    layer.running_mean.add_(torch.tensor([40.0, 0.0]))
    assert recalibrate(layer, [x]).largest_change == pytest.approx(20.0, abs=1e-10)  # of the first mean: 40/2


def test_layers_that_were_not_reached_are_reported():
    result = recalibrate(Partial(), [DATA])
    assert (result.layers, result.unreached) == (1, ("unused",))
    assert "not reached: unused" in str(result)


FORMS = {
    "tensor": ([DATA], None),
    "tuple": ([(DATA, TARGET)], None),
    "list": ([[DATA, TARGET]], None),
    "dict": ([{"x": DATA, "scale": 1.0}], None),
    "iterator": (iter([DATA]), None),
    "custom forward": ([(TARGET, DATA)], lambda model, batch: model(batch[1], scale=1.0)),
    "DataLoader": (torch.utils.data.DataLoader(torch.utils.data.TensorDataset(DATA, TARGET), batch_size=29), None),
}


@pytest.mark.parametrize(("batches", "forward"), FORMS.values(), ids=FORMS)
def test_batches_come_in_every_common_form(batches, forward):
    model = Keyword(deep_net(NORMS["plain"]))
    recalibrate(model, batches, forward=forward)
    expected = deep_net(NORMS["plain"])
    recalibrate(expected, [DATA])
    assert_same_state(model.net, expected)


def test_a_norm_called_by_keyword_is_included():
    class ByKeyword(Partial):
        def forward(self, x):
            return self.used(input=x)

    model = ByKeyword()
    recalibrate(model, [DATA])
    torch.testing.assert_close(statistics(model)["used"], moments(DATA), rtol=0, atol=1e-10)


@pytest.mark.parametrize("passes", [1, "exact"])
def test_no_batch_at_all_is_an_error(passes):
    with pytest.raises(NothingToRecord, match="there is no batch: pass an iterable of batches"):
        recalibrate(deep_net(NORMS["plain"]), [], passes=passes)


def test_batches_that_reach_no_norm_are_errors():
    with pytest.raises(NothingToRecord, match="no batch norm was reached"):
        recalibrate(deep_net(NORMS["plain"]), [DATA], forward=lambda model, batch: batch)


@pytest.mark.parametrize("call", [recalibrate, adapt, diagnose])
@pytest.mark.parametrize(
    "model",
    [nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.GroupNorm(2, 4), nn.LazyBatchNorm1d()],
    ids=["no norm", "no statistics", "GroupNorm", "lazy"],
)
def test_a_model_without_running_statistics_is_an_error(call, model):
    with pytest.raises(NothingToRecord, match=rf"{call.__name__}: {type(model).__name__} has no batch norm with"):
        call(model, [DATA.float()])


def test_exact_statistics_from_an_iterator_are_an_error():
    with pytest.raises(OptionError, match=r"needs the batches several times, and an iterator .* pass a list"):
        recalibrate(deep_net(NORMS["plain"]), iter([DATA]), passes="exact")


@pytest.mark.parametrize("passes", [0, 2, "all", None])
def test_another_number_of_passes_is_an_error(passes):
    with pytest.raises(OptionError, match=rf"passes must be 1 or \"exact\"; got {passes!r}"):
        recalibrate(deep_net(NORMS["plain"]), [DATA], passes=passes)


@each_norm
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_batch_that_is_not_finite_is_skipped_with_a_warning(norm, value):
    net, expected = deep_net(norm), deep_net(norm)
    with pytest.warns(MemnormWarning, match="1 batch is not finite in '1': skipped"):
        recalibrate(net, [DATA[:15], not_finite(value), DATA[15:]])
    recalibrate(expected, [DATA[:15], DATA[15:]])
    torch.testing.assert_close(statistics(net), statistics(expected), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::memnorm.MemnormWarning")
def test_batches_that_are_all_not_finite_are_an_error():
    with pytest.raises(NothingToRecord, match="finite"):
        recalibrate(deep_net(NORMS["plain"]), [not_finite(math.nan)])


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


def test_reverting_twice_is_harmless():
    net = deep_net(NORMS["memorized"])
    adaptation = adapt(net, [3 * DATA + 1])
    adaptation.revert()
    net(DATA)
    after_training = condition(net)
    adaptation.revert()
    assert_condition(net, after_training)


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


@pytest.mark.parametrize(
    "call",
    [
        *(memnorm.convert, memnorm.to_batchnorm, memnorm.summary, memnorm.plain_state_dict),
        lambda model: memnorm.recalibrate(model, []),
    ],
    ids=["convert", "to_batchnorm", "summary", "plain_state_dict", "recalibrate"],
)
@pytest.mark.parametrize("model", [nn.BatchNorm2d, "net", None], ids=str)
def test_what_is_no_module_is_an_error(call, model):
    with pytest.raises(DTypeError, match=r"expected a torch.nn.Module, got"):
        call(model)


@each_norm
def test_a_layer_frozen_by_the_user_normalises_with_its_own_statistics_meanwhile(norm):
    net = deep_net(norm)
    net[1].eval(), net[4].eval()
    recalibrate(net, DATA.split(10))
    expected = moments(inputs_of_norms(copy.deepcopy(net).eval(), [DATA])["7"])
    torch.testing.assert_close(statistics(net)["7"], expected, rtol=0, atol=1e-10)


def test_gradients_are_neither_needed_nor_left():
    net = deep_net(NORMS["memorized"])
    seen = []
    recalibrate(net, [DATA], forward=lambda model, batch: seen.append(model(batch).requires_grad))
    assert seen == [False]
    assert all(parameter.grad is None for parameter in net.parameters())
