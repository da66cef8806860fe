"""Episodes brought back to where a partial rollout was: each environment by its recorded state, or shown the answers that it
had."""

from __future__ import annotations

from collections.abc import Callable

from relax_hpc.records import Media, PartialRollout
from relax_hpc.roles.rollout.cast import Cast
from relax_hpc.roles.rollout.episode import Episode


def restore(cast: Cast, partial: PartialRollout, progress: Callable[[], None]) -> bool:
    """Bring new episodes to where the partial rollout was. Return False if their environments now answer otherwise."""
    if len(partial.samples) != len(cast.episodes):
        return False
    pairs = [*zip(cast.episodes, partial.samples, strict=True)]
    for i, (episode, sample) in enumerate(pairs):
        episode.tokens, episode.mask, episode.logprobs = [sample.tokens], [sample.loss_mask], [sample.logprobs]
        episode.spans, episode.begins = [*sample.spans], [*partial.turns[i]]
        episode.routed_experts, episode.turns = sample.routed_experts, sample.turns
        episode.finish = None if i in partial.cut else sample.finish
        episode.seat.failure = partial.failures.get(i, episode.seat.failure)
        if episode.seat.failure is None and episode.turns and not episode.seat.turns:
            cast.setup.environments.show(episode.seat, *(cast.said(episode, n) for n in range(episode.turns)))
    cast.setup.environments.wait(progress)
    for episode in cast.episodes:
        if episode.seat.failure is None and not _as_before(cast, episode):
            return False
        episode.done = len(episode.begins) == episode.turns
    return all(_digest(e.later) == _digest(s.media) for e, s in pairs if not e.seat.failure)


def _as_before(cast: Cast, episode: Episode) -> bool:
    """Compare what the environment answers now with the observations that the model saw. The episode has their media
    then."""
    for number, turn in enumerate(episode.seat.turns):
        if number + 1 < len(episode.begins):
            again = cast.observed(episode, turn, number)
            if again is None:
                return True
            if turn.done or again != episode.observation(number).tolist():
                return False
    return True


def _digest(media: Media | None) -> str:
    return media.digest if media else ""
