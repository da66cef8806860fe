"""Episodes: a request's prompts become groups. Engine and environments take turns, many episodes at once, then rewards.

    prompts × samples ──engine──► answers ──environment──► done? ──no: observation──► engine …
                            │                                └──yes──► reward ──► Group
                            └──progress raised Abort──► PartialRollout ──(later, any worker, newer weights)──► engine …

An environment or a reward that fails costs its own group only: the group is not generated or scored any further, and is
kept with the reason. An observation that leaves no room in the context ends its sample as one that reached the length
limit.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_hpc.engines import Completion, Engine, Sampling
from relax_hpc.environments import Environments, Seat, Turn
from relax_hpc.records import Failure, Finish, Group, PartialRollout, Prompt, Sample, with_experts
from relax_hpc.rewards import RewardRunner

NO_FAILURE = Failure("", "")


class RolloutAborted(Exception):
    """Raised when generation was aborted; carries the partial rollout."""

    def __init__(self, partial: PartialRollout) -> None:
        super().__init__(f"{partial.tokens} tokens")
        self.partial = partial


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

    def sample(self, version: int, failed: bool) -> Sample:
        """Return the sample. failed: its group failed, so it counts as generated only if it had come to its end."""
        turn = self.last or Turn(done=True)
        empty = np.empty(0, np.int32)
        return Sample(
            tokens=np.concatenate([empty, *self.tokens]),
            loss_mask=np.concatenate([empty.astype(np.uint8), *self.mask]),
            logprobs=np.concatenate([empty.astype(np.float32), *self.logprobs]),
            spans=self.spans or [(0, version)],
            finish=Finish.FAILED if failed and not self.done else self.finish or Finish.STOP,
            reward=turn.reward or 0.0,
            raw_reward=turn.reward or 0.0,
            turns=self.turns,
            extra=dict(turn.extra),
            routed_experts=self.routed_experts,
            seconds=self.seconds,
        )


def generate(
    prompts: list[Prompt],
    samples_per_prompt: int,
    seed: int,
    sampling: Sampling,
    max_turns: int,
    engine: Engine,
    tokenizer: Any,
    environments: Environments,
    reward_runner: RewardRunner,
    progress: Callable[[str], None],
    partial: PartialRollout | None = None,
) -> list[Group]:
    """Generate all prompts, `samples_per_prompt` samples each. Environments and rewards that fail make failed groups.

    partial: the partial rollout to go on from. Raises RolloutAborted if `progress` raises Abort during the model's
    turn.
    """
    acting = lambda: progress("environments")
    everyone = [(group, prompt) for group, prompt in enumerate(prompts) for _ in range(samples_per_prompt)]
    seats = environments.begin(everyone, acting)
    try:
        episodes = [Episode(prompt, group, seat) for (group, prompt), seat in zip(everyone, seats, strict=True)]
        differs = partial is not None and not _restore(episodes, partial, tokenizer, environments, acting)
        while not differs and (active := _active(episodes)):
            _speak(active, samples_per_prompt if partial is None else 1, seed, sampling, engine, progress)
            if any(e.finish is None for e in active):
                raise RolloutAborted(_partial(episodes, engine.version))
            _environments_answer(active, tokenizer, max_turns, engine.context, environments, acting)
    finally:
        environments.leave(seats)
    if differs:
        logging.getLogger("episodes").warning(
            "an environment answers otherwise than before: generated from the beginning"
        )
        return generate(
            prompts, samples_per_prompt, seed, sampling, max_turns, engine, tokenizer, environments, reward_runner, progress
        )  # fmt: skip
    return _score(episodes, engine.version, tokenizer, reward_runner, progress)


def _failures(episodes: Sequence[Episode]) -> dict[int, Failure]:
    """Return group -> its failure: that of its first sample that failed."""
    found: dict[int, Failure] = {}
    for episode in episodes:
        if episode.seat.failure is not None:
            found.setdefault(episode.group, episode.seat.failure)
    return found


def _active(episodes: Sequence[Episode]) -> list[Episode]:
    """Return the episodes that are not finished."""
    failed = _failures(episodes)
    return [e for e in episodes if not e.done and e.group not in failed]


def _restore(
    episodes: list[Episode],
    partial: PartialRollout,
    tokenizer: Any,
    environments: Environments,
    acting: Callable[[], None],
) -> bool:
    """Bring new episodes to where the partial rollout was, giving environments the same answers again. Return False if
    these now answer otherwise."""
    if len(partial.samples) != len(episodes):
        return False
    for i, (episode, sample) in enumerate(zip(episodes, partial.samples, strict=True)):
        episode.tokens, episode.mask, episode.logprobs = [sample.tokens], [sample.loss_mask], [sample.logprobs]
        episode.spans, episode.begins, episode.routed_experts = (
            [*sample.spans],
            [*partial.turns[i]],
            sample.routed_experts,
        )
        episode.finish, group = None if i in partial.cut else sample.finish, partial.groups[episode.group]
        if group.reason:
            episode.seat.failure = Failure(group.reason, group.detail)
    for number in range(max(sample.turns for sample in partial.samples)):
        said = [e for e, s in zip(episodes, partial.samples, strict=True) if number < s.turns and not e.seat.failure]
        _show(said, number, tokenizer, environments, acting)
        for episode in _active(said):
            if episode.last is not None and number + 1 < len(episode.begins):
                again = tokenizer.encode(episode.last.observation, add_special_tokens=False)
                if episode.last.done or again != episode.observation(number).tolist():
                    return False
    for episode in episodes:
        episode.done = len(episode.begins) == episode.turns
    return True


def _groups(episodes: Sequence[Episode], version: int) -> list[Group]:
    """Return the episodes as they are, finished or not, as one group a prompt."""
    failed, groups = _failures(episodes), list[Group]()
    for number, mine in itertools.groupby(episodes, operator.attrgetter("group")):
        together = list(mine)
        samples = [e.sample(version, number in failed) for e in together]
        failure = failed.get(number, NO_FAILURE)
        groups.append(Group(together[0].prompt, samples, failure.reason, failure.detail))
    return with_experts(groups) if failed else groups


def _partial(episodes: list[Episode], version: int) -> PartialRollout:
    return PartialRollout(
        groups=_groups(episodes, version),
        turns=[e.begins for e in episodes],
        cut=[i for i, e in enumerate(episodes) if e.finish is None],
    )


def _speak(
    active: list[Episode],
    samples_per_prompt: int,
    seed: int,
    sampling: Sampling,
    engine: Engine,
    progress: Callable[[str], None],
) -> None:
    """Generate the model's turn, or the rest of one that was cut off."""
    turn = active[0].turns
    for episode in active:
        if len(episode.begins) == turn:
            episode.begins.append(episode.length)
            episode.finish = None
    speaking = [e for e in active if e.finish is None]
    if turn:
        samples_per_prompt = 1
    begun = [e.turn(turn) for e in speaking]
    completions = engine.generate(
        [e.context() for e in speaking[::samples_per_prompt]], samples_per_prompt, sampling, seed + turn, lambda tokens: progress("generating"),
        begun if any(map(len, begun)) else (),
    )  # fmt: skip
    for episode, done in zip(speaking, completions, strict=True):
        episode.go_on(done)


