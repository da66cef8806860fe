"""A key/value cache with a row for each answer in the making: rows join at the end, where one leaves the last takes its place.

Room grows by a share of what there is, and one row is copied for each that leaves: all copying together is in
proportion to what is generated, however many rows come and go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from relax_hpc.engines.torch_model import Prefilled

MORE_ROWS = 1.5
"""Room for rows is multiplied by this where it is used up."""
MORE_COLUMNS = 2
"""Room for tokens is multiplied by this where it is used up."""
ROOM = 256
"""Tokens of room beyond the filled ones, at first."""


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, [rows, kv heads, room, head size], each row filled up to a length of its own."""

    keys: Tensor
    values: Tensor

    def __init__(self, cache: SlotCache, keys: Tensor, values: Tensor) -> None:
        """Make it without rows; keys, values: tensors of the same kind."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache
        self.keys, self.values = (x.new_zeros(0, x.shape[1], 0, x.shape[3]) for x in (keys, values))
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write one position of each row, behind its last; returns views of all positions."""
        at, end = self._cache.lengths, self._cache.end
        rows = torch.arange(len(at), device=at.device)
        self.keys[rows, :, at], self.values[rows, :, at] = key_states[:, :, 0], value_states[:, :, 0]
        return self.keys[: len(at), :, :end], self.values[: len(at), :, :end]

    def reserve(self, rows: int, room: int) -> None:
        """Have room for so many rows and tokens. What is not filled is zero: it is multiplied by a weight of zero."""
        for name in ("keys", "values"):
            old: Tensor = getattr(self, name)
            new = old.new_zeros(rows, old.shape[1], room, old.shape[3])
            new[: old.shape[0], :, : old.shape[2]] = old
            setattr(self, name, new)

    def get_seq_length(self) -> int:
        return self._cache.end

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.end + query_length, 0

    def get_max_length(self) -> int:
        return self.keys.shape[2]


class SlotCache(Cache):
    """A cache with a SlotLayer for every layer of a model, for rows that were prefilled elsewhere."""

    def __init__(self, made: Prefilled) -> None:
        """Make it without rows, for such as `made` has."""
        self.slots = [SlotLayer(self, layer.keys, layer.values) for layer in made.cache.in_place]
        self.lengths = made.lengths[:0]  # [rows] tokens that each row holds
        self.end = 0
        """Tokens of the longest row, one that is being written included; none is longer."""
        super().__init__(layers=list(self.slots))

    def join(self, made: Prefilled) -> None:
        """Append a row for each prefilled context, shifted to the left, over its padding."""
        before, lengths = len(self.lengths), made.lengths[made.row]
        width = made.cache.get_seq_length()
        after = before + len(lengths)
        self.reserve(after, width)
        columns = torch.arange(width, device=lengths.device) + (width - lengths)[:, None]
        columns.clamp_(max=width - 1)
        for slot, layer in zip(self.slots, made.cache.in_place, strict=True):
            for own, new in ((slot.keys, layer.keys), (slot.values, layer.values)):
                own[before:after, :, :width] = new[made.row[:, None], :, columns].transpose(1, 2)
        self.lengths, self.end = torch.cat([self.lengths, lengths]), max(self.end, width)

    def reserve(self, rows: int, columns: int) -> None:
        """Have room for so many rows, and so many tokens in each."""
        there, room = self.slots[0].keys.shape[0], self.slots[0].keys.shape[2]
        if rows <= there and columns <= room:
            return
        rows = max(rows, int(MORE_ROWS * there)) if rows > there else there
        columns = max(columns + ROOM, MORE_COLUMNS * room) if columns > room else room
        for layer in self.slots:
            layer.reserve(rows, columns)

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; those that are already in their place are not touched."""
        index = torch.tensor(rows, device=self.lengths.device)
        to = torch.tensor([place for place, row in enumerate(rows) if place != row], device=index.device)
        if len(to):
            for layer in self.slots:
                for own in (layer.keys, layer.values):
                    own[to, :, : self.end] = own[index[to], :, : self.end]
        self.lengths = self.lengths[index]
