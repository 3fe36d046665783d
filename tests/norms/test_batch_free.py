"""All norms without batch statistics as replacements of batch norm."""

import pickle

import pytest
import torch
from helpers.batch_free import SHAPES, random_batch_norm
from helpers.common import images, leaf, small_net
from helpers.conversion import BatchNormAct2d
from torch import nn

import memnorm
from memnorm.errors import InputError, OptionError
from memnorm.norms import evonorm_s0, frn, group, instance, layer, normprop, weight_norm
from memnorm.norms.batch_free import choose_groups

PER_IMAGE = [group, layer, instance, frn, evonorm_s0]
OWN = [frn, evonorm_s0, normprop, weight_norm]
ALL = [*PER_IMAGE, normprop, weight_norm]


def named(modules):
    return pytest.mark.parametrize("norm", modules, ids=lambda one: one.ENTRY["name"])


def replaced(norm, bn, **options):
    return norm.ENTRY["replace"](bn, **options)


@named(ALL)
def test_batch_norms_parameters_stay_the_same_objects(norm):
    bn = random_batch_norm((2, 6, 3, 3))
    new = replaced(norm, bn)
    assert new.weight is bn.weight
    assert new.bias is bn.bias


@named(ALL)
def test_mode_and_dtype_are_those_of_the_batch_norm(norm):
    new = replaced(norm, random_batch_norm((2, 6, 3, 3)).eval())
    assert not new.training
    assert {value.dtype for value in new.parameters()} == {torch.float64}


@named(ALL)
def test_a_model_in_eval_mode_stays_there_in_all_its_parts(norm):
    net = small_net().eval()
    net[2].train()
    memnorm.convert(net, norm.ENTRY["name"])
    assert [one.training for one in net] == [False, False, True, *([False] * 6)]
    assert not any(one.training for part in net[3:] for one in part.modules())


@named(PER_IMAGE)
def test_a_batch_norm_without_affine_map_gets_a_norm_without(norm):
    x = leaf((2, 6, 3, 3), seed=0)
    bare = replaced(norm, nn.BatchNorm2d(6, affine=False, dtype=torch.float64))
    full = replaced(norm, nn.BatchNorm2d(6, dtype=torch.float64))
    assert bare.weight is None
    assert bare.bias is None
    torch.testing.assert_close(bare.double()(x), full(x), rtol=0, atol=1e-12)


@named(PER_IMAGE)
def test_a_batch_norm_without_bias_gets_a_norm_without(norm):
    bn = random_batch_norm((2, 6, 3, 3))
    bn.bias = None
    full = random_batch_norm((2, 6, 3, 3))
    nn.init.zeros_(full.bias)
    x = leaf((2, 6, 3, 3), seed=0)
    new = replaced(norm, bn)
    assert new.bias is None
    torch.testing.assert_close(new(x), replaced(norm, full)(x), rtol=0, atol=1e-12)


@named(PER_IMAGE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_image_depends_on_the_others(norm, shape):
    new = replaced(norm, random_batch_norm(shape))
    x = leaf(shape, seed=0).detach()
    apart = torch.cat([new(one) for one in x.split(1)])
    torch.testing.assert_close(new(x), apart, rtol=0, atol=1e-12)


@named(ALL)
@pytest.mark.parametrize("shape", [(2, 4, 2), (1, 4, 2, 1, 2)], ids=str)
def test_first_and_second_derivatives_pass_gradcheck(norm, shape):
    new = replaced(norm, random_batch_norm(shape))
    x = leaf(shape, seed=0)
    new(x)
    names = [name for name, _ in new.named_parameters()]

    def run(x, *parameters):
        return torch.func.functional_call(new, dict(zip(names, parameters, strict=True)), (x,))

    inputs = (x, *(value.detach().clone().requires_grad_() for value in new.parameters()))
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@named(OWN)
def test_narrow_input_keeps_its_dtype_and_nearly_its_result(norm):
    new = replaced(norm, random_batch_norm((4, 6, 5, 5))).float()
    x = leaf((4, 6, 5, 5), seed=0, dtype=torch.float32)
    expected = new(x)
    y = new(x.bfloat16())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected, rtol=0.03, atol=0.05)


