"""Ghost batch norm: torch's batch norm called on each ghost batch in turn."""

import copy

import pytest
import torch
from helpers.common import SHAPES, assert_same_output_and_gradients, assert_same_state, leaf
from helpers.running_norms import Literal, built, drifting, follow, moments

import memnorm
from memnorm.errors import InputError, OptionError


class Ghosts(Literal):
    """Normalize and average each ghost batch separately, one after the other."""

    def __init__(self, sizes, momentum=0.1):
        super().__init__(momentum)
        self.sizes = sizes

    def __call__(self, x, gamma, beta):
        outputs = []
        for part in x.split(self.sizes):
            mean, var, count = moments(part)
            self.average(mean, var * count / (count - 1))
            outputs.append(self.output(part, gamma, beta, mean, var))
        return torch.cat(outputs)


SPLITS = {
    "even": (12, 4, [4, 4, 4]),
    "remainder": (11, 4, [4, 4, 3]),
    "remainder of one image": (9, 4, [4, 4, 1]),
    "one ghost batch": (4, 4, [4]),
    "a smaller batch": (3, 4, [3]),
    "one image each": (5, 1, [1, 1, 1, 1, 1]),
}


@pytest.mark.parametrize("momentum", [0.1, 0.6, None])
@pytest.mark.parametrize(("images", "size", "sizes"), SPLITS.values(), ids=SPLITS)
def test_a_trajectory_equals_the_equations(images, size, sizes, momentum):
    layer = built("ghost", ghost_size=size, momentum=momentum)
    follow(layer, Ghosts(sizes, momentum), steps=20, shapes=[(images, 3, 4, 3)])


def test_a_remainder_of_one_value_joins_the_last_whole_ghost_batch():
    layer = built("ghost", rank=2, ghost_size=4)
    follow(layer, Ghosts([4, 5]), steps=20, shapes=[(9, 3)])
    follow(built("ghost", rank=2, ghost_size=4), Ghosts([5]), steps=5, shapes=[(5, 3)])


@pytest.mark.parametrize("size", [8, 100])
@pytest.mark.parametrize("shape", [(8, *shape[1:]) for shape in SHAPES], ids=str)
def test_a_ghost_batch_as_large_as_the_batch_is_batch_norm(shape, size):
    ours = built("ghost", rank=len(shape), ghost_size=size)
    torchs = memnorm.to_batchnorm(copy.deepcopy(ours))
    for step in range(3):
        assert_same_output_and_gradients(ours, torchs, drifting(shape, step), atol=1e-12)
    assert_same_state(ours, torchs, atol=1e-14)


@pytest.mark.parametrize("images", [8, 9])
@pytest.mark.parametrize("shape", [(3, 4, 5), (3, 2, 3, 4)], ids=str)
def test_channels_last_stays_channels_last(shape, images):
    layout = torch.channels_last if len(shape) == 3 else torch.channels_last_3d
    layer = built("ghost", ghost_size=4)
    x = leaf((images, *shape), seed=0).detach()
    y = layer(x.contiguous(memory_format=layout))
    assert y.is_contiguous(memory_format=layout)
    torch.testing.assert_close(y, layer(x), rtol=1e-12, atol=1e-12)


def test_one_value_per_ghost_batch_is_an_error_that_names_the_size():
    with pytest.raises(InputError, match=r"ghost batches of 1 have one value per channel.*larger ghost_size"):
        built("ghost", rank=2, ghost_size=1)(drifting((8, 3), 0))


@pytest.mark.parametrize("size", [0, -3, 2.5, "8", True])
def test_wrong_sizes_are_errors(size):
    with pytest.raises(OptionError, match="ghost_size must be a positive number of images"):
        built("ghost", ghost_size=size)
