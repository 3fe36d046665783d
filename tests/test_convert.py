"""Giving a model its memory and taking it away again: what is kept, what is left alone, and what is said about it."""

import copy
import io
from operator import attrgetter

import pytest
import torch
from support import LAYERS, SHAPES, assert_same_output_and_gradients, assert_same_state, images, labels, leaf, small_net
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import memnorm
from memnorm import MemnormWarning, norms
from memnorm.convert import why_not
from memnorm.errors import InputError, NothingToConvert, OptionError, WrappedModelError
from memnorm.layers import MemorizedBatchNorm

VARIANTS = {
    "plain": {},
    "eps": {"eps": 1e-2},
    "affine=False": {"affine": False},
    "bias=False": {"bias": False},
    "track_running_stats=False": {"track_running_stats": False},
    "momentum=None": {"momentum": None},
    "momentum=0.3": {"momentum": 0.3},
}
SCRIPT_IS_DEPRECATED = "ignore:.*torch.jit.script.*:DeprecationWarning"


class BatchNormAct2d(nn.BatchNorm2d):
    """As in timm: a batch norm with a dropout and an activation behind it, and torch's forward copied out."""

    def __init__(self, num_features, drop=None, act=None):
        super().__init__(num_features)
        self.drop = drop or nn.Identity()
        self.act = act or nn.ReLU(inplace=True)

    def forward(self, x):
        if self.training:
            self.num_batches_tracked.add_(1)
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return self.act(self.drop(x))


class Renamed2d(nn.BatchNorm2d):
    """A subclass that adds nothing to the forward."""


class Dressed2d(nn.BatchNorm2d):
    """A subclass that is made, reset and printed in its own way, and takes data of any rank."""

    def __init__(self, num_features):
        super().__init__(num_features, eps=1e-3)

    def reset_parameters(self):
        super().reset_parameters()
        nn.init.zeros_(self.weight)

    def extra_repr(self):
        return "dressed"

    def _check_input_dim(self, input):
        pass


class AlwaysEval2d(nn.BatchNorm2d):
    """A usual way to freeze a batch norm for good."""

    def train(self, mode=True):
        return super().train(False)


class OwnForward2d(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) * 2


class FrozenBatchNorm2d(nn.Module):
    """As in torchvision: four buffers, no parameter."""

    def __init__(self, num_features):
        super().__init__()
        self.eps = 1e-5
        for name, fill in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((num_features,), fill))

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


class InPlaceABN(nn.Module):
    """As in inplace_abn: a batch norm and an activation in one, no subclass of torch's."""

    def __init__(self, num_features):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(num_features)), nn.Parameter(torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def forward(self, x):
        y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)
        return F.leaky_relu(y, 0.01)


def seasoned(model, shape=(8, 3, 5, 4), *, dtype=torch.float32, steps=3):
    """The model after a few training forwards, which leave statistics and counters that are no one's defaults."""
    for step in range(steps):
        model(leaf(shape, seed=step, dtype=dtype))
    return model


