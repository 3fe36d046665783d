"""What `convert` keeps of a model, the models that it takes, and its options."""

import copy
import functools
from operator import attrgetter

import pytest
import torch
from helpers.common import LAYERS, SHAPES, assert_same_output_and_gradients, assert_same_state, images, leaf, small_net
from helpers.conversion import VARIANTS, BatchNormAct2d, assert_bitwise, evaluated, memorized, trained, with_statistics
from torch import nn
from torch.nn import functional as F

import memnorm
from memnorm import MemorizedBatchNorm, norms
from memnorm.errors import InputError, NothingToConvert, OptionError, WrappedModelError


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_converted_layer_evaluates_bit_for_bit_as_before(shape, dtype):
    layer = with_statistics(LAYERS[len(shape)][1](3, dtype=dtype), shape, dtype=dtype)
    x = leaf(shape, seed=9, dtype=dtype)
    before = evaluated(layer, x)
    assert_bitwise(evaluated(memnorm.convert(layer), x), before)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_a_layer_of_any_kind_evaluates_bit_for_bit_as_before_and_after_the_way_back(options):
    layer = with_statistics(nn.BatchNorm2d(3, **options))
    x = leaf((4, 3, 2, 2), seed=9, dtype=torch.float32)
    before = evaluated(layer, x)
    new = memnorm.convert(layer)
    assert_bitwise(evaluated(new, x), before)
    assert_bitwise(evaluated(memnorm.to_batchnorm(new), x), before)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_a_layer_of_any_kind_trains_at_zero_strength_as_before(options):
    layer = with_statistics(nn.BatchNorm2d(3, dtype=torch.float64, **options), dtype=torch.float64)
    new = memnorm.convert(copy.deepcopy(layer), strength=0.0)
    assert_same_output_and_gradients(new, layer, leaf((4, 3, 2, 2), seed=9), atol=1e-12)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_the_settings_of_a_layer_and_its_parameter_objects_are_kept(options):
    layer = nn.BatchNorm2d(3, **options)
    new = memnorm.convert(layer)
    settings = attrgetter("num_features", "eps", "momentum", "affine", "track_running_stats")
    assert settings(new) == settings(layer)
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


def test_what_the_user_added_to_a_layer_is_kept():
    layer = nn.BatchNorm2d(3)
    layer.tag = "stem"
    layer.register_buffer("mask", torch.ones(3), persistent=False)
    layer.extra = nn.Parameter(torch.ones(2))
    new = memnorm.convert(layer)
    assert new.tag == "stem"
    assert new.mask is layer.mask
    assert new.extra is layer.extra
    assert "mask" not in new.state_dict()


HOOKS = {
    "forward": nn.Module.register_forward_hook,
    "forward with kwargs": functools.partial(nn.Module.register_forward_hook, with_kwargs=True),
    "forward pre": nn.Module.register_forward_pre_hook,
    "full backward": nn.Module.register_full_backward_hook,
    "state_dict": nn.Module.register_state_dict_post_hook,
    "load_state_dict post": nn.Module.register_load_state_dict_post_hook,
    "load_state_dict pre": nn.Module.register_load_state_dict_pre_hook,
}
each_hook = pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)


def hooked(register):
    """A model whose norm has the hook, a list of the classes that it is called with, and its handle."""
    model, called = nn.Sequential(nn.BatchNorm2d(3)), []
    return model, called, register(model[0], lambda module, *_: called.append(type(module)))


def exercise(model):
    """Call everything that a hook can be registered for."""
    model(leaf((4, 3, 2, 2), seed=0, dtype=torch.float32)).sum().backward()
    model.load_state_dict(model.state_dict())


@each_hook
def test_hooks_are_called_with_the_new_layer_and_after_the_way_back_with_the_plain_one(register):
    model, called, _handle = hooked(register)
    exercise(memnorm.convert(model))
    exercise(memnorm.to_batchnorm(model))
    assert called == [memnorm.MemorizedBatchNorm2d, nn.BatchNorm2d]


