"""A user's model by `package.module:factory`: what the factory is given, and what is said when something is wrong."""

import importlib
import os
import sys
import textwrap

import pytest
import torch
from torch import nn

from memnorm.lab import models
from memnorm.lab.errors import UsageError

NETS = """
    import torch
    from torch import nn

    seen = {}

    def net(classes=10, channels=3, norm=nn.BatchNorm2d):
        return nn.Sequential(nn.Conv2d(channels, 4, 3), norm(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                             nn.Linear(4, classes))

    def full(num_classes, in_channels, norm_layer, depth=1):
        seen.update(num_classes=num_classes, in_channels=in_channels, norm_layer=norm_layer, depth=depth)
        return net(num_classes, in_channels, norm_layer)

    def keyword_only(*, classes): return net(classes)
    def nothing(): return net()
    def hands_on(width=3, **kwargs):
        seen.update(kwargs=kwargs)
        return net(kwargs["num_classes"])

    class Net(nn.Module):
        def __init__(self, num_classes):
            super().__init__()
            self.body = net(num_classes)
        def forward(self, x): return self.body(x)
        @classmethod
        def make(cls, num_classes): return cls(num_classes)

    def needs_more(num_classes, secret): return net(num_classes)
    def positional(num_classes, /): return net(num_classes)
    def type_error(num_classes): return "a" + num_classes
    def value_error(num_classes): raise ValueError("no weights here")
    def silent_error(num_classes): raise AssertionError
    def a_string(num_classes): return "a model"
    def the_class(num_classes): return Net
    def pair(num_classes):
        model = net(num_classes)
        model.append(Twice())
        return model
    def frozen(num_classes):
        model = net(num_classes)
        model[1].eval()
        return model
    def random_input(num_classes): return Noise(net(num_classes))

    class Twice(nn.Module):
        def forward(self, x): return x, x

    class Noise(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.body = body
        def forward(self, x): return self.body(x + torch.rand(x.shape))

    built = nn.Linear(2, 2)
    number = 3
"""


@pytest.fixture
def nets(tmp_path, monkeypatch):
    """A folder with the module `users_nets`, as the current one; it is on the path only if the lab puts it there."""
    (tmp_path / "users_nets.py").write_text(textwrap.dedent(NETS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("users_"):
            del sys.modules[name]
    importlib.invalidate_caches()


def build(name, *, classes=7, image_shape=(3, 8, 8), **options):
    return models.build(name, classes=classes, image_shape=image_shape, **options)


def refusal(name, **request):
    with pytest.raises(UsageError) as caught:
        build(name, **request)
    return str(caught.value)


def seen():
    return sys.modules["users_nets"].seen


@pytest.mark.parametrize("factory", ["full", "keyword_only", "hands_on", "Net", "Net.make"])
def test_a_factory_in_the_current_folder_makes_a_model_for_the_classes(nets, factory):
    model = build(f"users_nets:{factory}")
    assert isinstance(model, nn.Module)
    assert model(torch.zeros(2, 3, 8, 8)).shape == (2, 7)


def test_a_module_inside_packages_is_found(nets):
    (nets / "users_package" / "inner").mkdir(parents=True)
    (nets / "users_package" / "inner" / "deep.py").write_text((nets / "users_nets.py").read_text())
    assert isinstance(build("users_package.inner.deep:keyword_only"), nn.Module)


def test_a_factory_is_given_what_its_signature_names(nets):
    def norm_layer(channels):
        return nn.GroupNorm(1, channels)

    build("users_nets:full", image_shape=(1, 8, 8), norm_layer=norm_layer, depth=5)
    assert seen() == {"num_classes": 7, "in_channels": 1, "norm_layer": norm_layer, "depth": 5}


def test_a_factory_with_kwargs_is_given_the_number_of_classes_and_the_options_only(nets):
    build("users_nets:hands_on", extra=1)
    assert seen()["kwargs"] == {"num_classes": 7, "extra": 1}


def test_a_factory_with_kwargs_is_given_a_norm_layer_that_was_asked_for(nets):
    build("users_nets:hands_on", norm_layer=nn.InstanceNorm2d)
    assert seen()["kwargs"]["norm_layer"] is nn.InstanceNorm2d


def test_a_norm_layer_is_not_dropped_in_silence(nets):
    assert "takes no norm_layer" in refusal("users_nets:keyword_only", norm_layer=nn.InstanceNorm2d)


def test_the_first_import_does_not_change_the_weights(nets):
    first, second = (build("users_nets:Net") for _ in range(2) if torch.manual_seed(3))
    assert all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))