def trained(model, *, steps=3, seed=0):
    """The network of `small_net`, trained; in training mode."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        train_step(model, optimizer, seed=seed + step)
    return model


def train_step(model, optimizer, *, seed):
    optimizer.zero_grad()
    F.cross_entropy(model(images(6, seed=seed)), labels(6, seed=seed)).backward()
    optimizer.step()


def evaluated(model, x):
    with torch.no_grad():
        return copy.deepcopy(model).eval()(x)


def memorized(model):
    return [module for module in model.modules() if isinstance(module, MemorizedBatchNorm)]


def assert_bitwise(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


# What stays as it is.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_converted_layer_evaluates_bit_for_bit_as_before(shape, dtype):
    layer = seasoned(LAYERS[len(shape)][1](3, dtype=dtype), shape, dtype=dtype)
    x = leaf(shape, seed=9, dtype=dtype)
    before = evaluated(layer, x)
    assert_bitwise(evaluated(memnorm.convert(layer), x), before)


def test_a_converted_network_evaluates_bit_for_bit_as_before():
    net = trained(small_net())
    before = evaluated(net, images(5, seed=9))
    assert_bitwise(evaluated(memnorm.convert(net), images(5, seed=9)), before)


def test_a_network_converted_in_eval_mode_evaluates_bit_for_bit_as_before():
    net = trained(small_net()).eval()
    before = net(images(5, seed=9))
    assert_bitwise(memnorm.convert(net)(images(5, seed=9)), before)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_a_layer_of_any_kind_evaluates_bit_for_bit_as_before(options):
    layer = seasoned(nn.BatchNorm2d(3, **options))
    x = leaf((4, 3, 2, 2), seed=9, dtype=torch.float32)
    before = evaluated(layer, x)
    assert_bitwise(evaluated(memnorm.convert(layer), x), before)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_a_layer_of_any_kind_trains_at_zero_strength_as_before(options):
    layer = seasoned(nn.BatchNorm2d(3, dtype=torch.float64, **options), dtype=torch.float64)
    new = memnorm.convert(copy.deepcopy(layer), strength=0.0)
    assert_same_output_and_gradients(new, layer, leaf((4, 3, 2, 2), seed=9), atol=1e-12)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_the_settings_of_a_layer_are_kept(options):
    layer = nn.BatchNorm2d(3, **options)
    settings = attrgetter("num_features", "eps", "momentum", "affine", "track_running_stats")
    assert settings(memnorm.convert(layer)) == settings(layer)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_parameters_stay_the_same_objects(options):
    layer = nn.BatchNorm2d(3, **options)
    new = memnorm.convert(layer)
    assert new.weight is layer.weight
    assert new.bias is layer.bias


@pytest.mark.parametrize(
    "norm", ["mbn", lambda c: nn.GroupNorm(2, c), nn.SyncBatchNorm], ids=["mbn", "GroupNorm", "SyncBatchNorm"]
)
def test_the_parameters_of_a_network_stay_the_same_objects_in_the_same_order(norm):
    net = small_net()
    before = dict(net.named_parameters())
    after = dict(memnorm.convert(net, norm).named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is parameter for name, parameter in before.items())


def test_an_optimizer_made_before_the_conversion_trains_the_converted_network():
    early, late = small_net(), small_net()
    optimizer = torch.optim.SGD(early.parameters(), lr=0.1, momentum=0.9)
    memnorm.convert(early), memnorm.convert(late)
    other = torch.optim.SGD(late.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        train_step(early, optimizer, seed=step)
        train_step(late, other, seed=step)
    assert_same_state(early, late)
    assert not torch.equal(early[1].weight, small_net()[1].weight)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_parameters_stay_frozen(frozen):
    layer = nn.BatchNorm2d(3)
    getattr(layer, frozen).requires_grad_(False)
    new = memnorm.convert(layer)
    assert [name for name, parameter in new.named_parameters() if not parameter.requires_grad] == [frozen]


def test_each_layer_keeps_its_own_mode():
    net = small_net()
    net[1].eval()
    memnorm.convert(net)
    assert [module.training for module in net.modules()] == [True, True, False] + [True] * 7


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_parameters_keep_their_dtype_and_statistics_are_float32_or_wider(dtype):
    new = memnorm.convert(nn.BatchNorm2d(3, dtype=dtype))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    statistics = (new.running_mean, new.running_var, new.running_weight, new.memory_mean, new.memory_var)
    assert new.weight.dtype == new.bias.dtype == dtype
    assert {buffer.dtype for buffer in statistics} == {wide}


def test_a_layer_on_meta_stays_on_meta():
    new = memnorm.convert(nn.BatchNorm2d(3, device="meta"))
    assert {tensor.device.type for tensor in (*new.parameters(), *new.buffers())} == {"meta"}


def test_running_statistics_and_counter_are_kept():
    layer = seasoned(nn.BatchNorm2d(3))
    before = copy.deepcopy(layer.state_dict())
    after = memnorm.convert(layer).state_dict()
    assert_bitwise({name: after[name] for name in before}, before)


def test_a_new_memory_is_empty():
    new = memnorm.convert(seasoned(nn.BatchNorm2d(3)))
    assert_bitwise((new.memory_count, new.running_weight), (torch.zeros(20), torch.zeros(())))


def test_attributes_set_by_the_user_are_kept():
    layer = nn.BatchNorm2d(3)
    layer.tag, layer.lr_scale = "stem", 0.1
    new = memnorm.convert(layer)
    assert (new.tag, new.lr_scale) == ("stem", 0.1)


def test_buffers_and_parameters_added_by_the_user_are_kept():
    layer = nn.BatchNorm2d(3)
    layer.register_buffer("mask", torch.ones(3), persistent=False)
    layer.extra = nn.Parameter(torch.ones(2))
    new = memnorm.convert(layer)
    assert new.mask is layer.mask
    assert new.extra is layer.extra
    assert "mask" not in new.state_dict()


def register(kind, layer, fired):
    hooks = {
        "forward": lambda: layer.register_forward_hook(lambda m, *_: fired.append(type(m))),
        "forward with kwargs": lambda: layer.register_forward_hook(
            lambda m, *_: fired.append(type(m)), with_kwargs=True
        ),
        "forward pre": lambda: layer.register_forward_pre_hook(lambda m, *_: fired.append(type(m))),
        "full backward": lambda: layer.register_full_backward_hook(lambda m, *_: fired.append(type(m))),
        "state_dict": lambda: layer.register_state_dict_post_hook(lambda m, *_: fired.append(type(m))),
        "load_state_dict post": lambda: layer.register_load_state_dict_post_hook(lambda m, _: fired.append(type(m))),
        "load_state_dict pre": lambda: layer.register_load_state_dict_pre_hook(lambda m, *_: fired.append(type(m))),
    }
    return hooks[kind]()


def exercise(model):
    """Everything that hooks hang on to, once."""
    model(leaf((4, 3, 2, 2), seed=0, dtype=torch.float32)).sum().backward()
    model.load_state_dict(model.state_dict())


HOOKS = [
    "forward",
    "forward with kwargs",
    "forward pre",
    "full backward",
    "state_dict",
    "load_state_dict post",
    "load_state_dict pre",
]


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_of_before_fire_with_the_new_layer(kind):
    model, fired = nn.Sequential(nn.BatchNorm2d(3)), []
    register(kind, model[0], fired)
    exercise(memnorm.convert(model))
    assert fired == [memnorm.MemorizedBatchNorm2d]


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_on_a_memorized_layer_fire_with_the_plain_one(kind):
    model, fired = nn.Sequential(memnorm.MemorizedBatchNorm2d(3)), []
    register(kind, model[0], fired)
    exercise(memnorm.to_batchnorm(model))
    assert fired == [nn.BatchNorm2d]


@pytest.mark.parametrize("kind", HOOKS)
def test_handles_of_before_remove_their_hooks(kind):
    model, fired = nn.Sequential(nn.BatchNorm2d(3)), []
    handle = register(kind, model[0], fired)
    memnorm.convert(model)
    handle.remove()
    exercise(model)
    assert fired == []


# Where the layers are.


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_batch_norm_that_is_the_model_comes_back_as_a_new_layer(shape):
    memorized_class, plain_class = LAYERS[len(shape)]
    layer = plain_class(3)
    new = memnorm.convert(layer)
    assert type(new) is memorized_class
    assert type(layer) is plain_class


def test_any_other_model_comes_back_itself():
    net = small_net()
    assert memnorm.convert(net) is net


def test_layers_are_found_at_any_depth():
    model = nn.ModuleDict(
        {
            "list": nn.ModuleList([nn.BatchNorm1d(2), nn.Sequential(nn.Sequential(nn.BatchNorm2d(2)))]),
            "deep": nn.ModuleDict({"er": nn.BatchNorm3d(2)}),
        }
    )
    memnorm.convert(model)
    kinds = [type(module) for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert kinds == [memnorm.MemorizedBatchNorm1d, memnorm.MemorizedBatchNorm2d, memnorm.MemorizedBatchNorm3d]


def test_a_layer_in_two_places_stays_one_layer():
    shared = nn.BatchNorm2d(3)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    memnorm.convert(model)
    assert isinstance(model["a"], MemorizedBatchNorm)
    assert model["b"][0] is model["a"]


def test_a_block_in_two_places_stays_one_block():
    block = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    model = nn.Sequential(block, nn.ReLU(), block)
    memnorm.convert(model)
    assert model[0] is model[2] is block
    assert isinstance(block[1], MemorizedBatchNorm)


def test_two_layers_with_the_same_parameters_go_on_sharing_them():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3))
    model[1].weight = model[0].weight
    memnorm.convert(model)
    assert model[1] is not model[0]
    assert model[1].weight is model[0].weight


def test_a_place_without_a_module_is_passed_over():
    model = nn.Sequential(nn.BatchNorm2d(3))
    model.register_module("downsample", None)
    memnorm.convert(model)
    assert model.downsample is None


# Options.


def test_without_options_layers_get_the_papers_defaults():
    layer = memnorm.convert(small_net())[1]
    assert (layer.memory_size, layer.decay, layer.strength.item()) == (20, 0.9, 0.5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory_size", 3),
        ("memory_size", None),
        ("decay", 0.5),
        ("strength", 0.1),
        ("prior_weight", 2.0),
        ("prior_from_init", True),
    ],
)
def test_an_option_reaches_every_layer(name, value):
    layers = memorized(memnorm.convert(small_net(), **{name: value}))
    assert [float(getattr(layer, name)) if name == "strength" else getattr(layer, name) for layer in layers] == [
        value,
        value,
    ]


BAD_OPTIONS = [
    ({"memory": 3}, r"unknown option memory for norm 'mbn'; its options are memory_size, decay, strength"),
    ({"momentum": 0.1, "eps": 1e-3}, r"unknown option eps, momentum for norm 'mbn'"),
    ({"norm": "mbm"}, r"unknown norm 'mbm'; available: .*mbn"),
    ({"memory_size": 0}, r"memory_size must be a positive number of batches, or None for all of them; got 0"),
    ({"memory_size": 2.5}, r"memory_size must be a positive number of batches, .* got 2\.5"),
    ({"decay": 0}, r"decay must lie in \(0, 1\]; got 0"),
    ({"decay": 1.5}, r"decay must lie in \(0, 1\]; got 1\.5"),
    ({"strength": -0.1}, r"strength must lie in \[0, 1\]; got -0\.1"),
    ({"strength": "high"}, r"strength must lie in \[0, 1\]; got 'high'"),
    ({"prior_weight": -1.0}, r"prior_weight must be zero or a positive number of batches; got -1\.0"),
]


@pytest.mark.parametrize("build", [nn.BatchNorm2d, memnorm.MemorizedBatchNorm2d], ids=["plain", "memorized"])
@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS, ids=lambda value: value if isinstance(value, str) else "")
def test_options_out_of_range_are_refused_in_words(options, words, build):
    with pytest.raises(OptionError, match=words):
        memnorm.convert(small_net(build), **options)


def test_a_refused_option_leaves_the_model_as_it_was():
    net = small_net()
    before = list(net)
    with pytest.raises(OptionError):
        memnorm.convert(net, decay=2.0)
    assert all(module is old for module, old in zip(net, before, strict=True))
    assert "strength" not in net[1].state_dict()


def test_a_refused_option_leaves_the_hooks_as_they_were():
    model, fired = nn.Sequential(nn.BatchNorm2d(3)), []
    register("load_state_dict pre", model[0], fired)
    with pytest.raises(OptionError):
        memnorm.convert(model, decay=2.0)
    exercise(model)
    assert fired == [nn.BatchNorm2d]


@pytest.mark.parametrize("norm", [20, None], ids=str)
def test_a_norm_that_is_neither_name_nor_function_is_refused_in_words(norm):
    with pytest.raises(OptionError, match="norm"):
        memnorm.convert(small_net(), norm)


def test_mbn_is_among_the_available_norms():
    assert "mbn" in norms.available()


def test_a_name_is_registered_once():
    with pytest.raises(OptionError, match="there is a norm 'mbn' already"):
        norms.register(norms.get("mbn"))


# A factory in place of a name.


def test_a_factory_builds_the_replacement_for_each_layer():
    net = memnorm.convert(small_net(), lambda channels: nn.GroupNorm(2, channels))
    assert [type(net[i]) for i in (1, 4)] == [nn.GroupNorm] * 2
    assert [net[i].num_channels for i in (1, 4)] == [6, 4]


def test_a_factory_is_given_the_options():
    net = memnorm.convert(small_net(), lambda channels, groups: nn.GroupNorm(groups, channels), groups=2)
    assert net[1].num_groups == 2


def test_what_a_factory_builds_takes_over_statistics():
    net = trained(small_net())
    expected = evaluated(net, images(5, seed=9))
    memnorm.convert(net, lambda channels: nn.BatchNorm2d(channels, momentum=0.01))
    assert net[1].momentum == 0.01
    assert_bitwise(evaluated(net, images(5, seed=9)), expected)


def test_what_a_factory_builds_takes_over_mode_and_dtype():
    net = small_net(dtype=torch.float64)
    net[1].eval()
    memnorm.convert(net, nn.SyncBatchNorm)
    assert [net[i].training for i in (1, 4)] == [False, True]
    assert net[1].running_mean.dtype == torch.float64


def test_a_replacement_without_parameters_of_that_shape_keeps_its_own():
    net = memnorm.convert(small_net(), lambda channels: nn.LayerNorm([channels, 6, 6]))
    assert net[1].weight.shape == (6, 6, 6)


@pytest.mark.parametrize(
    "build",
    [
        BatchNormAct2d,
        pytest.param(
            lambda channels: memnorm.convert(BatchNormAct2d(channels)),
        ),
    ],
    ids=["plain", "memorized"],
)
def test_a_factory_does_not_strip_a_norm_of_its_activation(build):
    model = nn.Sequential(build(4))
    x = leaf((4, 4, 3, 3), seed=0, dtype=torch.float32)
    expected = F.relu(F.group_norm(x, 2, model[0].weight, model[0].bias))
    memnorm.convert(model, lambda channels: nn.GroupNorm(2, channels))
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-6)


# Layers that are memorized already.


def test_memorized_layers_stay_the_same_objects_without_options():
    net = memnorm.convert(small_net())
    before = memorized(net)
    assert all(new is old for new, old in zip(memorized(memnorm.convert(net)), before, strict=True))


def test_in_a_mixed_model_the_memorized_layers_stay_and_the_others_are_converted():
    model = nn.Sequential(memnorm.MemorizedBatchNorm2d(3), nn.BatchNorm2d(3))
    kept = model[0]
    memnorm.convert(model)
    assert model[0] is kept
    assert isinstance(model[1], MemorizedBatchNorm)


def test_a_smaller_memory_keeps_the_newest_entries():
    layer = seasoned(memnorm.MemorizedBatchNorm2d(3, memory_size=8), steps=5)
    new = memnorm.convert(layer, memory_size=3)
    assert new.memory_size == 3
    assert_bitwise(new.memory_mean, layer.memory_mean[:3])
    assert_bitwise(new.memory_var, layer.memory_var[:3])
    assert_bitwise(new.memory_count, layer.memory_count[:3])


def test_a_smaller_memory_goes_on_like_one_that_was_always_that_small():
    shape = (8, 3, 5, 4)
    resized = seasoned(memnorm.MemorizedBatchNorm2d(3, memory_size=8, dtype=torch.float64), dtype=torch.float64)
    small = seasoned(memnorm.MemorizedBatchNorm2d(3, memory_size=2, dtype=torch.float64), dtype=torch.float64)
    resized = memnorm.convert(resized, memory_size=2)
    assert_same_state(resized, small, atol=1e-12)
    for seed in (7, 8):
        x = leaf(shape, seed=seed)
        torch.testing.assert_close(resized(x), small(x), rtol=0, atol=1e-12)


def test_a_larger_memory_keeps_every_entry():
    layer = seasoned(memnorm.MemorizedBatchNorm2d(3, memory_size=2), steps=5)
    new = memnorm.convert(layer, memory_size=4)
    assert_bitwise(new.memory_count, torch.tensor([160.0, 160.0, 0.0, 0.0]))
    assert_bitwise(new.memory_mean[:2], layer.memory_mean)
    assert_bitwise((new.running_mean, new.running_weight), (layer.running_mean, layer.running_weight))


def test_a_new_decay_keeps_the_memory_whole():
    layer = seasoned(memnorm.MemorizedBatchNorm2d(3))
    before = copy.deepcopy(layer.state_dict())
    new = memnorm.convert(layer, decay=0.5)
    assert new.decay == 0.5
    assert_bitwise(new.state_dict(), before)


def test_a_new_strength_replaces_the_old_one_only():
    layer = seasoned(memnorm.MemorizedBatchNorm2d(3))
    before = copy.deepcopy(layer.state_dict())
    new = memnorm.convert(layer, strength=0.25)
    before["strength"].fill_(0.25)
    assert_bitwise(new.state_dict(), before)


def test_a_strength_set_by_a_schedule_outlives_new_options():
    net = memnorm.convert(small_net())
    memnorm.StrengthSchedule(net, 10)
    memnorm.convert(net, memory_size=3)
    assert [layer.strength.item() for layer in memorized(net)] == [0.1, 0.1]


def test_options_that_are_not_given_stay():
    layer = memnorm.MemorizedBatchNorm2d(3, memory_size=5, decay=0.8, prior_weight=3.0, prior_from_init=True)
    new = memnorm.convert(layer, decay=0.7)
    assert (new.memory_size, new.decay, new.prior_weight, new.prior_from_init) == (5, 0.7, 3.0, True)


def test_a_layer_without_statistics_takes_a_new_strength_in_its_stride():
    layer = memnorm.MemorizedBatchNorm2d(3, track_running_stats=False)
    assert memnorm.convert(layer, strength=0.25).strength is None


def test_a_memorized_layer_on_meta_can_be_resized():
    layer = memnorm.MemorizedBatchNorm2d(3, device="meta")
    assert memnorm.convert(layer, memory_size=3).memory_count.shape == (3,)


# Look-alikes: converted with what they do, or left alone and named.


def test_a_norm_with_activation_evaluates_bit_for_bit_as_before():
    layer = seasoned(BatchNormAct2d(3, act=nn.SiLU()))
    x = leaf((4, 3, 2, 2), seed=9, dtype=torch.float32)
    before = evaluated(layer, x)
    assert_bitwise(evaluated(memnorm.convert(nn.Sequential(layer))[0], x), before)


def test_a_norm_with_activation_trains_at_zero_strength_as_before():
    layer = BatchNormAct2d(3, act=nn.SiLU()).double()
    new = memnorm.convert(copy.deepcopy(layer), strength=0.0)
    assert_same_output_and_gradients(new, layer, leaf((4, 3, 2, 2), seed=9), atol=1e-12)


def test_a_norm_with_activation_remembers():
    new = memnorm.convert(BatchNormAct2d(3))
    x = leaf((4, 3, 2, 2), seed=0, dtype=torch.float32)
    new(x)
    torch.testing.assert_close(new.memory_mean[0], x.mean((0, 2, 3)), rtol=0, atol=1e-6)


def test_a_norm_with_activation_keeps_its_dropout_in_training():
    new = memnorm.convert(BatchNormAct2d(3, drop=nn.Dropout(1.0), act=nn.Identity()))
    assert new(leaf((4, 3, 2, 2), seed=0, dtype=torch.float32)).abs().max() == 0


def test_a_norm_with_activation_comes_back_as_its_own_class():
    model = nn.Sequential(BatchNormAct2d(3, act=nn.SiLU()))
    keys = list(model.state_dict())
    seasoned(memnorm.convert(model))
    expected = evaluated(model, leaf((4, 3, 2, 2), seed=9, dtype=torch.float32))
    memnorm.to_batchnorm(model)
    assert type(model[0]) is BatchNormAct2d
    assert list(model.state_dict()) == keys
    assert_bitwise(evaluated(model, leaf((4, 3, 2, 2), seed=9, dtype=torch.float32)), expected)


def test_a_memorized_norm_with_activation_takes_options_and_still_comes_back_as_its_own_class():
    layer = memnorm.convert(memnorm.convert(BatchNormAct2d(3)), memory_size=3)
    assert layer.memory_size == 3
    assert layer(leaf((4, 3, 2, 2), seed=0, dtype=torch.float32)).min() >= 0
    assert type(memnorm.to_batchnorm(layer)) is BatchNormAct2d


def test_a_batch_norm_inside_a_norms_activation_is_converted_too():
    model = nn.Sequential(BatchNormAct2d(3, drop=nn.BatchNorm2d(3)))
    memnorm.convert(model)
    assert isinstance(model[0].drop, memnorm.MemorizedBatchNorm2d)


@pytest.mark.parametrize("build", [Renamed2d, Dressed2d])
def test_a_subclass_that_computes_what_batch_norm_does_is_converted(build):
    layer = seasoned(build(3))
    x = leaf((4, 3, 2, 2), seed=9, dtype=torch.float32)
    before = evaluated(layer, x)
    new = memnorm.convert(layer)
    assert isinstance(new, memnorm.MemorizedBatchNorm2d)
    assert_bitwise(evaluated(new, x), before)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_subclass_for_data_of_any_rank_goes_on_taking_it(shape):
    new = seasoned(memnorm.convert(Dressed2d(3)), shape)
    assert int(new.num_batches_tracked) == 3
    assert type(memnorm.to_batchnorm(new)) is LAYERS[len(shape)][1]


def patched():
    layer = nn.BatchNorm2d(3)
    layer.forward = lambda x: x * 2
    return layer


def parametrized():
    layer = nn.BatchNorm2d(3)
    parametrize.register_parametrization(layer, "weight", nn.Softplus())
    return layer


LEFT_ALONE = {
    "own forward": (lambda: OwnForward2d(3), "has its own forward"),
    "patched forward": (patched, "has its own forward"),
    "own train": (lambda: AlwaysEval2d(3), "has its own train"),
    "frozen": (lambda: FrozenBatchNorm2d(3), "FrozenBatchNorm2d is not torch's batch norm"),
    "in-place ABN": (lambda: InPlaceABN(3), "InPlaceABN is not torch's batch norm"),
    "lazy": (nn.LazyBatchNorm2d, "lazy; send one batch through the model, then convert"),
    "parametrized": (parametrized, "parametrized"),
}


@pytest.mark.parametrize(("build", "words"), LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_a_look_alike_is_left_alone_and_named_in_a_warning(build, words):
    model = nn.ModuleDict({"stem": nn.Sequential(build()), "bn": nn.BatchNorm2d(3)})
    kept = model["stem"][0]
    with pytest.warns(MemnormWarning, match=rf"convert left alone: stem\.0 \({words}") as caught:
        memnorm.convert(model)
    assert len(caught) == 1
    assert model["stem"][0] is kept
    assert isinstance(model["bn"], MemorizedBatchNorm)


@pytest.mark.parametrize(("build", "words"), LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_a_model_of_look_alikes_only_is_refused_by_name(build, words):
    with pytest.raises(NothingToConvert, match=rf"no batch norm that can be replaced; left alone: 0 \({words}"):
        memnorm.convert(nn.Sequential(build()))


@pytest.mark.parametrize(("build", "words"), LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_the_reason_to_leave_a_layer_alone_is_told(build, words):
    assert why_not(build()).startswith(words)


@pytest.mark.parametrize(
    "build",
    [nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm, Renamed2d, BatchNormAct2d, memnorm.MemorizedBatchNorm2d],
)
def test_there_is_no_reason_to_leave_a_batch_norm_alone(build):
    assert why_not(build(3)) is None


def test_the_warning_points_at_the_callers_line():
    with pytest.warns(MemnormWarning) as caught:
        memnorm.convert(nn.Sequential(OwnForward2d(3), nn.BatchNorm2d(3)))
    assert caught[0].filename == __file__


def test_a_long_list_of_look_alikes_is_cut_short():
    model = nn.Sequential(*(OwnForward2d(3) for _ in range(10)), nn.BatchNorm2d(3))
    with pytest.warns(MemnormWarning, match=r"7 \(has its own forward\) and 2 more \(memnorm.summary lists them"):
        memnorm.convert(model)


def test_a_look_alike_that_is_the_model_is_named_so():
    with pytest.raises(NothingToConvert, match=r"left alone: the model itself \(has its own forward\)"):
        memnorm.convert(OwnForward2d(3))


def test_a_norm_with_activation_and_a_patched_forward_is_left_alone():
    layer = BatchNormAct2d(3)
    layer.forward = lambda x: x * 2
    assert why_not(layer) == "has its own forward"


def test_a_lazy_norm_can_be_converted_after_one_forward():
    model = nn.Sequential(nn.LazyBatchNorm2d())
    model(leaf((4, 3, 2, 2), seed=0, dtype=torch.float32))
    assert type(memnorm.convert(model)[0]) is memnorm.MemorizedBatchNorm2d


@pytest.mark.filterwarnings(SCRIPT_IS_DEPRECATED)
def test_a_scripted_model_is_refused_with_what_to_do():
    scripted = torch.jit.script(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))
    with pytest.raises(NothingToConvert, match=r"left alone: 1 \(scripted; convert before torch.jit.script\)"):
        memnorm.convert(scripted)


@pytest.mark.filterwarnings(SCRIPT_IS_DEPRECATED)
def test_a_scripted_part_is_left_alone_and_named_in_a_warning():
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.BatchNorm2d(3))), nn.BatchNorm2d(3))
    with pytest.warns(MemnormWarning, match=r"left alone: 0\.0 \(scripted; convert before torch.jit.script\)"):
        memnorm.convert(model)
    assert isinstance(model[1], MemorizedBatchNorm)
    assert isinstance(model[0], torch.jit.ScriptModule)


def test_other_norms_are_none_of_our_business():
    model = nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True), nn.GroupNorm(1, 3), nn.BatchNorm2d(3))
    before = list(model)
    memnorm.convert(model)
    assert model[0] is before[0]
    assert model[1] is before[1]


# SyncBatchNorm, which takes data of any rank.


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sync_batch_norm_becomes_a_layer_for_data_of_any_rank(shape):
    new = memnorm.convert(nn.SyncBatchNorm(3))
    x = leaf(shape, seed=0, dtype=torch.float32)
    torch.testing.assert_close(new(x), LAYERS[len(shape)][1](3)(x), rtol=0, atol=1e-5)
    assert int((new.memory_count > 0).sum()) == 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sync_batch_norm_comes_back_as_the_batch_norm_for_the_data_it_saw(shape):
    model = seasoned(memnorm.convert(nn.Sequential(nn.SyncBatchNorm(3))), shape)
    x = leaf(shape, seed=9, dtype=torch.float32)
    expected = evaluated(model, x)
    plain = memnorm.to_batchnorm(model)
    assert type(plain[0]) is LAYERS[len(shape)][1]
    assert "process_group" not in plain[0].__dict__
    assert_bitwise(evaluated(plain, x), expected)


def test_a_sync_batch_norm_that_saw_no_data_comes_back_as_itself():
    layer = memnorm.to_batchnorm(memnorm.convert(nn.SyncBatchNorm(3)))
    assert type(layer) is nn.SyncBatchNorm
    assert layer.process_group is None


def test_a_sync_batch_norm_checkpoint_loads_into_the_converted_layer():
    checkpoint = nn.SyncBatchNorm(3)
    checkpoint.load_state_dict(seasoned(nn.BatchNorm2d(3)).state_dict())
    new = memnorm.convert(nn.SyncBatchNorm(3))
    new.load_state_dict(checkpoint.state_dict(), strict=True)
    x = leaf((4, 3, 2, 2), seed=9, dtype=torch.float32)
    assert_bitwise(evaluated(new, x), evaluated(checkpoint, x))


def test_one_dimensional_data_is_refused_in_words_after_a_sync_batch_norm():
    with pytest.raises(InputError, match=r"expected at least 2-D input \(N, C, …\), got shape \(3,\)"):
        memnorm.convert(nn.SyncBatchNorm(3))(torch.zeros(3))


# Nothing to do, or too late.


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.Linear(2, 2)), "Sequential has no batch norm; it has no norm at all"),
        (nn.Sequential(nn.GroupNorm(1, 2)), "has no batch norm; its norms are GroupNorm"),
        (nn.Sequential(nn.LayerNorm(2), nn.GroupNorm(1, 2)), "its norms are GroupNorm, LayerNorm"),
        (nn.Sequential(nn.InstanceNorm2d(2, track_running_stats=True)), "its norms are InstanceNorm2d"),
        (nn.Linear(2, 2), "Linear has no batch norm"),
    ],
    ids=["none", "GroupNorm", "two kinds", "InstanceNorm", "one layer"],
)
def test_a_model_without_batch_norm_is_refused_with_the_norms_it_has(model, words):
    with pytest.raises(NothingToConvert, match=words):
        memnorm.convert(model)


@pytest.mark.parametrize("build", [small_net, lambda: nn.BatchNorm2d(3)], ids=["network", "layer"])
def test_to_batchnorm_of_a_plain_model_is_refused(build):
    with pytest.raises(NothingToConvert, match=r"to_batchnorm: .* has no memorized layer; it is a plain model already"):
        memnorm.to_batchnorm(build())


@pytest.fixture
def process_group(tmp_path):
    """A group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("nested", [False, True], ids=["wrapped", "a wrapped part"])
