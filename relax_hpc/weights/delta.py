"""What changed between two versions of a tensor, lossless: after a step of RL most weights in bfloat16 have the same bits.

A tensor's elements are taken in blocks of 65 536. `count`: how many of each block changed; `at`: where in their block, two
bytes each; `to`: their new bits. A tensor of which too much changed is carried whole; one that did not change, not at all.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

BLOCK_BITS = 16
WORD_BYTES = 8
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types to compare elements by, by their width: NaNs are unequal and zeros equal as floats."""


def encode(name: str, base: Tensor | None, new: Tensor) -> list[tuple[str, Tensor]]:
    """Tensors that make `new` of `base`; none when they are equal, `new` itself where that is smaller."""
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
    """The new version's tensors; those that did not change are the base's own. Raises ValueError where they do not fit."""
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
    """Where two rows of integers differ, ascending; most words of eight bytes do not, and are looked at once."""
    width = WORD_BYTES // new.itemsize
    if width == 1 or any(t.data_ptr() % WORD_BYTES or t.storage_offset() % width for t in (old, new)):
        return (old != new).nonzero().flatten()
    whole = len(new) // width * width
    words = (old[:whole].view(torch.int64) != new[:whole].view(torch.int64)).nonzero()
    at = torch.cat([(words * width + torch.arange(width)).flatten(), torch.arange(whole, len(new))])
    return at[old[at] != new[at]]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(BITS[tensor.dtype.itemsize])
