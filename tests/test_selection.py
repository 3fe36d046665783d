"""`convert(model, include=…, exclude=…)`: which layers are replaced, and how `summary` shows it."""

import copy
import re
import warnings

import pytest
import torch
from helpers.common import images, small_net
from helpers.conversion import FrozenBatchNorm2d, trained
from torch import nn
from torch.nn.utils import parametrize

import memnorm
from memnorm import MemorizedBatchNorm
from memnorm.centering import ATTRIBUTE
from memnorm.errors import NothingToConvert, OptionError
from memnorm.norms.mabn import is_centred
from memnorm.norms.two_way import TwoWayBatchNorm


class Block(nn.Sequential):
    pass


class Head(nn.Sequential):
    pass


def detector():
    """Norms: backbone.stem, backbone.layer1.0, backbone.layer1.1, head.0 (1-d), neck."""
    backbone = nn.ModuleDict({"stem": nn.BatchNorm2d(3), "layer1": Block(nn.BatchNorm2d(3), nn.BatchNorm2d(3))})
    return nn.ModuleDict({"backbone": backbone, "head": Head(nn.BatchNorm1d(3)), "neck": nn.BatchNorm2d(3)})


STEM, FIRST, SECOND = "backbone.stem", "backbone.layer1.0", "backbone.layer1.1"
BACKBONE = [STEM, FIRST, SECOND]
EVERY = [*BACKBONE, "head.0", "neck"]
RULES = {
    "name of a layer": ("neck", ["neck"]),
    "name of a part": ("backbone", BACKBONE),
    "name of an inner part": ("backbone.layer1", [FIRST, SECOND]),
    "pattern": ("backbone.*", BACKBONE),
    "pattern of a part": ("*layer?", [FIRST, SECOND]),
    "pattern at the end": ("*.0", [FIRST, "head.0"]),
    "class of a layer": (nn.BatchNorm1d, ["head.0"]),
    "class of a part": (Block, [FIRST, SECOND]),
    "function": (lambda name, layer: layer.num_features == 3 and name.endswith("m"), [STEM]),
    "list": (["neck", Head, lambda name, _: name == STEM], [STEM, "head.0", "neck"]),
    "tuple": (("neck", "neck"), ["neck"]),
}


def converted(model):
    return [name for name, module in model.named_modules() if isinstance(module, MemorizedBatchNorm)]


@pytest.mark.parametrize(("rule", "names"), RULES.values(), ids=RULES)
def test_include_chooses_layers(rule, names):
    assert converted(memnorm.convert(detector(), include=rule)) == names


@pytest.mark.parametrize(("rule", "names"), RULES.values(), ids=RULES)
def test_exclude_leaves_layers_as_they_are(rule, names):
    model = detector()
    before = dict(model.named_modules())
    memnorm.convert(model, exclude=rule)
    assert converted(model) == [name for name in EVERY if name not in names]
    assert all(model.get_submodule(name) is before[name] for name in names)


def test_exclude_wins_over_include():
    assert converted(memnorm.convert(detector(), include="backbone", exclude="*.layer1")) == [STEM]


def test_no_rule_to_exclude_excludes_nothing():
    assert converted(memnorm.convert(detector(), exclude=[])) == EVERY


def test_a_layer_with_two_names_is_found_by_both():
    shared = nn.BatchNorm2d(3)
    for name in ("a", "b"):
        model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": nn.BatchNorm2d(3)})
        memnorm.convert(model, include=name)
        assert isinstance(model["a"], MemorizedBatchNorm)
        assert model["b"][0] is model["a"]
        assert type(model["c"]) is nn.BatchNorm2d


def test_the_class_of_the_model_itself_chooses_nothing():
    assert converted(memnorm.convert(detector(), include=nn.ModuleDict)) == BACKBONE


def test_a_layer_that_is_the_model_can_be_chosen_by_class():
    assert isinstance(memnorm.convert(nn.BatchNorm2d(3), include=nn.BatchNorm2d), MemorizedBatchNorm)


def test_excluded_layers_are_not_named_in_the_warning():
    model = nn.ModuleDict({"frozen": FrozenBatchNorm2d(3), "bn": nn.BatchNorm2d(3)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memnorm.convert(model, exclude="frozen")


def test_some_frozen_layers_can_stay_frozen():
    model = nn.ModuleDict({"stem": FrozenBatchNorm2d(3), "layer4": FrozenBatchNorm2d(3)})
    memnorm.convert(model, "two_way", frozen="convert", exclude="stem")
    assert [type(module) for module in model.values()] == [FrozenBatchNorm2d, memnorm.TwoWayBatchNorm2d]


# Errors


@pytest.mark.parametrize("option", ["include", "exclude"])
@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("bakbone", "matches no batch norm of ModuleDict. Did you mean 'backbone'"),
        ("backbone.layer2.*", "Did you mean 'backbone.layer1'"),
        ("zzz", "matches no batch norm of ModuleDict. print(memnorm.summary(model)) lists"),
        ("", "matches no batch norm of ModuleDict."),
        (["neck", "hed"], "'hed' matches no batch norm of ModuleDict. Did you mean 'head'"),
        (nn.BatchNorm3d, "BatchNorm3d matches no batch norm of ModuleDict. Its norms are BatchNorm1d, BatchNorm2d."),
    ],
    ids=["name", "pattern", "nothing near", "empty", "in a list", "class"],
)
def test_a_rule_that_matches_nothing_is_an_error_that_names_what_is_near(option, rule, words):
    with pytest.raises(OptionError, match=rf"convert: {option}=.*{re.escape(words)}"):
        memnorm.convert(detector(), **{option: rule})


