"""Private functions of torch: called in one module, and replaced where a torch has none."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import memnorm
from memnorm import _torch

PACKAGE = Path(memnorm.__file__).parent
MODULES = [path for path in PACKAGE.rglob("*.py") if "lab" not in path.relative_to(PACKAGE).parts]
PATHS = [
    node.args[0].value
    for node in ast.walk(ast.parse((PACKAGE / "_torch.py").read_text()))
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_private"
]


def private_names(path: Path) -> list[str]:
    """Names below torch that begin with an underscore, but for classes that users derive from as well."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            if "(" not in text and text.split(".")[0] in ("torch", "_C", "forward_ad", "Variable"):
                found.append(text)
    classes = (
        "_BatchNorm",
        "_NormBase",
        "_ConvNd",
        "_ConvTransposeNd",
        "_LazyNormBase",
        "_InstanceNorm",
        "__version__",
    )
    return [one for one in found if any(part.startswith("_") and part not in classes for part in one.split("."))]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_only_one_module_calls_private_functions_of_torch(path):
    if path.name != "_torch.py":
        assert not private_names(path)


def test_this_torch_has_them_all():
    assert _torch.missing == []
    assert set(_torch.KERNELS) <= set(PATHS)


PROGRAM = """
import json, sys, types, warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

root, lacking = Path(sys.argv[1]), json.loads(sys.argv[2])
sys.path.insert(0, str(root.parent))
source = (root / "_torch.py").read_text()
for path in lacking:
    assert f'"{path}", ' in source or f'"{path}"' in source
    source = source.replace(f'_private("{path}"', f'_private("no.such.{path}"')
    source = source.replace(f'_private(\\n    "{path}"', f'_private("no.such.{path}"')
source = source.replace('missing.append(path)', 'missing.append(path.removeprefix("no.such."))')
module = types.ModuleType("memnorm._torch")
module.__file__ = str(root / "_torch.py")
sys.modules["memnorm._torch"] = module
exec(compile(source, module.__file__, "exec"), module.__dict__)
assert sorted(module.missing) == sorted(lacking), (module.missing, lacking)

import memnorm

torch.set_num_threads(1)


def net(norm):
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4))
    return memnorm.convert(made.double(), norm)


def train(norm, reentrant=None, second=False, scaled=False):
    model = net(norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if second:
        memnorm.double_forward(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
    for step in range(6):
        optimizer.zero_grad()
        for part in range(2):
            x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2 * step + part)).double()
            x.requires_grad_()
            y = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
            scaler.scale(y.tanh().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    return [float(one.double().sum()) for one in model.state_dict().values()]


warnings.simplefilter("ignore")
found = {f"{norm}, {how}": train(norm, **options) for norm in ("mbn", "two_way") for how, options in {
    "plain": {}, "checkpoint": {"reentrant": False}, "reentrant": {"reentrant": True}, "scaled": {"scaled": True},
}.items()}
try:
    found["double"] = train("mbn", second=True)
except memnorm.MemnormError as error:
    found["double"] = str(error)
layer = memnorm.MemorizedBatchNorm2d(3).double()
x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(5)).double()
layer.recording = False
found["functorch"] = [float(torch.func.vjp(layer, x)[0].square().sum())]
print(json.dumps(found))
"""


def outcome(lacking: list[str]) -> dict:
    command = [sys.executable, "-c", PROGRAM, str(PACKAGE), json.dumps(lacking)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def expected() -> dict:
    return outcome([])


def assert_same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        torch.testing.assert_close(torch.tensor(found[key]), torch.tensor(values), rtol=1e-9, atol=1e-9, msg=key)


CALLBACK = "autograd.Variable._execution_engine.queue_callback"


def test_without_any_of_them_trainings_are_the_same_and_double_forward_says_what_is_missing(expected):
    found = outcome(PATHS)
    assert "does not say when a backward ends (queue_callback)" in found["double"]
    assert_same({**found, "double": expected["double"]}, expected)


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in PATHS if path != CALLBACK])
def test_without_one_of_them_trainings_are_the_same(path, expected):
    assert_same(outcome([path]), expected)
