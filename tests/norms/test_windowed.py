"""Norms that remember iterations: mabn, online and cbn."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from helpers.common import images, labels, small_net
from torch import nn
from torch.nn.utils import parametrize

import memnorm
from memnorm.norms.cbn import CrossIterationBatchNorm

OPTIONS = {"mabn": {"window": 12, "warmup": 1, "correct_after": 2}, "online": {"momentum": 0.1}, "cbn": {"window": 3}}
IN_BACKWARD = {"mabn": {"memory_product", "memory_product_images"}, "online": {"control_mean", "control_scale"}}
each_norm = pytest.mark.parametrize("name", OPTIONS)
each_in_backward = pytest.mark.parametrize("name", IN_BACKWARD)


def loss(net, seed, run=nn.Module.__call__):
    x = images(4, seed=seed, dtype=net[8].weight.dtype).requires_grad_()
    return nn.functional.cross_entropy(run(net, x), labels(4, seed=seed))


def trained(name, dtype=torch.float64, **options):
    net = memnorm.convert(small_net(dtype=dtype), name, **{**OPTIONS[name], **options})
    train(net, range(4))
    return net


def train(net, seeds, run=nn.Module.__call__):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for seed in seeds:
        optimizer.zero_grad()
        loss(net, seed, run).backward()
        optimizer.step()


def state(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def changed(module, before):
    """The buffers of the first norm that have changed."""
    now = module.state_dict()
    return {name[2:] for name in now if name.startswith("1.") and not torch.equal(now[name], before[name])}


@each_norm
def test_copies_and_loaded_checkpoints_train_alike(name):
    net = trained(name)
    loaded = trained(name)
    loaded.load_state_dict(net.state_dict())
    copies = [copy.deepcopy(net), loaded]
    if name != "mabn":  # torch does not pickle its parametrized layers
        copies.append(pickle.loads(pickle.dumps(net)))
    for one in (net, *copies):
        train(one, range(4, 7))
    for one in copies:
        torch.testing.assert_close(state(one), state(net), rtol=0, atol=0)


@each_norm
def test_a_reset_empties_the_memory(name):
    net = trained(name)
    fresh = memnorm.convert(small_net(dtype=torch.float64), name, **OPTIONS[name])
    net[1].reset_running_stats()
    own = {key: value for key, value in net[1].named_buffers() if "slope" not in key}  # whose shape cbn learns
    torch.testing.assert_close(own, {key: dict(fresh[1].named_buffers())[key] for key in own}, rtol=0, atol=0)
    assert not any(value.any() for key, value in net[1].named_buffers() if "slope" in key)


@each_norm
def test_a_plain_checkpoint_empties_the_memory(name):
    net, plain = trained(name), small_net(seed=1, dtype=torch.float64)
    plain(images(4, seed=0, dtype=torch.float64))
    net.load_state_dict(plain.state_dict())
    assert not any(net[1].get_buffer(key).any() for key in net[1].MEMORY)
    torch.testing.assert_close(net[1].running_var, plain[1].running_var, rtol=0, atol=0)


@each_norm
def test_a_narrow_network_remembers_in_float32(name):
    net = trained(name, torch.float32).bfloat16()
    output = net(images(4, seed=9).bfloat16())
    output.sum().backward()
    assert output.dtype == torch.bfloat16
    kept = {net[1].get_buffer(key).dtype for key in net[1].MEMORY}
    assert kept <= {torch.float32, torch.int64}
    assert {net.double()[1].get_buffer(key).dtype for key in net[1].MEMORY} <= {torch.float64, torch.int64}


@each_norm
def test_double_forward_records_every_statistic_once_per_step(name):
    net = trained(name)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    with memnorm.double_forward(net, optimizer):
        for seed in range(4, 7):
            before = state(net)
            optimizer.zero_grad()
            loss(net, seed).backward()
            assert changed(net, before) == IN_BACKWARD.get(name, set())
            optimizer.step()
            assert int(net[1].num_batches_tracked) == seed + 1
    if name == "cbn":
        mean = net[0](images(4, seed=6, dtype=torch.float64)).mean((0, 2, 3))
        torch.testing.assert_close(net[1].memory_mean[(int(net[1].memory_next) - 1) % 2], mean, rtol=0, atol=1e-12)


@each_in_backward
def test_recording_off_holds_for_the_direction_that_runs_inside(name):
    net = trained(name)
    before = state(net)
    with memnorm.recording(net, False):
        loss(net, 7).backward()
        assert not changed(net, before)
        later = loss(net, 8)
    later.backward()
    assert changed(net, before) == IN_BACKWARD[name]


@each_in_backward
def test_a_gradient_that_is_not_finite_is_not_recorded(name):
    net = trained(name)
    with memnorm.recording(net, False):
        later = loss(net, 7)
    before = state(net)
    later.backward(torch.tensor(torch.nan, dtype=torch.float64))
    assert not changed(net, before)


def test_cbn_keeps_no_activations_alive():
    net = trained("cbn")
    with torch.no_grad():
        out = net[0](images(4, seed=9, dtype=torch.float64))
        net[1](out)
    gone = weakref.ref(out)
    del out
    gc.collect()
    assert gone() is None


# Surgery


@pytest.mark.parametrize("name", ["mabn", "cbn"])
@pytest.mark.parametrize("back", [memnorm.to_batchnorm, lambda net: memnorm.convert(net, "bn")], ids=["plain", "bn"])
def test_the_way_back_undoes_the_surgery_and_evaluates_the_same(name, back):
    net, x = trained(name), images(4, seed=9, dtype=torch.float64)
    wanted = copy.deepcopy(net).eval()(x)
    net = back(net).eval()
    torch.testing.assert_close(net(x), wanted, rtol=0, atol=1e-12)
    assert not any(parametrize.is_parametrized(module) or module._forward_hooks for module in net.modules())
    assert set(net.state_dict()) == set(small_net().state_dict())


def test_a_second_conversion_performs_the_surgery_once():
    net = memnorm.convert(trained("mabn"), "mabn")
    assert [len(net[place].parametrizations.weight) for place in (0, 3)] == [1, 1]
    net = memnorm.convert(trained("cbn"), "cbn")
    assert [len(net[place]._forward_hooks) for place in (0, 3, 8)] == [1, 1, 1]
    assert isinstance(net[1], CrossIterationBatchNorm)


def test_online_norm_cannot_become_batch_norm_if_it_does_more_in_eval():
    with pytest.raises(memnorm.MemnormError, match="computes something else than batch norm in eval mode"):
        memnorm.to_batchnorm(trained("online"))
    net, x = trained("online", compensation=None), images(4, seed=9, dtype=torch.float64)
    wanted = copy.deepcopy(net).eval()(x)
    torch.testing.assert_close(memnorm.to_batchnorm(net).eval()(x), wanted, rtol=0, atol=1e-12)
