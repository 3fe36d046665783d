"""Two-way memory: its equations over whole trajectories, the large batch it aims at, and its state."""

import contextlib
import copy
import pickle

import pytest
import torch
from helpers.common import assert_same_state, images, labels, leaf, randn, randomize, small_net
from helpers.versions import TORCH, newer_than
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import memnorm
from memnorm.functional import pool
from memnorm.kernels import cpu
from memnorm.norms import two_way
from memnorm.norms.two_way import TwoWayBatchNorm, TwoWayBatchNorm1d, TwoWayBatchNorm2d, TwoWayBatchNorm3d
from memnorm.reference import ReferenceTwoWayBatchNorm, large_batch_norm

BY_RANK = {2: TwoWayBatchNorm1d, 3: TwoWayBatchNorm1d, 4: TwoWayBatchNorm2d, 5: TwoWayBatchNorm3d}
PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


@pytest.fixture(params=["kernels", "torch"])
def backend(request, monkeypatch):
    """Run a test on the kernels and on torch operations."""
    if request.param == "torch":
        monkeypatch.setattr(cpu, "module", lambda: None)
    elif cpu.module() is None:
        pytest.skip("the kernels were not built or are switched off")
    return request.param


def layer_of(rank=4, channels=3, **options):
    layer = BY_RANK[rank](channels, dtype=torch.float64, **{"warmup": 0, **options})
    randomize(layer, seed=5)
    return layer


def twins(rank, **options):
    ours = layer_of(rank, **options)
    theirs = ReferenceTwoWayBatchNorm(3, **{name: options[name] for name in ("decay", "strength") if name in options})
    theirs.load_state_dict({name: value for name, value in ours.state_dict().items() if name in ("weight", "bias")})
    return ours, theirs


def gradients(layer, x, grad):
    y = layer(x)
    return [y, *torch.autograd.grad(y, [x, layer.weight, layer.bias], grad)]


@pytest.mark.parametrize("window", [1, 4, 16])
@pytest.mark.parametrize("rest", [(), (5,), (4, 3), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("decay", [0.8, None])
def test_a_trajectory_with_varying_batches_is_that_of_the_literal_reference(decay, rest, window, backend):
    ours, theirs = twins(2 + len(rest), decay=decay, strength=0.7)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.0)
    for step in range(50):
        shape = (2 + (5 * step) % 7, 3, *rest)
        x, grad = leaf(shape, seed=step), randn(*shape, seed=1000 + step) + 0.3
        x.data.mul_(1 + 0.5 * (step % 4))
        torch.testing.assert_close(gradients(ours, x, grad), gradients(theirs, x, grad), rtol=0, atol=1e-10)
        if step % window == window - 1:
            optimizer.step()
            theirs.update()
        weight = sum(len(batch) * theirs.alpha(update) / 0.7 for update, batch in theirs.forwards)
        assert float(ours.running_weight) == pytest.approx(weight, rel=1e-12)
        assert float(ours.backward_weight) == pytest.approx(weight, rel=1e-12)
        assert int(ours.num_images) == theirs.images[-1]
        assert_means_are_those_of(ours, theirs)


def assert_means_are_those_of(ours, theirs):
    alphas = [theirs.alpha(update) for update, *_ in theirs.backwards]
    total = sum(alpha * len(g) for alpha, (_, g, _) in zip(alphas, theirs.backwards, strict=True))
    mean = sum(alpha * g.sum(0) for alpha, (_, g, _) in zip(alphas, theirs.backwards, strict=True)) / total
    product = sum(alpha * (g * x).sum(0) for alpha, (_, g, x) in zip(alphas, theirs.backwards, strict=True)) / total
    torch.testing.assert_close(ours.backward_mean, mean, rtol=0, atol=1e-11)
    torch.testing.assert_close(ours.backward_product, product, rtol=0, atol=1e-11)


RULE = {1: 0.955805826175841, 2: 0.9375, 8: 0.875, 32: 0.75, 128: 0.5, 1000: 0.5}


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("number", RULE)
def test_the_default_decay_of_an_update_follows_from_its_images(number, window, backend):
    layer = layer_of(3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    parts = [part for part in torch.arange(number).tensor_split(window) if len(part)]
    for part in parts:
        layer(leaf((len(part), 3, 2), seed=0)).sum().backward()
    assert int(layer.num_images) == number
    optimizer.step()
    assert float(layer.running_weight) == pytest.approx(2 * number * RULE[number], rel=1e-12)
    assert float(layer.backward_weight) == pytest.approx(2 * number * RULE[number], rel=1e-12)
    assert int(layer.num_images) == 0


@pytest.mark.parametrize("decay", [0.6, 1.0])
def test_a_fixed_decay_does_not_depend_on_the_images(decay, backend):
    layer, weight = layer_of(decay=decay), 0.0
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    for number in RULE:
        layer(leaf((number, 3, 2, 1), seed=number)).sum().backward()
        optimizer.step()
        weight = decay * (weight + 2 * number)
        assert [float(layer.running_weight), float(layer.backward_weight)] == pytest.approx([weight] * 2, rel=1e-12)
        assert int(layer.num_images) == 0


def test_layers_of_one_optimizer_fade_by_their_own_decay_dtype_and_images(backend):
    layers = [TwoWayBatchNorm1d(3, warmup=0, decay=decay, dtype=dtype) for decay, dtype in FADING]
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.0)
    for index, layer in enumerate(layers):
        layer(leaf((8 + 24 * (index % 2), 3), seed=0).to(layer.weight.dtype)).sum().backward()
    optimizer.step()
    found = [[float(layer.running_weight), float(layer.backward_weight)] for layer in layers]
    wanted = [7.0, 24.0, 7.0, 24.0, 4.0, 12.8]
    torch.testing.assert_close(found, [[one, one] for one in wanted], rtol=1e-6, atol=0)


FADING = [(None, torch.float32), (None, torch.float64), (None, torch.float64), (None, torch.float32)]
FADING += [(0.5, torch.float32), (0.4, torch.float64)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e200])
def test_images_of_a_batch_that_is_not_finite_are_not_counted(bad, backend):
    layer = layer_of()
    layer(leaf((2, 3, 4, 4), seed=0))
    x = leaf((2, 3, 4, 4), seed=1).detach()
    x[1, 2, 0, 0] = bad
    layer(x)
    assert int(layer.num_images) == 2