@pytest.mark.parametrize("call", [memnorm.convert, memnorm.to_batchnorm])
@pytest.mark.usefixtures("process_group")
def test_a_model_wrapped_for_distributed_training_is_refused_with_what_to_do(call, nested):
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), memnorm.MemorizedBatchNorm1d(3)))
    words = rf"wrapped in DistributedDataParallel, .* DistributedDataParallel\(memnorm\.{call.__name__}\(model\)\)"
    with pytest.raises(WrappedModelError, match=words):
        call(nn.Sequential(model) if nested else model)


def test_a_model_wrapped_in_fsdp_is_refused_with_what_to_do():
    class FullyShardedDataParallel(nn.Sequential):
        """A stand-in: the real one needs more than one process to say the same."""

    with pytest.raises(WrappedModelError, match=r"FullyShardedDataParallel\(memnorm\.convert\(model\)\)"):
        memnorm.convert(FullyShardedDataParallel(nn.BatchNorm2d(3)))


# The way back.


def test_every_class_of_a_model_is_torchs_own_again():
    original = [type(module) for module in small_net().modules()]
    model = memnorm.to_batchnorm(trained(memnorm.convert(small_net())))
    assert [type(module) for module in model.modules()] == original


def test_a_model_evaluates_bit_for_bit_the_same_without_its_memory():
    model = trained(memnorm.convert(small_net()))
    before = evaluated(model, images(5, seed=9))
    assert_bitwise(evaluated(memnorm.to_batchnorm(model), images(5, seed=9)), before)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_a_layer_of_any_kind_evaluates_bit_for_bit_the_same_without_its_memory(options):
    layer = seasoned(memnorm.convert(nn.BatchNorm2d(3, **options)))
    x = leaf((4, 3, 2, 2), seed=9, dtype=torch.float32)
    before = evaluated(layer, x)
    assert_bitwise(evaluated(memnorm.to_batchnorm(layer), x), before)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_conversion_and_back_restores_every_attribute(shape, options):
    layer = seasoned(LAYERS[len(shape)][1](3, **options), shape)
    back = memnorm.to_batchnorm(memnorm.convert(copy.deepcopy(layer)))
    assert type(back) is type(layer)
    assert back.__dict__.keys() == layer.__dict__.keys()
    assert repr(back) == repr(layer)
    assert_same_state(back, layer)


