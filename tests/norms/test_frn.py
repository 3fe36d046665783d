"""Filter Response Normalization against its equations, and which layers have the threshold."""

import pytest
import torch
from helpers.batch_free import SHAPES, assert_trains_like, random_batch_norm
from helpers.common import leaf, randn
from torch import nn

import memnorm
from memnorm.errors import InputError
from memnorm.norms.frn import FilterResponseNorm


def literal(x, weight, bias, threshold, added_eps=None, eps=1e-6):
    """One channel of one image at a time."""
    rows = []
    for image in x:
        channels = []
        for c, values in enumerate(image):
            power = (values**2).sum() / values.numel()
            y = weight[c] * values / torch.sqrt(power + eps + (0 if added_eps is None else abs(added_eps))) + bias[c]
            channels.append(torch.where(y > threshold[c], y, threshold[c]))
        rows.append(torch.stack(channels))
    return torch.stack(rows)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trains_like_its_equations(shape):
    new = FilterResponseNorm.replacing(random_batch_norm(shape), eps=1e-3)
    with torch.no_grad():
        new.threshold.copy_(0.3 * randn(6, seed=3))
    assert_trains_like(new, lambda x, **own: literal(x, eps=1e-3, **own), shape)


@pytest.mark.parametrize("shape", [(5, 6), (4, 6, 1, 1), (3, 6, 2, 2)], ids=str)
def test_trains_like_its_equations_with_a_learned_epsilon(shape):
    new = FilterResponseNorm.replacing(random_batch_norm(shape), learned_eps=True)
    with torch.no_grad():
        new.added_eps.fill_(-0.5)
    assert_trains_like(new, literal, shape)


def test_starts_as_the_paper_has_it():
    new = FilterResponseNorm(4, learned_eps=True)
    assert new.eps == 1e-6
    values = {name: value.tolist() for name, value in new.named_parameters()}
    assert values["weight"] == [1] * 4
    assert values["bias"] == values["threshold"] == [0] * 4
    assert values["added_eps"] == pytest.approx(1e-4)
    assert "added_eps" not in dict(FilterResponseNorm(4).named_parameters())


@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 1, 1)], ids=str)
def test_single_values_need_a_learned_epsilon_and_the_error_says_so(shape):
    with pytest.raises(InputError, match="learned_eps=True"):
        FilterResponseNorm.replacing(random_batch_norm(shape))(leaf(shape, seed=0))


def test_without_threshold_it_trains_like_the_normalisation_alone():
    new = FilterResponseNorm.replacing(random_batch_norm((3, 6, 4, 3)))
    new.threshold = None
    low = torch.full((6,), -1e9, dtype=torch.float64)
    assert_trains_like(new, lambda x, **own: literal(x, threshold=low, **own), (3, 6, 4, 3))


def test_a_layer_converted_by_itself_keeps_its_threshold():
    assert memnorm.convert(nn.BatchNorm2d(3), "frn").threshold is not None
