"""The compiled module's own look, where somebody pulls the layer's tensors from under it or hands it something else."""

import copy
import datetime
import gc
import weakref

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
    """A layer whose buffers the kernels have checked."""
    layer = layer_for(shape, **options)
    for seed in range(2):
        layer(data(shape, seed))
    assert layer._handle is not None
    return layer


def prepared(known, **changed):
    """What `train_prepared` takes."""
    usual = {"layer": known, "ranks": (4,), "x": data(SHAPE, 3), "weight": known.weight, "bias": known.bias}
    return list({**usual, "residual": None, "relu": False, **changed}.values())


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
        {"handle": (*[None] * 12, datetime.datetime_CAPI)},
        {"handle": datetime.datetime_CAPI},
        {"decay": "0.9"},
        {"eps": None},
        {"prior_weight": None},
    ],
    ids=["another capsule inside", "another capsule", "decay", "eps", "prior_weight"],
)
def test_wrong_attributes_of_a_layer_raise(wrong):
    layer = known_layer()
    before = copy.deepcopy(layer.state_dict())
    vars(layer).update({"_handle" if name == "handle" else name: value for name, value in wrong.items()})
    with pytest.raises((TypeError, ValueError)):
        layer(data(SHAPE, 3))
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


@pytest.mark.parametrize("wrong", [{"layer": 1}, {"layer": None}, {"ranks": [4]}], ids=str)
def test_wrong_arguments_raise(wrong):
    with pytest.raises(TypeError, match="a layer and a tuple"):
        cpu.module().train_prepared(*prepared(known_layer(), **wrong))


@pytest.mark.parametrize("unusual", [{"x": None}, {"weight": 1}, {"residual": 1}, {"ranks": ("4",)}, {"x": 1}], ids=str)
def test_tensors_that_the_kernels_cannot_read_are_refused(unusual):
    layer = known_layer()
    before = copy.deepcopy(layer.state_dict())
    assert cpu.module().train_prepared(*prepared(layer, **unusual)) is None
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def called(saved):
    """What the forward of a layer without a backward memory leaves for its backward."""
    return (saved, False, 1e-5, None, None, False)


def test_a_backward_of_something_else_is_refused():
    x, saved, wanted = data(SHAPE, 0), bytearray(4 * 20), (True, True, True, False)
    backward = cpu.module().backward
    with torch.no_grad():
        assert backward(called(saved), (True, False, False, False), x, None, 1, None) is None
        assert backward(called(saved[1:]), wanted, x, None, x, torch.ones(3)) is None
        for wrong in (None, (saved,), [saved, False, 1e-5, None, None, False]):
            with pytest.raises(TypeError, match="unexpected arguments"):
                backward(wrong, wanted, x, None, x, torch.ones(3))
        with pytest.raises(TypeError, match="expected 6 arguments"):
            backward(0)


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
    x, saved = data(SHAPE, 0), bytearray(4 * 20)
    with Full(room), torch.no_grad(), pytest.raises(MemoryError, match="full"):
        cpu.module().backward(called(saved), (True,) * 4, x, x, x, torch.ones(3))


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
