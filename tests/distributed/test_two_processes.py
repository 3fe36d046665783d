"""Two real processes under torchrun: what plain DDP, sync=True and the exchange do to parameters and memories."""

from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from rankkit import STEPS, everything, net, results, sgd, torchrun, trajectory
from support import images
from torch import nn

import memnorm
from memnorm.functional import Moments
from memnorm.layers import MemorizedBatchNorm

RANKS = 2
PROGRAM = Path(__file__).with_name("ranks.py")
NAMES = ("plain", "joint_single", "joint_double", "exchanged_single", "exchanged_double", "collectives")
LAYERS = 2  # memorized ones of the net


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each process saw, by the name of the training."""
    folder = tmp_path_factory.mktemp("ranks")
    torchrun(PROGRAM, str(folder), *NAMES, processes=RANKS)
    return results(folder, RANKS)


def memories(state):
    return {name: value for name, value in state.items() if "memory" in name or "running" in name}


def parameters(state):
    return {name: value for name, value in state.items() if name.endswith(("weight", "bias")) and "running" not in name}


def same(ours, theirs, atol=0.0):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "collectives"])
def test_every_rank_has_the_same_parameters_after_every_step(found, name):
    for one, other in zip(found[0][name], found[1][name], strict=True):
        same(parameters(one["state"]), parameters(other["state"]))


def test_under_plain_ddp_every_rank_remembers_its_own_batches(found):
    """The first layer sees the images through a convolution of rank 0's first weights: known here."""
    first = net()
    for rank in range(RANKS):
        inputs = [images(4, seed=100 * rank + step, dtype=torch.float64) + rank for step in range(STEPS)]
        mean = first[0](inputs[0]).mean((0, 2, 3))
        same(found[rank]["plain"][0]["state"]["1.memory_mean"][0], mean.detach(), atol=1e-12)
        assert (found[rank]["plain"][-1]["state"]["1.memory_count"] > 0).all()
    ends = [memories(seen["plain"][-1]["state"])["1.memory_mean"] for seen in found]
    assert (ends[0] - ends[1]).abs().min() > 1e-3  # no entry of one is an entry of the other


@pytest.mark.parametrize("scheme", ["single", "double"])
def test_sync_is_one_process_with_the_joint_batch(found, scheme):
    """Uneven parts, an empty one in every fourth step, over more steps than the memory is long."""
    model = net()
    optimizer = sgd(model)
    if scheme == "double":
        memnorm.double_forward(model, optimizer)
    for step, alone in enumerate(trajectory(model, optimizer, everything(RANKS))):
        together = [seen[f"joint_{scheme}"][step] for seen in found]
        same(torch.cat([one["output"] for one in together]), alone["output"], atol=1e-10)
        for one in together:
            same(one["gradients"], alone["gradients"], atol=1e-10)
            same(one["state"], alone["state"], atol=1e-10)


def replicas_that_share(double):
    """What `exchange_memory` promises, literally: the inputs of a layer in all processes as one set of values."""
    replicas = [net() for _ in range(RANKS)]
    optimizers = [sgd(replica) for replica in replicas]
    for step in range(STEPS):
        inputs = {}
        for rank, (model, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            optimizer.zero_grad()
            x = images(4, seed=100 * rank + step, dtype=torch.float64) + rank
            with memnorm.recording(model, False), watching(model, inputs if not double else {}):
                scores = model(x)
            nn.functional.cross_entropy(scores, torch.arange(4) % 5).backward()
        for twins in zip(*(model.parameters() for model in replicas), strict=True):
            mean = torch.stack([twin.grad for twin in twins]).mean(0)
            for twin in twins:
                twin.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        for rank, model in enumerate(replicas if double else []):
            x = images(4, seed=100 * rank + step, dtype=torch.float64) + rank
            with torch.no_grad(), memnorm.recording(model, False), watching(model, inputs):
                model(x)
        for model in replicas:
            for name, layer in memorized(model).items():
                values = torch.cat(inputs[name]).transpose(0, 1).flatten(1)
                moments = Moments(values.mean(1), values.var(1, correction=0), values.shape[1] / RANKS)
                layer._remember(moments)
        yield replicas


def memorized(model):
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, MemorizedBatchNorm)}


@contextmanager
def watching(model, inputs):
    """Keep the inputs of the memorized layers."""

    def keep(name):
        return lambda _layer, args: inputs.setdefault(name, []).append(args[0].detach())

    handles = [layer.register_forward_pre_hook(keep(name)) for name, layer in memorized(model).items()]
    yield
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("scheme", ["single", "double"])
def test_an_exchanged_memory_holds_the_values_of_all_ranks_as_one_batch_per_step(found, scheme):
    for step, replicas in enumerate(replicas_that_share(scheme == "double")):
        for rank, replica in enumerate(replicas):
            state = found[rank][f"exchanged_{scheme}"][step]["state"]
            same(state, replica.state_dict(), atol=1e-10)
        same(
            memories(found[0][f"exchanged_{scheme}"][step]["state"]),
            memories(found[1][f"exchanged_{scheme}"][step]["state"]),
        )


def test_collectives_of_a_step(found):
    """BN has its buffers copied from rank 0; plain DDP has nothing but the gradients; an exchange adds one."""
    counts = found[0]["collectives"]
    gradients = {"gloo:all_reduce": 1}
    assert counts["bn"].keys() == {"gloo:all_reduce", "gloo:broadcast"}
    assert counts["plain"] == gradients
    assert counts["exchange"] == gradients | {"gloo:all_gather": 1}
    assert counts["sync"] == {"gloo:all_gather": LAYERS, "gloo:all_reduce": 1 + LAYERS}
