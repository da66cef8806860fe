"""Episodes: an order's prompts become groups. Engine and environments take turns, many episodes at once, then rewards.

prompts × copies ──engine──► answers ──environment──► done? ──no: observation──► engine …
                                                        └──yes──► reward ──► Group
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_hpc.engines import Completion, Engine, Sampling
from relax_hpc.environments import Environment, Turn
from relax_hpc.records import Finish, Group, Prompt, Sample
from relax_hpc.rewards import Failure, Judge


@dataclass(slots=True)
class Episode:
    """One sample in the making."""

    prompt: Prompt
    environment: Environment
    tokens: list[NDArray[np.int32]] = field(default_factory=list)
    mask: list[NDArray[np.uint8]] = field(default_factory=list)
    logprobs: list[NDArray[np.float32]] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    finish: Finish = Finish.STOP
    turns: int = 0
    last: Turn | None = None
    routed_experts: NDArray[np.unsignedinteger[Any]] | None = None
    """Of the last turn, whose context is all that was before."""
    seconds: float = 0.0

    @property
    def length(self) -> int:
        return sum(len(t) for t in self.tokens)

    def context(self) -> NDArray[np.int32]:
        """[P + T] all the model sees next."""
        return np.concatenate([self.prompt.tokens, *self.tokens])

    def add(
        self, tokens: NDArray[np.int32], logprobs: NDArray[np.float32] | None, spans: list[tuple[int, int]]
    ) -> None:
        """Go on by tokens: the model's own when they have logprobs, else an observation."""
        begin = self.length
        for start, version in spans:
            if not self.spans or self.spans[-1][1] != version:
                self.spans.append((begin + start, version))
        self.tokens.append(tokens)
        self.mask.append(np.full(len(tokens), logprobs is not None, np.uint8))
        self.logprobs.append(np.zeros(len(tokens), np.float32) if logprobs is None else logprobs)

    def go_on(self, turn: Completion) -> None:
        """Add a turn of the model's."""
        self.add(turn.tokens, turn.logprobs, turn.spans)
        self.finish, self.routed_experts = turn.finish, turn.routed_experts
        self.seconds += turn.seconds

    def sample(self, version: int) -> Sample:
        turn = self.last or Turn(done=True)
        empty = np.empty(0, np.int32)
        return Sample(
            tokens=np.concatenate([empty, *self.tokens]),
            loss_mask=np.concatenate([empty.astype(np.uint8), *self.mask]),
            logprobs=np.concatenate([empty.astype(np.float32), *self.logprobs]),
            spans=self.spans or [(0, version)],
            finish=self.finish,
            reward=turn.reward or 0.0,
            raw_reward=turn.reward or 0.0,
            turns=self.turns,
            extra=dict(turn.extra),
            routed_experts=self.routed_experts,
            seconds=self.seconds,
        )


def play(
    prompts: list[Prompt],
    copies: int,
    seed: int,
    sampling: Sampling,
    max_turns: int,
    engine: Engine,
    tokenizer: Any,
    environments: Sequence[Callable[[], Environment]],
    judge: Judge,
    progress: Callable[[str], None],
) -> list[Group]:
    """Play all prompts, `copies` samples each; `environments` are those of the sources, by position. Rewards that fail make failed groups."""
    episodes = [Episode(p, environments[p.source]()) for p in prompts for _ in range(copies)]
    try:
        for episode in episodes:
            episode.environment.reset(episode.prompt)
        _first_turn(episodes, prompts, copies, seed, sampling, engine, progress)
        active = _environments_answer(episodes, tokenizer, max_turns)
        for turn in range(1, max_turns):
            if not active:
                break
            _later_turn(active, seed + turn, sampling, engine, progress)
            active = _environments_answer(active, tokenizer, max_turns)
    finally:
        for episode in episodes:
            episode.environment.close()
    return _score(episodes, copies, engine.version, tokenizer, judge, progress)


def _first_turn(
    episodes: list[Episode],
    prompts: list[Prompt],
    copies: int,
    seed: int,
    sampling: Sampling,
    engine: Engine,
    progress: Callable[[str], None],
) -> None:
    completions = engine.generate(
        [p.tokens for p in prompts], copies, sampling, seed, lambda tokens: progress("generating")
    )
    for episode, done in zip(episodes, completions, strict=True):
        episode.go_on(done)


def _later_turn(
    active: list[Episode], seed: int, sampling: Sampling, engine: Engine, progress: Callable[[str], None]
) -> None:
    completions = engine.generate(
        [e.context() for e in active], 1, sampling, seed, lambda tokens: progress("generating")
    )
    for episode, done in zip(active, completions, strict=True):
        episode.go_on(done)


def _environments_answer(active: list[Episode], tokenizer: Any, max_turns: int) -> list[Episode]:
    """Show every environment its model's last turn; the episodes that go on."""
    going_on = []
    for episode in active:
        episode.turns += 1
        answer = tokenizer.decode(episode.tokens[-1].tolist(), skip_special_tokens=True)
        episode.last = episode.environment.step(answer)
        if episode.last.done or episode.finish is Finish.LENGTH or episode.turns == max_turns:
            continue
        observation = tokenizer.encode(episode.last.observation, add_special_tokens=False)
        episode.add(np.asarray(observation, np.int32), None, [])
        going_on.append(episode)
    return going_on


def _score(
    episodes: list[Episode], copies: int, version: int, tokenizer: Any, judge: Judge, progress: Callable[[str], None]
) -> list[Group]:
    samples = [e.sample(version) for e in episodes]
    unscored = [i for i, e in enumerate(episodes) if e.last is None or e.last.reward is None]
    scores = judge.score(
        [(episodes[i].prompt, samples[i].text(tokenizer)) for i in unscored], lambda: progress("scoring")
    )
    reasons: dict[int, str] = {}
    for i, score in zip(unscored, scores, strict=True):
        if isinstance(score, Failure):
            reasons.setdefault(i // copies, score.reason)
            continue
        samples[i].reward = samples[i].raw_reward = score.reward
        samples[i].extra |= score.extra
    return [
        Group(episodes[g * copies].prompt, samples[g * copies : (g + 1) * copies], reasons.get(g, ""))
        for g in range(len(episodes) // copies)
    ]
