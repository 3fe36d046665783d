"""Code of our own for the devices that profit from it; everything else is composed from torch operations."""

from __future__ import annotations

import os


def switched_off() -> bool:
    """Return True if the user wants torch operations everywhere."""
    return os.environ.get("MEMNORM_KERNELS", "").lower() == "off"
