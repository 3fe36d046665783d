"""The compiled module's own look, where somebody pulls the layer's tensors from under it or hands it something else."""

import datetime
import gc
import weakref

import numpy as np
import pytest
import torch
from helpers.common import randn
from helpers.kernels import assert_near, data, in_torch, layer_for, needs_kernels
from torch import nn
from torch.overrides import TorchFunctionMode

from memnorm.errors import InputError
from memnorm.kernels import cpu

pytestmark = needs_kernels
SHAPE = (4, 3, 5, 6)


def known_layer(shape=SHAPE, **options):
    """A layer that the compiled module looks at by itself."""
    layer = layer_for(shape, **options)
    for seed in range(2):
        layer(data(shape, seed))
    assert layer._known_memory.handle is not None
    return layer


def arguments(layer, **changed):
    """What `train_layer` takes."""
    usual = {
        "known": layer._known_memory.handle,
        "buffers": layer._buffers,
        "parameters": layer._parameters,
        "x": data(SHAPE, 3),
        "residual": None,
        "rectify": False,
        "ranks": (4,),
        "threads": 1,
        "recording": True,
        "eps": 1e-5,
        "decay": 0.9,
        "prior_weight": 1.0,
        "prior_always": False,
        "evenly": False,
    }
    return list({**usual, **changed}.values())


@pytest.mark.parametrize("knows", ["hook", "attribute"])
def test_a_model_that_its_own_parameter_knows_is_collected(knows):
    model = nn.Sequential(known_layer())
    if knows == "hook":
        model[0].weight.register_hook(lambda grad, known=model: grad * len(known))
    else:
        model[0].weight.owner = model
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"known": None},
        {"known": (*[None] * 11, datetime.datetime_CAPI)},
        {"known": datetime.datetime_CAPI},
        {"ranks": [4]},
        {"ranks": ("4",)},
        {"threads": "1"},
        {"eps": None},
    ],
    ids=["nothing", "another capsule inside", "another capsule", "list", "text", "threads", "eps"],
)
def test_what_is_no_argument_of_its_own_is_an_error_that_says_so(wrong):
    layer = known_layer()
    with pytest.raises((TypeError, ValueError)):
        cpu.module().train_layer(*arguments(layer, **wrong))


@pytest.mark.parametrize("unusual", [{"buffers": []}, {"parameters": None}, {"x": None}, {"buffers": {}}], ids=str)
def test_what_may_be_of_use_to_others_is_left_to_them(unusual):
    assert cpu.module().train_layer(*arguments(known_layer(), **unusual)) is None


def test_a_backward_of_something_else_is_left_or_refused():
    x, saved, wanted = data(SHAPE, 0), bytearray(4 * 19), (True, True, True, False)
    backward = cpu.module().backward_layer
    with torch.no_grad():
        assert backward(saved, x, None, 1, None, (True, False, False, False), 1, None, None) is None
        with pytest.raises(TypeError):
            backward(saved, x, None, x, torch.ones(3), wanted, "1", None, None)


class Full(TorchFunctionMode):
    """Memory is out once, after `room` tensors."""

    def __init__(self, room):
        super().__init__()
        self.room = room

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.empty_like:
            self.room -= 1
            if self.room == -1:
                raise MemoryError("full")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("room", range(4))
def test_the_error_of_an_allocation_is_the_one_that_arrives(room):
    x, saved = data(SHAPE, 0), bytearray(4 * 19)
    with Full(room), torch.no_grad(), pytest.raises(MemoryError, match="full"):
        cpu.module().backward_layer(saved, x, x, x, torch.ones(3), (True,) * 4, 1, None, None)


@pytest.mark.parametrize("on", [True, 1])
def test_a_record_is_told_to_autograd_however_the_switch_is_written(on):
    layer = known_layer()
    layer.recording = on
    before = layer.running_mean._version
    layer(data(SHAPE, 2))
    assert int(layer.num_batches_tracked) == 3
    assert layer.running_mean._version == before + 1


def cut_memory(layer):
    for name in ("memory_mean", "memory_var", "memory_count"):
        buffer = layer.get_buffer(name)
        buffer.resize_(2, *buffer.shape[1:])
    layer.memory_size = 2


def narrow_in_place(layer):
    layer.weight.data.view(torch.bfloat16)[:3] = 1.5
    layer.weight.data = layer.weight.data.view(torch.bfloat16)[:3]


@pytest.mark.parametrize("change", [cut_memory, narrow_in_place], ids=lambda one: one.__name__)
def test_a_change_that_keeps_tensor_and_address_is_seen(change):
    def trained():
        layer = layer_for(SHAPE, memory_size=5)
        for seed in range(2):
            layer(data(SHAPE, seed))
        change(layer)
        outputs = {str(seed): layer(data(SHAPE, seed)).detach() for seed in range(2, 6)}
        return {**outputs, "mean": layer.running_mean, "weight": layer.running_weight}

    found = trained()
    with in_torch():
        wanted = trained()
    assert_near(found, wanted, 1e-5)


def test_the_place_of_a_parameter_is_not_given_to_another_while_it_is_known():
    """The allocator likes to: half() and then bfloat16() would put other data where the weight was."""
    layer, memory = layer_for(SHAPE), np.ones(3, np.float32)
    layer.weight.data = torch.from_numpy(memory)
    layer(data(SHAPE, 0))
    alive = weakref.ref(memory)
    del memory
    layer.weight.data = layer.weight.data.half()
    assert alive() is not None
    layer(data(SHAPE, 1))
    assert alive() is None


def test_a_gradient_that_torch_only_imagines_is_zero():
    layer, x = known_layer(), data(SHAPE, 2).requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x), x, torch._efficientzerotensor(SHAPE))
    assert torch.equal(gradient, torch.zeros(SHAPE))


@pytest.mark.parametrize("freed", ["input", "saved input", "weight", "running_mean"])
def test_a_freed_storage_is_an_error_and_no_crash(freed):
    layer, x = known_layer(), data(SHAPE, 2).requires_grad_()
    y = layer(x)
    tensor = x if "input" in freed else getattr(layer, freed)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(InputError, match="storage was freed"):
        torch.autograd.backward(y, randn(*SHAPE, seed=1).float()) if freed == "saved input" else layer(x)
