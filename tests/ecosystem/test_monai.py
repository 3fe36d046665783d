"""3-D networks of MONAI, built with batch norm."""

import pytest
from helpers.ecosystem import pictures, round_trip
from helpers.optional import library

nets = library("monai.networks.nets")
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.filterwarnings("error::memnorm.MemnormWarning")]


@pytest.mark.parametrize("name", ["BasicUNet", "SegResNet"])
def test_a_3d_network_trains_two_way_and_returns(name):
    model = getattr(nets, name)(spatial_dims=3, in_channels=1, out_channels=2, norm="batch")
    round_trip(model, lambda seed: pictures(1, 32, 32, 32, seed=seed))
