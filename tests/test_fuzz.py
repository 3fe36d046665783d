"""Random wrong and right calls of the layers and of the API, a seed each.

Every failure is an error of memnorm or torch's own, changes no buffer and leaves the layer or the model usable. No
value that is not finite enters a buffer.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memnorm
from memnorm.kernels import cpu

CHANNELS = 3
CALLS_PER_LAYER = 8
PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
NORMS = ("mbn", "two_way", "bn", "brn", "lagged_bn", "moving_bn", "momentum_bn", "ghost", "mabn", "online", "cbn")
NORMS += ("group", "layer", "evonorm_s0", "frn", "instance")  # the last two need pixels
TORCH = Path(torch.__file__).parent

# Values for arguments


def anything(rng: random.Random) -> Any:
    """A value of any kind. No large number that torch could allocate as a size."""
    constants = (
        *(None, True, False, 0, 1, 2, 3, -1, 0.0, 0.5, 1.0, -0.5, 2.5, 1e-300, 1e308, 1j, 10**20, 10**400),
        *(float("nan"), float("inf"), -float("inf"), Fraction(1, 2), Decimal("0.5"), np.float32(0.5), np.int64(2)),
        *("", "a", "no", "exact", "mbn", "relu", "gradients", b"a", ..., nn.Identity, lambda *_: None),
    )
    made: tuple[Callable[[], Any], ...] = (
        *(list, tuple, dict, set, object, nn.Identity, lambda: iter([1])),
        *(lambda: [0.1], lambda: [0.1, "a"], lambda: (0.4, 0.6), lambda: {"steps": 1}, lambda: {3: 4}, lambda: [None]),
        *(lambda: np.array([1, 2]), lambda: np.array(0.5), lambda: torch.tensor(0.5), lambda: torch.ones(2)),
        *(lambda: torch.ones(4, 3, 8, 8), lambda: [torch.randn(4, 3, 8, 8)], lambda: [torch.zeros(0, 3, 8, 8)]),
        *(lambda: [torch.full((4, 3, 8, 8), torch.nan)], lambda: [torch.zeros(())], lambda: [[]], lambda: [{}]),
        *(lambda: ["a"], lambda: [{"a": 1}]),
    )
    return rng.choice(constants) if rng.random() < 0.6 else rng.choice(made)()


def some_options(rng: random.Random, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: anything(rng) for name in rng.sample(names, rng.randint(0, min(2, len(names))))}


# What must hold


def is_allowed(error: BaseException, torchs: Callable[[], Any]) -> bool:
    """Return True for our errors, for RuntimeError, which torch's own code raises, for what torch's modules raise, and
    for an error of the type that `torchs` raises.
    """
    if isinstance(error, RuntimeError):
        return True
    try:
        torchs()
    except Exception as other:
        if isinstance(error, type(other)):
            return True
    traceback = error.__traceback__
    assert traceback is not None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return Path(traceback.tb_frame.f_code.co_filename).is_relative_to(TORCH)


def state(module: nn.Module) -> dict[str, Any]:
    """Copies of all parameters and buffers, the classes of all modules and their modes."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    found: dict[str, Any] = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    return found | {f"class of {name!r}": (type(one), one.training) for name, one in module.named_modules()}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())
    return bool(a == b)


def assert_unchanged(module: nn.Module, before: dict[str, Any], call: str) -> None:
    after = state(module)
    differ = [name for name in before.keys() | after.keys() if not same(before.get(name), after.get(name))]
    assert not differ, f"{call}: failed and changed {sorted(differ)}"


def assert_finite(module: nn.Module, call: str) -> None:
    wrong = [n for n, one in module.named_buffers() if one.is_floating_point() and not bool(one.isfinite().all())]
    assert not wrong, f"{call}: not finite afterwards: {wrong}"


@contextmanager
def allowed_to_fail(module: nn.Module, call: str, torchs: Callable[[], Any] = lambda: None) -> Iterator[None]:
    """Context manager for a call that may fail with an allowed error, if it then changes nothing."""
    before = state(module)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        if not is_allowed(error, torchs):
            raise AssertionError(f"{call}: {type(error).__name__}: {error}") from error
        assert_unchanged(module, before, call)
    assert_finite(module, call)


# Layers


