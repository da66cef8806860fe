"""Sessions: a key each, a tree of turns each; what agents ask becomes asks of the engine's stream.

    agent's request ──Call──► history known? ──yes: its tokens go on──┐
                                   └──no: rendered, a new branch──────┴──► Ask ──engine──► Completion ──► Turn ──► reply
                                                                                                └──► the tree
Everything here but `Gateway`'s own methods (server.py) runs in the thread that serves requests.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_hpc.engines import Completion, Sampling
from relax_hpc.environments.tools import Call as ToolCall
from relax_hpc.gateway.messages import Message, fingerprints, for_template
from relax_hpc.gateway.refusals import Refusal
from relax_hpc.gateway.rendering import Renderer
from relax_hpc.gateway.tree import Node, Tree
from relax_hpc.records import Finish
from relax_hpc.spool.request import request_seed

MAX_REFUSED = 50
"""Requests in a row that may be refused before a session is given up: its client tries for ever."""
MAX_OPEN = 64
"""Requests of one session that may be open at once."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request of an agent, whichever API it came by: messages, or tokens."""

    messages: Sequence[Mapping[str, Any]] = ()
    tokens: NDArray[np.int32] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    stream: bool = False
    logprobs: bool = False
    usage: bool = False
    """True where a stream ends with the number of tokens."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The model's answer to a call."""

    id: str
    text: str
    calls: tuple[dict[str, Any], ...]
    """Calls of tools, as OpenAI writes them, with arguments as objects."""
    said: Completion
    context: int
    """Tokens before the answer."""
    created: int

    @property
    def cut(self) -> bool:
        return self.said.finish is Finish.LENGTH


@dataclass(slots=True, eq=False)
class Session:
    """What one agent's run said and was told; it knows the gateway by its key alone."""

    key: str
    seed: int
    sampling: Sampling
    tree: Tree = field(default_factory=Tree)
    ended: bool = False
    open: int = 0
    """Requests that wait for their answer."""
    refused: int = 0
    """Requests that were refused since the last one that was answered."""
    last_refusal: str = ""
    overflowed: bool = False
    """True if a request left no room in the model's context."""
    asked: int = 0

    @classmethod
    def begin(cls, seed: int, sampling: Sampling) -> Session:
        return cls(secrets.token_urlsafe(32), seed, sampling)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call with its tokens, ready for the engine."""

    session: Session
    call: Call
    parent: Node | None
    told: NDArray[np.int32]
    context: NDArray[np.int32]
    sampling: Sampling
    seed: int
    messages: tuple[Message, ...]


Generate = Callable[[Session, NDArray[np.int32], Sampling, int], "asyncio.Future[Completion]"]


class Desk:
    """Turns calls into asks, and completions into turns of a session's tree."""

    def __init__(self, renderer: Renderer, context: int, generate: Generate) -> None:
        """context: the most tokens of a sequence; generate: begins an answer of the engine."""
        self.renderer, self.context, self._generate = renderer, context, generate

    def prepare(self, session: Session, call: Call) -> Prepared:
        """Find the call's place in the session's tree. Raises Refusal."""
        if session.ended:
            raise ended()
        if session.open >= MAX_OPEN:
            raise Refusal(f"{MAX_OPEN} requests of this session are open: wait for their answers", 429)
        messages, parent, told = self._place(session, call)
        context = told if parent is None else np.concatenate([parent.tokens(), told])
        if len(context) >= self.context:
            session.overflowed = True
            raise Refusal(
                f"the messages have {len(context)} tokens, which leaves no room for an answer in the model's context of "
                f"{self.context}: shorten them",
                param="messages", code="context_length_exceeded",
            )  # fmt: skip
        base, session.asked = session.sampling, session.asked + 1
        longest = min(base.max_new_tokens, call.max_tokens or base.max_new_tokens)
        name = f"turn {session.asked}" if call.seed is None else f"seed {call.seed}"
        sampling = replace(base, max_new_tokens=longest, stop=(*base.stop, *call.stop))
        seed = request_seed(session.seed, name)
        return Prepared(session, call, parent, told, context, sampling, seed, tuple(messages))

    def _place(self, session: Session, call: Call) -> tuple[list[Message], Node | None, NDArray[np.int32]]:
        if call.tokens is not None:
            parent, known = session.tree.find_tokens(call.tokens)
            return [], parent, call.tokens[known:]
        messages = for_template(call.messages)
        history = [*fingerprints(messages, _about(call))]
        parent, known = session.tree.find(history)
        if parent is not None:
            before, new = messages[:known], messages[known:]
            told = self.renderer.after(parent.said.tokens, before, new, call.tools, call.options)
            if told is not None:
                return messages, parent, told
        return messages, None, self.renderer.whole(messages, call.tools, call.options)

    async def answer(self, ready: Prepared, gone: Callable[[], Any]) -> Turn:
        """Generate the answer and keep it; one that nobody waits for any more (`gone`) is not kept. Raises Refusal."""
        session, call = ready.session, ready.call
        session.open += 1
        try:
            said = await self._generate(session, ready.context, ready.sampling, ready.seed)
            if session.ended or await gone():
                raise ended()
        finally:
            session.open -= 1
        turn = self._turn(ready, said)
        reply = {"role": "assistant", "content": turn.text, "tool_calls": turn.calls}
        history = None
        if call.tokens is None:
            *_, history = fingerprints([*ready.messages, reply], _about(call))
        session.tree.add(ready.parent, ready.told, said, history)
        session.refused = 0
        return turn

    def _turn(self, ready: Prepared, said: Completion) -> Turn:
        text, found = self.renderer.text(said.tokens, ready.sampling.stop), list[ToolCall]()
        if ready.call.tools:
            text, found = self.renderer.calls(said.tokens, text)
        calls = tuple(
            {
                "id": f"call_{secrets.token_hex(12)}", "type": "function",
                "function": {"name": one.name, "arguments": one.arguments},
            }
            for one in found
        )  # fmt: skip
        return Turn(secrets.token_hex(12), text, calls, said, len(ready.context), int(time.time()))

    def refuse(self, session: Session, refusal: Refusal) -> None:
        """Count a refusal against a session."""
        session.refused, session.last_refusal = session.refused + 1, str(refusal)


def ended() -> Refusal:
    return Refusal("this session has ended: end the agent; each rollout has a key of its own", 410)


def _about(call: Call) -> object:
    return [call.tools, call.options]