def _show(
    episodes: Sequence[Episode], turn: int, tokenizer: Any, environments: Environments, acting: Callable[[], None]
) -> None:
    """Show each environment that turn of its model."""
    said = [tokenizer.decode(episode.turn(turn).tolist(), skip_special_tokens=True) for episode in episodes]
    environments.step([(episode.seat, text) for episode, text in zip(episodes, said, strict=True)], acting)
    for episode in episodes:
        episode.turns = turn + 1


def _environments_answer(
    active: list[Episode],
    tokenizer: Any,
    max_turns: int,
    context: int,
    environments: Environments,
    acting: Callable[[], None],
) -> None:
    """Show each environment its model's last turn, and the model the environment's answer. context: most tokens of a
    sample."""
    _show(active, active[0].turns, tokenizer, environments, acting)
    for episode in _active(active):
        assert episode.last is not None
        episode.done = episode.last.done or episode.finish is Finish.LENGTH or episode.turns == max_turns
        if episode.done:
            continue
        observation = tokenizer.encode(episode.last.observation, add_special_tokens=False)
        if len(episode.prompt.tokens) + episode.length + len(observation) >= context:
            episode.done, episode.finish = True, Finish.LENGTH
        else:
            episode.add(np.asarray(observation, np.int32), None, [])


def _score(
    episodes: list[Episode], version: int, tokenizer: Any, reward_runner: RewardRunner, progress: Callable[[str], None]
) -> list[Group]:
    groups, failed = _groups(episodes, version), _failures(episodes)
    samples = [sample for group in groups for sample in group.samples]
    unscored = [
        i
        for i, e in enumerate(episodes)
        if e.group not in failed and (e.last is None or e.last.reward is None)
    ]  # fmt: skip
    verdicts = reward_runner.score(
        [(episodes[i].prompt, samples[i].text(tokenizer)) for i in unscored],
        lambda: progress("scoring"),
        [episodes[i].group for i in unscored],
    )
    for i, verdict in zip(unscored, verdicts, strict=True):
        if isinstance(verdict, Failure):
            group = groups[episodes[i].group]
            group.reason, group.detail = verdict.reason, verdict.detail
            continue
        samples[i].reward = samples[i].raw_reward = verdict.reward
        samples[i].extra |= verdict.extra
    return groups