def make_layer(rng: random.Random, rank: int, dtype: torch.dtype) -> nn.Module | None:
    """A layer with random options, some of them wrong; None if that is an error."""
    norm = rng.choice(NORMS[:2] if rng.random() < 0.5 else NORMS[: -2 if rank == 2 else None])
    torch_options: dict[str, Any] = {"affine": rng.random() < 0.8, "momentum": rng.choice((0.1, None, 0.5))}
    if rng.random() < 0.2:
        torch_options["track_running_stats"] = False
    plain = PLAIN[rank](CHANNELS, dtype=dtype, **torch_options)
    options: dict[str, Any] = {}
    if norm == "mbn":
        options = {"memory_size": rng.choice((1, 2, 20, None)), "decay": rng.choice((0.9, 1.0, 1e-30))}
        options |= {"strength": rng.choice((0.0, 0.5, 1.0)), "prior_from_init": rng.random() < 0.5}
        options |= {"prior_weight": rng.choice((0.0, 1.0, 1e30))}
    if norm == "two_way":
        options = {"warmup": rng.choice((0, 2)), "decay": rng.choice((0.5, 1.0)), "center": None}
    if rng.random() < 0.1:
        options |= some_options(
            rng, ("memory_size", "decay", "strength", "prior_weight", "prior_from_init", "momentum")
        )
    with allowed_to_fail(plain, f"convert(bn, {norm!r}, **{_described(options)})"):
        return memnorm.convert(plain, norm, **options)
    return None


def some_input(rng: random.Random, rank: int, dtype: torch.dtype) -> Any:
    """A batch, mostly one that a layer can take."""
    shape = [rng.choice((1, 2, 4)), CHANNELS, *(rng.choice((1, 2, 3)) for _ in range(rank - 2))]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(rng.randrange(2**31)), dtype=dtype)
    if rng.random() < 0.25:
        return x
    return rng.choice(INPUTS)(rng, x)


def _with_one_value(rng: random.Random, x: Tensor) -> Tensor:
    x.view(-1)[rng.randrange(x.numel())] = rng.choice((torch.nan, torch.inf, -torch.inf))
    return x


def _inference(_rng: random.Random, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


def _freed(_rng: random.Random, x: Tensor) -> Tensor:
    x.untyped_storage().resize_(0)
    return x


INPUTS: tuple[Callable[[random.Random, Tensor], Any], ...] = (
    lambda rng, x: x.to(rng.choice((torch.float16, torch.bfloat16, torch.float32, torch.float64))),
    lambda rng, x: x.to(rng.choice((torch.int32, torch.bool, torch.complex64, torch.uint8))),
    lambda rng, x: x * rng.choice((1e38, 1e300, 1e-44, 1e-300, 0.0)),
    lambda rng, x: x.double() * rng.choice((1e18, 1e38, 1e60, 1e150)),
    lambda rng, x: x[:, : rng.choice((0, 1, 2))],
    lambda rng, x: torch.full_like(x, rng.choice((1e30, -3e38, 1.0))),
    lambda rng, x: anything(rng),
    lambda _, x: x[:0],
    lambda _, x: torch.cat([x, x], 1),
    lambda _, x: x.reshape(-1),
    lambda _, x: x[None],
    lambda _, x: x[..., :0],
    lambda _, x: x.transpose(0, 1).contiguous().transpose(0, 1),
    lambda _, x: x[:1].expand(4, *x.shape[1:]),
    lambda _, x: x.to_sparse(),
    lambda _, x: x.to("meta"),
    lambda _, x: nn.Parameter(x),
    lambda _, x: torch._neg_view(x),
    *(_with_one_value, _inference, _freed),
)


def some_residual(rng: random.Random, x: Tensor) -> Any:
    if x.is_sparse or rng.random() < 0.4:
        return torch.zeros_like(x)
    # Made anew: the storage of x may be freed.
    others = (
        lambda: _freed(rng, torch.zeros(x.shape)),
        lambda: torch.zeros(x.shape, device="meta"),
        lambda: torch.zeros(x.shape, dtype=torch.complex64),
    )
    return rng.choice((*others, lambda: torch.zeros(x.shape)[:0], lambda: anything(rng)))()


def call_layer(rng: random.Random, layer: nn.Module, x: Any) -> Any:
    """A forward, sometimes with further arguments, and sometimes a backward."""
    options: dict[str, Any] = {}
    if isinstance(layer, memnorm.MemorizedBatchNorm) and rng.random() < 0.2:
        options["activation"] = rng.choice(
            ("relu", "relu", "relu", None, "gelu", "", 5, nn.ReLU, [], np.array([1, 2]), torch.relu)
        )
        if rng.random() < 0.5:
            options["residual"] = some_residual(rng, x) if isinstance(x, Tensor) else anything(rng)
    if isinstance(x, Tensor) and x.is_floating_point() and not x.is_inference() and rng.random() < 0.7:
        x = x.detach().requires_grad_()
    with torch.set_grad_enabled(rng.random() < 0.8):
        return layer(x, **options)


def backward(rng: random.Random, output: Any) -> None:
    if isinstance(output, Tensor) and output.requires_grad and not output.is_meta:
        factor = rng.choice((1.0, 1.0, 1.0, 0.0, 1e38, torch.nan, torch.inf))
        output.backward(torch.ones_like(output) * factor)


def fuzz_layer(seed: int) -> None:
    rng = random.Random(seed)
    rank = rng.choice((2, 3, 4, 5))
    dtype = rng.choice((torch.float32, torch.float64))
    layer = make_layer(rng, rank, dtype)
    if layer is None:
        return
    for number in range(CALLS_PER_LAYER):
        layer.train(rng.random() < 0.8)
        x, output = some_input(rng, rank, dtype), None
        call = f"seed {seed}, call {number}: {layer} on {_described(x)}"
        with allowed_to_fail(layer, call, lambda x=x: PLAIN[rank](CHANNELS, dtype=dtype)(x)):
            output = call_layer(rng, layer, x)
        with allowed_to_fail(layer, f"{call}, backward"):
            backward(rng, output)
    x = torch.randn(4, CHANNELS, *[2] * (rank - 2), dtype=dtype)
    assert layer.train()(x).shape == x.shape, f"seed {seed}: {layer} is not usable"
    if hasattr(layer, "reset_running_stats"):
        layer.reset_running_stats()  # type: ignore[operator]  # they may be those of very large values
    for mode in (True, False):
        assert layer.train(mode)(x).isfinite().all(), f"seed {seed}: {layer} in {'training' if mode else 'eval'} mode"
    assert_finite(layer, f"seed {seed}, last call")


def _described(x: Any) -> str:
    if isinstance(x, list):
        return f"[{', '.join(map(_described, x))}]"
    if isinstance(x, dict):
        return f"{{{', '.join(f'{key!r}: {_described(one)}' for key, one in x.items())}}}"
    return f"{type(x).__name__} {x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)[:50]


# API


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 2))


