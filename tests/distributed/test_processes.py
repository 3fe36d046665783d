"""Real processes under torchrun: what plain DDP, sync=True and the exchange do to parameters and memories."""

from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from helpers.common import images, leaf, randn
from helpers.ranks import STEPS, everything, loss, net, results, sgd, state_of, torchrun, trajectory, two_way_net
from helpers.versions import newer_than
from torch import nn

import memnorm
from memnorm.functional import Moments
from memnorm.layers import MemorizedBatchNorm

PROGRAM = Path(__file__).with_name("ranks.py")
TRAININGS = ("plain", "plain_two_way", "joint_single", "joint_double", "exchanged_single", "exchanged_double")
LAYERS = 2  # memorized ones of the net


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids="{} processes".format)
def found(request, tmp_path_factory):
    """The results of each rank, by the name of its program in ranks.py."""
    folder = tmp_path_factory.mktemp("ranks")
    torchrun(str(PROGRAM), str(folder), processes=request.param)
    return results(folder, request.param)


def memories(state):
    return {name: value for name, value in state.items() if "memory" in name or "running" in name}


def parameters(state):
    return {name: value for name, value in state.items() if name.endswith(("weight", "bias")) and "running" not in name}


def image_of(rank, step):
    return images(4, seed=100 * rank + step, dtype=torch.float64) + rank


def same(ours, theirs, atol=0.0):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("name", TRAININGS)
def test_every_rank_has_the_same_parameters_after_every_step(found, name):
    for states in zip(*(seen[name] for seen in found), strict=True):
        for state in states[1:]:
            same(parameters(state["state"]), parameters(states[0]["state"]))


def test_under_plain_ddp_every_rank_remembers_its_own_batches(found):
    """The weights of the first convolution are known: they are the initial ones."""
    first = net()
    for rank, seen in enumerate(found):
        mean = first[0](image_of(rank, 0)).mean((0, 2, 3))
        same(seen["plain"][0]["state"]["1.memory_mean"][0], mean.detach(), atol=1e-12)
        assert (seen["plain"][-1]["state"]["1.memory_count"] == 4 * 6 * 6).all()
    ends = [seen["plain"][-1]["state"]["1.memory_mean"] for seen in found]
    assert (ends[0] - ends[1]).abs().min() > 1e-3  # no entry of one is an entry of the other


def test_under_plain_ddp_both_memories_of_two_way_layers_are_local_and_fade_with_every_step(found):
    weights = [step["state"]["1.backward_weight"] for step in found[0]["plain_two_way"]]
    expected = torch.tensor(0.0, dtype=torch.float64)
    for weight in weights:
        expected = two_way_net()[1].decay * (expected + 4 * 6 * 6)
        same(weight, expected, atol=1e-10)
    first, second = (seen["plain_two_way"][-1]["state"] for seen in found[:2])
    for name in ("running_mean", "backward_mean", "backward_product"):
        assert (first[f"1.{name}"] - second[f"1.{name}"]).abs().max() > 1e-6, name


@pytest.mark.parametrize("scheme", ["single", "double"])
def test_sync_is_one_process_with_the_joint_batch(found, scheme):
    """Uneven parts, an empty one in every fourth step, over more steps than the memory is long."""
    model = net()
    optimizer = sgd(model)
    if scheme == "double":
        memnorm.double_forward(model, optimizer)
    for step, alone in enumerate(trajectory(model, optimizer, everything(len(found)))):
        together = [seen[f"joint_{scheme}"][step] for seen in found]
        same(torch.cat([one["output"] for one in together]), alone["output"], atol=1e-10)
        for one in together:
            same(one["gradients"], alone["gradients"], atol=1e-10)
            same(one["state"], alone["state"], atol=1e-10)


def test_sync_is_one_process_with_the_joint_batch_for_two_way_memory_as_well(found):
    """DDP averages gradients, so each rank multiplies its loss by the number of ranks, and with it the means."""
    model = two_way_net(decay=None)  # the images of an update are those of all ranks
    ranks = len(found)
    for step, alone in enumerate(trajectory(model, sgd(model), everything(ranks))):
        for name in ("1", "4"):
            for vector in ("backward_mean", "backward_product"):
                alone["state"][f"{name}.{vector}"] *= ranks
        together = [seen["joint_two_way"][step] for seen in found]
        same(torch.cat([one["output"] for one in together]), alone["output"], atol=1e-10)
        for one in together:
            same(one["gradients"], alone["gradients"], atol=1e-10)
            same(one["state"], alone["state"], atol=1e-10)