def test_state_dict_has_the_keys_of_the_original_in_their_order():
    model = memnorm.to_batchnorm(trained(memnorm.convert(small_net())))
    assert list(model.state_dict()) == list(small_net().state_dict())


def test_the_state_dict_loads_into_the_original_architecture():
    model = memnorm.to_batchnorm(trained(memnorm.convert(small_net())))
    fresh = small_net(seed=3)
    fresh.load_state_dict(model.state_dict(), strict=True)
    assert_bitwise(evaluated(fresh, images(5, seed=9)), evaluated(model, images(5, seed=9)))


def saved_bytes(model):
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


def test_a_saved_model_mentions_memnorm_while_it_has_a_memory():
    assert b"memnorm" in saved_bytes(memnorm.convert(small_net()))


def with_double_forward(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = memnorm.double_forward(model, optimizer)
    for step in range(3):
        train_step(model, optimizer, seed=step)
    return handle


@pytest.mark.parametrize("copied", [False, True], ids=["itself", "copy"])
@pytest.mark.parametrize("how", ["trained", "with Double-Forward", "checkpointed"])
def test_a_saved_model_needs_nothing_of_memnorm_after_to_batchnorm(how, copied):
    model = memnorm.convert(small_net())
    if how == "trained":
        trained(model)
    elif how == "with Double-Forward":
        handle = with_double_forward(model)
        assert handle.steps == 3
    else:
        torch.utils.checkpoint.checkpoint(model, images(4, seed=0), use_reentrant=False).sum().backward()
    plain = memnorm.to_batchnorm(copy.deepcopy(model) if copied else model)
    assert b"memnorm" not in saved_bytes(plain)


def test_to_batchnorm_removes_double_forward():
    model = memnorm.convert(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memnorm.double_forward(model, optimizer)
    memnorm.to_batchnorm(model)
    train_step(model, optimizer, seed=0)
    assert len(model._forward_pre_hooks) == len(optimizer._optimizer_step_post_hooks) == 0
    assert int(model[1].num_batches_tracked) == 1  # once, by torch itself


def test_to_batchnorm_of_a_copy_leaves_the_original_training():
    model, other = memnorm.convert(small_net()), memnorm.convert(small_net())
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, other)]
    for net, optimizer in zip((model, other), optimizers, strict=True):
        memnorm.double_forward(net, optimizer)
        train_step(net, optimizer, seed=0)
    memnorm.to_batchnorm(copy.deepcopy(model))
    for net, optimizer in zip((model, other), optimizers, strict=True):
        train_step(net, optimizer, seed=1)
    assert_same_state(model, other)


