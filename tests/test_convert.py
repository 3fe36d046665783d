"""What convert keeps, where it reaches and which options it takes."""

import copy
from operator import attrgetter

import pytest
import torch
from helpers.common import LAYERS, SHAPES, assert_same_output_and_gradients, assert_same_state, images, leaf, small_net
from helpers.conversion import VARIANTS, assert_bitwise, evaluated, memorized, seasoned, train_step, trained
from torch import nn

import memnorm
from memnorm import norms
from memnorm.errors import OptionError
from memnorm.layers import MemorizedBatchNorm


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
        ("shift", False),
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
    ({"shift": 0}, r"shift must be True, or False for the paper's Eq\. 4; got 0"),
    ({"shift": False, "sync": True}, r"shift=False .* cannot be had with sync"),
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
