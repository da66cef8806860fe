"""One episode of an environment without a model: somebody else answers for it.

NAME, or a source of a recipe ──► environment, in its own process and sandbox ◄──answers── a person, or a script
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relax_hpc.environments import Environments, Turn
from relax_hpc.environments.tools.schemas import with_tools
from relax_hpc.files.errors import RunError
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Prompt
from relax_hpc.rewards import Step, Trajectory, make_rewards
from relax_hpc.roles.rollout.episodes import calls_in


@dataclass(frozen=True, slots=True)
class Episode:
    """What is needed to play one."""

    recipe: Recipe
    prompt: Prompt
    scores: bool
    """True where the source's reward scores what the environment does not."""

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Schemas of the tools that the model would be shown."""
        return [one for one in with_tools(self.recipe).source[self.prompt.source].tools if isinstance(one, dict)]


def of_name(
    name: str, options: dict[str, Any], sandbox: str, text: str, answer: str | None, metadata: dict[str, Any]
) -> Episode:
    """Make an episode of an environment by its name, with a prompt of one's own."""
    source = {"task": "chain_sum", "environment": name, "environment_options": options, "sandbox": sandbox}
    recipe = Recipe.model_validate({"model": {"name": "tiny"}, "source": [source]})
    return Episode(recipe, Prompt(0, 0, text, np.zeros(1, np.int32), answer, metadata), False)


def of_recipe(recipe: Recipe, source: int, row: int) -> Episode:
    """Make an episode of a recipe's source, with the prompt of one of its rows. Raises RunError for those that it has
    not."""
    if not 0 <= source < len(recipe.source):
        raise RunError(f"--source {source}: the recipe has sources 0 to {len(recipe.source) - 1}")
    if recipe.source[source].agent:
        raise RunError(
            f"source {source} has an `agent`, which asks a model by itself: only environments are played here"
        )
    from transformers import AutoConfig, AutoTokenizer

    from relax_hpc.data import PromptSources
    from relax_hpc.engines.model_folder import context_of
    from relax_hpc.trainers.build import materialise

    with tempfile.TemporaryDirectory(prefix="relax-hpc-try-") as scratch:
        folder = Path(scratch)
        materialise(recipe.model, folder, recipe.run.seed)
        tokenizer, context = AutoTokenizer.from_pretrained(folder), context_of(AutoConfig.from_pretrained(folder))
        sources = PromptSources.of(with_tools(recipe), tokenizer, context, folder)
        rows = sources.sizes[source]
        if not 0 <= row < rows:
            raise RunError(f"--row {row}: source {source} has rows 0 to {rows - 1}")
        return Episode(recipe, sources.without_media(source, row), True)


def play(episode: Episode, answers: Iterator[str], tell: Callable[[Turn], None]) -> list[Turn]:
    """Play the episode until the environment is done, or answers run out; `tell` is told each turn of its. Raises
    RunError where it fails as a sample would."""
    environments = Environments(episode.recipe)
    seats = environments.begin([(0, episode.prompt)])
    [seat] = seats
    try:
        environments.wait(lambda: None)
        while seat.failure is None and not (seat.turns and seat.turns[-1].done):
            answer = next(answers, None)
            if answer is None:
                break
            environments.show(seat, answer)
            environments.wait(lambda: None)
            if seat.failure is None:
                tell(seat.turns[-1])
        if seat.failure is None:
            environments.leave(seats)
        if seat.failure is not None:
            raise RunError(f"{seat.failure.reason}: {seat.failure.detail}")
        return seat.turns
    finally:
        environments.close()


def score(episode: Episode, said: Sequence[str], turns: Sequence[Turn]) -> float | None:
    """The episode's reward: that of its turns, and, where the last turn has none, of the source's reward; None where it
    has neither."""
    earned = [turn.reward for turn in turns if turn.reward is not None]
    if not episode.scores or not turns or not turns[-1].done or turns[-1].reward is not None:
        return sum(earned) if earned else None
    answer = turns[-1].answer
    if answer is None:
        answer = said[-1] if episode.tools else "".join(said)
    steps = [Step(text, calls_in(text), turn.observation, turn.reward) for text, turn in zip(said, turns, strict=True)]
    reward = make_rewards(episode.recipe.sources)[episode.prompt.source]
    [(found, _)] = reward(episode.prompt, [Trajectory.of(answer, steps, None)])
    return sum(earned) + found
