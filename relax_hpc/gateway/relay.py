"""The relay: what agents ask for goes to the engine's stream, what it completes goes back; new weights may come in between.

gateway.asks() ──► stream.ask ──► stream.advance ──► gateway.answer
                      ▲                 │ suspended: what an answer has so far is kept …
                      └── … and begun ◄─┘            and goes on under the new weights
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from relax_hpc.engines import Ask, Completion, Streams
from relax_hpc.gateway.server import Gateway


@dataclass(slots=True)
class _Open:
    """An ask under way, and what earlier weights made of its answer."""

    ask: Ask
    parts: list[Completion] = field(default_factory=list)


class Relay:
    """Carries asks and completions between a gateway and an engine, in the thread that owns the engine."""

    def __init__(self, gateway: Gateway, engine: Streams, progress: Callable[[], None] = lambda: None) -> None:
        """progress: called while a lost server is started again."""
        self._gateway, self._engine, self._progress = gateway, engine, progress
        self._stream = engine.stream(progress)
        self._open: dict[int, _Open] = {}

    def advance(self, wait_s: float) -> None:
        """Work for up to `wait_s` seconds, or wait for as long where nobody asks. Raises as Stream.advance does."""
        for ask in (new := self._gateway.asks()):
            self._open[ask.key] = _Open(ask)
        if new:
            self._stream.ask(new)
        if not self._open:
            self._gateway.wait(wait_s)
            return
        for key, completion in self._stream.advance(wait_s):
            self._gateway.answer(key, _joined([*self._open.pop(key).parts, completion]))

    def suspend(self, load: Callable[[], None]) -> None:
        """Have answers under way go on under the weights that `load` brings; who asks meanwhile waits."""
        for key, completion in self._stream.abort():
            one = self._open[key]
            if completion.finish is not None:
                self._gateway.answer(key, _joined([*self._open.pop(key).parts, completion]))
            elif len(completion.tokens):
                one.parts.append(completion)
                one.ask = replace(one.ask, begun=np.concatenate([one.ask.begun, completion.tokens]))
        load()
        self._stream = self._engine.stream(self._progress)
        self._stream.ask([one.ask for one in self._open.values()])

    def close(self) -> None:
        """End what is under way."""
        self._stream.abort()


def _joined(parts: list[Completion]) -> Completion:
    """Join the parts of an answer that different weights made."""
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0, *(len(part.tokens) for part in parts)])
    return Completion(
        tokens=np.concatenate([part.tokens for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        spans=[
            (int(at) + begin, version) for at, part in zip(starts, parts, strict=False) for begin, version in part.spans
        ],
        finish=parts[-1].finish,
        routed_experts=parts[-1].routed_experts,
        seconds=sum(part.seconds for part in parts),
    )
