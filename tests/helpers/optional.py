"""Optional libraries."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest


def library(name: str) -> ModuleType:
    """Import it, or skip the tests of this file. `make test-full` installs them all, and there a missing one fails.

    Any exception counts as missing, because libraries that do not fit together may raise anything.
    """
    try:
        return importlib.import_module(name)
    except Exception as error:
        if os.environ.get("MEMNORM_ALL_LIBRARIES"):
            raise
        pytest.skip(f"{name} cannot be imported: {type(error).__name__}: {error}", allow_module_level=True)
