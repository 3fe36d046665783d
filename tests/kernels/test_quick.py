"""The compiled module's own look at a layer's tensors: it sees what the look from Python sees, and leaves the rest."""

import gc
import weakref

import pytest
import torch
from helpers.common import randn
from helpers.kernels import LAYOUTS, assert_near, data, in_torch, layer_for, needs_kernels
from torch import nn
from torch.nn.utils import parametrize

from memnorm.errors import InputError
from memnorm.kernels import cpu

pytestmark = needs_kernels
SHAPE = (4, 3, 5, 6)
SHAPES = [(6, 5), (5, 4, 6), SHAPE, (2, 3, 4, 3, 5), (2, 17, 1, 1), (3, 1, 2, 2)]


class Looks:
    """How often `train_layer` and `backward_layer` were asked, and what they left to Python."""

    def __init__(self, patch):
        self.asked, self.left = [], []
        for name in ("train_layer", "backward_layer"):
            patch.setattr(cpu.module(), name, self._watching(name, getattr(cpu.module(), name)))

    def _watching(self, name, function):
        def call(*arguments):
            found = function(*arguments)
            (self.left if found is None else self.asked).append(name)
            return found

        return call


@pytest.fixture
def looks(monkeypatch):
    return Looks(monkeypatch)


def step(layer, x, residual=None):
    """Output and gradients, as a mapping."""
    x = x.detach().requires_grad_()
    y = layer(x, activation=None if residual is None else "relu", residual=residual)
    wanted = [x, *layer.parameters()]
    gradients = torch.autograd.grad(y, wanted, randn(*x.shape, seed=3).to(x.dtype))
    return {str(index): one.detach() for index, one in enumerate((y, *gradients))}


def by_addresses(layer, *arguments):
    """The same without that look."""
    layer.__dict__.pop("_known_memory", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu.module(), "backward_layer", lambda *_: None)
        return step(layer, *arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels last", "offset"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_residual", [False, True])
def test_it_computes_what_addresses_from_python_compute_bit_for_bit(shape, dtype, layout, with_residual, looks):
    one, other = layer_for(shape, dtype), layer_for(shape, dtype)
    for seed in range(4):
        x = LAYOUTS[layout](data(shape, seed, dtype))
        residual = LAYOUTS[layout](data(shape, seed + 9, dtype)) if with_residual else None
        ours, theirs = step(one, x, residual), by_addresses(other, x, residual)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())
    assert looks.asked.count("train_layer") == 3, "from the second batch on"


@pytest.mark.parametrize("layout", ["transposed", "batch inside", "sliced", "expanded images", "expanded values"])
def test_layouts_that_need_a_copy_are_left_to_python(layout, looks):
    layer = layer_for(SHAPE)
    for seed in range(3):
        step(layer, LAYOUTS[layout](data(SHAPE, seed)))
    assert "train_layer" not in looks.asked
    assert "train_layer" in looks.left


def replaced(layer):
    layer.weight = nn.Parameter(layer.weight.detach() * 2)


def other_data(layer):
    layer.bias.data = layer.bias.data + 1


def narrow(layer):
    layer.weight.data = layer.weight.data.to(torch.float16)


def expanded(layer):
    layer.weight.data = layer.weight.data[:1].expand(3)


def computed(layer):
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    parametrize.register_parametrization(layer, "weight", Doubled())


def without(layer):
    layer.weight, layer.bias = None, None


def without_bias(layer):
    layer.bias = None


def other_rules(layer):
    layer.decay, layer.prior_weight, layer.eps = 0.5, 2.0, 0.1


def evenly(layer):
    layer.momentum = None


def silent(layer):
    layer.recording = False


@pytest.mark.parametrize(
    "change",
    [replaced, other_data, narrow, expanded, computed, without, without_bias, other_rules, evenly, silent],
    ids=lambda one: one.__name__,
)
def test_what_changed_between_two_batches_is_seen(change):
    def trained():
        layer = layer_for(SHAPE, memory_size=3)
        for seed in range(3):
            step(layer, data(SHAPE, seed))
        change(layer)
        return {**step(layer, data(SHAPE, 3)), **step(layer, data(SHAPE, 4))}, layer.state_dict()

    found, state = trained()
    with in_torch():
        wanted, wanted_state = trained()
    assert_near(found, wanted, 1e-5)
    assert_near(state, wanted_state, 1e-5)


def test_a_parameter_cut_short_in_place_is_an_error():
    layer = layer_for(SHAPE)
    step(layer, data(SHAPE, 0))
    layer.weight.data = layer.weight.data[:2]
    with pytest.raises(InputError, match="2 values"):
        layer(data(SHAPE, 1))


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(4, 5, 5, 6), "3 channels"),
        (torch.zeros(4, 3, 5), "4-D"),
        (torch.zeros(SHAPE, dtype=torch.int64), "float"),
        (torch.zeros(0, 3, 5, 6), "empty"),
    ],
)
def test_bad_input_is_refused_in_the_words_of_the_first_time(x, words):
    layer = layer_for(SHAPE)
    messages = []
    for seed in range(2):
        with pytest.raises(Exception, match=words) as caught:
            layer(x)
        messages.append(str(caught.value))
        step(layer, data(SHAPE, seed))
    assert messages[0] == messages[1]


def test_a_weight_that_someone_computed_is_not_held():
    layer = layer_for(SHAPE)
    step(layer, data(SHAPE, 0))
    source = torch.ones(3, requires_grad=True)
    weight = source * 2
    torch.func.functional_call(layer, {"weight": weight}, (data(SHAPE, 1),))
    alive = weakref.ref(weight)
    del weight
    gc.collect()
    assert alive() is None


def test_the_gradient_may_come_in_another_layout_or_kind(looks):
    one, other = layer_for(SHAPE), layer_for(SHAPE)
    for seed in range(2):
        x = data(SHAPE, seed)
        gradients = []
        for layer, layout in ((one, "contiguous"), (other, "channels last")):
            leaf = x.clone().requires_grad_()
            layer(leaf).backward(LAYOUTS[layout](randn(*SHAPE, seed=3).float()))
            gradients.append(leaf.grad)
        torch.testing.assert_close(*gradients)
    assert looks.left.count("backward_layer") == 2


def test_saved_tensors_that_come_back_in_another_layout_do_not_matter():
    """Hooks that offload or compress may give a contiguous tensor back for a channels-last one."""
    plain, hooked = layer_for(SHAPE), layer_for(SHAPE)
    x = LAYOUTS["channels last"](data(SHAPE, 0))
    wanted = step(plain, x)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.contiguous(), lambda tensor: tensor):
        found = step(hooked, x)
    assert_near(found, wanted, 1e-6)


def test_without_its_introduction_it_says_so_and_wrong_arguments_are_errors():
    kernels = cpu.module()
    for arguments in ((), (1, 2, 3, 4, 5, 6), ({}, {}, False, 3, 4, ())):
        with pytest.raises((TypeError, KeyError)):
            kernels.know(*arguments)
    with pytest.raises((TypeError, ValueError)):
        kernels.train_layer(*[None] * 14)
    with pytest.raises(TypeError):
        kernels.backward_layer(None)
