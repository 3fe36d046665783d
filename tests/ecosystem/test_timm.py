"""One model of every module of timm that has batch norm."""

import functools

import pytest
from helpers.ecosystem import check_family, pictures, sizes
from helpers.optional import library

timm = library("timm")
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.filterwarnings("error::memnorm.MemnormWarning")]


def samples(model):
    config = model.pretrained_cfg
    channels, default, _ = config["input_size"]
    for size in [default] if config.get("fixed_input_size") else sizes(default):
        yield lambda seed, size=size: pictures(channels, size, size, seed=seed)


@pytest.mark.parametrize("family", timm.list_modules())
def test_a_model_trains_two_way_and_returns(family, record_property):
    builders = {name: functools.partial(timm.create_model, name) for name in timm.list_models(module=family)}
    check_family(builders, samples, record_property)
