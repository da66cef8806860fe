"""An episode: one sample in the making, of the model's turns and the environment's answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_hpc.engines import Completion
from relax_hpc.environments import Seat, Turn
from relax_hpc.records import Finish, Media, Prompt, Sample, StopReason

STOP_REASON = "stop_reason"
"""Number of a sample: the StopReason."""


@dataclass(slots=True)
class Episode:
    """One sample in the making."""

    prompt: Prompt
    group: int
    seat: Seat
    """The sample's place in its environment."""
    tokens: list[NDArray[np.int32]] = field(default_factory=list)
    mask: list[NDArray[np.uint8]] = field(default_factory=list)
    logprobs: list[NDArray[np.float32]] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    """Indices of the tokens at which the model's turns begin."""
    finish: Finish | None = Finish.STOP
    """How the last turn ended; None while it has not."""
    turns: int = 0
    """How many turns the environment has answered."""
    done: bool = False
    stopped: StopReason | None = None
    """The limit that ended it."""
    later: Media | None = None
    """All that the episode shows, once its environment showed more than the prompt."""
    routed_experts: NDArray[np.unsignedinteger[Any]] | None = None
    """Routed experts of the last turn, whose context is everything before it."""
    seconds: float = 0.0

    @property
    def last(self) -> Turn | None:
        """The environment's last answer; None before the first."""
        return self.seat.turns[-1] if self.seat.turns else None

    @property
    def length(self) -> int:
        return sum(len(t) for t in self.tokens)

    @property
    def media(self) -> Media | None:
        """All that the model has seen and heard."""
        return self.later or self.prompt.media

    def stop(self, reason: StopReason) -> None:
        """End by a limit."""
        self.done, self.stopped, self.finish = True, reason, Finish.LENGTH

    def context(self) -> NDArray[np.int32]:
        """Tokens that the model sees before its turn: [P + T]."""
        context: NDArray[np.int32] = np.concatenate([self.prompt.tokens, *self.tokens])
        return context[: len(self.prompt.tokens) + self.begins[-1]]

    def turn(self, number: int) -> NDArray[np.int32]:
        """Return the tokens of one of the model's turns."""
        begin, end = [*self.begins, self.length][number : number + 2]
        said = np.concatenate([np.empty(0, np.uint8), *self.mask])[begin:end] == 1
        tokens: NDArray[np.int32] = np.concatenate([np.empty(0, np.int32), *self.tokens])[begin:end][said]
        return tokens

    def observation(self, number: int) -> NDArray[np.int32]:
        """Return the tokens of the environment's answer to a turn."""
        begin, end = self.begins[number : number + 2]
        tokens: NDArray[np.int32] = np.concatenate(self.tokens)
        return tokens[begin + len(self.turn(number)) : end]

    def add(
        self, tokens: NDArray[np.int32], logprobs: NDArray[np.float32] | None, spans: list[tuple[int, int]]
    ) -> None:
        """Append tokens: the model's own if they have logprobs, else an observation."""
        if not len(tokens):
            return
        begin = self.length
        for start, version in spans:
            if not self.spans or self.spans[-1][1] != version:
                self.spans.append((begin + start, version))
        self.tokens.append(tokens)
        self.mask.append(np.full(len(tokens), logprobs is not None, np.uint8))
        self.logprobs.append(np.zeros(len(tokens), np.float32) if logprobs is None else logprobs)

    def go_on(self, turn: Completion) -> None:
        """Append one of the model's turns."""
        self.add(turn.tokens, turn.logprobs, turn.spans)
        self.finish, self.routed_experts = turn.finish, turn.routed_experts
        self.seconds += turn.seconds

    def answer(self, sample: Sample, tokenizer: Any) -> str:
        """Return the text that the source's reward scores: the final answer, or all that the model said."""
        final = self.last.answer if self.last else None
        return sample.text(tokenizer) if final is None else final

    def sample(self, version: int, failed: bool) -> Sample:
        """Return the sample. failed: its group failed, so it counts as generated only if it had come to its end."""
        turn, failed = self.last or Turn(done=True), self.seat.failure is not None or (failed and not self.done)
        empty = np.empty(0, np.int32)
        return Sample(
            tokens=np.concatenate([empty, *self.tokens]),
            loss_mask=np.concatenate([empty.astype(np.uint8), *self.mask]),
            logprobs=np.concatenate([empty.astype(np.float32), *self.logprobs]),
            spans=self.spans or [(0, version)],
            finish=Finish.FAILED if failed else self.finish or Finish.STOP,
            reward=self.earned,
            raw_reward=self.earned,
            turns=self.turns,
            extra={**turn.extra, **({STOP_REASON: float(self.stopped)} if self.stopped else {})},
            routed_experts=self.routed_experts,
            seconds=self.seconds,
            media=self.later,
            turn_rewards=self._turn_rewards(),
        )

    @property
    def earned(self) -> float:
        """All that the environment gave for turns."""
        return sum(turn.reward or 0.0 for turn in self.seat.turns)

    def _turn_rewards(self) -> NDArray[np.float32] | None:
        """[T] rewards of turns before the last, at the last token of each; None where there are none."""
        earned = np.zeros(self.length, np.float32)
        mask = np.concatenate([np.empty(0, np.uint8), *self.mask])
        for turn, end in zip(self.seat.turns, self.begins[1:], strict=False):
            said = np.flatnonzero(mask[:end])
            earned[said[-1:]] += turn.reward or 0.0
        return earned if earned.any() else None