def test_the_trial_leaves_modes_statistics_and_the_random_state_alone(nets):
    torch.manual_seed(3)
    model = build("users_nets:random_input")
    drawn = torch.rand(3)
    torch.manual_seed(3)
    twin = sys.modules["users_nets"].random_input(7)
    assert torch.equal(torch.rand(3), drawn)
    assert all(torch.equal(one, model.state_dict()[name]) for name, one in twin.state_dict().items())
    assert all(module.training for module in model.modules())


def test_the_trial_leaves_a_layer_in_eval_that_was_put_there(nets):
    model = build("users_nets:frozen")
    assert [module.training for module in model] == [True, False, True, True, True]


@pytest.mark.parametrize(
    "name", ["users_nets:", ":full", "users_nets:full:more", "nets/users_nets.py:full", "users nets:full", "a..b:c"]
)
def test_a_name_of_another_form_is_refused_with_the_form(nets, name):
    message = refusal(name)
    assert f"model {name!r}" in message
    assert "my_nets.small:make" in message


@pytest.mark.parametrize(
    ("module", "missing"), [("users_absent", "users_absent"), ("users_absent.nets", "users_absent")]
)
def test_a_missing_module_is_named_with_the_folder_that_was_searched(nets, module, missing):
    message = refusal(f"{module}:full")
    assert f"no module {missing!r}" in message
    assert os.getcwd() in message
    assert "PYTHONPATH" in message


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def (", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("from torch import not_there", "ImportError"),
        ("import users_not_installed", "ModuleNotFoundError: No module named 'users_not_installed'"),
    ],
)
def test_a_module_that_fails_to_import_is_refused_with_its_error(nets, source, words):
    (nets / "users_broken.py").write_text(source + "\n")
    assert f"importing users_broken raised {words}" in refusal("users_broken:full")


@pytest.mark.parametrize(
    ("factory", "request_", "words"),
    [
        ("ful", {}, ["users_nets has no 'ful'; it has full"]),
        ("built", {}, ["built is Linear; name a function"]),
        ("number", {}, ["number is int; name a function"]),
        ("a_string", {}, ["must return a torch.nn.Module; got str"]),
        ("the_class", {}, ["got type"]),
        ("type_error", {}, ["type_error(num_classes=7) raised TypeError: can only concatenate str"]),
        ("value_error", {}, ["raised ValueError: no weights here"]),
        ("silent_error", {}, ["raised AssertionError"]),
        ("needs_more", {}, ["missing 1 required positional argument: 'secret'"]),
        ("positional", {}, ["positional() raised TypeError"]),
        (
            "full",
            {"depht": 2},
            ["unexpected keyword argument 'depht'", "further parameters go into the model's options"],
        ),
        ("full", {"num_classes": 5}, ["got shape (2, 5)"]),  # an option overrides what would be filled in
        ("nothing", {}, ["tensor of shape (2, 7)", "got shape (2, 10)", "num_classes"]),
        ("pair", {}, ["got tuple"]),
        ("keyword_only", {"image_shape": (1, 8, 8)}, ["two images of shape 1×8×8", "RuntimeError", "in_channels"]),
    ],
)
def test_a_factory_that_makes_no_fitting_model_is_refused_with_the_reason(nets, factory, request_, words):
    message = refusal(f"users_nets:{factory}", **request_)
    assert message.startswith(f"model users_nets:{factory}: ")
    assert all(one in message for one in words)