def test_only_recorded_forwards_in_training_count_images(backend):
    layer = layer_of()
    x = leaf((2, 3, 4, 4), seed=0).detach()
    with memnorm.recording(layer, False):
        layer(x)
    layer.eval()(x)
    assert int(layer.num_images) == 0
    layer.train()(x)
    layer(x[:1])
    assert int(layer.num_images) == 3
    layer.reset_memory()
    assert int(layer.num_images) == 0


def test_without_an_optimizer_each_backward_fades_by_its_own_images(backend):
    layer, weight = layer_of(2), 0.0
    for number in (8, 32, 2):
        layer(leaf((number, 3), seed=number)).sum().backward()
        weight = RULE[number] * (weight + number)
        assert float(layer.backward_weight) == pytest.approx(weight, rel=1e-12)
        assert int(layer.num_images) == 0


@pytest.mark.parametrize(("decay", "factor"), [(None, RULE[8]), (0.6, 0.6)])
def test_means_that_wait_for_an_exchange_fade_as_the_memory_does(decay, factor, backend):
    layer = layer_of(2, decay=decay)
    layer(leaf((2, 3), seed=0)).sum().backward()  # so that the kernels know the buffers
    layer.reset_memory()
    optimizer, last = (torch.optim.SGD(model.parameters(), lr=0.0) for model in (layer, nn.Linear(1, 1)))
    with memnorm.distributed.exchange_memory(layer, last):
        layer(leaf((8, 3), seed=1)).sum().backward()
        optimizer.step()
        last.step()
    assert float(layer.backward_weight) == pytest.approx(8 * factor, rel=1e-12)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_checkpoint_within_a_window_resumes_bit_for_bit(parts, backend):
    def run(net, optimizer, batches):
        for number in batches:
            loss_of(net, number, count=2 + 3 * (number % 3)).backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()

    straight = memnorm.convert(small_net(dtype=torch.float64), "two_way", warmup=3)
    optimizer = torch.optim.SGD(straight.parameters(), lr=0.1)
    run(straight, optimizer, range(8 + parts))
    resumed = memnorm.convert(small_net(seed=1, dtype=torch.float64), "two_way", warmup=3)
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    for ours, theirs in zip(resumed.parameters(), straight.parameters(), strict=True):
        ours.grad = theirs.grad.clone()
    assert int(resumed[1].num_images) == sum(2 + 3 * (number % 3) for number in range(8, 8 + parts))
    for net, steps in ((straight, optimizer), (resumed, torch.optim.SGD(resumed.parameters(), lr=0.1))):
        run(net, steps, range(8 + parts, 20))
    assert_same_state(resumed, straight)


def test_a_checkpoint_without_a_count_of_images_loads_strictly_as_none_counted():
    net = trained(3)
    loss_of(net, 9).backward()
    state = {name: value for name, value in net.state_dict().items() if not name.endswith("num_images")}
    fresh = memnorm.convert(small_net(seed=1, dtype=torch.float64), "two_way", warmup=0)
    loss_of(fresh, 0)
    fresh.load_state_dict(state, strict=True)
    assert int(fresh[1].num_images) == 0
    assert torch.equal(fresh[1].backward_weight, net[1].backward_weight)
    assert int(fresh[1].num_updates) == int(net[1].num_updates)


