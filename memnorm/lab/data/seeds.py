"""Seeds made from other numbers: `mix(seed, "augment", iteration)` is a new seed, unrelated to its neighbours.

Adding instead of hashing would make run 1 at iteration 0 draw what run 0 draws at iteration 1.
"""

from __future__ import annotations

import hashlib


def mix(*parts: int | str) -> int:
    """A whole number in [0, 2**63), the same on every machine for the same parts."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