def test_parameters_stay_the_same_objects_on_the_way_back():
    model = memnorm.convert(small_net())
    before = list(model.parameters())
    after = list(memnorm.to_batchnorm(model).parameters())
    assert all(new is old for new, old in zip(after, before, strict=True))


def test_modes_stay_on_the_way_back():
    model = memnorm.convert(small_net())
    model[1].eval()
    memnorm.to_batchnorm(model)
    assert [model[i].training for i in (1, 4)] == [False, True]


def test_a_shared_layer_stays_one_layer_on_the_way_back():
    shared = memnorm.MemorizedBatchNorm2d(3)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    memnorm.to_batchnorm(model)
    assert type(model["a"]) is nn.BatchNorm2d
    assert model["b"][0] is model["a"]


def test_a_layer_that_is_the_model_comes_back_as_a_plain_one():
    assert type(memnorm.to_batchnorm(memnorm.MemorizedBatchNorm1d(3))) is nn.BatchNorm1d


def test_a_half_model_comes_back_bit_for_bit():
    original = trained(small_net()).half()
    back = memnorm.to_batchnorm(memnorm.convert(copy.deepcopy(original)))
    assert_same_state(back, original)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda model: model.to("cpu"), id="moved"),
        pytest.param(lambda model: memnorm.convert(model, memory_size=3), id="new options"),
        pytest.param(copy.deepcopy, id="copied"),
        pytest.param(lambda model: model.load_state_dict(model.state_dict()) and model, id="loaded"),
        pytest.param(lambda model: model.float().half(), id="widened and narrowed"),
    ],
)
@pytest.mark.parametrize("first", ["half", "convert"])
def test_a_half_model_comes_back_in_half_whatever_happened_in_between(first, change):
    model = memnorm.convert(small_net().half()) if first == "half" else memnorm.convert(small_net()).half()
    back = memnorm.to_batchnorm(change(model))
    dtypes = {tensor.dtype for tensor in (*back.parameters(), *back.buffers()) if tensor.is_floating_point()}
    assert dtypes == {torch.float16}
    assert evaluated(back, images(2, seed=0).half()).dtype == torch.float16


