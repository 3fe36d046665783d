"""Torch's own tools on networks with each of the norms that record: export, tracing, autocast, averages, files."""

import copy

import pytest
import torch
from helpers.common import assert_same_state, images, labels, small_net
from helpers.export import MANY, assert_folded, in_onnx_runtime, quantized
from helpers.versions import TORCH
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import memnorm
from memnorm import norms

NAMES = [name for name in norms.available() if norms.get(name).records]
each_norm = pytest.mark.parametrize("name", NAMES)
IN_BACKWARD = ["mabn", "online", "two_way"]  # these record there, too


def network(name, *, seed=0, steps=3):
    options = {"total_steps": 20} if norms.get(name).scales_with_run else {}
    if name == "two_way":
        options["center"] = None  # which changes what is accumulated, not what torch.func returns
    return trained(memnorm.convert(small_net(seed=seed), name, **options), range(steps))


def trained(net, seeds, dtype=None):
    """With Double-Forward."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with memnorm.double_forward(net, optimizer):
        for seed in seeds:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                loss = F.cross_entropy(net(images(6, seed=seed)), labels(6, seed=seed))
            loss.backward()
            optimizer.step()
    return net


@each_norm
def test_an_exported_network_evaluates_the_same_with_operations_of_torch_alone(name):
    net = network(name).eval()
    program = torch.export.export(net, (images(4, seed=0),), dynamic_shapes=(MANY,))
    used = {str(node.target).split(".")[0] for node in program.graph.nodes if node.op == "call_function"}
    assert used <= {"aten", "_operator"}
    assert not program.graph_signature.buffers_to_mutate
    x = images(7, seed=9)
    torch.testing.assert_close(program.module()(x), net(x), rtol=0, atol=1e-5)


@each_norm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_statistics_are_float32_near_those_without_and_written_in_place(name, dtype):
    narrow, wide = network(name), network(name)
    before = dict(narrow.named_buffers())
    trained(narrow, range(10, 13), dtype)
    trained(wide, range(10, 13))
    for key, buffer in narrow.named_buffers():
        assert buffer is before[key], key
        assert buffer.dtype == wide.get_buffer(key).dtype, key
        torch.testing.assert_close(buffer, wide.get_buffer(key), rtol=0.05, atol=0.05, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "online"])  # more than batch norm in eval
def test_an_average_evaluates_as_its_plain_twin(name):
    net = network(name)
    averaged = AveragedModel(net, use_buffers=True, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for seed in (10, 11):
        averaged.update_parameters(trained(net, [seed]))
    x = images(5, seed=9)
    plain = memnorm.to_batchnorm(copy.deepcopy(averaged.module))
    assert {type(layer) for layer in plain.modules() if "Norm" in type(layer).__name__} == {nn.BatchNorm2d}
    torch.testing.assert_close(averaged.eval()(x), plain.eval()(x), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch about itself, and about what it leaves uncompiled
@pytest.mark.parametrize("name", [name for name in NAMES if name != "cbn"])  # it is plain batch norm when compiled
def test_a_compiled_training_is_the_eager_one_and_compiles_in_the_first_step_only(name):
    torch._dynamo.reset()
    eager = network(name)
    inner = copy.deepcopy(eager)
    compiled = torch.compile(inner, fullgraph=name not in IN_BACKWARD, backend="aot_eager")
    before, seen = torch._dynamo.utils.counters["stats"]["unique_graphs"], []
    for seed in range(10, 14):
        trained(eager, [seed])
        trained(compiled, [seed])
        seen.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)
    assert seen == [seen[0]] * 4
    assert_same_state(inner, eager, atol=1e-5, rtol=1e-7)  # W is some hundreds: atol is below float32


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", IN_BACKWARD)
def test_a_full_graph_that_would_not_record_in_backward_is_an_error(name):
    torch._dynamo.reset()
    compiled = torch.compile(network(name), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="records in backward" if TORCH > (2, 8) else "MemnormError"):
        trained(compiled, [10])


@each_norm
def test_a_functional_call_records_into_the_buffers_passed_in_and_no_others(name):
    net, twin, kept = network(name), network(name), network(name)
    _optimizer = torch.optim.SGD(twin.parameters())  # without one, two-way memory counts the backward as an update
    parameters, buffers = dict(net.named_parameters()), {key: one.clone() for key, one in net.named_buffers()}
    x, target = images(6, seed=10), labels(6, seed=10)
    F.cross_entropy(torch.func.functional_call(net, (parameters, buffers), (x,)), target).backward()
    F.cross_entropy(twin(x), target).backward()
    assert_same_state(net, kept)
    for key, buffer in twin.named_buffers():
        torch.testing.assert_close(buffers[key], buffer, rtol=0, atol=0, msg=lambda m, k=key: f"{k}: {m}")
    for key, parameter in twin.named_parameters():
        torch.testing.assert_close(parameters[key].grad, parameter.grad, rtol=0, atol=0)


@pytest.mark.slow
@each_norm
def test_onnx_runtime_computes_what_the_network_does_on_any_number_of_images(name, tmp_path):
    net = network(name).eval()
    computed = in_onnx_runtime(net, tmp_path)
    for x in (images(7, seed=9), images(1, seed=3)):
        torch.testing.assert_close(computed(x), net(x).detach(), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "online"])  # more than batch norm in eval
def test_quantization_of_a_network_made_plain_folds_every_norm(name):
    net = network(name).eval()
    narrow = quantized(memnorm.to_batchnorm(copy.deepcopy(net)))
    assert_folded(narrow)
    x = images(16, seed=9)
    with torch.no_grad():
        assert (narrow(x) - net(x)).std() < 0.1 * net(x).std()