def enter(context: Any) -> None:
    with context:
        pass


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def schedule() -> memnorm.StrengthSchedule:
    return memnorm.StrengthSchedule(memnorm.MemorizedBatchNorm2d(3), 10)


def train(model: nn.Module, x: Any, every: Any = 1) -> None:
    """A step with Double-Forward, a schedule and a monitor."""
    optimizer = sgd(model)
    handle = memnorm.double_forward(model, optimizer, every=every)
    try:
        monitor = memnorm.monitor(model)
        model(x).sum().backward()
        optimizer.step()
        memnorm.StrengthSchedule(model, 10).step()
        monitor.read(1)
    finally:
        handle.remove()


def load_damaged(model: nn.Module, a: Any) -> None:
    """Load a checkpoint of which one entry is not finite, unless torch's batch norm would take it."""
    if type(model[1]) is nn.BatchNorm2d:  # type: ignore[index]
        return
    checkpoint = {name: value.clone() for name, value in model.state_dict().items()}
    entries = [name for name, value in model[1].named_buffers() if value.is_floating_point()]  # type: ignore[index]
    checkpoint[f"1.{entries[len(repr(a)) % len(entries)]}"].fill_(float("nan"))
    model.load_state_dict(checkpoint)


SCHEDULE = {"total_steps": 10, "milestones": [4, 6], "values": [0.1, 0.5, 0.9], "last_step": 0}