def test_a_function_that_includes_nothing_is_an_error():
    with pytest.raises(OptionError, match=r"include=.*lambda.* matches no batch norm"):
        memnorm.convert(detector(), include=lambda name, module: False)


@pytest.mark.parametrize("option", ["include", "exclude"])
@pytest.mark.parametrize("rule", [3, ["neck", None], {"neck": 1}], ids=str)
def test_a_rule_of_another_type_is_an_error(option, rule):
    words = rf"convert: {option} must be a name, a glob pattern, a class, a function \(name, module\) -> bool, or a"
    with pytest.raises(OptionError, match=words):
        memnorm.convert(detector(), **{option: rule})


@pytest.mark.parametrize("rules", [{"exclude": "*"}, {"include": "neck", "exclude": "neck"}, {"include": []}], ids=str)
def test_rules_that_leave_nothing_are_an_error_with_the_reasons(rules):
    with pytest.raises(NothingToConvert, match=r"include and exclude leave no .*: backbone\.stem \((exclude|not in)"):
        memnorm.convert(detector(), **rules)


def test_a_wrong_rule_does_not_change_the_model():
    model = memnorm.convert(detector(), exclude="neck")
    before = str(memnorm.summary(model))
    with pytest.raises(OptionError):
        memnorm.convert(model, include="nack")
    assert str(memnorm.summary(model)) == before


# What was chosen


def notes(model):
    return {row.name: row.note for row in memnorm.summary(model).layers}


def test_a_summary_says_which_rule_left_a_layer_out():
    model = memnorm.convert(detector(), include=["backbone", Head], exclude="*.layer1")
    found = notes(model)
    assert found["neck"] == "left out: not in include='backbone', Head"
    assert found[FIRST] == found[SECOND] == "left out: exclude='*.layer1'"
    assert found[STEM].startswith("remembers 0 of 20 batches")


def test_the_next_conversion_decides_again():
    model = memnorm.convert(detector(), exclude="neck")
    memnorm.convert(model, exclude="head")
    assert notes(model)["head.0"].startswith("remembers")
    assert isinstance(model["neck"], MemorizedBatchNorm)
    assert not [key for key in vars(model["neck"]) if "left_out" in key]
    assert notes(memnorm.to_batchnorm(model))["neck"] == "plain, can be converted"


def test_to_batchnorm_leaves_no_mark():
    model = memnorm.to_batchnorm(memnorm.convert(detector(), exclude="neck"))
    assert notes(model)["neck"] == "plain, can be converted"
    assert vars(model["neck"]).keys() == vars(nn.BatchNorm2d(3)).keys()


def test_an_excluded_sync_batch_norm_is_saved_without_a_warning():
    model = memnorm.convert(nn.Sequential(nn.BatchNorm2d(3), nn.SyncBatchNorm(3)), exclude=nn.SyncBatchNorm)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.state_dict()


def test_a_summary_shows_the_channels_of_a_frozen_layer():
    assert [row.channels for row in memnorm.summary(nn.Sequential(FrozenBatchNorm2d(3))).layers] == [3]


# Two norms in one model


def test_replaced_layers_are_still_reported_when_another_part_has_a_norm_without_memory():
    net = memnorm.convert(memnorm.convert(small_net(), include="1"), "group", include="4")
    stripped = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    with pytest.warns(memnorm.MemnormWarning, match="came after memnorm.convert"):
        stripped.state_dict()


def test_layers_of_another_norm_stay_with_what_belongs_to_it():
    net = memnorm.convert(small_net(), "two_way", include="1")
    memnorm.convert(net, "mbn", include="4")
    assert [type(net[i]) for i in (1, 4)] == [memnorm.TwoWayBatchNorm2d, memnorm.MemorizedBatchNorm2d]
    assert ATTRIBUTE in vars(net[0])
    assert ATTRIBUTE not in vars(net[3])


def test_a_layer_that_changes_its_norm_loses_what_belonged_to_the_old_one():
    net = memnorm.convert(small_net(), "mabn")
    memnorm.convert(net, "mbn", include="4")
    assert is_centred(net[0])
    assert not parametrize.is_parametrized(net[3])


def test_a_model_with_two_norms_trains_and_returns():
    net = memnorm.convert(memnorm.convert(small_net(), "two_way", include="1"), "mbn", include="4")
    trained(net)
    assert isinstance(net[1], TwoWayBatchNorm)
    x = images(3, seed=5)
    before = copy.deepcopy(net).eval()(x)
    torch.testing.assert_close(memnorm.to_batchnorm(net).eval()(x), before, rtol=0, atol=0)
