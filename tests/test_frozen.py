"""`convert(model, frozen="convert")`: frozen batch norm becomes trainable, and its statistics the first memory."""

import copy

import pytest
import torch
from helpers.common import assert_same_output_and_gradients, images, leaf, randn, small_net
from helpers.conversion import FrozenBatchNorm2d, assert_bitwise, evaluated, trained, with_statistics
from torch import nn
from torch.nn import functional as F

import memnorm
from memnorm import MemnormWarning, norms
from memnorm.errors import NothingToConvert, OptionError


class Detectron2FrozenBatchNorm2d(FrozenBatchNorm2d):
    """As in detectron2: the number of channels and a counter that is None. Checkpoints with a counter do not load."""

    def __init__(self, num_features, eps=1e-3):
        super().__init__(num_features, eps)
        self.num_features = num_features
        self.register_buffer("num_batches_tracked", None)

    _load_from_state_dict = nn.Module._load_from_state_dict


class DetrFrozenBatchNorm2d(FrozenBatchNorm2d):
    """As in DETR: eps is part of the formula."""

    def __init__(self, num_features):
        super().__init__(num_features)
        del self.eps

    def forward(self, x):
        weight, bias, mean, var = (
            getattr(self, name).view(1, -1, 1, 1) for name in ("weight", "bias", "running_mean", "running_var")
        )
        scale = weight * (var + 1e-5).rsqrt()
        return x * scale + (bias - mean * scale)


class FrozenBatchNorm1d(FrozenBatchNorm2d):
    pass


class FrozenBatchNorm3d(FrozenBatchNorm2d):
    pass


class FrozenBatchNormAct2d(FrozenBatchNorm2d):
    """As in timm: `drop` and `act` follow."""

    def __init__(self, num_features):
        super().__init__(num_features)
        self.drop, self.act = nn.Identity(), nn.ReLU()

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class FrozenBatchNormRelu2d(FrozenBatchNorm2d):
    def forward(self, x):
        return F.relu(super().forward(x))


class FrozenBatchNormOtherEps2d(DetrFrozenBatchNorm2d):
    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, 1e-2)


class FixedBN(DetrFrozenBatchNorm2d):
    """A name that does not say what it is."""


class RecordsBN(FrozenBatchNorm2d):
    """Not frozen: only its affine map is constant."""

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)


LOOK_ALIKES = [FrozenBatchNorm2d, Detectron2FrozenBatchNorm2d, DetrFrozenBatchNorm2d, FixedBN]


def with_constants(model, seed=0):
    """The model, its frozen layers with constants as after training."""
    for number, layer in enumerate(module for module in model.modules() if isinstance(module, FrozenBatchNorm2d)):
        for index, name in enumerate(("weight", "bias", "running_mean", "running_var")):
            noise = randn(len(layer.weight), seed=seed + 10 * number + index).float()
            getattr(layer, name).copy_(noise.exp() if name == "running_var" else 1 + noise)
    return model


def frozen_net(build=FrozenBatchNorm2d):
    return with_constants(small_net(build))


KEEPING = [name for name in norms.available() if norms.get(name).keeps_weights]


@pytest.mark.parametrize(
    ("build", "norm"),
    [*((FrozenBatchNorm2d, norm) for norm in KEEPING), *((build, "mbn") for build in LOOK_ALIKES[1:])],
)
def test_a_frozen_network_evaluates_as_before(build, norm):
    net = frozen_net(build)
    before = evaluated(net, images(5, seed=9))
    memnorm.convert(net, norm, frozen="convert")
    torch.testing.assert_close(evaluated(net, images(5, seed=9)), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("build", "kind", "shape"),
    [
        (FrozenBatchNorm1d, memnorm.MemorizedBatchNorm1d, (4, 3)),
        (FrozenBatchNorm2d, memnorm.MemorizedBatchNorm2d, (4, 3, 2, 2)),
        (FrozenBatchNorm3d, memnorm.MemorizedBatchNorm3d, (4, 3, 2, 2, 2)),
    ],
)
def test_the_name_of_the_class_says_which_data_it_takes(build, kind, shape):
    layer = with_constants(build(3))
    x = leaf(shape, seed=0, dtype=torch.float32)
    new = memnorm.convert(layer, frozen="convert")
    assert type(new) is kind
    torch.testing.assert_close(evaluated(new, x), evaluated(layer, x), rtol=1e-5, atol=1e-5)


