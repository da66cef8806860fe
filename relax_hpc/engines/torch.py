"""The torch engine: batched generation with transformers, in the worker's own process.

    prompts, media ──each distinct pair once──► prefill ──cache rows repeated──► samples_per_prompt rows each
    rows ──forward one position, draw──► tokens ──ended?──► the cache is compacted to the rows that continue

Prompts, with the tokens that their answers have already, are padded on the left, so that all rows write the same
position of the cache, and one call does for all of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from relax_hpc.engines.base import Abort, Completion, Sampling, Tokens, Weights
from relax_hpc.engines.kv_cache import InPlaceCache
from relax_hpc.engines.model_folder import aliases, check_whole, room_for, weights_of
from relax_hpc.engines.sampling import draw
from relax_hpc.engines.torch_model import LOOK_EVERY, Shown, TorchModel
from relax_hpc.engines.torch_stream import TorchStream
from relax_hpc.files.tensor_files import shapes
from relax_hpc.huggingface.lora import adapt, adapter_of
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Finish, Media, Progress

COMPACT_AT = 0.75
"""The batch is compacted when no more than this share of its rows still continues."""
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


class TorchEngine(TorchModel):
    """See relax_hpc.engines.base.Engine."""

    swaps = False
    seeded = True

    def __init__(self, recipe: Recipe, model_dir: Path) -> None:
        super().__init__(recipe, model_dir)
        self._stream: TorchStream | None = None
        lora = recipe.trainer.lora
        self._adapted = lora is not None and lora.sync == "adapter"
        if lora is not None and self._adapted:
            adapt(self.model, lora)
            self.model.requires_grad_(False)
        filled = [*weights_of(self.model).values(), *adapter_of(self.model).values()]
        self._resting = [(tensor, tensor.untyped_storage().nbytes()) for tensor in filled]
        """Tensors that `load` fills, and the bytes that each takes."""

    def load(
        self, version: int, tensors: Weights, progress: Progress = lambda: None, files: Sequence[Path] = ()
    ) -> None:
        if self._adapted:
            self._fill(f"version {version}", adapter_of(self.model), tensors, set())
        else:
            self._fill(f"version {version}", weights_of(self.model), tensors, aliases(self.model))
        self.version = version

    def load_base(self, tensors: Weights, progress: Progress = lambda: None) -> None:
        self._fill("the adapter's base", weights_of(self.model), tensors, aliases(self.model))

    @torch.no_grad()
    def _fill(self, what: str, own: Mapping[str, Tensor], tensors: Weights, optional: set[str]) -> None:
        given = dict(tensors)
        check_whole(what, shapes(given.items()), shapes(own.items()), optional)
        for name, tensor in given.items():
            own[name].copy_(tensor)

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
            cache, logits, batch = self._begin(shown, samples_per_prompt, rooms, progress)
            try:
                self._decode(cache, logits, batch, out, sampling, seed, progress, begun)
            finally:
                out.going.zero_()[batch.rows] = batch.alive
        return self._completions(out)

    def stream(self, progress: Progress = lambda: None) -> TorchStream:
        if self._stream is not None:
            self._stream.abort()
        self._stream = TorchStream(self)
        return self._stream

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
        stops = self.stop_strings(sampling.stop)
        tails = [answer.tolist() for answer in begun] or [[]] * len(batch.rows)  # stop strings may begin there
        look_every, said, generated = LOOK_EVERY[self.device.type], time.monotonic(), 0
        steps = out.tokens.shape[1]
        for step in range(steps):
            tokens, logprobs = draw(logits, sampling, generator)
            out.tokens[batch.rows, step] = tokens
            out.logprobs[batch.rows, step] = logprobs
            out.lengths[batch.rows] += batch.alive
            ended = self.ends[tokens]
            if stops is not None:
                for i in stops.possible(tokens):
                    row = int(batch.rows[i])
                    last = out.tokens[row, max(0, step + 1 - stops.window) : step + 1].tolist()
                    ended[i] |= stops.complete([*tails[row], *last])
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
            logits = self.forward(cache, tokens[:, None], batch.position, visible)
            batch.position.add_(1)
            if self.family.axes == 1:
                batch.position.clamp_(max=self.context - 1)  # rows that ended stay until the batch is compacted
            if time.monotonic() - said > PROGRESS_EVERY_S:
                said = time.monotonic()
                progress(generated)
        progress(int(out.lengths.sum()))

    def _begin(
        self, shown: Sequence[Shown], samples_per_prompt: int, room: list[int], progress: Callable[[int], None]
    ) -> tuple[InPlaceCache, Tensor, _Batch]:
        """Prefill each distinct context, then repeat its cache row, its last logits and its padding for every sample."""
        made = self.prefill(shown, max(room) - 1, lambda: progress(0))
        of = made.row.repeat_interleave(samples_per_prompt)
        made.cache.select(of)
        batch = _Batch(
            rows=torch.arange(len(of), device=self.device),
            alive=torch.ones(len(of), dtype=torch.bool, device=self.device),
            room=torch.tensor(room, device=self.device).repeat_interleave(samples_per_prompt),
            position=made.following[of][:, None],
            visible=made.visible[of][:, None, None],
        )
        return made.cache, made.logits[of], batch

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