def test_the_large_batch_of_the_reference_is_torchs_batch_norm_of_all_batches():
    batches = [leaf((2 + index, 3, 4, 2), seed=index) for index in range(3)]
    torchs = nn.BatchNorm2d(3, dtype=torch.float64)
    randomize(torchs, seed=1)
    ours = large_batch_norm(batches, [1.0] * 3, torchs.weight, torchs.bias)
    joint = torchs(torch.cat(batches))
    torch.testing.assert_close(torch.cat(ours), joint, rtol=0, atol=1e-12)
    probe = randn(*joint.shape, seed=9)
    mine = torch.autograd.grad((torch.cat(ours) * probe).sum(), batches)
    torch.testing.assert_close(mine, torch.autograd.grad((joint * probe).sum(), batches), rtol=0, atol=1e-12)


# The large batch, at fixed weights. `Cycle` gives every layer the memory that the claim is about: the latest entries of
# the other micro-batches with equal weights, taken from what the layer itself has recorded.

STATE = (("running_mean", "running_var", "running_weight"), two_way.BACKWARD)


class Cycle:
    """Sweeps over the micro-batches of a large batch."""

    def __init__(self, net):
        self.layers = [layer for layer in net.modules() if isinstance(layer, TwoWayBatchNorm)]
        self.entries = {(layer, names): {} for layer in self.layers for names in STATE}
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.0)  # so that nothing fades: it never steps

    def others(self, layer, names, index):
        """The union of the entries of all micro-batches but this one; weight 0 if there are none."""
        found = [entry for key, entry in self.entries[layer, names].items() if key != index]
        if not found:
            return torch.zeros(4).double(), torch.ones(4).double(), torch.tensor(0.0).double()
        mean, second, weight = map(torch.stack, zip(*found, strict=True))
        union = pool(mean, second, weight)
        return union if names is STATE[0] else union._replace(var=pool(second, mean, weight).mean)

    def before(self, index):
        for layer in self.layers:
            for names in STATE:
                for name, value in zip(names, self.others(layer, names, index), strict=True):
                    layer.get_buffer(name).copy_(value)

    def after(self, index):
        for layer in self.layers:
            for names in STATE:
                union = [layer.get_buffer(name).clone() for name in names]
                others = self.others(layer, names, index)
                self.entries[layer, names][index] = without(union, others, shift=names is STATE[0])


def without(union, others, *, shift):
    """The batch that, merged with `others`, makes `union`."""
    weight = union[2] - others[2]
    first = (union[2] * union[0] - others[2] * others[0]) / weight
    second = [part[1] + part[0].square() if shift else part[1] for part in (union, others)]
    rest = (union[2] * second[0] - others[2] * second[1]) / weight
    return first, rest - first.square() if shift else rest, weight


