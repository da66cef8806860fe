"""The torch engine: batched generation with transformers, in the worker's own process.

    prompts ──each distinct one once──► prefill ──cache rows repeated──► samples_per_prompt rows each
    rows ──forward one position, draw──► tokens ──ended?──► the cache is compacted to the rows that continue

Prompts, with the tokens that their answers have already, are padded on the left, so that all rows write the same
position of the cache, and one call does for all of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from relax_hpc.engines.base import Abort, Completion, Sampling, Tokens, Weights
from relax_hpc.engines.kv_cache import InPlaceCache, use_grouped_attention
from relax_hpc.engines.model_folder import aliases, check_whole, context_of, end_tokens, room_for, weights_of
from relax_hpc.engines.sampling import draw
from relax_hpc.engines.stops import StopStrings
from relax_hpc.files.tensor_files import shapes
from relax_hpc.huggingface import unfilled
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Finish, Progress

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
        self.model = unfilled(config, getattr(torch, recipe.trainer.dtype), self.device)
        use_grouped_attention(self.model)
        self.context = context_of(config)
        self.layers: int = config.get_text_config().num_hidden_layers
        self.ends = torch.zeros(
            self.model.get_output_embeddings().weight.shape[0], dtype=torch.bool, device=self.device
        )
        self.ends[end_tokens(model_dir, config, self.tokenizer)] = True
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
    ) -> list[Completion]:
        if not len(prompts) * samples_per_prompt:
            return []
        began, rooms = time.monotonic(), room_for(prompts, self.context, sampling.max_new_tokens, begun)
        out = _Output(began, len(prompts) * samples_per_prompt, max(rooms), self.device)
        contexts = [np.concatenate(both) for both in zip(prompts, begun, strict=True)] if begun else prompts
        with contextlib.suppress(Abort):
            cache, logits, batch = self._prefill(contexts, samples_per_prompt, rooms, progress)
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
            batch.position.add_(1).clamp_(max=self.context - 1)  # rows that ended stay until the batch is compacted
            if time.monotonic() - said > PROGRESS_EVERY_S:
                said = time.monotonic()
                progress(generated)
        progress(int(out.lengths.sum()))

    def _forward(self, cache: InPlaceCache, tokens: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        """[B, V] logits of the last position. tokens, position: [B, L]; mask: [B, 1, L, S]."""
        logits: Tensor = self.model(
            input_ids=tokens, position_ids=position, attention_mask=mask, past_key_values=cache, use_cache=True,
            logits_to_keep=1,
        ).logits  # fmt: skip
        return logits[:, -1]

    def _prefill(
        self, prompts: Sequence[Tokens], samples_per_prompt: int, room: list[int], progress: Callable[[int], None]
    ) -> tuple[InPlaceCache, Tensor, _Batch]:
        """Run each distinct prompt once, then repeat its cache row, its last logits and its padding for every sample."""
        distinct = {prompt.tobytes(): prompt for prompt in prompts}
        place = {key: i for i, key in enumerate(distinct)}
        of = torch.tensor([place[prompt.tobytes()] for prompt in prompts], device=self.device)
        of = of.repeat_interleave(samples_per_prompt)
        width = max(len(prompt) for prompt in prompts)
        padded = np.zeros((len(distinct), width), np.int64)
        for i, prompt in enumerate(distinct.values()):
            padded[i, width - len(prompt) :] = prompt
        lengths = torch.tensor([len(prompt) for prompt in distinct.values()], device=self.device)
        limit = width + max(room) - 1
        visible = torch.arange(limit, device=self.device) >= width - lengths[:, None]  # [distinct, limit]
        cache = InPlaceCache(self.layers, len(distinct), limit)
        logits = []
        size = max(1, PREFILL_TOKENS // width)
        for start in range(0, len(distinct), size):
            rows = slice(start, min(start + size, len(distinct)))
            progress(0)
            cache.write_to(rows)
            tokens = torch.from_numpy(padded[rows]).to(self.device)
            logits.append(self._prefill_part(cache, tokens, visible[rows, :width]))
        cache.select(of)
        batch = _Batch(
            rows=torch.arange(len(of), device=self.device),
            alive=torch.ones(len(of), dtype=torch.bool, device=self.device),
            room=torch.tensor(room, device=self.device).repeat_interleave(samples_per_prompt),
            position=lengths[of][:, None],
            visible=visible[of][:, None, None],
        )
        return cache, torch.cat(logits)[of], batch

    def _prefill_part(self, cache: InPlaceCache, tokens: Tensor, real: Tensor) -> Tensor:
        """Fill the cache with prompts [B, L]; returns the logits of their last positions. real: [B, L] bool, False on
        padding, which attends to itself alone: a query must see something."""
        width = tokens.shape[1]
        causal = torch.ones(width, width, dtype=torch.bool, device=self.device).tril()
        mask = (causal & real[:, None, :]) | torch.eye(width, dtype=torch.bool, device=self.device)
        position = (real.cumsum(-1) - 1).clamp(min=0)
        return self._forward(cache, tokens, position, mask[:, None])

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
