"""`plain_state_dict`: a plain model loads it strictly and computes the same; the training model does not change."""

import copy
import io

import pytest
import torch
from helpers.common import assert_same_state, images, small_net
from helpers.conversion import BatchNormAct2d, FrozenBatchNorm2d, assert_bitwise, evaluated, train_step, trained
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

import memnorm
from memnorm import norms
from memnorm.errors import NothingToConvert, OptionError


def reloaded(model, plain):
    """The plain model with the state of `model`, saved and loaded without memnorm."""
    file = io.BytesIO()
    torch.save(memnorm.plain_state_dict(model), file)
    assert b"memnorm" not in file.getvalue()
    file.seek(0)
    plain.load_state_dict(torch.load(file, weights_only=True), strict=True)
    return plain


BATCH_NORMS = [name for name in norms.available() if norms.get(name).keeps_weights or name == "mabn"]


@pytest.mark.parametrize("name", BATCH_NORMS)
def test_a_plain_network_loads_it_and_computes_the_same(name):
    model = trained(memnorm.convert(small_net(), name))
    plain = reloaded(model, small_net(seed=1))
    x = images(5, seed=9)
    torch.testing.assert_close(evaluated(plain, x), evaluated(model, x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", BATCH_NORMS)
def test_it_is_the_state_dict_of_the_model_that_to_batchnorm_makes(name):
    model = trained(memnorm.convert(small_net(), name))
    found = memnorm.plain_state_dict(model)
    expected = memnorm.to_batchnorm(copy.deepcopy(model)).state_dict()
    assert set(found) == set(expected)
    assert_bitwise({key: found[key] for key in expected}, dict(expected))


@pytest.mark.parametrize("name", ["two_way", "mbn", "mabn", "cbn"])
def test_training_continues_as_if_nothing_had_been_saved(name):
    model, other = (memnorm.convert(small_net(), name) for _ in range(2))
    for net in (model, other):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(4):
            train_step(net, optimizer, seed=step)
            if net is model:
                memnorm.plain_state_dict(net)
    assert_same_state(model, other)


def test_double_forward_and_the_exchange_stay_attached():
    model = memnorm.convert(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memnorm.double_forward(model, optimizer)
    memnorm.distributed.exchange_memory(model, optimizer)
    before = len(model._forward_pre_hooks), len(optimizer._optimizer_step_post_hooks)
    memnorm.plain_state_dict(model)
    assert (len(model._forward_pre_hooks), len(optimizer._optimizer_step_post_hooks)) == before
    assert model[1]._outgoing is not None


def test_no_tensor_is_copied():
    model = memnorm.convert(small_net(), "two_way")
    own = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    assert {tensor.data_ptr() for tensor in memnorm.plain_state_dict(model).values()} <= own


def test_the_statistics_of_a_half_model_are_half():
    model = memnorm.convert(small_net()).half()
    plain = reloaded(model, small_net().half())
    assert memnorm.plain_state_dict(model)["1.running_mean"].dtype == torch.float16
    assert_same_state(plain, memnorm.to_batchnorm(model))


@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}], ids=str)
def test_layers_without_parameters_or_statistics_have_no_entries_for_them(options):
    model = memnorm.convert(nn.Sequential(nn.BatchNorm2d(3, **options)), "two_way")
    reloaded(model, nn.Sequential(nn.BatchNorm2d(3, **options)))


def test_a_single_layer_has_no_prefix():
    assert_same_state(reloaded(memnorm.MemorizedBatchNorm2d(3), nn.BatchNorm2d(3)), nn.BatchNorm2d(3))


def test_a_layer_in_two_places_has_both_entries():
    def build():
        shared = nn.BatchNorm2d(3)
        return nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})

    reloaded(memnorm.convert(build(), "two_way"), build())


def test_a_norm_with_activation_is_loaded_by_its_own_class():
    reloaded(memnorm.convert(nn.Sequential(BatchNormAct2d(3)), "two_way"), nn.Sequential(BatchNormAct2d(3)))


def test_layers_that_were_left_out_keep_their_entries():
    model = trained(memnorm.convert(small_net(), "two_way", exclude="4"))
    plain = reloaded(model, small_net(seed=1))
    assert_bitwise(evaluated(plain, images(5, seed=9)), evaluated(model, images(5, seed=9)))


# Wrappers


def compiled_part(net):
    net[3] = torch.compile(net[3], backend="eager")
    net[1] = torch.compile(net[1], backend="eager")
    return net


def checkpointed_part(net):
    return nn.Sequential(*[checkpoint_wrapper(module) for module in net])