def test_a_frozen_layer_trains_as_a_pretrained_batch_norm_does():
    frozen = with_constants(FrozenBatchNorm2d(3, eps=1e-3)).double()
    plain = nn.BatchNorm2d(3, eps=1e-3, dtype=torch.float64)
    plain.load_state_dict(frozen.state_dict(), strict=False)
    new, other = memnorm.convert(frozen, frozen="convert"), memnorm.convert(plain)
    for seed in range(3):
        assert_same_output_and_gradients(new, other, leaf((4, 3, 2, 2), seed=seed), atol=1e-12)
    assert_bitwise(new.state_dict(), other.state_dict())


def test_the_trained_statistics_are_the_first_memory():
    layer = with_constants(FrozenBatchNorm2d(3))
    mean, var = layer.running_mean.clone(), layer.running_var.clone()
    new = memnorm.convert(layer, frozen="convert", decay=1.0)
    x = leaf((4, 3, 2, 2), seed=0, dtype=torch.float32)
    new(x)
    assert_bitwise((new.memory_mean[1], new.memory_var[1]), (mean, var))
    torch.testing.assert_close(new.running_mean, (mean + x.mean((0, 2, 3))) / 2)


def test_the_eps_mode_hooks_and_attributes_of_a_frozen_layer_are_kept():
    layer, called = FrozenBatchNorm2d(3, eps=1e-2).eval(), []
    layer.tag = "stem"
    layer.register_forward_hook(lambda module, *_: called.append(type(module)))
    new = memnorm.convert(layer, frozen="convert")
    assert (new.eps, new.training, new.tag) == (1e-2, False, "stem")
    new(images(2, seed=0))
    assert called == [memnorm.MemorizedBatchNorm2d]


def test_the_frozen_layer_itself_does_not_change():
    layer = with_constants(FrozenBatchNorm2d(3))
    before = copy.deepcopy(layer.state_dict())
    with_statistics(memnorm.convert(layer, frozen="convert")).weight.data.zero_()
    assert_bitwise(layer.state_dict(), before)


@pytest.mark.parametrize("norm", ["two_way", "mbn", "brn"])
def test_a_frozen_network_returns_as_plain_batch_norm_with_equal_outputs(norm):
    net = trained(memnorm.convert(frozen_net(), norm, frozen="convert"))
    before = evaluated(net, images(5, seed=9))
    plain = memnorm.to_batchnorm(net)
    assert [type(plain[i]) for i in (1, 4)] == [nn.BatchNorm2d] * 2
    assert_bitwise(evaluated(plain, images(5, seed=9)), before)
    assert {key for layer in (plain[1], plain[4]) for key in vars(layer) if "memnorm" in key} == set()
    assert list(plain.state_dict()) == list(small_net().state_dict())


def test_eps_zero_is_replaced_and_the_outputs_stay_equal():
    net = frozen_net(lambda channels: FrozenBatchNorm2d(channels, eps=0.0))
    net[1].running_var[0] = 1e-7
    before = evaluated(net, images(5, seed=9))
    memnorm.convert(net, "two_way", frozen="convert")
    assert net[1].eps == 1e-5
    torch.testing.assert_close(evaluated(net, images(5, seed=9)), before, rtol=1e-4, atol=1e-4)
    trained(net)


