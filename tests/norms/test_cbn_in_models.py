"""Cross-iteration batch norm in a model: how it finds the layer before it, copies, checkpoints, precision."""

import gc
import pickle
import weakref
from copy import deepcopy

import pytest
import torch
from helpers.cbn import FEEDERS, fed, read_memory, step
from helpers.common import assert_same_output_and_gradients, images, labels, leaf, randn, small_net
from helpers.window import assert_states_equal, converted, state
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memnorm
from memnorm.errors import OptionError
from memnorm.norms.base import restored
from memnorm.norms.cbn import ENTRY, NOTE, CrossIterationBatchNorm, note_source, unwatch_sources, watch_sources


def test_without_a_layer_before_it_it_is_batch_norm():
    ours = CrossIterationBatchNorm(3, window=4, dtype=torch.float64)
    torchs = nn.BatchNorm1d(3, dtype=torch.float64)
    for seed in range(4):
        assert_same_output_and_gradients(ours, torchs, leaf((8, 3), seed=seed), atol=1e-12)
    assert int(ours.memory_filled) == 0


@pytest.mark.parametrize(
    "between", [nn.ReLU(inplace=True), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.5, inplace=True)], ids=str
)
def test_something_in_between_is_noticed(between):
    net, shape = fed(window=4)
    net.insert(1, between)
    for seed in range(3):
        step(net, leaf(shape, seed=seed), seed)
    assert int(net[2].memory_filled) == 0


def test_an_input_changed_in_place_is_noticed():
    net, shape = fed(window=4)
    x = leaf(shape, seed=0).detach()
    with torch.no_grad():
        out = net[0](x)
        x.zero_()
        net[1](out)
    assert int(net[1].memory_filled) == 0


def test_a_norm_after_two_layers_remembers_only_the_first():
    net, shape = fed(window=4)
    other = deepcopy(net[0])
    x = leaf(shape, seed=0)
    net(x)
    y = net[1](other(x))
    plain = nn.BatchNorm2d(4, dtype=torch.float64)
    plain.load_state_dict({name: net[1].state_dict()[name] for name in plain.state_dict()})
    torch.testing.assert_close(y, plain(other(x)), rtol=0, atol=1e-12)
    assert int(net[1].memory_filled) == 1


def test_a_copy_after_a_layer_of_another_shape_has_an_empty_memory():
    net, shape = fed(window=4)
    for seed in range(2):
        step(net, leaf(shape, seed=seed), seed)
    other, shape = fed("3-d")
    other[1] = deepcopy(net[1])
    plain = nn.BatchNorm3d(4, dtype=torch.float64)
    plain.load_state_dict({name: other[1].state_dict()[name] for name in plain.state_dict()})
    x = leaf(shape, seed=9)
    torch.testing.assert_close(other(x), plain(other[0](x)), rtol=0, atol=1e-12)
    assert (int(other[1].memory_filled), int(other[1].memory_next)) == (1, 1)


def test_notes_are_left_in_training_only_and_taken_away():
    net, shape = fed(window=4)
    x = leaf(shape, seed=0)
    out = net[0](x)
    assert hasattr(out, NOTE)
    net[1](out)
    assert not hasattr(out, NOTE)
    assert not hasattr(net[0].eval()(x), NOTE)
    assert not hasattr(net[0].train()(x[0]), NOTE)
    with torch.inference_mode():
        assert not hasattr(net[0](x), NOTE)
    assert hasattr(net[0](input=x), NOTE)


def test_a_norm_that_has_run_keeps_no_activations_alive():
    net, shape = fed(window=4)
    x = leaf(shape, seed=0).detach()
    with torch.no_grad():
        out = net[0](x)
        net[1](out)
    gone = weakref.ref(out)
    del out
    gc.collect()
    assert gone() is None
    assert net[1]._feed is None