def test_a_half_layer_without_affine_parameters_comes_back_bit_for_bit():
    original = seasoned(nn.BatchNorm2d(3, affine=False)).half()
    back = memnorm.to_batchnorm(memnorm.convert(copy.deepcopy(original)))
    assert_same_state(back, original)


def test_a_plain_model_trains_as_if_it_had_never_been_converted():
    original, back = trained(small_net()), trained(small_net())
    memnorm.to_batchnorm(memnorm.convert(back))
    trained(original, seed=5), trained(back, seed=5)
    assert_same_state(back, original)


# What is what.


def test_a_summary_has_a_row_for_each_norm_in_order():
    rows = memnorm.summary(memnorm.convert(small_net())).layers
    kind = "MemorizedBatchNorm2d"
    assert [(row.name, row.kind, row.channels, row.mode) for row in rows] == [
        ("1", kind, 6, "train"),
        ("4", kind, 4, "train"),
    ]


def scheduled():
    layer = memnorm.MemorizedBatchNorm2d(3)
    memnorm.StrengthSchedule(layer, 10)
    return layer


NOTES = {
    "plain": (lambda: nn.BatchNorm2d(3), "plain, can be converted"),
    "GroupNorm": (lambda: nn.GroupNorm(1, 3), "not a batch norm"),
    "frozen": (
        lambda: FrozenBatchNorm2d(3),
        "left alone: FrozenBatchNorm2d is not torch's batch norm: frozen statistics, or a forward of its own",
    ),
    "lazy": (nn.LazyBatchNorm2d, "left alone: lazy; send one batch through the model, then convert"),
    "fresh": (lambda: memnorm.MemorizedBatchNorm2d(3), "remembers 0 of 20 batches, decay 0.9, strength 0.5"),
    "filling": (
        lambda: seasoned(memnorm.MemorizedBatchNorm2d(3, decay=0.8)),
        "remembers 3 of 20 batches, decay 0.8, strength 0.5",
    ),
    "scheduled": (scheduled, "remembers 0 of 20 batches, decay 0.9, strength 0.1"),
    "full": (
        lambda: seasoned(memnorm.MemorizedBatchNorm2d(3, memory_size=2)),
        "remembers 2 of 2 batches, decay 0.9, strength 0.5",
    ),
    "unlimited": (
        lambda: seasoned(memnorm.MemorizedBatchNorm2d(3, memory_size=None)),
        "remembers all batches, decay 0.9, strength 0.5",
    ),
    "unlimited and fresh": (
        lambda: memnorm.MemorizedBatchNorm2d(3, memory_size=None),
        "remembers no batch yet, then all, decay 0.9, strength 0.5",
    ),
    "no statistics": (
        lambda: memnorm.MemorizedBatchNorm2d(3, track_running_stats=False),
        "no memory: track_running_stats=False",
    ),
    "meta": (lambda: memnorm.MemorizedBatchNorm2d(3, device="meta"), "on meta"),
}


