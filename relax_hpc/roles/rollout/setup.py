"""What a worker generates episodes with, and what a request asks of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from relax_hpc.engines import Engine, Sampling
from relax_hpc.environments import Environments
from relax_hpc.records import Failure, PartialRollout, Prompt
from relax_hpc.rewards import RewardRunner
from relax_hpc.roles.rollout.observations import Observations


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
    lockstep: bool = True
    """All episodes of a request take their turns together."""
    max_episode_tokens: int | None = None
    on_failed_sample: Literal["sample", "group"] = "sample"


@dataclass(frozen=True, slots=True)
class Asked:
    """Everything that a request asks of its episodes."""

    prompts: list[Prompt]
    samples_per_prompt: int
    seed: int
    sampling: Sampling
    unusable: Mapping[int, Failure] = field(default_factory=dict)
    """Prompts that fail from the start, by their place among `prompts`."""
