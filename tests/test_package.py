"""The package: what it exports, what it imports, and in which order."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import memnorm

PACKAGE = Path(memnorm.__file__).parent
PATHS = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
    if "lab" not in path.relative_to(PACKAGE).parts
}


def run(program: str) -> list[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/"
    ).stdout.splitlines()


def own_imports(tree: ast.AST) -> Iterator[str]:
    """The memnorm modules that a module imports, without those for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "memnorm")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "memnorm":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in PATHS else str(node.module)
        else:
            yield from own_imports(node)


def test_imports_go_one_way():
    """TopologicalSorter raises CycleError, with the cycle."""
    graph = {name: set(own_imports(ast.parse(path.read_text()))) for name, path in PATHS.items()}
    assert not [name for name, imported in graph.items() if not imported <= PATHS.keys()]
    assert set(graphlib.TopologicalSorter(graph).static_order()) == PATHS.keys()


@pytest.mark.parametrize("name", PATHS)
def test_no_function_imports_a_module_of_memnorm(name):
    functions = [one for one in ast.walk(ast.parse(PATHS[name].read_text())) if isinstance(one, ast.FunctionDef)]
    assert not [imported for function in functions for imported in own_imports(function)]


def test_no_module_has_the_name_of_a_public_function():
    assert not [name for name in memnorm.__all__ if f"memnorm.{name}" in PATHS]
    assert type(memnorm) is types.ModuleType


def test_importing_memnorm_brings_in_torch_and_the_standard_library_only():
    """Measured against a plain `import torch`: no compiler, no data library, no trainer, nothing optional."""
    program = (
        "import sys, torch; before = set(sys.modules); import memnorm.integrations.attach; "
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))); "
        "print('torch._dynamo' in set(sys.modules) - before, 'torch._inductor' in set(sys.modules) - before)"
    )
    packages, compilers = run(program)
    assert set(packages.split()) <= {"memnorm", "torch"}
    assert compilers == "False False"


def test_a_star_import_brings_the_public_names():
    namespace: dict[str, object] = {}
    exec("from memnorm import *", namespace)
    assert set(memnorm.__all__) <= namespace.keys()
