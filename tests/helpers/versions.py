"""What differs between versions of torch."""

from __future__ import annotations

import pytest
import torch

TORCH = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def newer_than(version: tuple[int, int], reason: str) -> pytest.MarkDecorator:
    """Skip a test of what this version of torch cannot do yet."""
    return pytest.mark.skipif(version >= TORCH, reason=f"torch {version[0]}.{version[1]}: {reason}")
