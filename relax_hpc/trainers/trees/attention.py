"""Attention in which a token sees its ancestors in a tree, and itself.

    a segment's queries ──► keys of the segments before it, one behind the other, and its own up to each query ──► outputs
    backward: the same, and what each segment's keys are given is added up

No score is computed that would be masked away, but for the triangle behind each query in its own segment. On a CPU this
is torch's flash attention, segment by segment; elsewhere torch's scaled_dot_product_attention, computed again in the
backward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from relax_hpc.files.errors import RunError
from relax_hpc.trainers.trees.layout import Block

QUERIES = 512
"""The most queries of one call that have others' keys before their own: bounds the mask."""
NAME = "relax_hpc_trees"
_current: ContextVar[TreeAttention] = ContextVar(NAME)
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class TreeAttention:
    """Attention of one micro-batch, for all its layers."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = [piece for block in blocks for piece in _pieces(block)]
        self.calls = 0
        self._before = max((_count(block.before) for block in self.blocks), default=0)
        self._mask: Tensor | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """[1, heads, T, D] from queries of this shape, and keys and values with as many heads or fewer; 0 at tokens of no
        block."""
        self.calls += 1
        found: Tensor = _Attend.apply(query, key, value, self, scale)  # type: ignore[no-untyped-call]
        return found

    def mask(self, block: Block, like: Tensor) -> Tensor | None:
        """[queries, keys] to add to a block's scores; None where causal attention is all."""
        if not block.before:
            return None
        if self._mask is None or (self._mask.dtype, self._mask.device) != (like.dtype, like.device):
            hidden = torch.full((QUERIES, self._before + QUERIES), -torch.inf, dtype=like.dtype, device=like.device)
            self._mask = hidden.triu(self._before + 1)
        count = block.end - block.begin
        return self._mask[:count, self._before - _count(block.before) : self._before + count]


def _pieces(block: Block) -> Iterator[Block]:
    if not block.before:
        yield block
        return
    for begin in range(block.begin, block.end, QUERIES):
        before = (*block.before, slice(block.begin, begin)) if begin > block.begin else block.before
        yield Block(begin, min(begin + QUERIES, block.end), before)


def _count(stretches: Sequence[slice]) -> int:
    return sum(one.stop - one.start for one in stretches)


class _Attend(torch.autograd.Function):
    """See TreeAttention. Keys of a block are gathered when they are needed, and kept by nobody."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, tree: TreeAttention, scale: float | None
    ) -> Tensor:
        out = _zeros(query, value.shape[-1], query.dtype)
        sums = query.new_zeros(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))
        flash = _fast(query, value)
        for block in tree.blocks:
            q, k, v, mask = _parts(query, key, value, block, tree)
            here = slice(block.begin, block.end)
            if flash:
                out[:, :, here], sums[:, :, here] = _flash(q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale)
            else:
                out[:, :, here] = _plain(q, k, v, mask, scale)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.tree, ctx.scale = tree, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        flash = _fast(query, value)
        # added up over the segments that see a key, in more digits than bfloat16 has
        for_query, for_key, for_value = (_zeros(x, x.shape[-1], sums.dtype) for x in (query, key, value))
        for block in ctx.tree.blocks:
            here = slice(block.begin, block.end)
            q, k, v, mask = _parts(query, key, value, block, ctx.tree)
            grad = grads[0][:, :, here]
            if flash:
                known = out[:, :, here], sums[:, :, here]
                found = _flash_backward(grad, q, k, v, *known, 0.0, mask is None, attn_mask=mask, scale=ctx.scale)
            else:
                with torch.enable_grad():
                    given = [x.detach().requires_grad_() for x in (q, k, v)]
                    found = torch.autograd.grad(_plain(given[0], given[1], given[2], mask, ctx.scale), given, grad)
            for_query[:, :, here] = found[0]
            at = 0
            for seen in (*block.before, here):
                of = slice(at, at := at + seen.stop - seen.start)
                for_key[:, :, seen] += found[1][:, :, of]
                for_value[:, :, seen] += found[2][:, :, of]
        return for_query.to(query), for_key.to(key), for_value.to(value), None, None


def _zeros(like: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """[1, heads, T, size] zeros; a token's heads lie together, as layers want them."""
    batch, heads, tokens, _ = like.shape
    return like.new_zeros((batch, tokens, heads, size), dtype=dtype).transpose(1, 2)


def _fast(query: Tensor, value: Tensor) -> bool:
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def _parts(
    query: Tensor, key: Tensor, value: Tensor, block: Block, tree: TreeAttention
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(queries of a block, keys and values that they see, mask)"""
    here = slice(block.begin, block.end)
    k, v = (torch.cat([x[:, :, seen] for seen in (*block.before, here)], 2) for x in (key, value))
    return query[:, :, here], k, v, tree.mask(block, query)


def _plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    each = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(each, 1) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale)


def understood(body: PreTrainedModel) -> bool:
    """Return True for a model whose attention can be exchanged for this: others are given a mask of all pairs."""
    return bool(body.config.get_text_config()._attn_implementation == "sdpa")


@contextlib.contextmanager
def attending(body: PreTrainedModel, tree: TreeAttention) -> Iterator[None]:
    """Let the language model of `body` attend so within this block."""
    AttentionInterface.register(NAME, _attend)
    config, token = body.config.get_text_config(), _current.set(tree)
    before, config._attn_implementation = config._attn_implementation, NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        _current.reset(token)
    if not tree.calls:
        raise RunError(f"{type(body).__name__} does not look up its attention: set trainer.share_prefixes = false")


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float | None = None, **ignored: Any
) -> tuple[Tensor, None]:
    """Attend as transformers' layers ask: [R, heads, L, D] -> [R, L, heads, D]."""
    rows, _, length, _ = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2) for x in (query, key, value))
    out = _current.get()(q, k, v, scaling)
    return out.transpose(1, 2).unflatten(1, (rows, length))[0], None
