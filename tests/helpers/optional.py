"""Optional libraries."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest

ECOSYSTEM = ("torchvision", "timm", "segmentation_models_pytorch", "monai", "ultralytics")


def library(name: str) -> ModuleType:
    """Import it, or skip the tests of this file. Where the library is installed for these tests, by `make test-full` or
    `make test-ecosystem`, a missing one fails.

    Any exception counts as missing, because libraries that do not fit together may raise anything.
    """
    required = "MEMNORM_ECOSYSTEM" if name.split(".")[0] in ECOSYSTEM else "MEMNORM_ALL_LIBRARIES"
    try:
        return importlib.import_module(name)
    except Exception as error:
        if os.environ.get(required):
            raise
        pytest.skip(f"{name} cannot be imported: {type(error).__name__}: {error}", allow_module_level=True)