@named([norm for norm in ALL if norm is not weight_norm])  # torch does not pickle parametrized layers
def test_a_model_survives_pickling(norm):
    net = memnorm.convert(small_net(), norm.ENTRY["name"])
    again = pickle.loads(pickle.dumps(net))
    x = images(2, seed=0)
    torch.testing.assert_close(again(x), net(x), rtol=0, atol=0)


@named(ALL)
def test_a_state_on_meta_can_be_made_real(norm):
    with torch.device("meta"):
        new = replaced(norm, nn.BatchNorm2d(6))
    new = new.to_empty(device="cpu")
    new.reset_parameters()
    torch.testing.assert_close(new.weight, torch.ones(6), rtol=0, atol=0)
    torch.testing.assert_close(new.bias, torch.zeros(6), rtol=0, atol=0)


@named(ALL)
def test_a_model_on_meta_is_converted(norm):
    with torch.device("meta"):
        net = small_net()
    memnorm.convert(net, norm.ENTRY["name"])
    assert net(torch.empty(2, 3, 8, 8, device="meta")).shape == (2, 5)


@named(OWN)
def test_a_wrong_number_of_channels_is_an_error(norm):
    new = replaced(norm, random_batch_norm((2, 6, 3, 3)))
    with pytest.raises(InputError, match=r"\(N, 6, …\).*\(2, 5, 3, 3\)"):
        new(leaf((2, 5, 3, 3), seed=0))


@named(OWN)
def test_an_unknown_option_is_named(norm):
    with pytest.raises(OptionError, match=r"momentum.*options are"):
        replaced(norm, random_batch_norm((2, 6, 3, 3)), momentum=0.1)


@named([frn, evonorm_s0])
@pytest.mark.parametrize("eps", [0, -1e-6, "small", None, True, float("nan")])
def test_eps_must_be_positive(norm, eps):
    with pytest.raises(OptionError, match="eps must be a positive number"):
        replaced(norm, random_batch_norm((2, 6, 3, 3)), eps=eps)


@pytest.mark.parametrize(
    ("channels", "wanted", "groups"),
    [(256, None, 32), (10, None, 5), (3, None, 1), (1, None, 1), (48, 32, 24), (10, 4, 2), (10, 100, 10), (7, 3, 1)],
)
def test_groups_divide_the_channels_and_have_at_least_two_by_default(channels, wanted, groups):
    assert choose_groups(channels, wanted) == groups


@pytest.mark.parametrize("wanted", [0, -1, 2.0, "all", True])
def test_a_wrong_number_of_groups_is_an_error(wanted):
    with pytest.raises(OptionError, match="num_groups must be a whole number"):
        choose_groups(64, wanted)


@named(ALL)
def test_a_second_conversion_leaves_the_layers_of_the_first_alone(norm):
    first = memnorm.convert(small_net(seed=1), norm.ENTRY["name"])
    before = [(name, type(one), len(list(one.parameters(recurse=False)))) for name, one in first.named_modules()]
    both = nn.Sequential(first, nn.Unflatten(1, (5, 1)), nn.Conv1d(5, 4, 1), nn.BatchNorm1d(4))
    if norm is instance:
        both[1] = nn.Unflatten(1, (1, 5))
        both[2] = nn.Conv1d(1, 4, 1)
    memnorm.convert(both, norm.ENTRY["name"])
    after = [(name, type(one), len(list(one.parameters(recurse=False)))) for name, one in first.named_modules()]
    assert after == before


def test_a_layer_with_its_own_activation_keeps_what_follows():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), BatchNormAct2d(4, act=nn.ReLU()))
    memnorm.convert(net, "group")
    assert isinstance(net[1], nn.Sequential)
    assert isinstance(net[1][2], nn.ReLU)
    net = nn.Sequential(nn.Conv2d(3, 4, 1), BatchNormAct2d(4, act=nn.ReLU()))
    memnorm.convert(net, "frn")
    assert isinstance(net[1][2], nn.Identity)
    assert net[1][0].threshold is not None
