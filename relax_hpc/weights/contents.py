"""Contents of a version, whatever transport carries it: every tensor's name, type, shape and checksum.

A tensor's checksum is the XXH3-128 of its bytes; the version's is that of all tensors' lines in the order of their
names. It depends on nothing else: not on the order of export, buckets, files or transport.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import xxhash
from torch import Tensor

from relax_hpc.files.tensor_files import NAMES, as_bytes
from relax_hpc.weights.base import DamagedWeights


class Entry(NamedTuple):
    """One tensor of a version."""

    dtype: str
    shape: tuple[int, ...]
    checksum: str


Contents = dict[str, Entry]
"""Tensor name -> its entry."""


def entry(tensor: Tensor) -> Entry:
    """Describe a tensor. The GIL is free while its bytes are read."""
    if tensor.dtype not in NAMES:
        raise ValueError(f"a tensor of type {tensor.dtype} cannot be published: use one of {sorted(map(str, NAMES))}")
    return Entry(NAMES[tensor.dtype], tuple(tensor.shape), xxhash.xxh3_128_hexdigest(as_bytes(tensor).data))


def checksum(contents: Contents) -> str:
    """The checksum of a whole version."""
    lines = (f"{name}\0{e.dtype}\0{list(e.shape)}\0{e.checksum}\n" for name, e in sorted(contents.items()))
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())


def from_json(plain: Mapping[str, Any]) -> Contents:
    """Make contents of what JSON makes of them."""
    return {name: Entry(dtype, tuple(shape), digest) for name, (dtype, shape, digest) in plain.items()}


def compare(expected: Contents, found: Mapping[str, Entry], where: str) -> None:
    """Raise DamagedWeights unless `found` is exactly what the manifest says."""
    for name in expected.keys() | found.keys():
        got, wanted = found.get(name), expected.get(name)
        if wanted != got:
            has, says = (
                f"checksum {e.checksum} ({e.dtype} {list(e.shape)})" if e else "nothing of that name, no checksum"
                for e in (got, wanted)
            )
            raise DamagedWeights(f"{where}: tensor '{name}' has {has}, its manifest says {says}: refused")
