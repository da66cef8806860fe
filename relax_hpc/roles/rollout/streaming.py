"""Episodes by themselves: each goes on as soon as its own turn, or its environment's answer, is there.

    reset ──► speaking ──its completion──► answering ──its environment's turn──► speaking … ──► done, or failed
               └── asks of the engine's stream      └── calls of Environments, as many side by side as there are processes

Nothing waits for the slowest: the engine works on whatever was asked, environments on whatever was said.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from relax_hpc.engines import Abort, Ask, EngineError, Stream, Streams
from relax_hpc.environments import Seat
from relax_hpc.records import Failure
from relax_hpc.roles.rollout.cast import Cast
from relax_hpc.roles.rollout.episode import Episode
from relax_hpc.roles.rollout.setup import RolloutAborted
from relax_hpc.spool.request import request_seed

LOOK_EVERY_S = 0.2
"""Seconds between two looks at everything else, while the engine works and no environment does."""
LOOK_SOON_S = 0.02
"""The same while environments are at work: their answers are to join the engine's batch at once."""


class Streaming:
    """Plays the episodes of a request."""

    def __init__(self, cast: Cast, progress: Callable[[str], None]) -> None:
        """progress: raises Abort to end generation."""
        assert isinstance(cast.setup.engine, Streams)
        self._cast, self._progress = cast, progress
        self._stream: Stream = cast.setup.engine.stream(lambda: progress("generating"))
        self._environments = cast.setup.environments
        self._of_seat = {e.seat.number: i for i, e in enumerate(cast.episodes)}
        self._speaking, self._waiting = set[int](), set[int]()
        """Numbers of the episodes that the engine speaks for, and that an environment is called for."""

    def play(self) -> None:
        """Play all episodes to their ends. Raises RolloutAborted if `progress` raises Abort."""
        try:
            self._begin()
            while self._speaking or self._waiting:
                self._progress("generating")
                self._hear()
                self._look()
        except Abort:
            for number, completion in self._stream.abort():
                self._cast.episodes[number].go_on(completion)
            raise RolloutAborted(self._cast.partial()) from None
        finally:
            self._environments.abandon()
            with contextlib.suppress(EngineError):
                self._stream.abort()

    def _begin(self) -> None:
        """Go on with every episode from where it is."""
        for episode in self._cast.episodes:
            if not episode.begins:
                episode.begins, episode.finish = [0], None
        for number, episode in enumerate(self._cast.episodes):
            if episode.done or episode.seat.failure is not None:
                continue
            if not episode.seat.begun:
                self._waiting.add(number)
            elif episode.finish is None:
                self._ask(number, episode)
            else:
                self._show(number, episode)

    def _hear(self) -> None:
        """Work, or wait, until the engine has something, and have it shown to the environments."""
        if not self._stream.busy:
            return
        for number, completion in self._stream.advance(LOOK_SOON_S if self._waiting else LOOK_EVERY_S):
            episode = self._cast.episodes[number]
            episode.go_on(completion)
            self._speaking.discard(number)
            if self._cast.active([episode]):
                self._show(number, episode)

    def _look(self) -> None:
        """Take what environments have answered; wait for it where the engine has nothing to do."""
        for seat in self._environments.advance(0 if self._stream.busy else LOOK_EVERY_S):
            self._answered(seat)

    def _answered(self, seat: Seat) -> None:
        number = self._of_seat[seat.number]
        if number not in self._waiting:
            return
        episode = self._cast.episodes[number]
        self._waiting.discard(number)
        if episode.finish is not None:
            self._cast.take_answer(episode)
        if self._cast.active([episode]):
            if episode.finish is not None:
                episode.begins.append(episode.length)
                episode.finish = None
            self._ask(number, episode)
        elif not episode.done:
            self._forget(episode.group)

    def _forget(self, group: int) -> None:
        """Wait no more for the environments of a group that has failed."""
        if group in self._cast.failed_groups():
            self._waiting -= {i for i in self._waiting if self._cast.episodes[i].group == group}

    def _show(self, number: int, episode: Episode) -> None:
        self._cast.show(episode)
        self._waiting.add(number)

    def _ask(self, number: int, episode: Episode) -> None:
        turn, asked = len(episode.begins) - 1, self._cast.asked
        seed = request_seed(asked.seed, f"{number}/{turn}")
        try:
            self._stream.ask([Ask(number, episode.context(), asked.sampling, seed, episode.turn(turn), episode.media)])
        except ValueError as error:
            episode.seat.failure = Failure.of(episode.prompt, "the engine refuses the context", str(error))
        else:
            self._speaking.add(number)
