"""`memnorm check`: passes where the layers are right, and notices a device that is not."""

import json
import math

import pytest
import torch
from helpers.cuda import STAND_INS, by_schema
from torch.utils._python_dispatch import TorchDispatchMode

from memnorm.kernels import cpu, cuda
from memnorm.lab import check
from memnorm.lab.check import Check, Result

QUICK = [one for one in check.all_checks() if "compiled" not in one.what]
FLOAT32 = [one for one in QUICK if one.what == "layer, float32, contiguous"]


def outcomes(checks):
    return {(one.what, one.norm): one.outcome for one in check.run("cpu", checks)}


def test_the_checks_cover_norms_dtypes_layouts_compilation_and_training():
    found = {one.what for one in check.all_checks() if one.norm == "mbn"}
    dtypes, layouts = ("float32", "float16", "bfloat16"), ("contiguous", "channels_last")
    wanted = {f"layer, {dtype}, {layout}" for dtype in dtypes for layout in layouts}
    assert found == wanted | {"layer, float32, compiled", "training, 20 steps, float32"}
    assert found < {one.what for one in check.all_checks() if one.norm == "two_way"}


def test_the_cpu_passes():
    assert set(outcomes(QUICK).values()) == {"passed"}


def test_the_layers_and_algorithm_1_equal_their_equations_in_float64():
    checks = check.exact_checks()
    assert {one.allowed for one in checks} == {1e-12}
    assert set(outcomes(checks).values()) == {"passed"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch about itself
def test_compiled_layers_pass_on_the_cpu():
    compiled = [one for one in check.all_checks() if one not in QUICK and "compiled" in one.what]
    assert set(outcomes(compiled).values()) == {"passed"}


class Device(TorchDispatchMode):
    """A stand-in device: float32 and narrower results of one operation are too large by `factor`."""

    def __init__(self, operation, factor):
        super().__init__()
        self.operation, self.factor = operation, factor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ != self.operation:
            return found
        several = found if isinstance(found, tuple) else (found,)
        wrong = [one * self.factor if self.takes(one) else one for one in several]
        return tuple(wrong) if isinstance(found, tuple) else wrong[0]

    @staticmethod
    def takes(value):
        return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


OPERATIONS = ["var_mean", "native_batch_norm", "sum", "lerp", "where"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_device_that_computes_one_operation_wrongly_fails(operation):
    with Device(operation, 1.0):
        assert set(outcomes(FLOAT32).values()) == {"passed"}
    with Device(operation, 1.0003):
        assert "FAILED" in outcomes(FLOAT32).values()


def test_a_device_with_wrong_convolutions_fails_in_training_only():
    training = [one for one in QUICK if one.what == "training, 20 steps, float32"]
    with Device("convolution", 1.01):
        found = outcomes(FLOAT32 + training)
    assert {outcome for (what, _), outcome in found.items() if what.startswith("layer")} == {"passed"}
    assert {outcome for (what, _), outcome in found.items() if what.startswith("training")} == {"FAILED"}


@pytest.fixture
def kernels(monkeypatch):
    """The CPU as a CUDA device, with stand-ins for torch's kernels; call it to make one of them wrong by a factor."""

    def install(wrong="", factor=1.0):
        for stand_in in STAND_INS:
            name, right = stand_in.__name__, by_schema(stand_in)

            def called(*arguments, name=name, right=right):
                found = right(*arguments)
                if name != wrong:
                    return found
                if not isinstance(found, tuple):
                    return found * factor
                return tuple(one if one is None else one * factor for one in found)

            monkeypatch.setattr(torch, name, called)

    monkeypatch.delenv("MEMNORM_KERNELS", raising=False)
    monkeypatch.setattr(cpu, "module", lambda: None)
    monkeypatch.setattr(cuda, "_wanted", lambda: True)
    monkeypatch.setattr(cuda, "DEVICE", "cpu")
    return install


def test_a_cuda_device_passes(kernels):
    kernels()
    layers = [one for one in QUICK if one.what.startswith("layer")]
    assert set(outcomes(layers).values()) == {"passed"}


@pytest.mark.parametrize("stand_in", STAND_INS, ids=lambda one: one.__name__)
def test_a_cuda_device_with_one_wrong_kernel_fails_in_every_dtype_and_layout(kernels, stand_in):
    kernels(stand_in.__name__, 1.02)
    layers = [one for one in QUICK if one.what.startswith("layer") and one.norm == "mbn"]
    assert set(outcomes(layers).values()) == {"FAILED"}


def test_a_value_that_is_not_finite_fails(kernels):
    kernels("batch_norm_elemt", math.nan)
    (result, _) = check.run("cpu", FLOAT32)
    assert (result.error, result.outcome) == (math.inf, "FAILED")


def raising(norms):
    def measure(norm, device):
        if norm in norms:
            raise RuntimeError("no such operation\nand more")
        return 0.0

    return Check("an operation", "mbn", 1e-5, measure)


def test_a_check_that_raises_fails():
    (result,) = check.run("cpu", [raising({"mbn"})])
    assert (result.outcome, result.problem) == ("FAILED", "RuntimeError: no such operation")


def test_a_check_that_torchs_batch_norm_raises_in_as_well_is_skipped():
    (result,) = check.run("cpu", [raising({"mbn", "bn"})])
    assert result.outcome == "skipped"


@pytest.mark.parametrize("one", [one for one in QUICK if one.norm == "two_way"], ids=lambda one: one.what)
def test_torchs_batch_norm_runs_in_every_check(one):
    assert one.measure("bn", torch.device("cpu")) >= 0


PASSED = Result("layer, float32, contiguous", "mbn", 2e-7, 1e-5)
WRONG = Result("layer, float16, contiguous", "mbn", 0.5, 1e-3)
RAISED = Result("training, 20 steps, float32", "mbn", math.nan, 1e-4, "RuntimeError: no such operation")
SKIPPED = Result("layer, float32, compiled", "mbn", math.nan, 1e-5, "RuntimeError: no compiler", skipped=True)


@pytest.mark.parametrize(
    ("results", "code"),
    [([PASSED], 0), ([PASSED, SKIPPED], 0), ([SKIPPED], 1), ([PASSED, WRONG], 1), ([PASSED, RAISED], 1)],
    ids=["passed", "one skipped", "all skipped", "wrong", "raised"],
)
def test_the_exit_code_says_if_all_that_could_be_checked_passed(call, no_git, monkeypatch, results, code):
    monkeypatch.setattr(check, "run", lambda device: iter(results))
    assert call("check")[0] == code


def test_the_report_has_versions_the_device_and_each_failure(call, no_git, monkeypatch):
    monkeypatch.setattr(check, "run", lambda device: iter([PASSED, WRONG, RAISED, SKIPPED]))
    _, out, err = call("check")
    assert f"torch {torch.__version__}" in out
    assert "device cpu: " in out
    assert "1 passed, 2 failed, 1 skipped" in out
    assert "layer, float16, contiguous, mbn, FAILED: error 5.0e-01, allowed 1e-03" in out
    assert "training, 20 steps, float32, mbn, FAILED: RuntimeError: no such operation" in out
    assert "compiled, mbn, skipped: torch's batch norm raises as well: RuntimeError: no compiler" in out
    assert err.count("\n") == 4


def test_json_has_no_nan(call, no_git, monkeypatch):
    monkeypatch.setattr(check, "run", lambda device: iter([PASSED, RAISED]))
    _, out, _ = call("check", "--json")
    found = json.loads(out, parse_constant=pytest.fail)
    assert [one["error"] for one in found["results"]] == [2e-7, None]
    assert [one["outcome"] for one in found["results"]] == ["passed", "FAILED"]


@pytest.mark.parametrize("device", ["cuda:99", "nonsense", "meta"])
def test_a_device_that_is_absent_gets_one_sentence(call, device):
    code, out, err = call("check", "--device", device)
    assert (code, out) == (2, "")
    assert err.startswith(f"memnorm: device '{device}' cannot be used here: ")
    assert err.count("\n") == 1
