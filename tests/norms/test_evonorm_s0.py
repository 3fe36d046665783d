"""EvoNorm-S0 against its equation, and which layers have the nonlinearity."""

import pytest
import torch
from helpers.batch_free import SHAPES, assert_trains_like, per_channel, random_batch_norm
from helpers.common import randn
from torch import nn

import memnorm
from memnorm.errors import InputError
from memnorm.norms.evonorm_s0 import EvoNormS0


def literal(x, weight, bias, gate, groups=2, eps=1e-5):
    """x σ(v x)/√(s² + ε) · γ + β, one group of one image at a time."""
    size = x.shape[1] // groups
    rows = []
    for image in x:
        parts = []
        for index in range(groups):
            part = image[index * size : (index + 1) * size]
            mean = part.sum() / part.numel()
            var = ((part - mean) ** 2).sum() / part.numel()
            v = per_channel(gate[index * size : (index + 1) * size], part[None])[0]
            parts.append(part / (1 + torch.exp(-v * part)) / torch.sqrt(var + eps))
        rows.append(torch.cat(parts))
    return torch.stack(rows) * per_channel(weight, x) + per_channel(bias, x)


@pytest.mark.parametrize("shape", [(4, 6), *SHAPES], ids=str)
@pytest.mark.parametrize("groups", [2, 3])
def test_trains_like_its_equation(shape, groups):
    new = EvoNormS0.replacing(random_batch_norm(shape), num_groups=groups, eps=1e-4)
    with torch.no_grad():
        new.gate.copy_(1 + 0.5 * randn(6, seed=3))
    assert_trains_like(new, lambda x, **own: literal(x, groups=groups, eps=1e-4, **own), shape)


def test_starts_as_the_paper_has_it():
    new = EvoNormS0(64)
    assert new.eps == 1e-5
    assert new.num_groups == 32
    assert new.gate.tolist() == new.weight.tolist() == [1] * 64
    assert new.bias.tolist() == [0] * 64


def test_without_nonlinearity_it_is_an_affine_map():
    new = EvoNormS0.replacing(random_batch_norm((3, 6, 4, 3)))
    new.gate = None
    assert_trains_like(
        new, lambda x, weight, bias: per_channel(weight, x) * x + per_channel(bias, x), (3, 6, 4, 3), atol=1e-11
    )


@pytest.mark.parametrize("kind", [nn.ReLU, nn.SiLU])
def test_the_following_activation_is_removed(kind):
    net = memnorm.convert(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), kind(), nn.Flatten()), "evonorm_s0")
    assert [type(one).__name__ for one in net] == ["Conv2d", "EvoNormS0", "Identity", "Flatten"]
    assert net[1].gate is not None


@pytest.mark.parametrize("behind", [nn.PReLU(), nn.Conv2d(4, 2, 1), nn.Flatten()], ids=lambda one: type(one).__name__)
def test_without_a_following_activation_there_is_no_gate(behind):
    net = memnorm.convert(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), behind), "evonorm_s0")
    assert net[1].gate is None
    assert net[2] is behind


def test_a_layer_converted_by_itself_keeps_its_gate():
    assert memnorm.convert(nn.BatchNorm2d(3), "evonorm_s0").gate is not None


def test_groups_of_a_single_value_are_an_error_that_says_what_to_do():
    new = EvoNormS0(4, num_groups=4)
    with pytest.raises(InputError, match=r"each of its 4 groups.*num_groups=2"):
        new(torch.zeros(2, 4))
    assert EvoNormS0(4)(torch.ones(2, 4, 1, 1)).shape == (2, 4, 1, 1)
