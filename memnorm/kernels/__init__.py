"""Kernels for the CPU and for CUDA; on other devices the layers consist of torch operations."""

from __future__ import annotations

import os


def switched_off() -> bool:
    """Return True if the user wants torch operations everywhere."""
    return os.environ.get("MEMNORM_KERNELS", "").lower() == "off"
