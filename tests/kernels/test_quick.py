"""Layers whose tensors change between two batches: the kernels see every change."""

import gc
import weakref

import pytest
import torch
from helpers.common import randn
from helpers.kernels import LAYOUTS, assert_near, data, in_torch, layer_for, needs_kernels
from torch import nn
from torch.nn.utils import parametrize

from memnorm.errors import InputError

pytestmark = needs_kernels
SHAPE = (4, 3, 5, 6)


def step(layer, x, residual=None):
    """Output and gradients, as a mapping."""
    x = x.detach().requires_grad_()
    y = layer(x, activation=None if residual is None else "relu", residual=residual)
    wanted = [x, *layer.parameters()]
    gradients = torch.autograd.grad(y, wanted, randn(*x.shape, seed=3).to(x.dtype))
    return {str(index): one.detach() for index, one in enumerate((y, *gradients))}


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


def test_the_gradient_may_come_in_another_layout_or_kind():
    one, other = layer_for(SHAPE), layer_for(SHAPE)
    for seed in range(2):
        x = data(SHAPE, seed)
        gradients = []
        for layer, layout in ((one, "contiguous"), (other, "channels last")):
            leaf = x.clone().requires_grad_()
            layer(leaf).backward(LAYOUTS[layout](randn(*SHAPE, seed=3).float()))
            gradients.append(leaf.grad)
        torch.testing.assert_close(*gradients)


def test_saved_tensors_that_come_back_in_another_layout_do_not_matter():
    """Hooks that offload or compress may give a contiguous tensor back for a channels-last one."""
    plain, hooked = layer_for(SHAPE), layer_for(SHAPE)
    x = LAYOUTS["channels last"](data(SHAPE, 0))
    wanted = step(plain, x)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.contiguous(), lambda tensor: tensor):
        found = step(hooked, x)
    assert_near(found, wanted, 1e-6)
