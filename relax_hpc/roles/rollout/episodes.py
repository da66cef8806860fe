"""Episodes: a request's prompts become groups. Engine and environments take turns, many episodes at once, then rewards.

    prompts × samples ──engine──► answers ──environment──► done? ──no: observation──► engine …
                            │                                └──yes──► reward ──► Group
                            └──progress raised Abort──► PartialRollout ──(later, any worker, newer weights)──► engine …

Turns are taken in lockstep (lockstep.py), or by each episode as soon as it can (streaming.py). An environment that fails
costs its own sample, a reward that fails its own group. An observation that leaves no room in the context ends its sample as one that
reached the length limit. A model that says the token of an image's patch, or of a sound's frame, ends its sample: nothing
could be shown there. The sample has DREW_MEDIA among its numbers.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from relax_hpc.environments.tools import CallError, parse_calls
from relax_hpc.records import Failure, Group, PartialRollout, Sample
from relax_hpc.rewards import Step, Trajectory
from relax_hpc.roles.rollout import lockstep
from relax_hpc.roles.rollout.cast import Cast
from relax_hpc.roles.rollout.episode import Episode
from relax_hpc.roles.rollout.restore import restore
from relax_hpc.roles.rollout.setup import Asked, RolloutAborted, RolloutSetup
from relax_hpc.roles.rollout.streaming import Streaming

__all__ = ["Asked", "Episodes", "RolloutAborted", "RolloutSetup"]


class Episodes:
    """The episodes of one request."""

    def __init__(self, setup: RolloutSetup, asked: Asked, progress: Callable[[str], None]) -> None:
        """progress: called during long work, with what is done; raises Abort to end generation."""
        self._setup, self._asked, self._progress = setup, asked, progress
        self._acting = lambda: progress("environments")

    def generate(self, partial: PartialRollout | None = None) -> list[Group]:
        """Generate all prompts. Environments that fail make failed samples, rewards that fail make failed groups.

        partial: the partial rollout to go on from. Raises RolloutAborted if `progress` raises Abort while turns are taken.
        """
        asked, environments = self._asked, self._setup.environments
        everyone = [(group, p) for group, p in enumerate(asked.prompts) for _ in range(asked.samples_per_prompt)]
        seats = environments.begin(everyone, partial.environments if partial else {})
        try:
            cast = Cast(self._setup, asked, seats)
            if self._setup.lockstep or partial is not None:
                environments.wait(self._acting)
            goes_on = partial is None or restore(cast, partial, self._acting)
            if goes_on and self._setup.lockstep:
                lockstep.play(cast, self._progress, together=partial is None)
            elif goes_on:
                Streaming(cast, self._progress).play()
        finally:
            environments.leave(seats)
        if not goes_on:
            logging.getLogger("episodes").warning(
                "an environment answers otherwise than before: generated from the beginning"
            )
            return self.generate()
        return self._score(cast)

    def _score(self, cast: Cast) -> list[Group]:
        groups, failed = cast.groups(), cast.failed_groups()
        samples = [sample for group in groups for sample in group.samples]
        unscored = [
            (episode, sample)
            for episode, sample in zip(cast.episodes, samples, strict=True)
            if episode.group not in failed and not episode.seat.failure
            if episode.last is None or episode.last.reward is None
        ]
        verdicts = self._setup.rewards.score(
            [(episode.prompt, self._trajectory(cast, episode, sample)) for episode, sample in unscored],
            lambda: self._progress("scoring"),
            [episode.group for episode, _ in unscored],
        )
        for (episode, sample), verdict in zip(unscored, verdicts, strict=True):
            if isinstance(verdict, Failure):
                group = groups[episode.group]
                group.reason, group.detail = verdict.reason, verdict.detail
                continue
            sample.reward = sample.raw_reward = episode.earned + verdict.reward
            sample.extra |= verdict.extra
        return groups

    def _trajectory(self, cast: Cast, episode: Episode, sample: Sample) -> str:
        """Return what the source's reward scores."""
        answer = episode.answer(sample, self._setup.tokenizer)
        if self._setup.rewards.is_quick(episode.prompt.source):
            return answer
        texts = [cast.said(episode, n) for n in range(len(episode.seat.turns))]
        turns = [
            Step(text, calls_in(text), turn.observation, turn.reward)
            for text, turn in zip(texts, episode.seat.turns, strict=True)
        ]
        return Trajectory.of(answer, turns, episode.media)


def calls_in(text: str) -> list[dict[str, Any]]:
    try:
        return [dataclasses.asdict(call) for call in parse_calls(text)]
    except CallError:
        return []