# name: a function of the model, two values and options by name; the names of the options
API: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "convert": (lambda m, a, b, **o: memnorm.convert(m, **o), ("norm", "memory_size", "strength", "layer", "sync")),
    "convert mbn": (
        lambda m, a, b, **o: memnorm.convert(m, **o),
        ("memory_size", "decay", "strength", "prior_weight", "prior_from_init", "sync", "warmup"),
    ),
    "convert two_way": (
        lambda m, a, b, **o: memnorm.convert(m, "two_way", **o),
        ("decay", "strength", "warmup", "center", "sync", "memory_size"),
    ),
    "convert any": (
        lambda m, a, b, **o: memnorm.convert(m, b, **o),
        ("total_steps", "momentum", "ghost_size", "num_groups", "num_features", "r_max", "window", "eps"),
    ),
    "convert chosen": (
        lambda m, a, b, **o: memnorm.convert(m, "two_way", **o),
        ("include", "exclude", "frozen"),
    ),
    "convert wrong": (lambda m, a, b, **o: memnorm.convert(a, b, **o), ()),
    "to_batchnorm": (lambda m, a, b, **o: memnorm.to_batchnorm(a), ()),
    "plain_state_dict": (lambda m, a, b, **o: memnorm.plain_state_dict(a), ()),
    "plain_state_dict of the model": (lambda m, a, b, **o: memnorm.plain_state_dict(m), ()),
    "monitor": (lambda m, a, b, **o: memnorm.monitor(a), ()),
    "monitor read": (lambda m, a, b, **o: memnorm.monitor(m).read(a), ()),
    "train": (lambda m, a, b, **o: train(m, a, **o), ("every",)),
    "load": (lambda m, a, b, **o: load_damaged(m, a), ()),
    "summary": (lambda m, a, b, **o: memnorm.summary(a), ()),
    "center": (lambda m, a, b, **o: memnorm.center(m, a), ()),
    "recalibrate": (lambda m, a, b, **o: memnorm.recalibrate(m, a, **o), ("passes", "forward", "max_passes")),
    "adapt": (lambda m, a, b, **o: memnorm.adapt(m, a, **o).revert(), ("passes", "forward")),
    "diagnose": (lambda m, a, b, **o: str(memnorm.diagnose(m, a, **o)), ("forward", "max_batches")),
    "recording": (lambda m, a, b, **o: enter(memnorm.recording(a, b)), ()),
    "recording on": (lambda m, a, b, **o: enter(memnorm.recording(m, a)), ()),
    "rerecord": (lambda m, a, b, **o: memnorm.rerecord(m, a), ()),
    "rerecord wrong": (lambda m, a, b, **o: memnorm.rerecord(a, b), ()),
    "schedule": (lambda m, a, b, **o: memnorm.StrengthSchedule(m, a, **o).step(), ("milestones", "values")),
    "schedule state": (
        lambda m, a, b, **o: schedule().load_state_dict({**SCHEDULE, **o}),
        ("total_steps", "milestones", "values", "last_step", "other"),
    ),
    "schedule states": (lambda m, a, b, **o: schedule().load_state_dict(a), ()),
    "double_forward": (
        lambda m, a, b, **o: memnorm.double_forward(m, sgd(m), **o).remove(),
        ("every", "fraction", "scaler", "max_pending"),
    ),
    "double_forward wrong": (lambda m, a, b, **o: memnorm.double_forward(a, b), ()),
    "handle state": (lambda m, a, b, **o: memnorm.double_forward(m, sgd(m)).load_state_dict(a), ()),
    "register": (lambda m, a, b, **o: memnorm.norms.register(a), ()),
    "register norm": (
        lambda m, a, b, **o: memnorm.norms.register(
            memnorm.norms.Norm(**{"name": f"fuzz {id(o)}", "title": "", "paper": "", "replace": nn.Identity, **o})
        ),
        ("name", "replace", "refuse", "surgery", "settle"),
    ),
    "get": (lambda m, a, b, **o: memnorm.norms.get(a), ()),
    "layer": (
        lambda m, a, b, **o: memnorm.MemorizedBatchNorm2d(3, **o),
        ("memory_size", "decay", "strength", "prior_weight", "prior_from_init", "momentum"),
    ),
    "two-way layer": (lambda m, a, b, **o: memnorm.TwoWayBatchNorm2d(3, **o), ("decay", "strength", "warmup")),
    "set_strength": (lambda m, a, b, **o: memnorm.MemorizedBatchNorm2d(3).set_strength(a), ()),
}
EXACT = {"convert any": lambda rng: rng.choice((*memnorm.norms.available(), "", None))}


def fuzz_api(seed: int) -> None:
    rng = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = network()
    converted = rng.choice((None, "mbn", "two_way", "brn"))
    if converted:
        model = memnorm.convert(model, converted)
    name = rng.choice(list(API))
    function, names = API[name]
    a, b = anything(rng), EXACT.get(name, anything)(rng)
    options = some_options(rng, names)
    call = f"seed {seed}, {name} of a {converted} model with {_described([a, b, options])}"
    registered = dict(memnorm.norms._REGISTRY)
    try:
        with allowed_to_fail(model, call):
            function(model, a, b, **options)
    finally:
        memnorm.norms._REGISTRY.clear()
        memnorm.norms._REGISTRY.update(registered)
    assert model.train()(torch.randn(4, 3, 8, 8)).isfinite().all(), f"{call}: the model is not usable"
    assert_finite(model, call)


@pytest.mark.parametrize("start", range(0, 50, 25))
def test_random_calls_of_layers(start):
    for seed in range(start, start + 25):
        fuzz_layer(seed)


def test_random_calls_of_layers_without_kernels(monkeypatch):
    monkeypatch.setattr(cpu, "module", lambda: None)
    for seed in range(50, 100):
        fuzz_layer(seed)


@pytest.mark.parametrize("start", range(0, 400, 100))
def test_random_calls_of_the_api(start):
    for seed in range(start, start + 100):
        fuzz_api(seed)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 2250, 250))
def test_many_random_calls_of_layers(start, monkeypatch):
    if start % 500:
        monkeypatch.setattr(cpu, "module", lambda: None)
    for seed in range(start, start + 250):
        fuzz_layer(seed)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 11000, 1000))
def test_many_random_calls_of_the_api(start):
    for seed in range(start, start + 1000):
        fuzz_api(seed)
