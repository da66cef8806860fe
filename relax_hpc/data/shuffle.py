"""A shuffle that is a function of its name alone: the same on every machine and under every library version."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray


def order(size: int, *name: str | int) -> NDArray[np.int64]:
    """Shuffle range(size) with `name` as the key; returns the permutation, [size].

    Raw Philox words are sorted, not `Generator.permutation`: numpy keeps the streams of bit generators, and does not
    promise to keep those of its distributions (NEP 19).
    """
    key = np.frombuffer(blake2b("/".join(map(str, name)).encode(), digest_size=16).digest(), dtype="<u8")
    return np.argsort(np.random.Philox(key=key).random_raw(size), kind="stable")