def test_after_double_forward_the_newest_entry_is_of_the_weights_after_the_step():
    net = converted(small_net(dtype=torch.float64), ENTRY, window=3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with memnorm.double_forward(net, optimizer):
        for seed in range(4):
            optimizer.zero_grad()
            x = images(4, seed=seed, dtype=torch.float64)
            F.cross_entropy(net(x), labels(4, seed=seed)).backward()
            optimizer.step()
            assert int(net[1].memory_filled) == min(seed + 1, 2)
            torch.testing.assert_close(net[1].memory_mean[seed % 2], net[0](x).mean((0, 2, 3)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_forward_has_the_same_gradients_and_state(reentrant):
    plain, shape = fed(window=3)
    other = deepcopy(plain)
    for seed in range(5):
        x, probe = leaf(shape, seed=seed), randn(4, 4, 4, 3, seed=70 + seed)
        point = x.detach().clone().requires_grad_()
        (plain(x) * probe).sum().backward()
        (checkpoint(other, point, use_reentrant=reentrant) * probe).sum().backward()
        torch.testing.assert_close(point.grad, x.grad, rtol=0, atol=1e-12)
        assert_states_equal(state(other), state(plain), atol=1e-12)
        with torch.no_grad():
            for net in (plain, other):
                for parameter in net.parameters():
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None


def test_copies_and_loaded_checkpoints_train_alike():
    net, shape = fed(window=3, burn_in=1)
    for seed in range(4):
        step(net, leaf(shape, seed=seed), seed)
    loaded, _ = fed(window=3, burn_in=1)
    loaded.load_state_dict(net.state_dict())
    copies = [deepcopy(net), pickle.loads(pickle.dumps(net)), loaded]
    for seed in range(4, 7):
        x = leaf(shape, seed=seed)
        expected = step(net, x, seed)
        for copy in copies:
            torch.testing.assert_close(step(copy, x, seed), expected, rtol=0, atol=0)
    for copy in copies:
        assert_states_equal(state(copy), state(net))


def test_a_checkpoint_from_before_the_first_batch_empties_the_memory():
    net, shape = fed(window=3)
    fresh = state(net)
    step(net, leaf(shape, seed=0), 0)
    net.load_state_dict(fresh)
    torch.testing.assert_close(net(leaf(shape, seed=1)), fed(window=3)[0](leaf(shape, seed=1)), rtol=0, atol=0)


def test_a_plain_checkpoint_loads_and_empties_the_memory():
    plain = small_net(seed=1)
    plain(images(4, seed=0))
    net = converted(small_net(seed=2), ENTRY, window=3)
    net(images(4, seed=1))
    net.load_state_dict(plain.state_dict())
    assert int(net[1].memory_filled) == 0
    x = images(4, seed=2)
    torch.testing.assert_close(net.eval()(x), plain.eval()(x), rtol=0, atol=0)


def test_another_window_is_an_error():
    net, other = fed(window=3)[0], fed(window=4)[0]
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(net.state_dict())


def test_conversion_and_to_batchnorm_keep_the_outputs_of_a_trained_model():
    plain = small_net()
    for seed in range(3):
        plain(images(4, seed=seed))
    x = images(4, seed=9)
    expected = plain.eval()(x)
    net = converted(deepcopy(plain), ENTRY, window=3)
    torch.testing.assert_close(net(x), expected, rtol=0, atol=0)
    watch_sources(net)
    assert [len(net[i]._forward_hooks) for i in (0, 3, 8)] == [1, 1, 1]
    net.train()
    net(x)
    expected = net.eval()(x)
    unwatch_sources(net)
    for index in (1, 4):
        net[index] = restored(net[index])
    assert not any(module._forward_hooks or module._forward_hooks_with_kwargs for module in net.modules())
    assert {type(net[1]), type(net[4])} == {nn.BatchNorm2d}
    assert set(net.state_dict()) == set(plain.state_dict())
    assert vars(net[1]).keys() == vars(plain[1]).keys()
    torch.testing.assert_close(net(x), expected, rtol=0, atol=0)


def test_other_hooks_stay_when_those_of_cbn_are_removed():
    net, _ = fed()
    seen = []
    net[0].register_forward_hook(lambda *_: seen.append(1))
    unwatch_sources(net)
    net[0](leaf(FEEDERS["2-d strided, no bias"][1], seed=0))
    assert seen == [1]
    assert note_source not in net[0]._forward_hooks.values()


def test_transposed_convolutions_are_not_watched():
    net = nn.Sequential(nn.ConvTranspose2d(3, 4, 2), nn.BatchNorm2d(4))
    converted(net, ENTRY)(images(2, seed=0))
    assert not net[0]._forward_hooks
    assert int(net[1].memory_filled) == 0


def test_autocast_and_channels_last_agree_with_plain():
    net, shape = fed(window=4)
    net = net.float()
    last, narrow = deepcopy(net), deepcopy(net)
    for seed in range(5):
        x = leaf(shape, seed=seed, dtype=torch.float32).detach()
        y = net(x)
        torch.testing.assert_close(last(x.contiguous(memory_format=torch.channels_last)), y, rtol=0, atol=1e-5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = narrow(x)
        assert z.dtype == torch.bfloat16
        torch.testing.assert_close(z.float(), y, rtol=0.05, atol=0.05)
        with torch.no_grad():
            for model in (net, last, narrow):
                model[0].weight.add_(0.02 * randn(*model[0].weight.shape, seed=seed).float())
    assert int(narrow[1].memory_filled) == 3
    assert narrow[1].memory_slope_var.dtype == torch.float32


def test_under_autocast_the_memory_is_written_and_read_without_loss():
    net, shape = fed("linear", window=3)
    net.float()
    batches = [leaf(shape, seed=seed, dtype=torch.float32).detach() for seed in range(2)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for batch in batches:
            out = net[0](batch)
            net[1](out)
        still = read_memory(net, batches[0])
        centred = out.float() - out.float().mean(0)
        mean, var = net[1].memory_mean, net[1].memory_var
        torch.testing.assert_close(still.mean, mean.mean(0), rtol=0, atol=1e-6)
        torch.testing.assert_close(still.var, var.mean(0) + mean.var(0, correction=0), rtol=0, atol=1e-6)
        with torch.no_grad():
            net[0].weight.mul_(1.001)
        moved = read_memory(net, batches[0])
    slope = centred.double().t() @ batches[1].double() * 2 / shape[0]
    torch.testing.assert_close(net[1].memory_slope_var[1].double(), slope, rtol=0, atol=1e-4)
    torch.testing.assert_close(moved, read_memory(net, batches[0]), rtol=0, atol=0)


def test_half_precision_leaves_what_is_remembered_wide():
    net, shape = fed(window=3)
    net.bfloat16()
    for seed in range(3):
        y = net(leaf(shape, seed=seed, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    assert int(net[1].memory_filled) == 2
    assert {net[1].memory_mean.dtype, net[1].memory_slope_var.dtype} == {torch.float32}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be a whole number, at least 1; got 0"),
        ({"burn_in": 1.5}, "burn_in must be a whole number, at least 0; got 1.5"),
        ({"total_steps": 0}, "total_steps must be the number of steps of the training"),
        ({"rho": 1}, "unknown option rho; its options are window, burn_in, total_steps"),
    ],
)
def test_wrong_options_are_errors(options, message):
    with pytest.raises(OptionError, match=message):
        CrossIterationBatchNorm(3, **options)
