"""`memnorm.distributed` in a single process; tests/distributed/ uses several."""

import copy
import pickle

import pytest
import torch
from helpers.common import randn, small_net
from helpers.double_forward import batch, sgd, train_step
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memnorm
from memnorm.distributed import IGNORED, exchange_memory, keep_local
from memnorm.errors import DTypeError, MemnormError, NothingToRecord, OptionError

Layer = memnorm.MemorizedBatchNorm1d


@pytest.fixture
def group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def exchanged(**options):
    """A net that starts with a memorized layer, its optimizer, and the handle."""
    net = nn.Sequential(Layer(3, **options), nn.Linear(3, 1))
    optimizer = sgd(net)
    return net, optimizer, exchange_memory(net, optimizer)


def means(net):
    return net[0].memory_mean[net[0].memory_count > 0]


@pytest.mark.parametrize("sync", [True, "group"])
@pytest.mark.parametrize("initialised", [True, False])
def test_a_synchronised_layer_in_one_process_equals_an_ordinary_one(sync, initialised, request):
    world = request.getfixturevalue("group") if initialised or sync == "group" else None
    ours, other = Layer(3, sync=world if sync == "group" else sync), Layer(3)
    for seed in range(3):
        x = batch(seed)
        torch.testing.assert_close(ours(x), other(x), rtol=0, atol=0)
    torch.testing.assert_close(ours.state_dict(), other.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("sync", [1, "memory", None, [0, 1]])
def test_sync_is_a_bool_or_a_group(sync):
    with pytest.raises(OptionError, match="sync must be False, True for all processes, or a process group"):
        memnorm.convert(small_net(), sync=sync)


def test_sync_is_an_option_that_can_be_renewed_and_taken_away():
    net = memnorm.convert(small_net(), sync=True)
    assert net[1].sync is True
    assert "sync=True" in repr(net[1])
    assert memnorm.convert(net, decay=0.5)[1].sync is True
    assert memnorm.convert(net, sync=False)[1].sync is False
    assert "sync" not in vars(memnorm.to_batchnorm(memnorm.convert(net, sync=True))[1])


def test_copies_keep_their_group_and_pickles_use_all_processes(group):
    net = memnorm.convert(small_net(), sync=group)
    assert copy.deepcopy(net)[1].sync.group is group
    assert pickle.loads(pickle.dumps(net))[1].sync is True


def test_ddp_does_not_broadcast_the_memories_of_a_converted_model(group):
    net = memnorm.convert(nn.Sequential(small_net(), nn.BatchNorm1d(5), nn.InstanceNorm1d(5, track_running_stats=True)))
    wrapped = DistributedDataParallel(net)
    assert {name.rpartition(".")[0] for name in wrapped.named_module_buffers} == {"2"}  # the foreign one


def test_ddp_does_not_broadcast_the_memory_of_a_compiled_model(group):
    wrapped = DistributedDataParallel(torch.compile(memnorm.convert(small_net()), backend="eager"))
    assert wrapped.named_module_buffers == {}


def test_a_part_that_was_converted_alone_can_be_kept_local_in_the_whole():
    whole = nn.Sequential(memnorm.convert(small_net()), nn.BatchNorm1d(5))
    assert not hasattr(whole, IGNORED)
    keep_local(whole)
    assert "0.1.memory_mean" in getattr(whole, IGNORED)
    assert not any(name.startswith("1.") for name in getattr(whole, IGNORED))


@pytest.mark.parametrize("back", [memnorm.to_batchnorm, lambda net: memnorm.convert(net, "brn")])
def test_ddp_broadcasts_plain_batch_norms_again(back):
    net = small_net()
    setattr(net, IGNORED, ["8.weight"])  # the user's own
    memnorm.convert(net)
    assert "1.running_mean" in getattr(net, IGNORED)
    assert getattr(back(net), IGNORED) == ["8.weight"]


def test_a_model_that_is_itself_a_norm_is_kept_local_too(group):
    assert DistributedDataParallel(memnorm.convert(nn.BatchNorm1d(3))).named_module_buffers == {}


def test_an_exchange_makes_one_entry_per_step():
    net, optimizer, _ = exchanged()
    for step in range(3):
        optimizer.zero_grad()
        for micro in (2 * step, 2 * step + 1):
            net(batch(micro)).sum().backward()
        assert len(means(net)) == step  # nothing is remembered before the step
        optimizer.step()
    both = [torch.cat([batch(2 * step), batch(2 * step + 1)]) for step in (2, 1, 0)]
    torch.testing.assert_close(means(net), torch.stack([x.mean(0) for x in both]), rtol=0, atol=1e-6)
    assert net[0].memory_count.tolist()[:3] == [4.0] * 3  # as one of the batches


@pytest.mark.parametrize("first", ["exchange", "double_forward"])
def test_the_exchange_waits_for_the_second_forward_in_any_order_of_attaching(first):
    net = nn.Sequential(nn.Linear(3, 3), Layer(3), nn.Linear(3, 1))
    optimizer = sgd(net)
    attach = [lambda: exchange_memory(net, optimizer), lambda: memnorm.double_forward(net, optimizer)]
    for one in attach if first == "exchange" else reversed(attach):
        one()
    train_step(net, optimizer, batch(0))
    torch.testing.assert_close(net[1].memory_mean[0], net[0](batch(0)).mean(0).detach(), rtol=0, atol=1e-6)
    assert int(net[1].num_batches_tracked) == 1


def test_what_is_recorded_by_hand_after_the_step_can_be_exchanged_by_hand():
    net, optimizer, handle = exchanged()
    train_step(net, optimizer, batch(0))
    memnorm.rerecord(net, batch(1))
    assert len(means(net)) == 1
    handle.exchange()
    assert len(means(net)) == 2


def test_layers_record_their_own_batches_after_remove():
    net, optimizer, handle = exchanged()
    with handle:
        train_step(net, optimizer, batch(0))
    net(batch(1))
    assert len(means(net)) == 2
    train_step(net, optimizer, batch(2))
    assert len(means(net)) == 3
    exchange_memory(net, optimizer)  # and can be attached again


def test_copies_and_pickles_have_no_exchange():
    net, _, _ = exchanged()
    net(batch(0))
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        other(batch(1))
        torch.testing.assert_close(means(other), batch(1).mean(0)[None], rtol=0, atol=1e-6)


def test_layers_with_new_options_are_still_exchanged():
    net, optimizer, _ = exchanged()
    memnorm.convert(net, memory_size=2)
    for step in range(3):
        train_step(net, optimizer, batch(step))
    torch.testing.assert_close(means(net), torch.stack([batch(2).mean(0), batch(1).mean(0)]), rtol=0, atol=1e-6)


def test_to_batchnorm_ends_the_exchange():
    net, optimizer, _ = exchanged()
    memnorm.to_batchnorm(net)
    train_step(net, optimizer, batch(0))
    assert type(net[0]) is nn.BatchNorm1d


def test_removed_layers_are_reported_at_the_next_step():
    net, optimizer, _ = exchanged()
    net[0] = nn.BatchNorm1d(3)
    with pytest.raises(NothingToRecord, match="no memorized layers any more"):
        train_step(net, optimizer, batch(0))


def test_torchs_tools_that_accumulate_statistics_write_immediately():
    net, _, _ = exchanged()
    torch.optim.swa_utils.update_bn([randn(4, 3, seed=0, dtype=torch.float32)], net)
    assert int(net[0].num_batches_tracked) == 1


@pytest.mark.parametrize(
    ("net", "error", "message"),
    [
        (small_net(), NothingToRecord, "Sequential has no memorized layer"),
        (memnorm.convert(small_net(), sync=True), OptionError, "converted with sync"),
        (memnorm.convert(nn.Sequential(nn.BatchNorm1d(3, momentum=None))), OptionError, "momentum=None"),
    ],
)
def test_a_model_without_exchangeable_layers_is_an_error(net, error, message):
    with pytest.raises(error, match=message):
        exchange_memory(net, sgd(net))


def test_a_second_exchange_is_an_error():
    net, optimizer, _ = exchanged()
    with pytest.raises(MemnormError, match="exchanged already"):
        exchange_memory(net, optimizer)


def test_an_exchange_whose_optimizer_no_longer_steps_is_reported():
    net = nn.Sequential(Layer(3), nn.Linear(3, 1))
    exchange_memory(net, sgd(net), max_waiting=3)
    other = sgd(net)
    for step in range(3):
        train_step(net, other, batch(step))
    with pytest.raises(MemnormError, match=r"recorded 3 batches without a step .* remove\(\) on the handle"):
        train_step(net, other, batch(3))


def test_the_second_argument_is_an_optimizer():
    net = memnorm.convert(small_net())
    with pytest.raises(DTypeError, match=r"expected a torch\.optim\.Optimizer; got list"):
        exchange_memory(net, [sgd(net)])
