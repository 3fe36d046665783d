"""Population statistics: exact, independent of how the data is split, reversible, and judged in words."""

import copy
import math
import re

import pytest
import torch
from support import assert_same_state, images, randn, small_net
from torch import nn

import memnorm
from memnorm import MemnormWarning, adapt, diagnose, recalibrate
from memnorm.errors import InputError, NothingToRecord, OptionError
from memnorm.functional import memorized_batch_norm

NORMS = {
    "plain": lambda channels: nn.BatchNorm1d(channels, dtype=torch.float64),
    "memorized": lambda channels: memnorm.MemorizedBatchNorm1d(channels, dtype=torch.float64),
}
each_norm = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
DATA = randn(29, 4, seed=0) * torch.tensor([1.0, 2.0, 0.1, 5.0]) + torch.tensor([0.0, 3.0, -1.0, 50.0])
SPLITS = [[29], [1, 28], [10, 10, 9], [2, 3, 5, 7, 11, 1], [1] * 28 + [1]]


def deep_net(norm, *, seed=0):
    """Three norms with nonlinear layers between them, for data (N, 4); statistics and affine maps are no one's
    defaults, and a memory is partly filled.
    """
    net = nn.Sequential(
        nn.Linear(4, 6), norm(6), nn.ReLU(), nn.Linear(6, 5), norm(5), nn.Tanh(), nn.Linear(5, 3), norm(3)
    ).double()
    with torch.no_grad():
        for index, parameter in enumerate(net.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=100 * seed + index))
    for step in range(3):
        net(randn(8, 4, seed=50 + step))
    return net


def batch_norms(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)}


def moments(x):
    """Mean and biased variance of each column, from their definition."""
    mean = x.mean(0)
    return mean, (x - mean).square().mean(0)


def statistics(model):
    return {name: (layer.running_mean, layer.running_var) for name, layer in batch_norms(model).items()}


def inputs_of_norms(model, batches):
    """What reaches each norm, whole, as the model is."""
    seen = {name: [] for name in batch_norms(model)}
    handles = [
        layer.register_forward_pre_hook(lambda _module, args, name=name: seen[name].append(args[0].clone()))
        for name, layer in batch_norms(model).items()
    ]
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in seen.items()}


def condition(model):
    """Everything about a model that must not change behind its owner's back."""
    modules = list(model.modules())
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "identity": [id(tensor) for tensor in (*model.parameters(), *model.buffers())],
        "modes": [module.training for module in modules],
        "recording": [getattr(module, "recording", None) for module in modules],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules],
    }


def assert_condition(model, before, *, state=True):
    now = condition(model)
    for name in ("identity", "modes", "recording", "hooks"):
        assert now[name] == before[name], name
    if state:
        torch.testing.assert_close(now["state"], before["state"], rtol=0, atol=0)


# recalibrate, one pass.


@each_norm
def test_one_pass_gives_the_first_layer_the_moments_of_all_data(norm):
    net = deep_net(norm)
    recalibrate(net, DATA.split([3, 8, 2, 11, 5]))
    with torch.no_grad():
        expected = moments(net[0](DATA))
    torch.testing.assert_close(statistics(net)["1"], expected, rtol=0, atol=1e-10)


@each_norm
def test_one_pass_gives_deeper_layers_the_moments_of_what_they_saw_in_training_mode(norm):
    net = deep_net(norm)
    batches = DATA.split([3, 8, 2, 11, 5])
    twin = copy.deepcopy(net)
    for layer in batch_norms(twin).values():
        layer.recording = False
    expected = {name: moments(x) for name, x in inputs_of_norms(twin, batches).items()}
    recalibrate(net, batches)
    torch.testing.assert_close(statistics(net), expected, rtol=0, atol=1e-10)


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


# recalibrate, exact.


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
def test_a_small_error_in_the_statistics_is_put_right_by_an_exact_recalibration(norm):
    net = deep_net(norm)
    recalibrate(net, [DATA], passes="exact")
    expected = copy.deepcopy(statistics(net))
    net[1].running_mean.add_(0.01 * net[1].running_var.sqrt())
    recalibrate(net, [DATA], passes="exact")
    torch.testing.assert_close(statistics(net), expected, rtol=0, atol=1e-9)