class Network(nn.Module):
    """Three norms, the second behind a residual connection."""

    def __init__(self, rank):
        super().__init__()
        kind = {2: nn.Linear, 3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[rank]
        kernel, padding = ((), {}) if rank == 2 else ((3,), {"padding": 1})
        self.a, self.b, self.c = (kind(inputs, 4, *kernel, **padding) for inputs in (2, 4, 4))
        self.norms = nn.ModuleList(PLAIN[rank](4) for _ in range(3))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.norms[0](self.a(x)).tanh()
        x = x + self.norms[1](self.b(x)).tanh()
        x = self.norms[2](self.c(x)).tanh()
        return self.head(x.flatten(2).mean(2) if x.dim() > 2 else x)


def large_batch(rank, sizes):
    """A network, the micro-batches of a large batch, and the gradient of plain batch norm on the whole batch."""
    torch.manual_seed(rank)
    net, total = Network(rank).double(), sum(sizes)
    x = randn(total, 2, *{2: (), 3: (6,), 4: (4, 3), 5: (3, 2, 2)}[rank], seed=rank)
    y = torch.randint(0, 3, (total,), generator=torch.Generator().manual_seed(0))
    joint = copy.deepcopy(net)
    nn.functional.cross_entropy(joint(x), y).backward()
    return net, x.split(sizes), y.split(sizes), [parameter.grad for parameter in joint.parameters()]


def accumulated(net, xs, ys, before=lambda index: None, after=lambda index: None):
    """The gradient of all micro-batches, each weighted by its share of the images."""
    net.zero_grad()
    total = sum(map(len, ys))
    for index, (x, y) in enumerate(zip(xs, ys, strict=True)):
        before(index)
        (nn.functional.cross_entropy(net(x), y) * (len(y) / total)).backward()
        after(index)
    return [parameter.grad.clone() for parameter in net.parameters()]


def distance(ours, theirs):
    flat, wanted = (torch.cat([one.flatten() for one in gradient]) for gradient in (ours, theirs))
    return float((flat - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("rank", "sizes"), [(2, [4] * 8), (3, [2] * 8), (4, [2] * 8), (4, [1, 3, 2, 2, 5]), (5, [2] * 6)]
)
def test_at_fixed_weights_the_accumulated_gradient_becomes_that_of_the_large_batch(rank, sizes, backend):
    net, xs, ys, wanted = large_batch(rank, sizes)
    memnorm.convert(net, "two_way", warmup=0, center=None)
    cycle = Cycle(net)
    distances = [distance(accumulated(net, xs, ys, cycle.before, cycle.after), wanted) for _ in range(SWEEPS)]
    assert distances[-1] < 1e-12
    assert distances[-3] > 1e-12, "two sweeps fewer do not suffice"
    for ours, theirs in zip(accumulated(net, xs, ys, cycle.before, cycle.after), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


SWEEPS = 7


def settled(net, xs, ys, sweeps=40):
    """The accumulated gradient after many updates that change nothing."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    for _ in range(sweeps):
        found = accumulated(net, xs, ys)
        optimizer.step()
    return found


def test_with_the_fading_memory_the_gradient_is_far_nearer_to_the_large_batchs_than_bns_and_mbns(backend):
    """Of the large batch, the current micro-batch is in the memory as well: this is what remains of the distance."""
    found = {}
    for name, options in {"two_way": {"warmup": 0, "center": None}, "mbn": {"strength": 0.9}, "bn": {}}.items():
        net, xs, ys, wanted = large_batch(4, [2] * 8)
        found[name] = distance(settled(memnorm.convert(net, name, **options), xs, ys), wanted)
    assert found["two_way"] < 0.03
    assert found["two_way"] < min(found["mbn"], found["bn"]) / 4


@pytest.mark.parametrize("shape", [(8, 3), (8, 3, 5), (8, 3, 5, 4), (2, 3, 4, 3, 3)], ids=str)
def test_without_strength_fifty_steps_are_batch_norms(shape, backend):
    ours = layer_of(len(shape), strength=0.0)
    torchs = PLAIN[len(shape)](3, dtype=torch.float64)
    torchs.load_state_dict({name: ours.state_dict()[name] for name in torchs.state_dict()})
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9) for layer in (ours, torchs)]
    for step in range(50):
        x, probe = leaf(shape, seed=step), randn(*shape, seed=500 + step)
        outputs = []
        for layer, optimizer in zip((ours, torchs), optimizers, strict=True):
            point = x.detach().clone().requires_grad_()
            optimizer.zero_grad()
            y = layer(point)
            (y * probe).sum().backward()
            optimizer.step()
            outputs.append([y, point.grad, layer.weight, layer.bias])
        torch.testing.assert_close(*outputs, rtol=0, atol=1e-9)


def test_without_momentum_neither_direction_reads_the_memory(backend):
    ours = layer_of()
    for seed in range(3):
        gradients(ours, leaf((4, 3, 5, 4), seed=seed), randn(4, 3, 5, 4, seed=9) + 1)
    ours.momentum = None
    torchs = nn.BatchNorm2d(3, dtype=torch.float64)
    torchs.load_state_dict({name: ours.state_dict()[name] for name in torchs.state_dict()})
    x, probe = leaf((4, 3, 5, 4), seed=3), randn(4, 3, 5, 4, seed=4)
    torch.testing.assert_close(gradients(ours, x, probe), gradients(torchs, x, probe), rtol=0, atol=1e-10)


# What a training loop does to it


def trained(steps=3, accumulate=1, seed=0, net=None, **options):
    """A small network after some updates; each micro-batch has its own data."""
    net = net or memnorm.convert(small_net(dtype=torch.float64), "two_way", **{"warmup": 0, **options})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            loss_of(net, seed + step * accumulate + part).backward()
        optimizer.step()
    return net


def loss_of(net, seed, count=4):
    return nn.functional.cross_entropy(net(images(count, seed=seed, dtype=torch.float64)), labels(count, seed=seed))


def test_forwards_before_their_backwards_are_each_recorded_once(backend):
    layer = layer_of(decay=1.0)
    ys = [layer(leaf((2, 3, 4, 4), seed=seed)) for seed in range(3)]
    for y in ys:
        y.sum().backward()
    assert float(layer.running_weight) == float(layer.backward_weight) == 3 * 32


class Observed(TorchDispatchMode):
    """Lets every operation pass; the kernels leave a backward to torch operations meanwhile."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("first", [contextlib.nullcontext, Observed])
@pytest.mark.parametrize("second", [contextlib.nullcontext, Observed])
def test_a_second_backward_through_one_forward_is_not_recorded_again(first, second, backend):
    layer = layer_of(decay=1.0)
    y, grad = layer(leaf((2, 3, 4, 4), seed=0)), randn(2, 3, 4, 4, seed=1)
    with first():
        torch.autograd.grad(y, layer.weight, grad, retain_graph=True)
    before = layer.backward_mean.clone()
    with second():
        torch.autograd.grad(y, layer.weight, 5 * grad)
    assert float(layer.backward_weight) == 32
    assert torch.equal(layer.backward_mean, before)


def test_a_forward_without_backward_enters_the_forward_memory_alone(backend):
    layer = layer_of()
    with torch.no_grad():
        layer(leaf((2, 3, 4, 4), seed=0))
    assert (float(layer.running_weight), float(layer.backward_weight)) == (32, 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_not_remembered(bad, backend):
    layer = layer_of()
    layer(leaf((2, 3, 4, 4), seed=0)).sum().backward()
    before = {name: layer.get_buffer(name).clone() for name in two_way.BACKWARD}
    grad = torch.ones(2, 3, 4, 4).double()
    grad[0, 1, 2, 2] = bad
    layer(leaf((2, 3, 4, 4), seed=1)).backward(grad)
    for name, value in before.items():
        assert torch.equal(layer.get_buffer(name), value), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing_backward_is_recorded_once_and_as_without(reentrant, backend):
    nets = [memnorm.convert(small_net(dtype=torch.float64), "two_way", warmup=0) for _ in range(2)]
    for seed in range(4):
        for net, checkpointed in zip(nets, (False, True), strict=True):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for part in range(2):
                x = images(4, seed=10 * seed + part, dtype=torch.float64).requires_grad_()
                hidden = checkpoint(net[:6], x, use_reentrant=reentrant) if checkpointed else net[:6](x)
                nn.functional.cross_entropy(net[6:](hidden), labels(4, seed=seed)).backward()
            optimizer.step()
            net.zero_grad()
    assert_same_state(*nets, atol=1e-10)


def test_under_a_dispatch_mode_the_memory_fades_with_each_update():
    layer = TwoWayBatchNorm2d(3, decay=0.9, warmup=0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with FlopCounterMode(display=False):
        for seed in range(3):
            layer(leaf((2, 3, 4, 4), seed=seed, dtype=torch.float32)).square().sum().backward()
            optimizer.step()
    weight = 32 * (0.9 + 0.9**2 + 0.9**3)
    assert [float(layer.running_weight), float(layer.backward_weight)] == pytest.approx([weight, weight], rel=1e-6)


def test_create_graph_is_an_error_that_says_why(backend):
    layer = layer_of()
    x = leaf((2, 3, 4, 4), seed=0)
    with pytest.raises(memnorm.MemnormError, match=r"not the derivative of its forward.*\"mbn\""):
        torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)


def test_one_value_per_channel_trains_from_the_first_batch_on(backend):
    layer = layer_of(2)
    for seed in range(4):
        x = leaf((1, 3), seed=seed)
        y = layer(x)
        (grad,) = torch.autograd.grad((y * randn(1, 3, seed=seed)).sum(), x)
        assert y.isfinite().all()
        assert grad.isfinite().all()
        assert (grad != 0).all()


def test_one_value_per_channel_is_merged_with_the_initial_statistics_as_a_constant():
    """So the first gradient is that of mean 0 and variance 1, counted as one more value."""
    layer, x, grad = layer_of(2), leaf((1, 3), seed=0), randn(1, 3, seed=1)
    mean, var = x / 2, (x - x / 2).square() / 2 + (1 + (0 - x / 2).square()) / 2
    wanted = layer.weight * (x - mean) / (var + layer.eps).sqrt() + layer.bias
    y = layer(x)
    torch.testing.assert_close(y, wanted, rtol=0, atol=1e-12)
    expected = torch.autograd.grad(wanted, x, grad)
    torch.testing.assert_close(torch.autograd.grad(y, x, grad), expected, rtol=0, atol=1e-12)


def test_trained_statistics_are_the_first_memory_as_heavy_as_the_batch():
    plain = nn.BatchNorm2d(3, dtype=torch.float64)
    plain(leaf((4, 3, 5, 5), seed=0))
    layer = memnorm.convert(nn.Sequential(plain), "two_way", warmup=0)[0]
    x = leaf((2, 3, 4, 4), seed=1)
    mean = (plain.running_mean + x.mean((0, 2, 3))) / 2
    with torch.no_grad():
        centred = layer(x).mean((0, 2, 3)) - layer.bias
    scale = layer.weight / (layer.running_var + layer.eps).sqrt()
    torch.testing.assert_close(centred, (x.mean((0, 2, 3)) - mean) * scale, rtol=1e-9, atol=1e-12)
    assert float(layer.running_weight) == 64


def test_the_strength_grows_over_the_warm_up_and_a_resumed_run_continues_it():
    net = memnorm.convert(small_net(), "two_way", warmup=4, strength=0.8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen = []
    for step in range(7):
        if step == 2:
            state = copy.deepcopy(net.state_dict())
            net = memnorm.convert(small_net(), "two_way", warmup=4, strength=0.8)
            net.load_state_dict(state)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        seen.append(float(net[1].strength))
        nn.functional.cross_entropy(net(images(4, seed=step)), labels(4, seed=step)).backward()
        optimizer.step()
    assert seen == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    assert int(net[1].num_updates) == 4


def test_a_resumed_training_is_the_undisturbed_one():
    straight = trained(6, accumulate=3, warmup=4)
    resumed = trained(3, accumulate=3, warmup=4)
    fresh = memnorm.convert(small_net(seed=1, dtype=torch.float64), "two_way", warmup=4)
    fresh.load_state_dict(resumed.state_dict())
    trained(3, accumulate=3, seed=9, net=fresh)
    assert_same_state(fresh, straight, atol=1e-12)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copy_trains_as_the_original_and_apart_from_it(duplicate):
    net = trained(3)
    twin = duplicate(net)
    before = copy.deepcopy(net.state_dict())
    trained(2, seed=7, net=twin)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name
    trained(2, seed=7, net=net)
    assert_same_state(twin, net)


def test_checkpoints_of_plain_and_of_memorized_batch_norm_load_strictly():
    plain = small_net()
    plain(images(8, seed=0))
    memorized = memnorm.convert(copy.deepcopy(plain), "mbn", memory_size=3)
    for seed in range(5):
        memorized(images(4, seed=seed))
    for source in (plain, memorized):
        net = memnorm.convert(small_net(seed=2), "two_way", strength=0.7, warmup=0)
        trained_layer = net[1]
        trained_layer.backward_weight.fill_(3.0)
        net.load_state_dict(source.state_dict())
        assert torch.equal(net.eval()(images(4, seed=9)), source.eval()(images(4, seed=9)))
        assert float(trained_layer.backward_weight) == 0
        assert float(trained_layer.strength) == pytest.approx(0.7)
    assert float(trained_layer.running_weight) == float(memorized[1].running_weight) > 0


def test_the_way_back_is_plain_batch_norm_and_leaves_nothing_behind():
    net = trained(3).eval()
    x = images(4, seed=0, dtype=torch.float64)
    wanted = net(x)
    plain = memnorm.to_batchnorm(net)
    assert torch.equal(plain(x), wanted)
    assert [type(layer) for layer in plain] == [type(layer) for layer in small_net()]
    assert plain.state_dict().keys() == small_net().state_dict().keys()
    assert vars(plain[1]).keys() == vars(nn.BatchNorm2d(3)).keys()
    assert vars(plain[0]).keys() == vars(nn.Conv2d(3, 3, 3)).keys()


def test_converting_again_keeps_the_memory_and_sets_the_options():
    net = trained(3)
    weight = float(net[1].running_weight)
    again = memnorm.convert(net, "two_way", decay=0.5)
    assert isinstance(again[1], TwoWayBatchNorm2d)
    assert (again[1].decay, float(again[1].running_weight)) == (0.5, weight)
    assert memnorm.convert(again, "two_way", strength=0.5)[1].decay == 0.5
    assert memnorm.convert(again, "two_way", decay=None)[1].decay is None
    assert not isinstance(memnorm.convert(again, "mbn")[1], TwoWayBatchNorm)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_a_narrow_model_the_memory_stays_wide(dtype):
    net = trained(3).float().to(dtype)
    kept = {net[1].get_buffer(name).dtype for name in net[1].statistics}
    assert kept == {torch.float32}
    x = images(4, seed=0).to(dtype).requires_grad_()
    y = net[1](net[0](x))
    y.sum().backward()
    assert (y.dtype, x.grad.dtype) == (dtype, dtype)
    assert net[1].backward_mean.isfinite().all()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_and_torch_operations_agree(dtype, layout, monkeypatch):
    if cpu.module() is None:
        pytest.skip("the kernels were not built or are switched off")
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    found = []
    for kernels in (cpu.module, lambda: None):
        monkeypatch.setattr(cpu, "module", kernels)
        layer = TwoWayBatchNorm2d(16, warmup=0)
        randomize(layer, seed=1)
        for seed in range(5):
            x = leaf((3, 16, 8, 8), seed=seed).detach().to(dtype).contiguous(memory_format=layout).requires_grad_()
            y = layer(x)
            y.backward(randn(*x.shape, seed=50 + seed).to(dtype))
        found.append([y.float(), x.grad.float(), layer.weight.grad, *layer.buffers()])
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)


def test_double_forward_records_the_second_forward_as_fresh():
    """The moments of the second forward belong to the new weights: they have not faded when the next batch comes."""
    net = memnorm.convert(small_net(dtype=torch.float64), "two_way", warmup=0, decay=0.5)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    memnorm.double_forward(net, optimizer)
    expected = [0.0, 0.0]
    for step in range(4):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        optimizer.step()
        values = 4 * 36
        expected = [0.5 * expected[0] + values, 0.5 * (expected[1] + values)]
        assert [float(net[1].running_weight), float(net[1].backward_weight)] == pytest.approx(expected)


def test_recalibration_leaves_the_strength_to_which_it_grows():
    net = trained(3, strength=0.6)
    memnorm.recalibrate(net, [images(4, seed=0, dtype=torch.float64)])
    assert float(net[1].strength) == 0.6
    net[1].set_strength(0.3)
    trained(1, net=net)
    assert float(net[1].strength) == pytest.approx(0.3)


@pytest.mark.parametrize(
    "options",
    [{"warmup": -1}, {"warmup": 1.5}, {"decay": 0}, {"strength": 2}, {"center": "no"}, {"memory_size": 3}],
    ids=str,
)
def test_wrong_options_are_errors(options):
    with pytest.raises(memnorm.MemnormError, match=next(iter(options))):
        memnorm.convert(small_net(), "two_way", **options)


class BatchNormAct2d(nn.BatchNorm2d):
    """As timm's."""

    def __init__(self, channels):
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU()

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


def test_a_timm_like_layer_keeps_its_activation_and_its_class():
    net = memnorm.convert(nn.Sequential(nn.Conv2d(3, 4, 1), BatchNormAct2d(4)), "two_way", warmup=0)
    for layer in (net[1], pickle.loads(pickle.dumps(net))[1], copy.deepcopy(net)[1]):
        assert isinstance(layer, TwoWayBatchNorm)
        assert isinstance(layer, BatchNormAct2d)
        y = layer(leaf((2, 4, 3, 3), seed=0).float())
        assert y.min() == 0
        y.sum().backward()
        assert float(layer.backward_weight) > 0
    assert type(memnorm.to_batchnorm(net)[1]) is BatchNormAct2d


def test_synchronised_batch_norm_is_converted():
    model = nn.Sequential(nn.SyncBatchNorm(4))
    layer = memnorm.convert(model, "two_way", warmup=0, decay=0.9)[0]
    layer(leaf((3, 4, 5), seed=0).float()).sum().backward()
    assert float(layer.backward_weight) == pytest.approx(15 * 0.9)


@pytest.mark.parametrize("how", ["without affine map", "frozen", "gradient of the input alone"])
def test_kernels_record_both_means_if_nobody_asks_for_the_parameters_gradients(how, monkeypatch):
    if cpu.module() is None:
        pytest.skip("the kernels were not built or are switched off")
    found = []
    for kernels in (cpu.module, lambda: None):
        monkeypatch.setattr(cpu, "module", kernels)
        layer = TwoWayBatchNorm2d(3, warmup=0, dtype=torch.float64, affine=how != "without affine map")
        if how == "frozen":
            layer.requires_grad_(False)
        for seed in range(3):
            x = leaf((2, 3, 4, 4), seed=seed)
            (gradient,) = torch.autograd.grad(layer(x), x, randn(2, 3, 4, 4, seed=9 + seed) + 0.5)
        found.append([gradient, layer.backward_mean, layer.backward_product, layer.backward_weight])
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("move", ["share_memory", "data"])
def test_buffers_that_have_moved_are_written_where_they_are_now(move, backend):
    layer = layer_of(decay=1.0)
    layer(leaf((2, 3, 4, 4), seed=0)).sum().backward()
    y = layer(leaf((2, 3, 4, 4), seed=1))
    if move == "share_memory":
        layer.share_memory()
    else:
        for name in two_way.BACKWARD:
            layer.get_buffer(name).data = layer.get_buffer(name).data.clone()
    y.sum().backward()
    layer(leaf((2, 3, 4, 4), seed=2)).sum().backward()
    assert float(layer.backward_weight) == 3 * 32


def test_a_layer_without_statistics_survives_copies_and_steps():
    net = memnorm.convert(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)), "two_way")
    twin = copy.deepcopy(net)
    twin(images(4, seed=0)).square().sum().backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()


def test_a_strength_that_was_set_survives_a_checkpoint_and_the_next_update():
    net = trained(3, warmup=2)
    for index in (1, 4):
        net[index].set_strength(0.3)
    fresh = memnorm.convert(small_net(dtype=torch.float64), "two_way", warmup=2)
    fresh.load_state_dict(net.state_dict())
    trained(1, net=fresh)
    assert float(fresh[1].strength) == pytest.approx(0.3)


def test_a_count_that_is_written_from_outside_is_followed():
    """As `memnorm.distributed.broadcast_memory` does."""
    net = trained(2, warmup=10)
    net[1].num_updates.fill_(7)
    trained(1, net=net)
    assert int(net[1].num_updates) == 8
    assert float(net[1].strength) == pytest.approx(0.8)


def test_converting_again_keeps_the_choice_not_to_centre():
    net = memnorm.convert(small_net(), "two_way", center=None)
    weight = net[0].weight.clone()
    memnorm.convert(net, "two_way", decay=0.5)
    assert torch.equal(net[0].weight, weight)
    nn.functional.cross_entropy(net(images(4, seed=0)), labels(4, seed=0)).backward()
    assert net[0].weight.grad.mean((1, 2, 3)).abs().max() > 1e-4


def test_after_a_first_single_value_eval_is_reasonable():
    layer = layer_of(2)
    x = leaf((1, 3), seed=0)
    layer(x).sum().backward()
    assert layer.running_var.min() > 0.4  # half of the initial 1
    assert layer.eval()(x).abs().max() < 10


@pytest.mark.filterwarnings("ignore")  # of torch about itself
@pytest.mark.parametrize(
    "accumulate",
    [1, pytest.param(3, marks=newer_than((2, 8), "compiled, it refuses several forwards before their backwards"))],
)
def test_a_compiled_training_is_the_eager_one_and_compiles_once(accumulate):
    torch.compiler.reset()
    nets = [memnorm.convert(small_net(dtype=torch.float64), "two_way", warmup=2) for _ in range(2)]
    compiled = torch.compile(nets[1], fullgraph=True, backend="aot_eager")
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2) for _ in nets]
    graphs = []
    for step in range(5):
        for net, call, optimizer, scaler in zip(nets, (nets[0], compiled), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            losses = [loss_of(call, 10 * step + part) for part in range(accumulate)]  # forwards before backwards
            assert int(net[1].num_images) == 4 * accumulate
            for loss in losses:
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert_same_state(*nets, atol=1e-11)
    assert len(set(graphs)) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself
def test_compiling_with_recording_off_is_an_error():
    torch.compiler.reset()
    net = trained(1)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    match = "recording off" if TORCH > (2, 8) else "MemnormError"
    with memnorm.recording(net, False), pytest.raises(Exception, match=match):
        compiled(images(4, seed=0, dtype=torch.float64))


def test_batched_gradients_are_those_of_single_ones_and_are_not_recorded(backend):
    layer = layer_of()
    layer(leaf((2, 3, 4, 4), seed=0)).sum().backward()
    x, grads = leaf((2, 3, 4, 4), seed=1), randn(3, 2, 3, 4, 4, seed=2)
    y = layer(x)
    before = float(layer.backward_weight)
    (batched,) = torch.autograd.grad(y, x, grads, is_grads_batched=True, retain_graph=True)
    assert float(layer.backward_weight) == before
    memory = [layer.get_buffer(name).clone() for name in two_way.BACKWARD]
    for gradient, wanted in zip(grads, batched, strict=True):
        with memnorm.recording(layer, False):
            (single,) = torch.autograd.grad(y, x, gradient, retain_graph=True)
        torch.testing.assert_close(wanted, single, rtol=0, atol=1e-12)
    assert all(torch.equal(layer.get_buffer(name), value) for name, value in zip(two_way.BACKWARD, memory, strict=True))


@pytest.mark.filterwarnings("ignore")  # of torch about its own forward mode
def test_torch_func_and_forward_mode_are_errors_that_say_why():
    layer, x = layer_of(), leaf((2, 3, 4, 4), seed=0).detach()
    with pytest.raises(memnorm.MemnormError, match=r"torch\.func"):
        torch.func.grad(lambda x: layer(x).sum())(x)
    with pytest.raises(memnorm.MemnormError, match="forward-mode"), torch.autograd.forward_ad.dual_level():
        layer(torch.autograd.forward_ad.make_dual(x, x))


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.filterwarnings("ignore")
def test_compiled_single_values_are_the_eager_ones(batch):
    torch.compiler.reset()
    nets = [memnorm.convert(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).double(), "two_way") for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    compiled = torch.compile(nets[1], fullgraph=True, backend="aot_eager")
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    for step in range(4):
        outputs = []
        for call, optimizer in zip((nets[0], compiled), optimizers, strict=True):
            optimizer.zero_grad()
            outputs.append(call(randn(batch, 4, seed=step)))
            outputs[-1].square().sum().backward()
            optimizer.step()
        torch.testing.assert_close(*outputs, rtol=0, atol=1e-10)
    assert_same_state(*nets, atol=1e-10)


def test_converting_again_with_another_warm_up():
    net = memnorm.convert(small_net(), "two_way")
    assert float(memnorm.convert(net, "two_way", warmup=0)[1].strength) == 1.0
    net = trained(3, warmup=2)
    assert float(memnorm.convert(net, "two_way", warmup=100)[1].strength) == 1.0


def test_an_estimate_without_data_runs():
    with FakeTensorMode():
        net = memnorm.convert(nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)), "two_way")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(torch.randn(2, 3, 8, 8)).sum().backward()
        optimizer.step()
        assert net[1].backward_mean.shape == (6,)


@pytest.mark.parametrize("adds", [False, True])
def test_the_fused_call_is_norm_residual_and_relu(adds, backend):
    fused, apart = layer_of(), layer_of()
    for seed in range(4):
        results = []
        for layer in (fused, apart):
            x, shortcut = leaf((2, 3, 4, 4), seed=seed), leaf((2, 3, 4, 4), seed=50 + seed)
            added = shortcut if adds else None
            if layer is fused:
                y = layer(x, activation="relu", residual=added)
            else:
                y = layer(x).relu() if added is None else (layer(x) + added).relu()
            y.backward(randn(2, 3, 4, 4, seed=90 + seed))
            results.append([y, x.grad, *([shortcut.grad] if adds else [])])
        torch.testing.assert_close(*results, rtol=0, atol=1e-11)
    assert_same_state(fused, apart, atol=1e-11)
