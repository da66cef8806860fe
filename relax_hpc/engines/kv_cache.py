"""A key/value cache that is written in place, and attention that reads it in place.

transformers' cache concatenates, and its grouped-query attention repeats, the whole cache for every token: for small
models both cost more than the arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

GROUPED = "relax_hpc_grouped"
ROOM = 256
"""Tokens of room beyond the filled ones, at first; doubled whenever it is used up."""


class InPlaceLayer(CacheLayerMixin):
    """One layer's keys and values, [rows, kv heads, room, head size], of which the first `length` positions are filled."""

    keys: Tensor
    values: Tensor

    def __init__(self, rows: int, limit: int) -> None:
        """`limit`: the most tokens that a row will ever hold."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows, self.limit, self.length = rows, limit, 0
        self.writing = slice(0, rows)
        """The rows that the next update writes: a long prefill goes through the batch in parts."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        room = min(self.limit, key_states.shape[2] + ROOM)
        self.keys, self.values = (
            x.new_empty(self.rows, x.shape[1], room, x.shape[3]) for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new positions of the rows in `writing`; returns views of all their positions."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        if end > self.keys.shape[2]:
            self.select(None, min(self.limit, max(end, 2 * self.keys.shape[2])))
        self.keys[self.writing, :, self.length : end] = key_states
        self.values[self.writing, :, self.length : end] = value_states
        if self.writing.stop == self.rows:
            self.length = end
        return self.keys[self.writing, :, :end], self.values[self.writing, :, :end]

    def select(self, rows: Tensor | None, room: int | None = None) -> None:
        """Keep the rows with these indices, in this order, repeated where an index is; None keeps all."""
        old = self.keys, self.values
        count = self.rows if rows is None else len(rows)
        self.keys, self.values = (x.new_empty(count, x.shape[1], room or x.shape[2], x.shape[3]) for x in old)
        for new, from_ in zip((self.keys, self.values), old, strict=True):
            filled = from_[:, :, : self.length]
            new[:, :, : self.length] = filled if rows is None else filled[rows]
        self.rows, self.writing = count, slice(0, count)

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return self.limit


class InPlaceCache(Cache):
    """A cache with an InPlaceLayer for every layer of a model."""

    def __init__(self, layers: int, rows: int, limit: int) -> None:
        self.in_place = [InPlaceLayer(rows, limit) for _ in range(layers)]
        super().__init__(layers=list(self.in_place))

    def write_to(self, rows: slice) -> None:
        """Choose the rows that the next forward writes; parts go up, and the last one ends with the last row."""
        for layer in self.in_place:
            layer.writing = rows

    def select(self, rows: Tensor) -> None:
        for layer in self.in_place:
            layer.select(rows)


def grouped_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention by SDPA. For one query position, the heads that share a key/value head become its queries: no repeats.

    query: [B, heads, L, D]; key, value: [B, kv heads, S, D]; mask: [B, 1, L, S]. Returns [B, L, heads, D].
    """
    batch, heads, length, size = query.shape
    shared = key.shape[1]
    if length > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    grouped = query.reshape(batch, shared, heads // shared, size)
    out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=kwargs.get("scaling"))
    return out.reshape(batch, 1, heads, value.shape[-1]), None


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Let `model` attend through grouped_attention where transformers would have taken SDPA for it."""
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(GROUPED, grouped_attention)
        AttentionMaskInterface.register(GROUPED, sdpa_mask)
        model.set_attn_implementation(GROUPED)
