"""Episodes: a request's prompts become groups. Engine and environments take turns, many episodes at once, then rewards.

    prompts × samples ──engine──► answers ──environment──► done? ──no: observation──► engine …
                            │                                └──yes──► reward ──► Group
                            └──progress raised Abort──► PartialRollout ──(later, any worker, newer weights)──► engine …

An environment or a reward that fails costs its own group only: the group is not generated or scored any further, and is
kept with the reason. An observation that leaves no room in the context ends its sample as one that reached the length
limit. A model that says the token of an image's patch, or of a sound's frame, ends its sample: nothing could be shown there. The
DREW_MEDIA among its numbers.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from relax_hpc.engines import Engine, Sampling
from relax_hpc.environments import Environments
from relax_hpc.records import Failure, Finish, Group, Media, PartialRollout, Prompt, with_experts
from relax_hpc.rewards import RewardRunner
from relax_hpc.roles.rollout.episode import Episode
from relax_hpc.roles.rollout.observations import Observations, UnusableObservation

NO_FAILURE = Failure("", "")
DREW_MEDIA = "drew_media_token"


class RolloutAborted(Exception):
    """Raised when generation was aborted; carries the partial rollout."""

    def __init__(self, partial: PartialRollout) -> None:
        super().__init__(f"{partial.tokens} tokens")
        self.partial = partial


@dataclass(frozen=True, slots=True)
class RolloutSetup:
    """Everything that episodes are generated and scored with."""

    engine: Engine
    tokenizer: Any
    environments: Environments
    rewards: RewardRunner
    max_turns: int
    observations: Observations
    placeholders: frozenset[int] = frozenset()
    """Tokens that stand for a part of an image, a video or a sound."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Everything that a request asks of its episodes."""

    prompts: list[Prompt]
    samples_per_prompt: int
    seed: int
    sampling: Sampling
    unusable: Mapping[int, Failure] = field(default_factory=dict)
    """Prompts that fail from the start, by their place among `prompts`."""


