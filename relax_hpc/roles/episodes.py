"""Episodes: an order's prompts become groups. Engine and environments take turns, many episodes at once, then rewards.

prompts × copies ──engine──► answers ──environment──► done? ──no: observation──► engine …
                       │                                └──yes──► reward ──► Group
                       └──progress had Enough──► Part ──(later, whoever has it, with newer weights)──► engine …
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_hpc.engines import Completion, Engine, Sampling
from relax_hpc.environments import Environment, Turn
from relax_hpc.records import Finish, Group, Part, Prompt, Sample
from relax_hpc.rewards import Failure, Judge


class HalfPlayed(Exception):
    """The engine was told that it is enough: what there is of the episodes."""

    def __init__(self, part: Part) -> None:
        super().__init__(f"{part.tokens} tokens")
        self.part = part


@dataclass(slots=True)
class Episode:
    """One sample in the making."""

    prompt: Prompt
    environment: Environment
    tokens: list[NDArray[np.int32]] = field(default_factory=list)
    mask: list[NDArray[np.uint8]] = field(default_factory=list)
    logprobs: list[NDArray[np.float32]] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    """The tokens at which turns of the model's begin."""
    finish: Finish | None = Finish.STOP
    """None: its last turn has not ended."""
    turns: int = 0
    """That the environment has answered."""
    done: bool = False
    last: Turn | None = None
    routed_experts: NDArray[np.unsignedinteger[Any]] | None = None
    """Of the last turn, whose context is all that was before."""
    seconds: float = 0.0

    @property
    def length(self) -> int:
        return sum(len(t) for t in self.tokens)

    def context(self) -> NDArray[np.int32]:
        """[P + T] all the model sees before its turn."""
        context: NDArray[np.int32] = np.concatenate([self.prompt.tokens, *self.tokens])
        return context[: len(self.prompt.tokens) + self.begins[-1]]

    def turn(self, number: int) -> NDArray[np.int32]:
        """What the model said in a turn."""
        begin, end = [*self.begins, self.length][number : number + 2]
        said = np.concatenate([np.empty(0, np.uint8), *self.mask])[begin:end] == 1
        tokens: NDArray[np.int32] = np.concatenate([np.empty(0, np.int32), *self.tokens])[begin:end][said]
        return tokens

    def observation(self, number: int) -> NDArray[np.int32]:
        """What the environment said to it."""
        begin, end = self.begins[number : number + 2]
        tokens: NDArray[np.int32] = np.concatenate(self.tokens)
        return tokens[begin + len(self.turn(number)) : end]

    def add(
        self, tokens: NDArray[np.int32], logprobs: NDArray[np.float32] | None, spans: list[tuple[int, int]]
    ) -> None:
        """Go on by tokens: the model's own when they have logprobs, else an observation."""
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
            finish=Finish.STOP if self.finish is None else self.finish,
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
    part: Part | None = None,
) -> list[Group]:
    """Play all prompts, `copies` samples each; `environments` are those of the sources, by position. Rewards that fail make failed groups.

    `part`: what there is of them already. Raises HalfPlayed where `progress` raises Enough while the model speaks.
    """
    episodes = [Episode(p, environments[p.source]()) for p in prompts for _ in range(copies)]
    differs = False
    try:
        for episode in episodes:
            episode.environment.reset(episode.prompt)
        differs = part is not None and not _restore(episodes, part, tokenizer)
        while not differs and (active := [e for e in episodes if not e.done]):
            _speak(active, copies if part is None else 1, seed, sampling, engine, progress)
            if any(e.finish is None for e in active):
                raise HalfPlayed(_part(episodes, copies, engine.version))
            _environments_answer(active, tokenizer, max_turns)
    finally:
        for episode in episodes:
            episode.environment.close()
    if differs:
        logging.getLogger("episodes").warning("an environment answers otherwise than before: played from the beginning")
        return play(
            prompts, copies, seed, sampling, max_turns, engine, tokenizer, environments, judge, progress
        )  # fmt: skip
    return _score(episodes, copies, engine.version, tokenizer, judge, progress)


def _restore(episodes: list[Episode], part: Part, tokenizer: Any) -> bool:
    """Bring new episodes to where they were: environments by the answers that they had. False where these differ now."""
    if len(part.samples) != len(episodes):
        return False
    for i, (episode, sample) in enumerate(zip(episodes, part.samples, strict=True)):
        episode.tokens, episode.mask, episode.logprobs = [sample.tokens], [sample.loss_mask], [sample.logprobs]
        episode.spans, episode.begins, episode.routed_experts = [*sample.spans], [*part.turns[i]], sample.routed_experts
        episode.finish = None if i in part.cut else sample.finish
        for number in range(sample.turns):
            _environment_answers(episode, number, tokenizer)
            if number + 1 < len(episode.begins):
                assert episode.last is not None
                again = tokenizer.encode(episode.last.observation, add_special_tokens=False)
                if episode.last.done or again != episode.observation(number).tolist():
                    return False
        episode.done = len(episode.begins) == episode.turns
    return True


def _part(episodes: list[Episode], copies: int, version: int) -> Part:
    return Part(
        groups=[
            Group(episodes[i].prompt, [e.sample(version) for e in episodes[i : i + copies]])
            for i in range(0, len(episodes), copies)
        ],
        turns=[e.begins for e in episodes],
        cut=[i for i, e in enumerate(episodes) if e.finish is None],
    )


def _speak(
    active: list[Episode],
    copies: int,
    seed: int,
    sampling: Sampling,
    engine: Engine,
    progress: Callable[[str], None],
) -> None:
    """The model says its turn, or the rest of one that was cut off."""
    turn = active[0].turns
    for episode in active:
        if len(episode.begins) == turn:
            episode.begins.append(episode.length)
            episode.finish = None
    speaking = [e for e in active if e.finish is None]
    if turn:
        copies = 1
    begun = [e.turn(turn) for e in speaking]
    completions = engine.generate(
        [e.context() for e in speaking[::copies]], copies, sampling, seed + turn, lambda tokens: progress("generating"),
        begun if any(map(len, begun)) else (),
    )  # fmt: skip
    for episode, done in zip(speaking, completions, strict=True):
        episode.go_on(done)


def _environment_answers(episode: Episode, turn: int, tokenizer: Any) -> None:
    """Show its environment a turn of the model's."""
    episode.turns = turn + 1
    episode.last = episode.environment.step(tokenizer.decode(episode.turn(turn).tolist(), skip_special_tokens=True))


def _environments_answer(active: list[Episode], tokenizer: Any, max_turns: int) -> None:
    """Show every environment its model's last turn, and the models what they say to it."""
    for episode in active:
        _environment_answers(episode, episode.turns, tokenizer)
        assert episode.last is not None
        episode.done = episode.last.done or episode.finish is Finish.LENGTH or episode.turns == max_turns
        if not episode.done:
            observation = tokenizer.encode(episode.last.observation, add_special_tokens=False)
            episode.add(np.asarray(observation, np.int32), None, [])


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
