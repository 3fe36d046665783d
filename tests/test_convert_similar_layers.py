"""Layers that are similar to batch norm: `convert` keeps what they do, or skips them."""

import copy
import pickle

import pytest
import torch
from helpers.common import LAYERS, SHAPES, assert_same_output_and_gradients, assert_same_state, images, leaf
from helpers.conversion import (
    BatchNormAct2d,
    assert_bitwise,
    evaluated,
    with_statistics,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import memnorm
from memnorm import MemnormWarning, MemorizedBatchNorm
from memnorm.errors import NothingToConvert

SCRIPT_IS_DEPRECATED = "ignore:.*torch.jit.script.*:DeprecationWarning"


class Subclass2d(nn.BatchNorm2d):
    """A subclass that adds nothing to the forward."""


class OwnInit2d(nn.BatchNorm2d):
    """A subclass with its own init, reset and repr that takes data of any rank."""

    def __init__(self, num_features):
        super().__init__(num_features, eps=1e-3)

    def reset_parameters(self):
        super().reset_parameters()
        nn.init.zeros_(self.weight)

    def extra_repr(self):
        return "own"

    def _check_input_dim(self, input):
        pass


class AlwaysEval2d(nn.BatchNorm2d):
    """A common way to freeze a batch norm."""

    def train(self, mode=True):
        return super().train(False)


class OwnForward2d(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) * 2


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


def test_a_norm_with_activation_trains_at_zero_strength_as_before():
    layer = BatchNormAct2d(3, act=nn.SiLU()).double()
    new = memnorm.convert(copy.deepcopy(layer), strength=0.0)
    assert_same_output_and_gradients(new, layer, leaf((4, 3, 2, 2), seed=9), atol=1e-12)


def test_a_norm_with_activation_keeps_its_dropout_in_training():
    new = memnorm.convert(BatchNormAct2d(3, drop=nn.Dropout(1.0), act=nn.Identity()))
    assert new(leaf((4, 3, 2, 2), seed=0, dtype=torch.float32)).abs().max() == 0


def test_a_norm_with_activation_evaluates_bit_for_bit_as_before_and_gets_its_own_class_again():
    model, x = nn.Sequential(with_statistics(BatchNormAct2d(3, act=nn.SiLU()))), leaf((4, 3, 2, 2), seed=9).float()
    keys, expected = list(model.state_dict()), evaluated(model, x)
    memnorm.convert(memnorm.convert(model), memory_size=3)
    assert model[0].memory_size == 3
    assert isinstance(model[0], memnorm.MemorizedBatchNorm2d)
    assert isinstance(model[0], BatchNormAct2d), "timm would replace another class and drop the activation"
    assert_bitwise(evaluated(model, x), expected)
    memnorm.to_batchnorm(model)
    assert type(model[0]) is BatchNormAct2d
    assert list(model.state_dict()) == keys
    assert_bitwise(evaluated(model, x), expected)


def test_a_batch_norm_inside_a_norms_activation_is_converted_too():
    model = nn.Sequential(BatchNormAct2d(3, drop=nn.BatchNorm2d(3)))
    memnorm.convert(model)
    assert isinstance(model[0].drop, memnorm.MemorizedBatchNorm2d)


@pytest.mark.parametrize("build", [Subclass2d, OwnInit2d])
def test_a_subclass_that_computes_what_batch_norm_does_is_converted(build):
    layer = with_statistics(build(3))
    x = leaf((4, 3, 2, 2), seed=9, dtype=torch.float32)
    before = evaluated(layer, x)
    new = memnorm.convert(layer)
    assert isinstance(new, memnorm.MemorizedBatchNorm2d)
    assert_bitwise(evaluated(new, x), before)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_subclass_for_data_of_any_rank_still_takes_it(shape):
    new = with_statistics(memnorm.convert(OwnInit2d(3)), shape)
    assert int(new.num_batches_tracked) == 3
    assert type(memnorm.to_batchnorm(new)) is LAYERS[len(shape)][1]


def patched(layer):
    layer.forward = lambda x: x * 2
    return layer


def parametrized():
    layer = nn.BatchNorm2d(3)
    parametrize.register_parametrization(layer, "weight", nn.Softplus())
    return layer


SKIPPED = {
    "own forward": (lambda: OwnForward2d(3), "has its own forward"),
    "patched forward": (lambda: patched(nn.BatchNorm2d(3)), "has its own forward"),
    "activation and patched forward": (lambda: patched(BatchNormAct2d(3)), "has its own forward"),
    "own train": (lambda: AlwaysEval2d(3), "has its own train"),
    "in-place ABN": (lambda: InPlaceABN(3), "InPlaceABN is not torch's batch norm"),
    "lazy": (nn.LazyBatchNorm2d, "lazy; run one batch through the model first"),
    "parametrized": (parametrized, "parametrized"),
}


@pytest.mark.parametrize(("build", "words"), SKIPPED.values(), ids=SKIPPED)
def test_a_similar_layer_is_skipped_with_a_warning(build, words):
    model = nn.ModuleDict({"stem": nn.Sequential(build()), "bn": nn.BatchNorm2d(3)})
    kept = model["stem"][0]
    with pytest.warns(MemnormWarning, match=rf"convert skipped: stem\.0 \({words}") as caught:
        memnorm.convert(model)
    assert len(caught) == 1
    assert model["stem"][0] is kept
    assert isinstance(model["bn"], MemorizedBatchNorm)


def test_the_warning_points_at_the_callers_line():
    with pytest.warns(MemnormWarning) as caught:
        memnorm.convert(nn.Sequential(OwnForward2d(3), nn.BatchNorm2d(3)))
    assert caught[0].filename == __file__


def test_a_long_list_of_skipped_layers_is_cut():
    model = nn.Sequential(*(OwnForward2d(3) for _ in range(10)), nn.BatchNorm2d(3))
    with pytest.warns(MemnormWarning, match=r"7 \(has its own forward\) and 2 more \(memnorm.summary lists them"):
        memnorm.convert(model)


def test_a_model_that_cannot_be_converted_is_an_error():
    with pytest.raises(NothingToConvert, match=r"skipped: the model itself \(has its own forward\)"):
        memnorm.convert(OwnForward2d(3))


def test_a_lazy_norm_can_be_converted_after_one_forward():
    model = nn.Sequential(nn.LazyBatchNorm2d())
    model(leaf((4, 3, 2, 2), seed=0, dtype=torch.float32))
    assert type(memnorm.convert(model)[0]) is memnorm.MemorizedBatchNorm2d


@pytest.mark.filterwarnings(SCRIPT_IS_DEPRECATED)
def test_a_scripted_part_is_skipped_with_a_warning():
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.BatchNorm2d(3))), nn.BatchNorm2d(3))
    with pytest.warns(MemnormWarning, match=r"skipped: 0\.0 \(scripted; convert before torch.jit.script\)"):
        memnorm.convert(model)
    assert isinstance(model[1], MemorizedBatchNorm)
    assert isinstance(model[0], torch.jit.ScriptModule)


def test_other_norms_are_unchanged():
    model = nn.Sequential(nn.InstanceNorm2d(3, track_running_stats=True), nn.GroupNorm(1, 3), nn.BatchNorm2d(3))
    before = list(model)
    memnorm.convert(model)
    assert model[0] is before[0]
    assert model[1] is before[1]


def test_a_converted_norm_with_activation_survives_pickling():
    model = memnorm.convert(nn.Sequential(nn.Conv2d(3, 4, 1), BatchNormAct2d(4)))
    model(images(4, seed=0))
    copied = pickle.loads(pickle.dumps(model))
    assert type(copied[1]) is type(model[1])
    x = images(4, seed=1)
    torch.testing.assert_close(copied(x), model(x), rtol=0, atol=0)
    assert_same_state(copied, model)
