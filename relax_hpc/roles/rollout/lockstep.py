"""Turns in lockstep: all episodes speak as one batch, then all their environments answer.

    active episodes ──one batch──► their turns ──► environments, side by side ──► those that go on ──► …

The engine sees the same batches whatever takes long, so that a run gives the same bits again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relax_hpc.roles.rollout.cast import Cast
from relax_hpc.roles.rollout.episode import Episode
from relax_hpc.roles.rollout.setup import RolloutAborted


def play(cast: Cast, progress: Callable[[str], None], together: bool) -> None:
    """Play all episodes to their ends. together: a prompt's samples have the same context at their first turn. Raises
    RolloutAborted if `progress` raises Abort during the model's turn."""
    environments = cast.setup.environments
    while active := cast.active():
        _speak(cast, active, progress, together)
        if any(e.finish is None for e in active):
            raise RolloutAborted(cast.partial())
        for episode in active:
            cast.show(episode)
        environments.wait(lambda: progress("environments"))
        for episode in active:
            cast.take_answer(episode)


def _speak(cast: Cast, active: list[Episode], progress: Callable[[str], None], together: bool) -> None:
    """Generate the model's turn, or the rest of one that was cut off."""
    turn, asked = active[0].turns, cast.asked
    for episode in active:
        if len(episode.begins) == turn:
            episode.begins.append(episode.length)
            episode.finish = None
    speaking = [e for e in active if e.finish is None]
    each = asked.samples_per_prompt if together and not turn else 1
    begun = [e.turn(turn) for e in speaking]
    media = [e.media for e in speaking[::each]]
    shown: dict[str, Any] = {"media": media} if any(media) else {}  # an engine of one's own may not know them
    completions = cast.setup.engine.generate(
        [e.context() for e in speaking[::each]], each, asked.sampling, asked.seed + turn,
        lambda tokens: progress("generating"), begun if any(map(len, begun)) else (), **shown,
    )  # fmt: skip
    for episode, done in zip(speaking, completions, strict=True):
        episode.go_on(done)
