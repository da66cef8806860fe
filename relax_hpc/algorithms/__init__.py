"""Algorithms: pure functions of tensors from rewards and logprobs to one loss a token."""

from __future__ import annotations

from relax_hpc.algorithms.actor_critic import ActorCritic
from relax_hpc.algorithms.base import NEEDS, Algorithm, LossInputs, Totals
from relax_hpc.algorithms.own import Own
from relax_hpc.algorithms.policy import PolicyAlgorithm
from relax_hpc.algorithms.supervised import Supervised
from relax_hpc.recipe.tables.algorithm import AnyAlgorithm, OwnAlgorithm, Ppo, Sft

__all__ = ["NEEDS", "ActorCritic", "Algorithm", "LossInputs", "Supervised", "Totals", "make_algorithm"]


def make_algorithm(config: AnyAlgorithm) -> Algorithm:
    """Make the recipe's algorithm. Raises RegistryError for a user's own that does not fit the protocol."""
    if isinstance(config, Sft):
        return Supervised(config)
    if not isinstance(config, OwnAlgorithm):
        return ActorCritic(config) if isinstance(config, Ppo) else PolicyAlgorithm(config)
    return Own(config)
