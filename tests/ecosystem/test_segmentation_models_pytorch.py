"""Networks of segmentation_models_pytorch."""

import pytest
from helpers.ecosystem import pictures, round_trip
from helpers.optional import library

smp = library("segmentation_models_pytorch")
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.filterwarnings("error::memnorm.MemnormWarning")]


@pytest.mark.parametrize("name", ["Unet", "DeepLabV3Plus", "FPN"])
def test_a_network_trains_two_way_and_returns(name):
    model = getattr(smp, name)("resnet18", encoder_weights=None, classes=2)
    round_trip(model, lambda seed: pictures(3, 64, 64, seed=seed))
