"""Torch's group, layer and instance norm as replacements of batch norm."""

import pytest
import torch
from helpers.batch_free import SHAPES, assert_trains_like, per_channel, random_batch_norm
from helpers.common import leaf, small_net
from torch import nn

import memnorm
from memnorm.errors import InputError
from memnorm.norms import group, instance, layer


def literal(x, weight, bias, groups, eps):
    """y = γ (x − μ)/√(σ² + ε) + β, one group of one image at a time."""
    size = x.shape[1] // groups
    images = []
    for image in x:
        parts = []
        for index in range(groups):
            part = image[index * size : (index + 1) * size]
            mean = part.sum() / part.numel()
            var = ((part - mean) ** 2).sum() / part.numel()
            parts.append((part - mean) / torch.sqrt(var + eps))
        images.append(torch.cat(parts))
    return torch.stack(images) * per_channel(weight, x) + per_channel(bias, x)


@pytest.mark.parametrize("shape", [(4, 6), *SHAPES], ids=str)
@pytest.mark.parametrize("num_groups", [2, 3])
def test_group_norm_trains_like_its_equation(shape, num_groups):
    bn = random_batch_norm(shape, eps=1e-3)
    new = group.replace(bn, num_groups=num_groups)
    assert type(new) is nn.GroupNorm
    assert_trains_like(new, lambda x, weight, bias: literal(x, weight, bias, num_groups, 1e-3), shape)


@pytest.mark.parametrize("shape", [(4, 6), *SHAPES], ids=str)
def test_layer_norm_trains_like_its_equation(shape):
    new = layer.replace(random_batch_norm(shape))
    assert_trains_like(new, lambda x, weight, bias: literal(x, weight, bias, 1, 1e-5), shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_instance_norm_trains_like_its_equation(shape):
    new = instance.replace(random_batch_norm(shape, eps=1e-4))
    assert_trains_like(new, lambda x, weight, bias: literal(x, weight, bias, 6, 1e-4), shape)


@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 1), (4, 6, 1, 1)], ids=str)
def test_instance_norm_of_single_values_says_what_to_do(shape):
    new = instance.replace(random_batch_norm(shape))
    with pytest.raises(InputError, match=r"two values per image and channel.*convert\(model, \"group\"\)"):
        new(leaf(shape, seed=0))


def test_instance_norm_of_another_number_of_channels_is_an_error_also_without_affine_map():
    new = instance.replace(random_batch_norm((2, 6, 3, 3), affine=False))
    with pytest.raises(InputError, match=r"\(N, 6, …\)"):
        new(leaf((2, 3, 3, 3), seed=0))


def test_a_model_gets_as_many_groups_as_each_width_allows():
    net = memnorm.convert(small_net(), "group", num_groups=4)
    assert [one.num_groups for one in net.modules() if isinstance(one, nn.GroupNorm)] == [3, 4]
    net = memnorm.convert(small_net(), "group")
    assert [one.num_groups for one in net.modules() if isinstance(one, nn.GroupNorm)] == [3, 2]
    net = memnorm.convert(small_net(), "layer")
    assert [one.num_groups for one in net.modules() if isinstance(one, nn.GroupNorm)] == [1, 1]


def test_without_affine_map_the_layer_says_so_and_can_be_reset():
    for norm in (group, layer, instance):
        new = norm.ENTRY["replace"](random_batch_norm((2, 6, 3, 3), affine=False))
        assert not new.affine
        new.reset_parameters()
        assert new(leaf((2, 6, 3, 3), seed=0)).shape == (2, 6, 3, 3)
