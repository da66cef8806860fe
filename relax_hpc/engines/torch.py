"""The torch engine: batched generation with transformers, in the worker's own process.

    prompts, media ──each distinct pair once──► prefill ──cache rows repeated──► samples_per_prompt rows each
    rows ──forward one position, draw──► tokens ──ended?──► the cache is compacted to the rows that continue

Prompts, with the tokens that their answers have already, are padded on the left, so that all rows write the same
position of the cache, and one call does for all of them. What stands for a patch of an image or a frame of sound ends
an answer in which it is drawn: nothing could be shown there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from relax_hpc.engines.base import Abort, Completion, Sampling, Tokens, Weights
from relax_hpc.engines.kv_cache import InPlaceCache, use_grouped_attention
from relax_hpc.engines.model_folder import aliases, check_whole, context_of, end_tokens, room_for, weights_of
from relax_hpc.engines.sampling import draw
from relax_hpc.engines.stops import StopStrings
from relax_hpc.files.tensor_files import shapes
from relax_hpc.huggingface import as_arguments, hidden_states, unfilled
from relax_hpc.media.families import family_of
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Finish, Media, Progress

_Shown = tuple[Tokens, Media | None]
"""A context, and what it shows beside its text."""
PREFILL_TOKENS = 16384
"""Tokens of prompts, padding included, in one forward."""
COMPACT_AT = 0.75
"""The batch is compacted when no more than this share of its rows still continues."""
LOOK_EVERY = {"cpu": 1, "cuda": 16}
"""Steps between two checks how many rows continue; on a GPU each check waits for all that was queued."""
PROGRESS_EVERY_S = 0.2


@dataclass(slots=True)
class _Batch:
    """The rows that are being generated; B shrinks when the batch is compacted."""

    rows: Tensor  # [B] which completion each row is
    alive: Tensor  # [B] bool
    room: Tensor  # [B] tokens that the row may have
    position: Tensor  # [B, 1] of the next token that is fed
    visible: Tensor  # [B, 1, 1, S] bool: not the padding on the left

    def keep(self, index: Tensor) -> None:
        for name in ("rows", "alive", "room", "position", "visible"):
            setattr(self, name, getattr(self, name)[index])


class _Output:
    """The tokens that N completions have so far, of at most T."""

    def __init__(self, began: float, completions: int, longest: int, device: torch.device) -> None:
        with device:
            self.tokens = torch.zeros(completions, longest, dtype=torch.long)  # [N, T]
            self.logprobs = torch.zeros(completions, longest)  # [N, T] float32
            self.lengths = torch.zeros(completions, dtype=torch.long)  # [N]
            self.stopped = torch.zeros(completions, dtype=torch.bool)  # [N]
            self.going = torch.ones(completions, dtype=torch.bool)  # [N] cut off before its end
        self.began = began
        self.times: list[float] = []  # [T] seconds from `began` to each step's end


class TorchEngine:
    """See relax_hpc.engines.base.Engine."""

    swaps = False
    seeded = True

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
        self._resting = [(tensor, tensor.untyped_storage().nbytes()) for tensor in weights_of(self.model).values()]
        """Tensors that `load` fills, and the bytes that each takes."""
        self._stops: dict[tuple[str, ...], StopStrings] = {}

    def load(
        self, version: int, tensors: Weights, progress: Progress = lambda: None, files: Sequence[Path] = ()
    ) -> None:
        own, given = weights_of(self.model), dict(tensors)
        check_whole(version, shapes(given.items()), shapes(own.items()), aliases(self.model))
        with torch.no_grad():
            for name, tensor in given.items():
                own[name].copy_(tensor)
        self.version = version

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Tokens],
        samples_per_prompt: int,
        sampling: Sampling,
        seed: int,
        progress: Callable[[int], None] = lambda tokens: None,
        begun: Sequence[Tokens] = (),
        media: Sequence[Media | None] = (),
    ) -> list[Completion]:
        if not len(prompts) * samples_per_prompt:
            return []
        began, rooms = time.monotonic(), room_for(prompts, self.context, sampling.max_new_tokens, begun)
        out = _Output(began, len(prompts) * samples_per_prompt, max(rooms), self.device)
        contexts = [np.concatenate(both) for both in zip(prompts, begun, strict=True)] if begun else prompts
        shown = [*zip(contexts, media or [None] * len(prompts), strict=True)]
        with contextlib.suppress(Abort):
            cache, logits, batch = self._prefill(shown, samples_per_prompt, rooms, progress)
            try:
                self._decode(cache, logits, batch, out, sampling, seed, progress, begun)
            finally:
                out.going.zero_()[batch.rows] = batch.alive
        return self._completions(out)

    def offload(self) -> None:
        self.version = -1
        for tensor, _ in self._resting:
            tensor.untyped_storage().resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self, progress: Progress = lambda: None) -> None:
        for tensor, size in self._resting:
            tensor.untyped_storage().resize_(size)

    def close(self) -> None: ...

    def _decode(
        self, cache: InPlaceCache, logits: Tensor, batch: _Batch, out: _Output, sampling: Sampling, seed: int,
        progress: Callable[[int], None], begun: Sequence[Tokens],
    ) -> None:  # fmt: skip
        """Draw, check which rows ended, feed the drawn tokens; until no row continues."""
        generator = torch.Generator(self.device).manual_seed(seed)
        stops = self._stop_strings(sampling.stop)
        tails = [answer[-stops.window :].tolist() for answer in begun] if stops else []
        look_every, said, generated = LOOK_EVERY[self.device.type], time.monotonic(), 0
        steps = out.tokens.shape[1]
        for step in range(steps):
            tokens, logprobs = draw(logits, sampling, generator)
            out.tokens[batch.rows, step] = tokens
            out.logprobs[batch.rows, step] = logprobs
            out.lengths[batch.rows] += batch.alive
            ended = self.ends[tokens]
            if stops is not None:
                before = [tails[row] for row in batch.rows.tolist()] if tails else ()
                ended = ended | stops.ended(out.tokens[batch.rows, : step + 1], tokens, before)
            out.stopped[batch.rows] |= ended & batch.alive
            batch.alive &= ~ended & (batch.room > step + 1)
            out.times.append(time.monotonic() - out.began)
            if step % look_every == look_every - 1 or step == steps - 1:
                going = int(batch.alive.sum())
                generated = int(out.lengths.sum())
                if going == 0:
                    break
                if going <= COMPACT_AT * len(batch.rows):
                    index = batch.alive.nonzero().flatten()
                    cache.select(index)
                    batch.keep(index)
                    tokens = tokens[index]
            visible = batch.visible[..., : cache.get_seq_length() + 1]
            logits = self._forward(cache, tokens[:, None], batch.position, visible)
            batch.position.add_(1)
            if self.family.axes == 1:
                batch.position.clamp_(max=self.context - 1)  # rows that ended stay until the batch is compacted
            if time.monotonic() - said > PROGRESS_EVERY_S:
                said = time.monotonic()
                progress(generated)
        progress(int(out.lengths.sum()))

    def _forward(self, cache: InPlaceCache, tokens: Tensor, position: Tensor, mask: Tensor, **media: Any) -> Tensor:
        """[B, V] logits of the last position. tokens, position: [B, L], or [3, B, L]; mask: [B, 1, L, S]."""
        inputs = {"input_ids": tokens, "position_ids": position, "attention_mask": mask, "past_key_values": cache}
        if self.model.base_model is self.model:
            hidden = hidden_states(self.model, **inputs, **media, use_cache=True)
            last: Tensor = self.model.get_output_embeddings()(hidden[:, -1])
            return last
        logits: Tensor = self.model(**inputs, **media, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1]

    def _prefill(
        self, contexts: Sequence[_Shown], samples_per_prompt: int, room: list[int], progress: Callable[[int], None]
    ) -> tuple[InPlaceCache, Tensor, _Batch]:
        """Run each distinct context once, then repeat its cache row, its last logits and its padding for every sample."""
        keys = [(tokens.tobytes(), media.digest if media else "") for tokens, media in contexts]
        distinct = dict(zip(keys, contexts, strict=True))
        place = {key: i for i, key in enumerate(distinct)}
        of = torch.tensor([place[key] for key in keys], device=self.device)
        of = of.repeat_interleave(samples_per_prompt)
        width = max(len(tokens) for tokens, _ in contexts)
        padded, positions, following = self._placed([*distinct.values()], width)
        lengths = torch.tensor([len(tokens) for tokens, _ in distinct.values()], device=self.device)
        limit = width + max(room) - 1
        visible = torch.arange(limit, device=self.device) >= width - lengths[:, None]  # [distinct, limit]
        cache = InPlaceCache(self.layers, len(distinct), limit)
        logits = []
        size = max(1, PREFILL_TOKENS // width)
        for start in range(0, len(distinct), size):
            rows = slice(start, min(start + size, len(distinct)))
            progress(0)
            cache.write_to(rows)
            shown = self.family.joined([media for _, media in [*distinct.values()][rows] if media])
            tokens, position = (torch.from_numpy(a[..., rows, :]).to(self.device) for a in (padded, positions))
            arguments = as_arguments(shown, self.model)
            mask = self._prefill_mask(visible[rows, :width])
            logits.append(self._forward(cache, tokens, position, mask, **arguments))
        cache.select(of)
        batch = _Batch(
            rows=torch.arange(len(of), device=self.device),
            alive=torch.ones(len(of), dtype=torch.bool, device=self.device),
            room=torch.tensor(room, device=self.device).repeat_interleave(samples_per_prompt),
            position=torch.from_numpy(following).to(self.device)[of][:, None],
            visible=visible[of][:, None, None],
        )
        return cache, torch.cat(logits)[of], batch

    def _placed(self, contexts: Sequence[_Shown], width: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
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

    def _stop_strings(self, stops: tuple[str, ...]) -> StopStrings | None:
        if stops and stops not in self._stops:
            self._stops[stops] = StopStrings(self.tokenizer, stops, self.device)
        return self._stops.get(stops)

    def _completions(self, out: _Output) -> list[Completion]:
        tokens, logprobs = out.tokens.to("cpu", torch.int32).numpy(), out.logprobs.cpu().numpy()
        rows = zip(out.lengths.tolist(), out.stopped.tolist(), out.going.tolist(), strict=True)
        return [
            Completion(
                tokens=tokens[i, :length].copy(),
                logprobs=logprobs[i, :length].copy(),
                spans=[(0, self.version)] if length else [],
                finish=None if going else Finish.STOP if stopped else Finish.LENGTH,
                seconds=out.times[length - 1] if length else 0.0,
            )
            for i, (length, stopped, going) in enumerate(rows)
        ]
