"""The episodes of a request together: which go on, which have failed, and the groups that they make.

    environment's answer ──► done? fails? its observation fits? ──► the model's next turn, or the sample's end

A sample that fails leaves the others of its group alone: it is kept with Finish.FAILED, and its reason in the group's
detail. Its group fails where fewer than two samples are left, or where the recipe says so (rollout.on_failed_sample).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import numpy as np

from relax_hpc.environments import Seat, Turn, record
from relax_hpc.records import Failure, Finish, Group, PartialRollout, StopReason, with_experts
from relax_hpc.roles.rollout.episode import Episode
from relax_hpc.roles.rollout.observations import UnusableObservation
from relax_hpc.roles.rollout.setup import Asked, RolloutSetup

DREW_MEDIA = "drew_media_token"
FEWEST = 2
"""Samples that a group needs: one alone has nothing to be compared with."""


class Cast:
    """The episodes of one request."""

    def __init__(self, setup: RolloutSetup, asked: Asked, seats: Sequence[Seat]) -> None:
        self.setup, self.asked = setup, asked
        for seat in seats:
            seat.failure = asked.unusable.get(seat.group, seat.failure)
        self.episodes = [Episode(seat.prompt, seat.group, seat) for seat in seats]

    def active(self, among: Sequence[Episode] | None = None) -> list[Episode]:
        """Return the episodes that are not finished and have not failed, nor their groups."""
        failed = self.failed_groups()
        episodes = self.episodes if among is None else among
        return [e for e in episodes if not e.done and e.seat.failure is None and e.group not in failed]

    def failed_groups(self) -> dict[int, Failure]:
        """Return group -> its failure: that of its first sample that failed."""
        found, strict = dict[int, Failure](), self.setup.on_failed_sample == "group"
        for number, together in itertools.groupby(self.episodes, operator.attrgetter("group")):
            seats = [e.seat for e in together]
            failures = [seat.failure for seat in seats if seat.failure is not None]
            unbegun = any(seat.failure and not seat.begun for seat in seats)
            if failures and (strict or unbegun or len(seats) - len(failures) < min(FEWEST, len(seats))):
                found[number] = failures[0]
        return found

    def show(self, episode: Episode) -> None:
        """Have the environment shown its model's last turn."""
        self.setup.environments.show(episode.seat, self.said(episode, len(episode.begins) - 1))

    def said(self, episode: Episode, turn: int) -> str:
        """Return the text of one of the model's turns."""
        return str(self.setup.tokenizer.decode(episode.turn(turn).tolist(), skip_special_tokens=True))

    def take_answer(self, episode: Episode) -> None:
        """Show the model its environment's answer, unless the sample is over with it."""
        episode.turns = len(episode.begins)
        if episode.seat.failure is not None:
            return
        assert episode.last is not None
        episode.done = episode.last.done or self._drew_media(episode)
        if episode.done:
            return
        if limit := self._limit(episode):
            episode.stop(limit)
            return
        before, observation = episode.later, self.observed(episode, episode.last, episode.turns - 1)
        if observation is None:
            return
        if len(observation) > self._room(episode, episode.length):
            full = len(episode.prompt.tokens) + episode.length + len(observation) >= self.setup.engine.context
            episode.later = before
            episode.stop(StopReason.OBSERVATION if full else StopReason.MAX_EPISODE_TOKENS)
        else:
            episode.add(np.asarray(observation, np.int32), None, [])

    def _limit(self, episode: Episode) -> StopReason | None:
        """Return the limit that the model's last turn has reached, if any."""
        if episode.finish is Finish.LENGTH:
            full = len(episode.prompt.tokens) + episode.length >= self.setup.engine.context
            return StopReason.CONTEXT if full else StopReason.MAX_NEW_TOKENS
        return StopReason.MAX_TURNS if episode.turns == self.setup.max_turns else None

    def _room(self, episode: Episode, at: int) -> int:
        """Return the most tokens of an observation behind `at` tokens of the sample that leave room for an answer."""
        most = self.setup.engine.context - len(episode.prompt.tokens)
        return min(most, self.setup.max_episode_tokens or most) - at - 1

    def observed(self, episode: Episode, turn: Turn, number: int) -> list[int] | None:
        """Return the tokens of an environment's answer to a turn; the episode has its media then. None where these cannot be
        shown: the sample has failed."""
        said, observations = episode.turn(number), self.setup.observations
        room = self._room(episode, episode.begins[number] + len(said))
        try:
            tokens, shown = observations.fitting(turn.observation, episode.prompt.source, said, room)
        except UnusableObservation as error:
            failure = Failure.of(episode.prompt, "what the environment shows cannot be used", str(error))
            episode.seat.failure = failure
            return None
        if shown is not None:
            episode.later = observations.joined(episode.media, shown)
        return tokens

    def _drew_media(self, episode: Episode) -> bool:
        last = episode.tokens[-1][-1:] if episode.tokens else ()
        return any(int(token) in self.setup.placeholders for token in last)

    def groups(self) -> list[Group]:
        """Return the episodes as they are, finished or not, as one group a prompt."""
        failed, groups = self.failed_groups(), list[Group]()
        for number, mine in itertools.groupby(self.episodes, operator.attrgetter("group")):
            together = list(mine)
            samples = [e.sample(self.setup.engine.version, number in failed) for e in together]
            for episode, sample in zip(together, samples, strict=True):
                if self._drew_media(episode):
                    sample.extra[DREW_MEDIA] = 1.0
            failure = failed.get(number, Failure("", _details(together)))
            groups.append(Group(together[0].prompt, samples, failure.reason, failure.detail))
        return with_experts(groups) if any(e.seat.failure for e in self.episodes) else groups

    def partial(self) -> PartialRollout:
        """Return the episodes as they are, for another worker to go on from."""
        return PartialRollout(
            groups=self.groups(),
            turns=[e.begins for e in self.episodes],
            cut=[i for i, e in enumerate(self.episodes) if e.finish is None],
            failures={i: e.seat.failure for i, e in enumerate(self.episodes) if e.seat.failure is not None},
            environments={i: text for i, e in enumerate(self.episodes) if (text := record(e.seat)) is not None},
        )


def _details(together: Sequence[Episode]) -> str:
    """Say which samples of a group failed, and why, a line each."""
    failures = [(k, e.seat.failure) for k, e in enumerate(together) if e.seat.failure is not None]
    return "\n".join(f"sample {k}: {failure.reason}: {failure.detail}" for k, failure in failures)
