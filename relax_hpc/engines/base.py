"""The interface of an engine: token sequences in, tokens with logprobs and versions out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from relax_hpc.records import Finish, Media, Progress

Tokens = NDArray[np.int32]
Weights = Iterable[tuple[str, Tensor]]
"""A version's tensors by their Hugging Face names."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The settings by which tokens are drawn."""

    temperature: float = 1.0
    """0 takes the likeliest token; its logprobs are then of the distribution at temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """The tokens that an engine generated after one prompt."""

    tokens: NDArray[np.int32]  # [T] the end-of-sequence token, where one was drawn, is the last
    logprobs: NDArray[np.float32]  # [T] of the tempered distribution before top-p and top-k
    spans: list[tuple[int, int]]  # (start, version), the first start is 0; none where there are no tokens
    finish: Finish | None
    """The reason why it ended; None where `progress` raised Abort before its end."""
    routed_experts: NDArray[np.unsignedinteger[Any]] | None = None  # [P + T - 1, layers, k]
    """Experts that each token of prompt and answer was routed to, where the recipe asks for them."""
    seconds: float = 0.0
    """Seconds from the request to its last token."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One answer that a stream is asked for."""

    key: int
    """Names the ask; no other one that is under way has it."""
    context: Tokens
    """Everything before the answer, with the expanded placeholders of `media`."""
    sampling: Sampling
    seed: int
    """What is drawn depends on it and on the token's place in the answer: equal asks get equal answers."""
    begun: Tokens = field(default_factory=lambda: np.empty(0, np.int32))
    """Tokens that the answer has already; they count for `max_new_tokens` and stop strings, and are not part of the
    completion."""
    media: Media | None = None


class Abort(Exception):
    """Raised by `progress` to make `generate` stop where it is, and return what there is."""


class EngineError(Exception):
    """The engine cannot recover by itself: its worker ends, and other workers generate its requests."""


class EngineRestarted(EngineError):
    """The engine was lost and started again, without weights: load them, and generate again."""


class Engine(Protocol):
    """The interface to fill to add an engine; the suite tests/contract/test_engines.py runs over all of them."""

    version: int
    """The version of the weights that it generates with; -1 before the first."""
    context: int
    """The most tokens that a sequence may have, prompt and answer together."""
    swaps: bool
    """True where `load` may be called from within `progress`: tokens from there on are of the new version."""
    seeded: bool
    """True where a seed gives the same completions again, bit for bit, on the same machine."""

    def load(
        self, version: int, tensors: Weights, progress: Progress = lambda: None, files: Sequence[Path] = ()
    ) -> None:
        """Load a whole version, verified by the caller. Raises ValueError for names or shapes that differ,
        EngineRestarted, EngineError.

        `files`: safetensors files with exactly these tensors, for an engine that reads files itself. `progress` is
        called during anything that lasts longer than the loading itself, such as starting a lost engine again.
        """
        ...

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
        """Generate `samples_per_prompt` completions of every prompt, as one batch, prompt-major.

        Where the engine is `seeded`, the same arguments and weights give the same completions. `progress` is called
        with the number of tokens generated so far (an engine may count completions when they end), at least once a
        second (it is the heartbeat). Where it raises Abort, completions that have not ended have no `finish`. `begun`:
        tokens that each prompt's answer has already (`samples_per_prompt` is 1 then). They count for `max_new_tokens`
        and stop strings, and are not part of the completion. `media`: what each prompt shows
        beside its text, later turns that stand in it included. Raises ValueError when a prompt leaves no room in the
        context, EngineRestarted, EngineError.
        """
        ...

    def offload(self) -> None:
        """Give the device's memory back, weights and cache; nothing is called before `onload`."""
        ...

    def onload(self, progress: Progress = lambda: None) -> None:
        """Take the device's memory again after `offload`, without weights: `load` brings them."""
        ...

    def close(self) -> None:
        """End everything that the engine has running."""
        ...


class Stream(Protocol):
    """Answers in the making that begin and end each at its own time: whatever waits joins those under way.

        stream.ask([...])
        while stream.busy:
            for key, completion in stream.advance(0.5): ...

    An answer depends on its ask alone, whoever shares the batch with it, but for what a batch of another shape rounds
    otherwise.
    """

    @property
    def busy(self) -> bool:
        """True while an ask has no completion yet."""
        ...

    def ask(self, asks: Sequence[Ask]) -> None:
        """Take asks, all or none, and return at once; any thread may call it, also during `advance`. Raises ValueError,
        which names the ask, for a context or an answer without room, or a key that is under way."""
        ...

    def advance(self, wait_s: float) -> list[tuple[int, Completion]]:
        """Go on for up to `wait_s` seconds, and return as soon as answers have ended: their keys and completions.
        Returns at once where nothing is under way. After EngineRestarted or EngineError everything under way is gone,
        and the stream is of no use any more."""
        ...

    def abort(self) -> list[tuple[int, Completion]]:
        """End all that is under way; returns it with what it has so far: those that have not ended have no `finish`.
        Raises as `advance` does."""
        ...


@runtime_checkable
class TakesAdapters(Protocol):
    """An engine that can be given an adapter's base once, and then versions that hold the adapter alone."""

    def load_base(self, tensors: Weights, progress: Progress = lambda: None) -> None:
        """Load the base, verified by the caller, before the first version, and after `onload` or EngineRestarted. Raises
        as `load` does."""
        ...


@runtime_checkable
class Streams(Protocol):
    """An engine with streams. One without them generates batch by batch: every answer waits for the longest."""

    def stream(self, progress: Progress = lambda: None) -> Stream:
        """Begin a stream, in place of the one before, which is aborted. `progress` is called by `advance` during
        anything that lasts longer than its `wait_s`, such as starting a lost engine again.

        While it is busy, `generate` and `offload` are not called, and `load` only where the engine `swaps`, between two
        calls of `advance`: answers go on with the new weights, and their spans say where.
        """
        ...