def test_two_way_layers_exchange_both_memories_and_count_every_value(found):
    ranks, values = len(found), 4 * 6 * 6
    for step in range(STEPS):
        states = [seen["exchanged_two_way"][step]["state"] for seen in found]
        for state in states[1:]:
            same(state, states[0])
        expected = ranks * values * sum(0.8**age for age in range(1, step + 2))
        assert float(states[0]["1.running_weight"]) == pytest.approx(expected)
        assert float(states[0]["1.backward_weight"]) == pytest.approx(expected)
    first = two_way_net()[0]
    inputs = torch.cat([first(image_of(rank, 0)) for rank in range(ranks)])
    same(found[0]["exchanged_two_way"][0]["state"]["1.running_mean"], inputs.mean((0, 2, 3)).detach(), atol=1e-12)
    assert found[0]["exchanged_two_way"][-1]["state"]["1.backward_product"].abs().min() > 1e-6


def replicas_that_share(ranks, double):
    """`exchange_memory`, literally: the inputs of a layer on all ranks are one set of values."""
    replicas = [net() for _ in range(ranks)]
    optimizers = [sgd(replica) for replica in replicas]
    for step in range(STEPS):
        inputs = {}
        for rank, (model, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            optimizer.zero_grad()
            with memnorm.recording(model, False), watching(model, {} if double else inputs):
                scores = model(image_of(rank, step))
            nn.functional.cross_entropy(scores, torch.arange(4) % 5).backward()
        for twins in zip(*(model.parameters() for model in replicas), strict=True):
            mean = torch.stack([twin.grad for twin in twins]).mean(0)
            for twin in twins:
                twin.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        for rank, model in enumerate(replicas if double else []):
            with torch.no_grad(), memnorm.recording(model, False), watching(model, inputs):
                model(image_of(rank, step))
        for model in replicas:
            for name, layer in memorized(model).items():
                layer._remember(union_of(inputs[name]))
        yield replicas


def union_of(batches):
    """Moments of all values, with the weight of the average batch."""
    values = torch.cat(batches).transpose(0, 1).flatten(1)
    return Moments(values.mean(1), values.var(1, correction=0), values.shape[1] / len(batches))


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
    for step, replicas in enumerate(replicas_that_share(len(found), scheme == "double")):
        for rank, replica in enumerate(replicas):
            state = found[rank][f"exchanged_{scheme}"][step]["state"]
            same(state, replica.state_dict(), atol=1e-10)
        same(
            memories(found[0][f"exchanged_{scheme}"][step]["state"]),
            memories(found[1][f"exchanged_{scheme}"][step]["state"]),
        )


@newer_than((2, 8), "its profiler does not see the reduction of the gradients")
def test_collectives_of_a_step(found):
    """BN broadcasts its buffers; a memory needs only the reduction of the gradients; an exchange adds one gather."""
    counts = found[0]["collectives"]
    gradients = {"gloo:all_reduce": 1}
    assert counts["bn"].keys() == {"gloo:all_reduce", "gloo:broadcast"}
    assert counts["plain"] == gradients
    assert counts["exchange"] == gradients | {"gloo:all_gather": 1}
    assert counts["sync"] == {"gloo:all_gather": LAYERS, "gloo:all_reduce": 1 + LAYERS}


def test_the_exchange_communicates_outside_the_forward(found):
    counts = found[0]["collectives"]
    assert counts["forward of sync"] == {"gloo:all_gather": LAYERS}
    assert counts["forward of exchange"] == counts["forward of plain"] == {}


def test_accumulation_with_no_sync_is_one_process_that_accumulates(found):
    """Each joint micro-batch is an entry."""
    model = net()
    optimizer = sgd(model)
    memnorm.double_forward(model, optimizer)
    batch = everything(len(found))
    for step in range(4):
        optimizer.zero_grad()
        for micro in (2 * step, 2 * step + 1):
            x, y, share = batch(micro)
            loss(model(x), y, share=share / 2).backward()
        optimizer.step()
        for seen in found:
            same(seen["accumulated_joint"][step], model.state_dict(), atol=1e-10)


def test_the_exchange_makes_one_entry_of_the_accumulated_batches_of_all_ranks(found):
    """The second forward of the first step records with the new weights."""
    ranks = len(found)
    state = found[0]["accumulated_exchange"][0]
    model = net()
    model.load_state_dict(parameters(state), strict=False)
    inputs = [model[0](image_of(rank, micro)).detach() for rank in range(ranks) for micro in (0, 1)]
    entry = union_of(inputs)
    for seen in found:
        first, last = seen["accumulated_exchange"][0], seen["accumulated_exchange"][-1]
        same(first["1.memory_mean"][0], entry.mean, atol=1e-12)
        same(first["1.memory_var"][0], entry.var, atol=1e-12)
        assert first["1.memory_count"].tolist() == [4 * 6 * 6, 0, 0, 0]
        assert last["1.memory_count"].tolist() == [4 * 6 * 6] * 4
        assert int(last["1.num_batches_tracked"]) == 4
        same(memories(last), memories(found[0]["accumulated_exchange"][-1]))


def test_second_derivatives_are_those_of_one_process(found):
    ranks = range(len(found))
    layer = memnorm.MemorizedBatchNorm2d(3, dtype=torch.float64)
    layer(torch.cat([randn(4, 3, 2, 2, seed=50 + rank) + 1 for rank in ranks]))
    x = torch.cat([part(rank) for rank in ranks]).requires_grad_()
    probe = torch.cat([randn(*part(rank).shape, seed=70 + rank) for rank in ranks])
    (first,) = torch.autograd.grad((layer(x).square() * probe).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    for name, value in (("first", first), ("second", second)):
        same(torch.cat([seen["second_derivative"][name] for seen in found]), value.detach(), atol=1e-10)


def part(rank):
    return leaf((3 + 2 * rank, 3, 2, 2), seed=rank).detach()


def test_activation_checkpointing_changes_nothing(found):
    for seen in found:
        same(seen["checkpointed"]["checkpointed"], seen["checkpointed"]["plain"], atol=1e-12)


def test_a_group_shares_its_batch_and_a_copy_stays_in_it(found):
    members = 2
    for rank, seen in enumerate(found):
        values = torch.cat([part(one) for one in range(members)] if rank < members else [part(rank)])
        state = seen["group_of_two"]["state"]
        same(state["memory_mean"][0], values.mean((0, 2, 3)), atol=1e-12)
        assert state["memory_count"][0] == len(values) * 4
        assert seen["group_of_two"]["pickled"] is True


def test_an_exchange_is_among_the_members_of_its_group(found):
    for members in ([0, 1], [0]):
        for rank, seen in enumerate(found):
            together = members if rank in members else [rank]
            values = torch.cat([part(one) for one in together])
            state = seen["exchanged_in_groups"][str(members)]
            same(state["memory_mean"][0], values.mean((0, 2, 3)), atol=1e-12)
            same(state["memory_var"][0], values.var((0, 2, 3), correction=0), atol=1e-12)
            assert state["memory_count"].tolist() == [len(values) * 4 / len(together)] + [0] * 19


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_joint_layer_keeps_wide_statistics_of_narrow_data(found, dtype):
    together = [seen["narrow"][str(dtype)] for seen in found]
    x = torch.cat([part(rank) for rank in range(len(found))]).to(dtype).requires_grad_()
    layer = memnorm.MemorizedBatchNorm2d(3)
    y = layer(x)
    y.float().square().sum().backward()
    step = torch.finfo(dtype).eps
    for name, value in (("output", y.detach()), ("gradient", x.grad)):
        joint = torch.cat([one[name] for one in together])
        assert joint.dtype == dtype
        torch.testing.assert_close(joint, value, rtol=step, atol=4 * step)
    for one in together:
        same(one["state"], layer.state_dict(), atol=1e-5)
        assert one["state"]["memory_mean"].dtype == torch.float32


def test_an_empty_joint_batch_passes_and_a_single_value_is_an_error_on_every_rank(found):
    for seen in found:
        empty, single = seen["scant"]
        assert empty == "nothing"
        assert "more than 1 value per channel" in single


def test_without_statistics_it_is_batch_norm_of_the_joint_batch(found):
    x = torch.cat([part(rank) for rank in range(len(found))])
    expected = nn.functional.batch_norm(x, None, None, training=True)
    same(torch.cat([seen["without_statistics"] for seen in found]), expected, atol=1e-12)


def test_broadcast_memory_copies_the_memory_of_rank_0(found):
    model = net()
    model(image_of(0, 0))
    for seen in found:
        same(seen["handed_out"], state_of(model), atol=1e-12)


def test_with_every_norm_that_records_all_ranks_have_the_same_parameters(found):
    assert len(found[0]["others"]) > 5
    for seen in found[1:]:
        same(seen["others"], found[0]["others"])


def test_a_batch_that_is_not_finite_does_not_enter_the_exchanged_memory(found):
    values = torch.cat([part(rank) for rank in range(1, len(found))])
    count = len(values) * 4 / (len(found) - 1)
    for seen in found:
        state = seen["spoilt"]
        same(state["memory_mean"][0], values.mean((0, 2, 3)), atol=1e-12)
        same(state["running_var"], values.var((0, 2, 3), correction=0), atol=1e-12)
        assert state["memory_count"].tolist() == [count] + [0] * 19
        assert int(state["num_batches_tracked"]) == 1