WRAPPERS = {
    "DataParallel": nn.DataParallel,
    "compile": lambda net: torch.compile(net, backend="eager"),
    "compile of DataParallel": lambda net: torch.compile(nn.DataParallel(net), backend="eager"),
    "DataParallel of compile": lambda net: nn.DataParallel(torch.compile(net, backend="eager")),
    "AveragedModel": AveragedModel,
    "compiled parts": compiled_part,
    "checkpointed parts": checkpointed_part,
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("name", ["two_way", "mabn"])
def test_the_keys_are_those_of_the_model_inside_a_wrapper(name, wrap):
    net = trained(memnorm.convert(small_net(), name))
    expected = {key: value.clone() for key, value in memnorm.plain_state_dict(net).items()}
    plain = reloaded(wrap(net), small_net(seed=1))
    assert_bitwise({key: plain.state_dict()[key] for key in expected}, expected)


@pytest.fixture
def process_group(tmp_path):
    """A group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_the_keys_are_those_of_the_model_inside_ddp():
    reloaded(nn.parallel.DistributedDataParallel(memnorm.convert(small_net(), "two_way")), small_net())


def test_a_part_that_is_named_module_keeps_its_name():
    def build():
        return nn.ModuleDict({"module": small_net()})

    reloaded(nn.DataParallel(memnorm.convert(build(), "two_way")), build())


def test_a_buffer_with_the_name_of_the_wrappers_own_is_kept():
    def build():
        net = nn.Sequential(nn.BatchNorm2d(3))
        net.register_buffer("n_averaged", torch.tensor(7))
        return net

    plain = build()
    plain.n_averaged.fill_(0)
    assert int(reloaded(AveragedModel(memnorm.convert(build())), plain).n_averaged) == 7


# Layers that were frozen


@pytest.mark.parametrize("eps", [1e-5, 1e-3, 0.0])
@pytest.mark.parametrize("name", ["two_way", "mbn", "brn"])
def test_a_frozen_network_loads_it_and_computes_the_same(name, eps):
    def build():
        return small_net(lambda channels: FrozenBatchNorm2d(channels, eps))

    model = trained(memnorm.convert(build(), name, frozen="convert"))
    model[1].running_var[0] = 1e-6  # where eps matters
    plain = reloaded(model, build())
    x = images(5, seed=9)
    torch.testing.assert_close(evaluated(plain, x), evaluated(model, x), rtol=1e-4, atol=1e-4)


class StrictFrozenBatchNorm2d(FrozenBatchNorm2d):
    """As in detectron2: checkpoints with a counter of batches do not load."""

    _load_from_state_dict = nn.Module._load_from_state_dict


@pytest.mark.parametrize("build", [StrictFrozenBatchNorm2d, nn.BatchNorm2d])
def test_frozen_and_plain_batch_norm_load_the_entries_of_a_layer_that_was_frozen(build):
    model = trained(memnorm.convert(small_net(StrictFrozenBatchNorm2d), "two_way", frozen="convert"))
    plain = reloaded(model, small_net(build))
    x = images(5, seed=9)
    torch.testing.assert_close(evaluated(plain, x), evaluated(model, x), rtol=1e-5, atol=1e-5)


def test_a_layer_that_was_frozen_and_has_changed_its_norm_is_still_known():
    model = memnorm.convert(small_net(StrictFrozenBatchNorm2d), "two_way", frozen="convert")
    reloaded(memnorm.convert(memnorm.convert(model, "brn"), "mbn"), small_net(StrictFrozenBatchNorm2d))


# Errors


@pytest.mark.parametrize("others", [None, "1"], ids=["alone", "in a part"])
@pytest.mark.parametrize("name", ["frn", "evonorm_s0", "weight_norm", "normprop"])
def test_a_norm_that_batch_norm_cannot_replace_is_an_error(name, others):
    net = small_net() if others is None else memnorm.convert(small_net(), "two_way", include=others)
    memnorm.convert(net, name, exclude=others)
    with pytest.raises(OptionError, match=r"plain_state_dict: [14].* is .*, which batch norm cannot replace"):
        memnorm.plain_state_dict(net)


def test_online_norm_is_an_error_where_it_does_more_in_eval():
    with pytest.raises(OptionError, match=r"plain_state_dict: .* computes something else than batch norm in eval mode"):
        memnorm.plain_state_dict(memnorm.convert(small_net(), "online"))


@pytest.mark.parametrize("name", [None, "group"])
def test_a_model_without_memorized_layers_is_an_error(name):
    model = small_net() if name is None else memnorm.convert(small_net(), name)
    with pytest.raises(NothingToConvert, match="plain_state_dict: Sequential has no memorized layer"):
        memnorm.plain_state_dict(model)