@each_hook
def test_handles_still_remove_their_hooks(register):
    model, called, handle = hooked(register)
    memnorm.convert(model)
    handle.remove()
    exercise(model)
    assert called == []


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_converting_a_batch_norm_returns_a_new_layer(shape):
    memorized_class, plain_class = LAYERS[len(shape)]
    layer = plain_class(3)
    new = memnorm.convert(layer)
    assert type(new) is memorized_class
    assert type(layer) is plain_class


def test_layers_are_found_at_any_depth():
    model = nn.ModuleDict(
        {
            "list": nn.ModuleList([nn.BatchNorm1d(2), nn.Sequential(nn.Sequential(nn.BatchNorm2d(2)))]),
            "deep": nn.ModuleDict({"er": nn.BatchNorm3d(2)}),
        }
    )
    model.register_module("downsample", None)
    assert memnorm.convert(model) is model
    assert model["downsample"] is None
    kinds = [type(module) for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert kinds == [memnorm.MemorizedBatchNorm1d, memnorm.MemorizedBatchNorm2d, memnorm.MemorizedBatchNorm3d]


def test_a_layer_in_two_places_stays_one_layer():
    shared = nn.BatchNorm2d(3)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    for change, kind in ((memnorm.convert, memnorm.MemorizedBatchNorm2d), (memnorm.to_batchnorm, nn.BatchNorm2d)):
        change(model)
        assert type(model["a"]) is kind
        assert model["b"][0] is model["a"]


def test_a_wrong_option_does_not_change_the_hooks():
    model, called, _handle = hooked(nn.Module.register_load_state_dict_pre_hook)
    with pytest.raises(OptionError):
        memnorm.convert(model, decay=2.0)
    exercise(model)
    assert called == [nn.BatchNorm2d]


def test_a_norm_that_is_also_kept_in_a_list_is_converted_there():
    model = nn.Sequential(nn.BatchNorm2d(3))
    model.norms = [model[0]]
    memnorm.convert(model)
    assert model.norms[0] is model[0]
    assert isinstance(model[0], MemorizedBatchNorm)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sync_batch_norm_becomes_a_layer_for_data_of_any_rank(shape):
    new = memnorm.convert(nn.SyncBatchNorm(3))
    x = leaf(shape, seed=0, dtype=torch.float32)
    torch.testing.assert_close(new(x), LAYERS[len(shape)][1](3)(x), rtol=0, atol=1e-5)
    assert int((new.memory_count > 0).sum()) == 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sync_batch_norm_becomes_the_batch_norm_for_its_inputs(shape):
    model = with_statistics(memnorm.convert(nn.Sequential(nn.SyncBatchNorm(3))), shape)
    x = leaf(shape, seed=9, dtype=torch.float32)
    expected = evaluated(model, x)
    plain = memnorm.to_batchnorm(model)
    assert type(plain[0]) is LAYERS[len(shape)][1]
    assert "process_group" not in plain[0].__dict__
    assert_bitwise(evaluated(plain, x), expected)


def test_a_sync_batch_norm_without_inputs_becomes_a_sync_batch_norm_again():
    layer = memnorm.to_batchnorm(memnorm.convert(nn.SyncBatchNorm(3)))
    assert type(layer) is nn.SyncBatchNorm
    assert layer.process_group is None


def test_one_dimensional_data_is_an_error_after_a_sync_batch_norm():
    with pytest.raises(InputError, match=r"expected at least 2-D input \(N, C, …\), got shape \(3,\)"):
        memnorm.convert(nn.SyncBatchNorm(3))(torch.zeros(3))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.Linear(2, 2)), "Sequential has no batch norm; it has no norm"),
        (nn.Sequential(nn.GroupNorm(1, 2)), "has no batch norm; its norms are GroupNorm"),
        (nn.Sequential(nn.LayerNorm(2), nn.GroupNorm(1, 2)), "its norms are GroupNorm, LayerNorm"),
        (nn.Sequential(nn.InstanceNorm2d(2, track_running_stats=True)), "its norms are InstanceNorm2d"),
        (nn.Linear(2, 2), "Linear has no batch norm"),
    ],
    ids=["none", "GroupNorm", "two kinds", "InstanceNorm", "one layer"],
)
def test_a_model_without_batch_norm_is_an_error_that_names_its_norms(model, words):
    with pytest.raises(NothingToConvert, match=words):
        memnorm.convert(model)