def test_a_frozen_layer_on_meta_stays_on_meta():
    new = memnorm.convert(FrozenBatchNorm2d(3).to("meta"), frozen="convert")
    assert {tensor.device.type for tensor in (*new.parameters(), *new.buffers())} == {"meta"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_a_frozen_layer_keeps_its_dtype(dtype):
    new = memnorm.convert(with_constants(FrozenBatchNorm2d(3)).to(dtype), frozen="convert")
    assert new.weight.dtype == dtype
    assert memnorm.to_batchnorm(new).running_mean.dtype == dtype


# Layers that stay frozen


@pytest.mark.parametrize("build", LOOK_ALIKES)
def test_by_default_frozen_layers_stay_and_the_warning_names_the_option_and_their_number(build):
    model = nn.ModuleDict({"stem": frozen_net(build), "bn": nn.BatchNorm2d(3)})
    kept = [model["stem"][i] for i in (1, 4)]
    words = r'convert skipped: 2 frozen layers, such as stem\.1 \(convert\(model, frozen="convert"\) makes them'
    with pytest.warns(MemnormWarning, match=words) as caught:
        memnorm.convert(model)
    assert len(caught) == 1
    assert [model["stem"][i] for i in (1, 4)] == kept
    assert isinstance(model["bn"], memnorm.MemorizedBatchNorm2d)


def test_a_warning_names_frozen_layers_and_others():
    other = nn.BatchNorm2d(3)
    other.forward = lambda x: x
    with pytest.warns(MemnormWarning, match=r"1 frozen layer, 0 \(.*\); 1 \(has its own forward\)$"):
        memnorm.convert(nn.Sequential(FrozenBatchNorm2d(3), other, nn.BatchNorm2d(3)))


def test_a_model_with_frozen_layers_only_is_an_error_that_names_the_option():
    with pytest.raises(NothingToConvert, match=r'2 frozen layers, such as 1 \(convert\(model, frozen="convert"\)'):
        memnorm.convert(frozen_net())


def patched(layer):
    layer.forward = lambda x: x * 2
    return layer


@pytest.mark.parametrize("frozen", ["keep", "convert"])
@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: RecordsBN(3), "RecordsBN does more than batch norm"),
        (lambda: RecordsBN(3).eval(), "RecordsBN does more than batch norm"),
        (lambda: FrozenBatchNormAct2d(3), "FrozenBatchNormAct2d does more than batch norm"),
        (lambda: FrozenBatchNormRelu2d(3), "FrozenBatchNormRelu2d does more than batch norm"),
        (lambda: FrozenBatchNormOtherEps2d(3), "FrozenBatchNormOtherEps2d does more than batch norm"),
        (lambda: FrozenBatchNorm2d(3, eps="small"), "FrozenBatchNorm2d does more than batch norm"),
        (lambda: patched(FrozenBatchNorm2d(3)), "has its own forward"),
    ],
    ids=[
        "not frozen",
        "not frozen, in eval mode",
        "activation",
        "activation in forward",
        "other eps",
        "no eps",
        "patched forward",
    ],
)
def test_a_frozen_layer_that_does_more_is_skipped_with_the_reason(build, words, frozen):
    model = nn.Sequential(build(), nn.BatchNorm2d(3))
    kept, state = model[0], copy.deepcopy(model[0].state_dict())
    with pytest.warns(MemnormWarning, match=rf"convert skipped: 0 \({words}"):
        memnorm.convert(model, frozen=frozen)
    assert model[0] is kept
    assert_bitwise(kept.state_dict(), state)


@pytest.mark.parametrize("value", ["thaw", True, None, ["convert"]], ids=str)
def test_another_value_is_an_error(value):
    with pytest.raises(OptionError, match=r"convert: frozen must be 'keep' or 'convert'; got"):
        memnorm.convert(frozen_net(), frozen=value)


def test_a_norm_that_needs_the_wiring_says_how_to_convert_frozen_layers():
    with pytest.raises(OptionError, match=r'convert\(convert\(model, "bn", frozen="convert"\), \'normprop\'\)'):
        memnorm.convert(frozen_net(), "normprop", frozen="convert")
    memnorm.convert(memnorm.convert(frozen_net(), "bn", frozen="convert"), "normprop")
