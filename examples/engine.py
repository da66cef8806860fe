"""An engine of one's own: transformers without a cache, the samples of one prompt side by side. Slow, short, and it keeps the whole contract.

prompts ──one after the other──► its samples as one batch ──forward, draw──► tokens ──ended?──► Completions
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from relax_hpc.engines.base import Abort, Completion, Sampling, Tokens, Weights
from relax_hpc.engines.model_folder import aliases, check_whole, context_of, end_tokens, room_for, weights_of
from relax_hpc.engines.sampling import draw
from relax_hpc.engines.stops import StopStrings
from relax_hpc.files.tensor_files import shapes
from relax_hpc.huggingface import unfilled
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Finish, Media, Progress


@dataclass
class _Row:
    """One completion in the making."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None
    seconds: float = 0.0


class PlainEngine:
    """See relax_hpc.engines.base.Engine."""

    swaps = False
    seeded = True

    def __init__(self, recipe: Recipe, model_dir: Path) -> None:
        self.config: Any = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        self.dtype: torch.dtype = getattr(torch, recipe.trainer.dtype)
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        self.context, self.version = context_of(self.config), -1
        self.ends = set(end_tokens(model_dir, self.config, self.tokenizer))
        self.model: PreTrainedModel = self._empty()

    def load(
        self, version: int, tensors: Weights, progress: Progress = lambda: None, files: Sequence[Path] = ()
    ) -> None:
        """Look at all of it first: a version of another model changes nothing."""
        own, given = weights_of(self.model), dict(tensors)
        check_whole(f"version {version}", shapes(given.items()), shapes(own.items()), aliases(self.model))
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
        if any(media):
            raise ValueError("this engine shows no images, videos or sounds to its model")
        rooms = room_for(prompts, self.context, sampling.max_new_tokens, begun)
        rows = [[_Row() for _ in range(samples_per_prompt)] for _ in prompts]
        prefixes = begun or [np.empty(0, np.int32)] * len(prompts)
        every = [row for of_prompt in rows for row in of_prompt]
        generator, began = torch.Generator().manual_seed(seed), time.monotonic()
        stops = StopStrings(self.tokenizer, sampling.stop, torch.device("cpu")) if sampling.stop else None

        def look(going: Sequence[_Row]) -> None:
            for row in going:
                row.seconds = time.monotonic() - began
            progress(sum(len(row.tokens) for row in every))

        with contextlib.suppress(Abort):  # what has not ended has no `finish`
            for prompt, room, mine, before in zip(prompts, rooms, rows, prefixes, strict=True):
                self._complete(prompt, before.tolist(), room, mine, sampling, generator, stops, look)
        return [self._completion(row) for row in every]

    def offload(self) -> None:
        """Let go of the weights; no name of them may be left."""
        self.version = -1
        del self.model

    def onload(self, progress: Callable[[], None] = lambda: None) -> None:
        self.model = self._empty()

    def close(self) -> None: ...

    def _complete(
        self, prompt: NDArray[np.int32], before: list[int], room: int, rows: list[_Row], sampling: Sampling,
        generator: torch.Generator, stops: StopStrings | None, look: Callable[[Sequence[_Row]], None],
    ) -> None:  # fmt: skip
        """Draw a token for each row that goes on, until none does; all of them are equally long."""
        going = rows
        for _ in range(room):
            context = torch.tensor([[*prompt.tolist(), *before, *row.tokens] for row in going])
            logits = self.model(input_ids=context, use_cache=False, logits_to_keep=1).logits[:, -1]
            drawn, logprobs = draw(logits, sampling, generator)
            for row, token, logprob in zip(going, drawn.tolist(), logprobs.tolist(), strict=True):
                row.tokens.append(token)
                row.logprobs.append(logprob)
            stopped = [row.tokens[-1] in self.ends for row in going]
            if stops is not None:
                for i in stops.possible(drawn):
                    stopped[i] |= stops.complete([*before, *going[i].tokens])
            for row, ended in zip(going, stopped, strict=True):
                row.finish = Finish.STOP if ended else Finish.LENGTH if len(row.tokens) == room else None
            look(going)
            going = [row for row in going if row.finish is None]
            if not going:
                return

    def _completion(self, row: _Row) -> Completion:
        return Completion(
            tokens=np.array(row.tokens, np.int32),
            logprobs=np.array(row.logprobs, np.float32),
            spans=[(0, self.version)] if row.tokens else [],
            finish=row.finish,
            seconds=row.seconds,
        )

    def _empty(self) -> PreTrainedModel:
        """The model, to be filled by `load`."""
        return unfilled(self.config, self.dtype, torch.device("cpu"))
