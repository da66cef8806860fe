"""Lossless differences between two versions of a tensor: a step of RL changes few of the weights in bfloat16.

A tensor's elements are taken in blocks of 65 536. `count`: number of changed elements in each block; `at`: their places
in the block, two bytes each; `to`: their new bits. A tensor that changed too much is carried whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

BLOCK_BITS = 16
WORD_BYTES = 8
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by which elements of a width in bytes are compared: as floats, NaNs are unequal and zeros equal."""


def encode(name: str, base: Tensor | None, new: Tensor) -> list[tuple[str, Tensor]]:
    """Encode `new` as changes of `base` for `apply`: none when they are equal, `new` itself where that is smaller."""
    if base is None or base.dtype != new.dtype or base.shape != new.shape:
        return [(f"whole:{name}", new)]
    old, bits = _bits(base), _bits(new)
    at = _different(old, bits)
    if len(at) == 0:
        return []
    blocks = (len(bits) >> BLOCK_BITS) + 1
    if len(at) * (2 + bits.itemsize) + 4 * blocks >= new.nbytes:
        return [(f"whole:{name}", new)]
    return [
        (f"count:{name}", torch.bincount(at >> BLOCK_BITS, minlength=blocks).int()),
        (f"at:{name}", (at & ((1 << BLOCK_BITS) - 1)).to(torch.uint16)),
        (f"to:{name}", bits[at]),
    ]


def apply(base: Mapping[str, Tensor], change: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Apply a change; returns the new version's tensors, unchanged ones being the base's. Raises ValueError for a misfit."""
    new = dict(base)
    for key, value in change.items():
        kind, _, name = key.partition(":")
        if kind == "whole":
            new[name] = value
        elif kind == "to":
            count, at = change[f"count:{name}"].long(), change[f"at:{name}"].long()
            if int(count.sum()) != len(at) or name not in base:
                raise ValueError(f"the change of tensor '{name}' does not fit its base")
            where = (torch.arange(len(count)).repeat_interleave(count) << BLOCK_BITS) | at
            bits = _bits(base[name]).clone()
            bits[where] = value
            new[name] = bits.view(base[name].dtype).reshape(base[name].shape)
    return new


def _different(old: Tensor, new: Tensor) -> Tensor:
    """Positions where two rows of integers differ, ascending. Words of eight bytes are compared first: most are equal."""
    width = WORD_BYTES // new.itemsize
    if width == 1 or any(t.data_ptr() % WORD_BYTES or t.storage_offset() % width for t in (old, new)):
        return (old != new).nonzero().flatten()
    whole = len(new) // width * width
    words = (old[:whole].view(torch.int64) != new[:whole].view(torch.int64)).nonzero()
    at = torch.cat([(words * width + torch.arange(width)).flatten(), torch.arange(whole, len(new))])
    return at[old[at] != new[at]]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(BITS[tensor.dtype.itemsize])
