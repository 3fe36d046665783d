"""The package loads its parts when they are used."""

import subprocess
import sys

import pytest

import memnorm


def fresh(program):
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/"
    ).stdout.split()


def test_importing_memnorm_and_its_reports_does_without_torch():
    assert fresh("import sys, memnorm, memnorm.lab.spec; print('torch' in sys.modules)") == ["False"]


def test_only_the_module_for_a_trainer_imports_that_trainer():
    program = (
        "import sys, memnorm.integrations.attach; print(*{'lightning', 'accelerate', 'transformers'} & {*sys.modules})"
    )
    assert fresh(program) == []


@pytest.mark.parametrize("first", ["convert", "double_forward", "diagnose"])
def test_a_public_name_stays_the_function_after_the_module_of_that_name_was_imported(first):
    program = f"import importlib, memnorm; importlib.import_module('memnorm.{first}'); print(callable(memnorm.{first}))"
    assert fresh(program) == ["True"]


@pytest.mark.parametrize("name", [*memnorm.__all__, *memnorm._MODULES])
def test_every_public_name_and_module_is_an_attribute_and_listed(name):
    assert hasattr(memnorm, name)
    assert name in dir(memnorm)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'convrt'"):
        memnorm.convrt  # noqa: B018


def test_a_star_import_brings_the_public_names():
    namespace = {}
    exec("from memnorm import *", namespace)
    assert set(memnorm.__all__) <= namespace.keys()
