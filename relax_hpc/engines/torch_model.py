"""A model that generates: what batches (torch.py) and streams (torch_stream.py) share.

    contexts, media ──each distinct pair once, padded on the left──► prefill ──► a cache row and next logits each
    drawn tokens ──forward, one position──► next logits

What stands for a patch of an image or a frame of sound ends an answer in which it is drawn: nothing could be shown there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer
from transformers.cache_utils import Cache

from relax_hpc.engines.base import Tokens
from relax_hpc.engines.kv_cache import InPlaceCache, use_grouped_attention
from relax_hpc.engines.model_folder import context_of, end_tokens
from relax_hpc.engines.stops import StopStrings
from relax_hpc.huggingface import as_arguments, hidden_states, unfilled
from relax_hpc.media.families import family_of
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Media, Progress

Shown = tuple[Tokens, Media | None]
"""A context, and what it shows beside its text."""
PREFILL_TOKENS = 16384
"""Tokens of prompts, padding included, in one forward."""
LOOK_EVERY = {"cpu": 1, "cuda": 16}
"""Steps between two checks how many rows continue; on a GPU each check waits for all that was queued."""


def key_of(shown: Shown) -> tuple[bytes, str]:
    """Return a key that equal contexts with equal media have in common."""
    tokens, media = shown
    return tokens.tobytes(), media.digest if media else ""


def fitting(contexts: Iterable[Shown]) -> int:
    """Count how many contexts, from the first on, fit into one forward; it is one at least."""
    distinct, width, count = set[tuple[bytes, str]](), 0, 0
    for context in contexts:
        distinct.add(key_of(context))
        width = max(width, len(context[0]))
        if count and len(distinct) * width > PREFILL_TOKENS:
            break
        count += 1
    return count


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Contexts of which every distinct one went through the model once: D rows, padded on the left."""

    cache: InPlaceCache
    logits: Tensor  # [D, V] after the last token
    following: Tensor  # [D] position of the next token
    visible: Tensor  # [D, limit] bool: not the padding
    lengths: Tensor  # [D]
    row: Tensor  # [N] of each context


class TorchModel:
    """A model without weights yet, in the worker's own process."""

    def __init__(self, recipe: Recipe, model_dir: Path) -> None:
        detected = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(detected if recipe.rollout.device == "auto" else recipe.rollout.device)
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        self.family = family_of(config)
        self.model = unfilled(config, getattr(torch, recipe.trainer.dtype), self.device)
        use_grouped_attention(self.model)
        self.context = context_of(config)
        self.layers: int = config.get_text_config().num_hidden_layers
        self.ends = torch.zeros(
            self.model.get_output_embeddings().weight.shape[0], dtype=torch.bool, device=self.device
        )
        self.ends[end_tokens(model_dir, config, self.tokenizer)] = True
        self.ends[list(self.family.placeholders(config).values())] = True
        self.version = -1
        self._stops: dict[tuple[str, ...], StopStrings] = {}

    def forward(self, cache: Cache, tokens: Tensor, position: Tensor, mask: Tensor, **media: Any) -> Tensor:
        """[B, V] logits of the last position. tokens, position: [B, L], or [3, B, L]; mask: [B, 1, L, S]."""
        inputs = {"input_ids": tokens, "position_ids": position, "attention_mask": mask, "past_key_values": cache}
        if self.model.base_model is self.model:
            hidden = hidden_states(self.model, **inputs, **media, use_cache=True)
            last: Tensor = self.model.get_output_embeddings()(hidden[:, -1])
            return last
        logits: Tensor = self.model(**inputs, **media, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1]

    def prefill(self, contexts: Sequence[Shown], room: int = 0, progress: Progress = lambda: None) -> Prefilled:
        """Run each distinct context once; the cache has room for `room` more tokens. `progress`: called before each
        forward."""
        keys = [key_of(context) for context in contexts]
        distinct = dict(zip(keys, contexts, strict=True))
        place = {key: i for i, key in enumerate(distinct)}
        row = torch.tensor([place[key] for key in keys], device=self.device)
        width = max(len(tokens) for tokens, _ in contexts)
        padded, positions, following = self._placed([*distinct.values()], width)
        lengths = torch.tensor([len(tokens) for tokens, _ in distinct.values()], device=self.device)
        limit = width + room
        visible = torch.arange(limit, device=self.device) >= width - lengths[:, None]  # [distinct, limit]
        cache = InPlaceCache(self.layers, len(distinct), limit)
        logits = []
        size = max(1, PREFILL_TOKENS // width)
        for start in range(0, len(distinct), size):
            rows = slice(start, min(start + size, len(distinct)))
            progress()
            cache.write_to(rows)
            shown = self.family.joined([media for _, media in [*distinct.values()][rows] if media])
            tokens, position = (torch.from_numpy(a[..., rows, :]).to(self.device) for a in (padded, positions))
            arguments = as_arguments(shown, self.model)
            mask = self._prefill_mask(visible[rows, :width])
            logits.append(self.forward(cache, tokens, position, mask, **arguments))
        return Prefilled(cache, torch.cat(logits), torch.from_numpy(following).to(self.device), visible, lengths, row)

    def _placed(self, contexts: Sequence[Shown], width: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Tokens [N, L] of contexts padded on the left, positions [N, L] or [axes, N, L], the position [N] after each."""
        padded = np.zeros((len(contexts), width), np.int64)
        several = self.family.axes > 1
        # and one more, of what follows, where it is the same on every axis
        positions = np.zeros((self.family.axes, len(contexts), width + 1), np.float32 if several else np.int64)
        for i, (tokens, media) in enumerate(contexts):
            if media:
                media.check("the engine's encoders")
            padded[i, width - len(tokens) :] = tokens
            placed = self.family.positions_onward(self.model.config, tokens, media)
            positions[:, i, width - len(tokens) :] = placed
        following, positions = positions[0, :, -1], positions[..., :-1]
        return padded, positions if several else positions[0], following

    def _prefill_mask(self, real: Tensor) -> Tensor:
        """[B, 1, L, L] of prompts. real: [B, L] bool, False on padding, which attends to itself alone: a query must see
        something."""
        width = real.shape[1]
        causal = torch.ones(width, width, dtype=torch.bool, device=self.device).tril()
        mask = (causal & real[:, None, :]) | torch.eye(width, dtype=torch.bool, device=self.device)
        return mask[:, None]

    def stop_strings(self, stops: tuple[str, ...]) -> StopStrings | None:
        """Return what finds these stop strings; None where there are none."""
        if stops and stops not in self._stops:
            self._stops[stops] = StopStrings(self.tokenizer, stops, self.device)
        return self._stops.get(stops)