def test_exact_statistics_of_a_float32_network_settle_too():
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


def test_data_that_never_settles_is_warned_about():
    with pytest.warns(MemnormWarning, match=r"still changed by .* standard deviations in pass 4\. Random augmentation"):
        result = recalibrate(deep_net(NORMS["plain"]), Shuffled(), passes="exact")
    assert result.passes == 4


def test_max_passes_gives_up_earlier():
    batches = Shuffled()
    with pytest.warns(MemnormWarning, match="in pass 2"):
        recalibrate(deep_net(NORMS["plain"]), batches, passes="exact", max_passes=2)
    assert batches.rounds == 2


@pytest.mark.parametrize("max_passes", [0, -1])
def test_max_passes_below_one_is_refused_in_words(max_passes):
    with pytest.raises(OptionError, match="max_passes"):
        recalibrate(deep_net(NORMS["plain"]), [DATA], passes="exact", max_passes=max_passes)


def test_the_warning_points_at_the_callers_line():
    with pytest.warns(MemnormWarning) as caught:
        recalibrate(deep_net(NORMS["plain"]), Shuffled(), passes="exact")
    assert caught[0].filename == __file__


# recalibrate: what is reported, and what the batches may be.


class Partial(nn.Module):
    """A network one of whose norms is never called."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.BatchNorm1d(4).double(), nn.BatchNorm1d(4).double()

    def forward(self, x):
        return self.used(x)


def test_the_result_counts_layers_batches_and_passes():
    result = recalibrate(deep_net(NORMS["plain"]), DATA.split(10))
    assert (result.layers, result.batches, result.passes, result.unreached) == (3, 3, 1, ())


def test_the_result_tells_the_largest_change_in_standard_deviations():
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


def test_the_result_reads_as_a_sentence():
    text = str(recalibrate(deep_net(NORMS["plain"]), DATA.split(10)))
    assert re.fullmatch(
        r"3 layers recalibrated on 3 batches in 1 passes; largest change in the last pass [\d.e+-]+", text
    )


class Keyword(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, *, scale=1.0):
        return self.net(x * scale)


TARGET = torch.zeros(29)
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


def test_a_norm_called_by_keyword_is_seen():
    class ByKeyword(Partial):
        def forward(self, x):
            return self.used(input=x)

    model = ByKeyword()
    recalibrate(model, [DATA])
    torch.testing.assert_close(statistics(model)["used"], moments(DATA), rtol=0, atol=1e-10)


@pytest.mark.parametrize("passes", [1, "exact"])
def test_no_batch_at_all_is_refused_in_words(passes):
    with pytest.raises(NothingToRecord, match="there is no batch: pass an iterable of batches"):
        recalibrate(deep_net(NORMS["plain"]), [], passes=passes)


def test_batches_that_reach_no_norm_are_refused_in_words():
    with pytest.raises(NothingToRecord, match="no batch norm was reached"):
        recalibrate(deep_net(NORMS["plain"]), [DATA], forward=lambda model, batch: batch)


@pytest.mark.parametrize("call", [recalibrate, adapt, diagnose])
@pytest.mark.parametrize(
    "model",
    [nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.GroupNorm(2, 4), nn.LazyBatchNorm1d()],
    ids=["no norm", "no statistics", "GroupNorm", "lazy"],
)
def test_a_model_without_running_statistics_is_refused_in_words(call, model):
    with pytest.raises(NothingToRecord, match=rf"{call.__name__}: {type(model).__name__} has no batch norm whose"):
        call(model, [DATA.float()])


def test_exact_statistics_from_an_iterator_are_refused_in_words():
    with pytest.raises(OptionError, match=r"goes through the batches repeatedly, and an iterator .* pass a list"):
        recalibrate(deep_net(NORMS["plain"]), iter([DATA]), passes="exact")


@pytest.mark.parametrize("passes", [0, 2, "all", None])
def test_another_number_of_passes_is_refused_in_words(passes):
    with pytest.raises(OptionError, match=rf"passes must be 1 or \"exact\"; got {passes!r}"):
        recalibrate(deep_net(NORMS["plain"]), [DATA], passes=passes)


def not_finite(value):
    batch = DATA[:7].clone()
    batch[2, 1] = value
    return batch


@each_norm
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_batch_that_is_not_finite_is_left_out_with_a_warning(norm, value):
    net, expected = deep_net(norm), deep_net(norm)
    with pytest.warns(MemnormWarning, match="1 batches are not finite in '1' and were left out"):
        recalibrate(net, [DATA[:15], not_finite(value), DATA[15:]])
    recalibrate(expected, [DATA[:15], DATA[15:]])
    torch.testing.assert_close(statistics(net), statistics(expected), rtol=0, atol=0)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(recalibrate),
        diagnose,
    ],
)
def test_the_warning_about_a_batch_that_is_not_finite_points_at_the_callers_line(call):
    with pytest.warns(MemnormWarning, match="not finite") as caught:
        call(deep_net(NORMS["plain"]), [DATA, not_finite(math.nan)])
    assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.filterwarnings("ignore::memnorm.MemnormWarning")
def test_batches_that_are_all_not_finite_are_refused_as_such():
    with pytest.raises(NothingToRecord, match="finite"):
        recalibrate(deep_net(NORMS["plain"]), [not_finite(math.nan)])


# recalibrate: what else of the model it touches.


@pytest.mark.parametrize("passes", [1, "exact"])
def test_dropout_is_off(passes):
    with_dropout = nn.Sequential(nn.Dropout(0.9), deep_net(NORMS["plain"]))
    without = nn.Sequential(nn.Identity(), deep_net(NORMS["plain"]))
    for model in (with_dropout, without):
        recalibrate(model, [DATA], passes=passes)
    assert_same_state(with_dropout, without)


@each_norm
@pytest.mark.parametrize("passes", [1, "exact"])
def test_a_layer_frozen_by_the_user_is_left_alone(norm, passes):
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


def test_the_new_statistics_stand_in_for_the_memory():
    layer = memnorm.MemorizedBatchNorm1d(4, strength=0.5, dtype=torch.float64)
    recalibrate(layer, [DATA])
    x = randn(6, 4, seed=3)
    expected = memorized_batch_norm(x, layer.weight, layer.bias, *moments(DATA), 0.5 * 6, layer.eps)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


def mixed_net():
    """Plain and memorized norms, a frozen one of each, dropout, and a recorder that the user switched off."""
    net = nn.Sequential(deep_net(NORMS["plain"]), nn.Linear(3, 4), deep_net(NORMS["memorized"]), nn.Dropout(0.5))
    net = net.double()
    net[0][4].eval(), net[2][4].eval()
    net[2][1].recording = False
    net[0].register_forward_hook(lambda *_: None)
    return net


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
def test_after_an_exception_half_way_everything_is_as_before(passes, round_, error):
    net = mixed_net()
    before = condition(net)
    with pytest.raises(error):
        recalibrate(net, Failing(error, round_), passes=passes)
    assert_condition(net, before)


def test_after_a_batch_the_model_cannot_take_everything_is_as_before():
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


def test_double_forward_does_not_take_the_batches_for_training():
    net = deep_net(NORMS["memorized"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    memnorm.double_forward(net, optimizer)
    net(DATA).sum().backward()
    recalibrate(net, [DATA[:7], DATA[7:]])
    optimizer.step()
    assert [int((layer.memory_count > 0).sum()) for layer in batch_norms(net).values()] == [2, 2, 2]  # prior and batch


# adapt


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


def test_the_with_form_reverts_at_its_end():
    net = mixed_net()
    before = condition(net)
    with adapt(net, [3 * DATA + 1]):
        assert not torch.equal(net[0][1].running_mean, before["state"]["0.1.running_mean"])
    assert_condition(net, before)


def test_the_with_form_reverts_after_an_exception_and_lets_it_through():
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


def test_one_value_per_channel_is_refused_again_after_reverting_to_an_untrained_layer():
    layer = memnorm.MemorizedBatchNorm1d(4, dtype=torch.float64)
    with adapt(layer, [DATA]):
        layer(DATA[:1])
    with pytest.raises(InputError, match="Expected more than 1 value per channel"):
        layer(DATA[:1])


# diagnose


def rms(x):
    return float(x.square().mean().sqrt())


def layer_and_batches(build, *, size=5, count=4, **options):
    """One layer without affine map, its statistics off from those of the batches it will see."""
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
    assert diagnose(model, batches, show=False).layers[0].batch_noise == pytest.approx(expected, abs=1e-12)


@each_build
def test_staleness_is_the_distance_of_running_statistics_from_what_the_layer_sees(build):
    model, batches = layer_and_batches(build)
    expected = rms(distance((model[0].running_mean, model[0].running_var), moments(torch.cat(batches)), 1e-3))
    assert diagnose(model, batches, show=False).layers[0].staleness == pytest.approx(expected, abs=1e-12)


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
    assert diagnose(model, batches, show=False).layers[0].disagreement == pytest.approx(expected, abs=1e-12)


@each_build
def test_output_disagreement_is_relative_to_the_output_in_eval_mode(build):
    model, batches = layer_and_batches(build)
    trained, evaluated = outputs_in_both_modes(model, batches)
    expected = rms(trained - evaluated) / rms(evaluated)
    assert diagnose(model, batches, show=False).output_disagreement == pytest.approx(expected, abs=1e-12)


@each_build
def test_changed_predictions_are_a_share_of_all_rows(build):
    model, batches = layer_and_batches(build, size=2, count=10)
    trained, evaluated = outputs_in_both_modes(model, batches)
    expected = (trained.argmax(1) != evaluated.argmax(1)).double().mean().item()
    assert diagnose(model, batches, show=False).changed_predictions == expected
    assert 0 < expected < 1


def test_there_are_no_predictions_without_scores():
    model = nn.Sequential(nn.BatchNorm2d(3))
    assert diagnose(model, [images(4, seed=0)], show=False).changed_predictions is None


def test_the_diagnosis_names_layers_kinds_and_sizes():
    net = nn.Sequential(deep_net(NORMS["plain"]), nn.Linear(3, 4).double(), deep_net(NORMS["memorized"]))
    result = diagnose(net, DATA.split([9, 20]), show=False)
    assert result.batches == 2
    assert [(d.name, d.kind, d.values_per_batch) for d in result.layers] == [
        (name, type(layer).__name__, 14.5) for name, layer in batch_norms(net).items()
    ]


@each_norm
def test_nothing_is_stale_after_an_exact_recalibration(norm):
    net = deep_net(norm)
    assert max(d.staleness for d in diagnose(net, [DATA], show=False).layers) > 0.1
    recalibrate(net, [DATA], passes="exact")
    assert max(d.staleness for d in diagnose(net, DATA.split([4, 25]), show=False).layers) < 1e-9


@each_norm
def test_larger_batches_are_less_noisy(norm):
    net, data = deep_net(norm), randn(256, 4, seed=5)
    noise = [[d.batch_noise for d in diagnose(net, data.split(n), show=False).layers] for n in (2, 16, 128)]
    assert all(a > b > c for a, b, c in zip(*noise, strict=True))


def test_a_filled_memory_brings_training_and_eval_closer_than_plain_batch_norm_at_batch_2():
    """Both with the statistics of the same training forwards, both diagnosed on the same pairs."""
    batches = randn(80, 3, 4, 4, seed=6).split(2)
    disagreement = {}
    for name, build in (("plain", nn.BatchNorm2d), ("memorized", memnorm.MemorizedBatchNorm2d)):
        layer = build(3, dtype=torch.float64)
        for batch in batches[:30]:
            layer(batch)
        disagreement[name] = diagnose(layer, batches[30:], show=False).layers[0].disagreement
    assert disagreement["memorized"] < 0.5 * disagreement["plain"]


def test_a_diagnosis_is_printed(capsys):
    result = diagnose(deep_net(NORMS["plain"]), [DATA])
    assert capsys.readouterr().out == f"{result}\n"


def test_a_diagnosis_is_not_printed_with_show_off(capsys):
    diagnose(deep_net(NORMS["plain"]), [DATA], show=False)
    assert capsys.readouterr().out == ""


def test_a_printed_diagnosis_is_a_table_and_the_verdict():
    result = diagnose(deep_net(NORMS["plain"]), [DATA], show=False)
    lines = str(result).splitlines()
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
    verdict = diagnose(build(), batches, show=False).verdict
    assert {word for word in ("noisy", "stale", "disagree") if re.search(rf"\b{word}\b", verdict)} == words
    assert verdict.startswith("Nothing unusual") == (not words)


@pytest.mark.filterwarnings("ignore::memnorm.MemnormWarning")
def test_the_verdict_on_a_batch_that_is_not_finite_is_not_that_nothing_is_unusual():
    model = settled(Damped(), LOTS)
    assert "Nothing unusual" not in diagnose(model, [*LOTS.split(1024), not_finite(math.nan)], show=False).verdict


def test_the_verdict_names_the_worst_layer():
    net = settled(deep_net(NORMS["plain"]), DATA)
    net[4].running_mean.add_(1000)
    verdict = diagnose(net, [DATA], show=False).verdict
    assert re.search(r"Running statistics are stale: in 4 they are \d{2,}\.\d\d standard deviations", verdict)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_diagnosis_leaves_everything_as_before(training):
    net = mixed_net()
    if not training:
        net.eval()
    before = condition(net)
    diagnose(net, DATA.split(10), show=False)
    assert_condition(net, before)


def test_a_diagnosis_that_fails_leaves_everything_as_before():
    net = mixed_net()
    before = condition(net)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        diagnose(net, [DATA, DATA[:, :3]], show=False)
    assert_condition(net, before)


def test_a_diagnosis_leaves_no_gradient():
    net = deep_net(NORMS["memorized"])
    seen = []
    diagnose(net, [DATA], show=False, forward=lambda model, batch: seen.append(model(batch)) or seen[-1])
    assert not any(output.requires_grad for output in seen)


def test_dropout_is_off_in_a_diagnosis():
    model = settled(nn.Sequential(nn.BatchNorm1d(4).double(), nn.Dropout(0.5)), DATA)
    assert diagnose(model, [DATA], show=False).output_disagreement < 1e-9


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
    expected = diagnose(net, DATA.split(10), show=False)
    result = diagnose(Wrapped(net), DATA.split(10), show=False)
    assert result.output_disagreement == expected.output_disagreement > 0
    assert result.changed_predictions == expected.changed_predictions


def test_a_model_without_tensors_in_its_output_has_no_output_disagreement():
    def call_only(model, batch):
        model(batch)

    result = diagnose(deep_net(NORMS["plain"]), [DATA], show=False, forward=call_only)
    assert (result.output_disagreement, result.changed_predictions) == (0.0, None)


def test_layers_that_were_not_reached_are_not_diagnosed():
    assert [d.name for d in diagnose(Partial(), [DATA], show=False).layers] == ["used"]


def test_an_iterator_of_batches_can_be_diagnosed():
    net = deep_net(NORMS["plain"])
    assert diagnose(net, iter(DATA.split(10)), show=False) == diagnose(net, DATA.split(10), show=False)


def test_a_diagnosis_without_batches_is_refused_in_words():
    with pytest.raises(NothingToRecord, match="diagnose: there is no batch; pass a few, of the size used in training"):
        diagnose(deep_net(NORMS["plain"]), [])


def test_a_diagnosis_that_reaches_no_norm_is_refused_in_words():
    with pytest.raises(NothingToRecord, match="no batch norm was reached"):
        diagnose(deep_net(NORMS["plain"]), [DATA], forward=lambda model, batch: batch)
