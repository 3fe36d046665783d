"""recalibrate: what it computes, and on what."""

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
    batch_norms,
    deep_net,
    each_norm,
    inputs_of_norms,
    moments,
    not_finite,
    statistics,
)
from torch import nn

import memnorm
from memnorm import MemnormWarning, adapt, diagnose, recalibrate
from memnorm.errors import NothingToRecord, OptionError

SPLITS = [[29], [1, 28], [10, 10, 9], [2, 3, 5, 7, 11, 1], [1] * 28 + [1]]


@each_norm
def test_one_pass_gives_the_first_layer_the_moments_of_all_data(norm):
    net = deep_net(norm)
    recalibrate(net, DATA.split([3, 8, 2, 11, 5]))
    with torch.no_grad():
        expected = moments(net[0](DATA))
    torch.testing.assert_close(statistics(net)["1"], expected, rtol=0, atol=1e-10)


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
@pytest.mark.parametrize("sizes", SPLITS[:4], ids=str)
def test_one_pass_over_a_single_layer_does_not_depend_on_the_split(norm, sizes):
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), norm(4))
    nn.init.eye_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    sizes = [size + 1 if size == 1 else size for size in sizes]  # plain batch norm wants two values to train on
    data = DATA.repeat(2, 1)[: sum(sizes)]
    recalibrate(model, data.split(sizes))
    torch.testing.assert_close(statistics(model)["1"], moments(data), rtol=0, atol=1e-10)


@pytest.mark.parametrize("build", [nn.BatchNorm2d, memnorm.MemorizedBatchNorm2d], ids=["plain", "memorized"])
def test_statistics_of_images_are_over_every_pixel(build):
    layer = build(3)
    x = images(10, seed=0) * 3 + 1
    recalibrate(layer, x.split([4, 6]))
    expected = moments(x.double().transpose(0, 1).flatten(1).T)
    torch.testing.assert_close((layer.running_mean.double(), layer.running_var.double()), expected, rtol=0, atol=1e-5)


def test_data_far_from_zero_keeps_its_variance():
    layer = nn.BatchNorm1d(2)
    x = randn(64, 2, seed=0, dtype=torch.float32) + 1000
    recalibrate(layer, x.split([7, 57]))
    torch.testing.assert_close(layer.running_var.double(), moments(x.double())[1], rtol=1e-4, atol=0)


@each_norm
def test_the_number_of_batches_is_counted_anew(norm):
    net = deep_net(norm)
    recalibrate(net, DATA.split(8))
    assert [int(layer.num_batches_tracked) for layer in batch_norms(net).values()] == [4, 4, 4]


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
def test_exact_statistics_do_not_depend_on_the_statistics_of_before(norm):
    one, other = deep_net(norm), deep_net(norm)
    for step in range(5):
        other(100 * randn(8, 4, seed=70 + step))
    recalibrate(one, [DATA], passes="exact")
    recalibrate(other, [DATA], passes="exact")
    torch.testing.assert_close(statistics(other), statistics(one), rtol=0, atol=1e-9)


@each_norm
def test_exact_statistics_need_a_pass_for_each_layer_and_one_to_see_it(norm):
    assert recalibrate(deep_net(norm), [DATA], passes="exact").passes == 4


def test_exact_statistics_of_a_settled_model_need_one_pass():
    net = deep_net(NORMS["plain"])
    recalibrate(net, [DATA], passes="exact")
    assert recalibrate(net, [DATA], passes="exact").passes == 1


@each_norm
def test_a_small_error_in_the_statistics_is_corrected_by_an_exact_recalibration(norm):
    net = deep_net(norm)
    recalibrate(net, [DATA], passes="exact")
    expected = copy.deepcopy(statistics(net))
    net[1].running_mean.add_(0.01 * net[1].running_var.sqrt())
    recalibrate(net, [DATA], passes="exact")
    torch.testing.assert_close(statistics(net), expected, rtol=0, atol=1e-9)


def test_exact_statistics_of_a_float32_network_converge_too():
    net = small_net()
    assert recalibrate(net, images(24, seed=0).split([5, 19]), passes="exact").passes <= 3


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
    """Other data every time, as a loader with random augmentation gives."""

    def __init__(self):
        self.rounds = 0

    def __iter__(self):
        self.rounds += 1
        yield randn(16, 4, seed=self.rounds)


def test_data_that_differs_in_every_pass_gives_a_warning():
    with pytest.warns(MemnormWarning, match=r"still changed by .* standard deviations in pass 4\. Random augmentation"):
        result = recalibrate(deep_net(NORMS["plain"]), Shuffled(), passes="exact")
    assert result.passes == 4


def test_max_passes_stops_earlier():
    batches = Shuffled()
    with pytest.warns(MemnormWarning, match="in pass 2"):
        recalibrate(deep_net(NORMS["plain"]), batches, passes="exact", max_passes=2)
    assert batches.rounds == 2


@pytest.mark.parametrize("max_passes", [0, -1])
def test_max_passes_below_one_is_an_error(max_passes):
    with pytest.raises(OptionError, match="max_passes"):
        recalibrate(deep_net(NORMS["plain"]), [DATA], passes="exact", max_passes=max_passes)


def test_the_warning_points_at_the_callers_line():
    with pytest.warns(MemnormWarning) as caught:
        recalibrate(deep_net(NORMS["plain"]), Shuffled(), passes="exact")
    assert caught[0].filename == __file__


def test_the_result_counts_layers_batches_and_passes():
    result = recalibrate(deep_net(NORMS["plain"]), DATA.split(10))
    assert (result.layers, result.batches, result.passes, result.unreached) == (3, 3, 1, ())


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


def test_layers_that_were_not_reached_stay_as_they_were():
    model = Partial()
    model.unused.running_mean.fill_(3.0)
    before = copy.deepcopy(model.unused)
    recalibrate(model, [DATA], passes="exact")
    assert_same_state(model.unused, before)


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


def test_a_batch_whose_variance_overflows_is_skipped_with_a_warning():
    layer = nn.BatchNorm1d(4).double()
    with pytest.warns(MemnormWarning, match="not finite"):
        recalibrate(layer, [DATA, not_finite(1e300)])
    torch.testing.assert_close((layer.running_mean, layer.running_var), moments(DATA), rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore::memnorm.MemnormWarning")
def test_batches_that_are_all_not_finite_are_an_error():
    with pytest.raises(NothingToRecord, match="finite"):
        recalibrate(deep_net(NORMS["plain"]), [not_finite(math.nan)])