@pytest.mark.parametrize(("build", "note"), NOTES.values(), ids=NOTES)
def test_a_summary_notes_what_each_layer_is(build, note):
    assert [row.note for row in memnorm.summary(nn.Sequential(build())).layers] == [note]


def test_a_summary_tells_layers_in_eval_mode():
    net = small_net()
    net[1].eval()
    assert [row.mode for row in memnorm.summary(net).layers] == ["eval", "train"]


def test_a_printed_summary_is_a_table_of_names_and_memory():
    lines = str(memnorm.summary(nn.ModuleDict({"stem": seasoned(memnorm.MemorizedBatchNorm2d(3))}))).splitlines()
    assert lines[0].split() == ["layer", "kind", "channels", "mode"]
    assert lines[2].split(maxsplit=4) == [
        "stem",
        "MemorizedBatchNorm2d",
        "3",
        "train",
        "remembers 3 of 20 batches, decay 0.9, strength 0.5",
    ]
    assert len(lines) == 3


def test_a_layer_that_is_the_model_has_a_name_in_the_printed_summary():
    assert "(the model)" in str(memnorm.summary(nn.BatchNorm2d(3)))


def test_a_printed_summary_of_a_model_without_norms_says_so():
    assert str(memnorm.summary(nn.Linear(2, 2))) == "no norm layer"


def test_a_summary_leaves_the_model_as_it_was():
    net = trained(memnorm.convert(small_net()))
    before = copy.deepcopy(net)
    memnorm.summary(net)
    assert_same_state(net, before)