class Episodes:
    """The episodes of one request."""

    def __init__(self, setup: RolloutSetup, asked: Asked, progress: Callable[[str], None]) -> None:
        """progress: called during long work, with what is done; raises Abort to end generation."""
        self._setup, self._asked, self._progress = setup, asked, progress
        self._acting = lambda: progress("environments")
        self._episodes: list[Episode] = []

    def generate(self, partial: PartialRollout | None = None) -> list[Group]:
        """Generate all prompts. Environments and rewards that fail make failed groups.

        partial: the partial rollout to go on from. Raises RolloutAborted if `progress` raises Abort during the model's
        turn.
        """
        asked, environments = self._asked, self._setup.environments
        everyone = [(group, p) for group, p in enumerate(asked.prompts) for _ in range(asked.samples_per_prompt)]
        seats = environments.begin(everyone, self._acting)
        try:
            for seat in seats:
                seat.failure = asked.unusable.get(seat.group, seat.failure)
            self._episodes = [Episode(p, group, seat) for (group, p), seat in zip(everyone, seats, strict=True)]
            goes_on = partial is None or self._restore(partial)
            while goes_on and (active := _active(self._episodes)):
                self._speak(active, together=partial is None)
                if any(e.finish is None for e in active):
                    raise RolloutAborted(self._partial())
                self._environments_answer(active)
        finally:
            environments.leave(seats)
        if not goes_on:
            logging.getLogger("episodes").warning(
                "an environment answers otherwise than before: generated from the beginning"
            )
            return self.generate()
        return self._score()

    def _restore(self, partial: PartialRollout) -> bool:
        """Bring new episodes to where the partial rollout was, giving environments the same answers again. Return False
        if these now answer otherwise."""
        if len(partial.samples) != len(self._episodes):
            return False
        pairs = [*zip(self._episodes, partial.samples, strict=True)]
        for i, (episode, sample) in enumerate(pairs):
            episode.tokens, episode.mask, episode.logprobs = [sample.tokens], [sample.loss_mask], [sample.logprobs]
            episode.spans, episode.begins = [*sample.spans], [*partial.turns[i]]
            episode.routed_experts = sample.routed_experts
            episode.finish, group = None if i in partial.cut else sample.finish, partial.groups[episode.group]
            if group.reason:
                episode.seat.failure = Failure(group.reason, group.detail)
        for number in range(max(sample.turns for sample in partial.samples)):
            said = [e for e, s in pairs if number < s.turns and not e.seat.failure]
            self._show(said, number)
            for episode in _active(said):
                if episode.last is not None and number + 1 < len(episode.begins):
                    again = self._observed(episode)
                    if episode.last.done or again != episode.observation(number).tolist():
                        return False
        for episode in self._episodes:
            episode.done = len(episode.begins) == episode.turns
        return all(_digest(e.later) == _digest(s.media) for e, s in pairs if not e.seat.failure)

    def _groups(self) -> list[Group]:
        """Return the episodes as they are, finished or not, as one group a prompt."""
        failed, groups = _failures(self._episodes), list[Group]()
        for number, mine in itertools.groupby(self._episodes, operator.attrgetter("group")):
            together = list(mine)
            samples = [e.sample(self._setup.engine.version, number in failed) for e in together]
            for episode, sample in zip(together, samples, strict=True):
                if self._drew_media(episode):
                    sample.extra[DREW_MEDIA] = 1.0
            failure = failed.get(number, NO_FAILURE)
            groups.append(Group(together[0].prompt, samples, failure.reason, failure.detail))
        return with_experts(groups) if failed else groups

    def _partial(self) -> PartialRollout:
        return PartialRollout(
            groups=self._groups(),
            turns=[e.begins for e in self._episodes],
            cut=[i for i, e in enumerate(self._episodes) if e.finish is None],
        )

    def _speak(self, active: list[Episode], together: bool) -> None:
        """Generate the model's turn, or the rest of one that was cut off. together: a prompt's samples have the same
        context at their first turn."""
        turn = active[0].turns
        for episode in active:
            if len(episode.begins) == turn:
                episode.begins.append(episode.length)
                episode.finish = None
        speaking = [e for e in active if e.finish is None]
        each = self._asked.samples_per_prompt if together and not turn else 1
        begun = [e.turn(turn) for e in speaking]
        media = [e.media for e in speaking[::each]]
        shown: dict[str, Any] = {"media": media} if any(media) else {}  # an engine of one's own may not know them
        completions = self._setup.engine.generate(
            [e.context() for e in speaking[::each]], each, self._asked.sampling, self._asked.seed + turn,
            lambda tokens: self._progress("generating"), begun if any(map(len, begun)) else (), **shown,
        )  # fmt: skip
        for episode, done in zip(speaking, completions, strict=True):
            episode.go_on(done)

    def _show(self, episodes: Sequence[Episode], turn: int) -> None:
        """Show each environment that turn of its model."""
        decode = self._setup.tokenizer.decode
        said = [(e.seat, decode(e.turn(turn).tolist(), skip_special_tokens=True)) for e in episodes]
        self._setup.environments.step(said, self._acting)
        for episode in episodes:
            episode.turns = turn + 1

    def _environments_answer(self, active: list[Episode]) -> None:
        """Show each environment its model's last turn, and the model the environment's answer."""
        self._show(active, active[0].turns)
        for episode in _active(active):
            assert episode.last is not None
            ended = episode.finish is Finish.LENGTH or episode.turns == self._setup.max_turns
            episode.done = episode.last.done or ended or self._drew_media(episode)
            if episode.done:
                continue
            before, observation = episode.later, self._observed(episode)
            if observation is None:
                continue
            if len(episode.prompt.tokens) + episode.length + len(observation) >= self._setup.engine.context:
                episode.done, episode.finish, episode.later = True, Finish.LENGTH, before
            else:
                episode.add(np.asarray(observation, np.int32), None, [])

    def _drew_media(self, episode: Episode) -> bool:
        last = episode.tokens[-1][-1:] if episode.tokens else ()
        return any(int(token) in self._setup.placeholders for token in last)

    def _observed(self, episode: Episode) -> list[int] | None:
        """Return the tokens of the environment's last answer; the episode has its media then. None where these cannot be
        shown: its group has failed."""
        assert episode.last is not None
        try:
            tokens, shown = self._setup.observations.tokens(episode.last.observation)
        except UnusableObservation as error:
            failure = Failure.of(episode.prompt, "what the environment shows cannot be used", str(error))
            episode.seat.failure = failure
            return None
        if shown is not None:
            episode.later = self._setup.observations.joined(episode.media, shown)
        return tokens

    def _score(self) -> list[Group]:
        groups, failed = self._groups(), _failures(self._episodes)
        samples = [sample for group in groups for sample in group.samples]
        unscored = [
            (episode, sample)
            for episode, sample in zip(self._episodes, samples, strict=True)
            if episode.group not in failed and (episode.last is None or episode.last.reward is None)
        ]
        verdicts = self._setup.rewards.score(
            [(episode.prompt, sample.text(self._setup.tokenizer)) for episode, sample in unscored],
            lambda: self._progress("scoring"),
            [episode.group for episode, _ in unscored],
        )
        for (episode, sample), verdict in zip(unscored, verdicts, strict=True):
            if isinstance(verdict, Failure):
                group = groups[episode.group]
                group.reason, group.detail = verdict.reason, verdict.detail
                continue
            sample.reward = sample.raw_reward = verdict.reward
            sample.extra |= verdict.extra
        return groups


def _digest(media: Media | None) -> str:
    return media.digest if media else ""


def _failures(episodes: Sequence[Episode]) -> dict[int, Failure]:
    """Return group -> its failure: that of its first sample that failed."""
    found: dict[int, Failure] = {}
    for episode in episodes:
        if episode.seat.failure is not None:
            found.setdefault(episode.group, episode.seat.failure)
    return found


def _active(episodes: Sequence[Episode]) -> list[Episode]:
    """Return the episodes that are not finished, of groups that did not fail."""
    failed = _failures(episodes)
    return [e for e in episodes if not e.done and e.group not in failed]