@pytest.fixture
def process_group(tmp_path):
    """A group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("nested", [False, True], ids=["wrapped", "a wrapped part"])
@pytest.mark.parametrize("call", [memnorm.convert, memnorm.to_batchnorm])
@pytest.mark.usefixtures("process_group")
def test_a_model_wrapped_for_distributed_training_is_an_error_that_says_what_to_do(call, nested):
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), memnorm.MemorizedBatchNorm1d(3)))
    words = rf"wrapped in DistributedDataParallel, .* DistributedDataParallel\(memnorm\.{call.__name__}\(model\)\)"
    with pytest.raises(WrappedModelError, match=words):
        call(nn.Sequential(model) if nested else model)


def test_a_model_wrapped_in_fsdp_is_an_error_that_says_what_to_do():
    class FullyShardedDataParallel(nn.Sequential):
        """A stand-in, because the real one needs more than one process."""

    with pytest.raises(WrappedModelError, match=r"FullyShardedDataParallel\(memnorm\.convert\(model\)\)"):
        memnorm.convert(FullyShardedDataParallel(nn.BatchNorm2d(3)))


def test_without_options_layers_get_the_papers_defaults():
    layer = memnorm.convert(small_net())[1]
    assert (layer.memory_size, layer.decay, layer.strength.item()) == (20, 0.9, 0.5)


@pytest.mark.parametrize("memory_size", [3, None])
def test_options_reach_every_layer(memory_size):
    given = {"memory_size": memory_size, "decay": 0.5, "strength": 0.1, "prior_weight": 2.0, "prior_from_init": True}
    for layer in memorized(memnorm.convert(small_net(), **given)):
        assert {name: getattr(layer, name) for name in given} == given


BAD_OPTIONS = [
    ({"memory": 3}, r"unknown option memory for norm 'mbn'; its options are memory_size, decay, strength"),
    ({"momentum": 0.1, "eps": 1e-3}, r"unknown option eps, momentum for norm 'mbn'"),
    ({"norm": "mbm"}, r"unknown norm 'mbm'; available: .*mbn"),
    ({"memory_size": 0}, r"memory_size must be a positive number of batches, or None for all of them; got 0"),
    ({"memory_size": 2.5}, r"memory_size must be a positive number of batches, .* got 2\.5"),
    ({"memory_size": True}, r"memory_size must be a positive number of batches, .* got True"),
    ({"decay": 0}, r"decay must lie in \(0, 1\]; got 0"),
    ({"decay": 1.5}, r"decay must lie in \(0, 1\]; got 1\.5"),
    ({"decay": float("nan")}, r"decay must lie in \(0, 1\]; got nan"),
    ({"strength": -0.1}, r"strength must lie in \[0, 1\]; got -0\.1"),
    ({"strength": "high"}, r"strength must lie in \[0, 1\]; got 'high'"),
    ({"prior_weight": -1.0}, r"prior_weight must be zero or a positive number of batches; got -1\.0"),
    ({"prior_weight": float("inf")}, r"prior_weight must be zero or a positive number of batches; got inf"),
]


@pytest.mark.parametrize("build", [nn.BatchNorm2d, memnorm.MemorizedBatchNorm2d], ids=["plain", "memorized"])
@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS, ids=lambda value: value if isinstance(value, str) else "")
def test_wrong_options_are_errors(options, words, build):
    with pytest.raises(OptionError, match=words):
        memnorm.convert(small_net(build), **options)


@pytest.mark.parametrize("norm", [20, None], ids=str)
def test_a_norm_that_is_neither_name_nor_function_is_an_error(norm):
    with pytest.raises(OptionError, match="norm"):
        memnorm.convert(small_net(), norm)


def test_a_name_is_registered_once():
    with pytest.raises(OptionError, match="there is already a norm 'mbn'"):
        norms.register(norms.get("mbn"))


def test_a_factory_builds_the_replacement_of_each_layer_with_the_options():
    net = memnorm.convert(small_net(), lambda channels, groups: nn.GroupNorm(groups, channels), groups=2)
    assert [type(net[i]) for i in (1, 4)] == [nn.GroupNorm] * 2
    assert [(net[i].num_channels, net[i].num_groups) for i in (1, 4)] == [(6, 2), (4, 2)]


def test_a_layer_from_a_factory_gets_the_statistics():
    net = trained(small_net())
    expected = evaluated(net, images(5, seed=9))
    memnorm.convert(net, lambda channels: nn.BatchNorm2d(channels, momentum=0.01))
    assert net[1].momentum == 0.01
    assert_bitwise(evaluated(net, images(5, seed=9)), expected)


def test_a_layer_from_a_factory_gets_mode_and_dtype():
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
        lambda channels: memnorm.convert(BatchNormAct2d(channels)),
    ],
    ids=["plain", "memorized"],
)
def test_a_factory_does_not_strip_a_norm_of_its_activation(build):
    model = nn.Sequential(build(4))
    x = leaf((4, 4, 3, 3), seed=0, dtype=torch.float32)
    expected = F.relu(F.group_norm(x, 2, model[0].weight, model[0].bias))
    memnorm.convert(model, lambda channels: nn.GroupNorm(2, channels))
    torch.testing.assert_close(model(x), expected, rtol=0, atol=1e-6)


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


def test_a_layer_with_a_smaller_memory_trains_like_one_that_always_had_that_size():
    shape = (8, 3, 5, 4)
    resized = with_statistics(memnorm.MemorizedBatchNorm2d(3, memory_size=8, dtype=torch.float64), dtype=torch.float64)
    small = with_statistics(memnorm.MemorizedBatchNorm2d(3, memory_size=2, dtype=torch.float64), dtype=torch.float64)
    resized = memnorm.convert(resized, memory_size=2)
    assert_same_state(resized, small, atol=1e-12)
    for seed in (7, 8):
        x = leaf(shape, seed=seed)
        torch.testing.assert_close(resized(x), small(x), rtol=0, atol=1e-12)


def test_a_new_decay_and_a_new_strength_keep_the_memory():
    layer = with_statistics(memnorm.MemorizedBatchNorm2d(3))
    before = copy.deepcopy(layer.state_dict())
    new = memnorm.convert(layer, decay=0.5, strength=0.25)
    before["strength"].fill_(0.25)
    assert new.decay == 0.5
    assert_bitwise(new.state_dict(), before)


def test_a_strength_set_by_a_schedule_survives_new_options():
    net = memnorm.convert(small_net())
    memnorm.StrengthSchedule(net, 10)
    memnorm.convert(net, memory_size=3)
    assert [layer.strength.item() for layer in memorized(net)] == [0.1, 0.1]


def test_options_that_are_not_given_stay():
    layer = memnorm.MemorizedBatchNorm2d(3, memory_size=5, decay=0.8, prior_weight=3.0, prior_from_init=True)
    new = memnorm.convert(layer, decay=0.7)
    kept = (new.memory_size, new.decay, new.prior_weight, new.prior_from_init)
    assert kept == (5, 0.7, 3.0, True)


def test_a_layer_without_statistics_ignores_a_new_strength():
    layer = memnorm.MemorizedBatchNorm2d(3, track_running_stats=False)
    assert memnorm.convert(layer, strength=0.25).strength is None


def test_a_memorized_layer_on_meta_can_be_resized():
    layer = memnorm.MemorizedBatchNorm2d(3, device="meta")
    assert memnorm.convert(layer, memory_size=3).memory_count.shape == (3,)
