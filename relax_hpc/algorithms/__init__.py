"""Algorithms: pure functions of tensors from rewards and logprobs to one loss a token."""

from __future__ import annotations

from relax_hpc.algorithms.actor_critic import ActorCritic
from relax_hpc.algorithms.base import NEEDS, Algorithm, LossInputs, Totals
from relax_hpc.algorithms.policy import PolicyAlgorithm
from relax_hpc.recipe.algorithm import AnyAlgorithm, OwnAlgorithm, Ppo
from relax_hpc.registry import RegistryError, check_call, resolve

__all__ = ["NEEDS", "ActorCritic", "Algorithm", "LossInputs", "Totals", "make_algorithm"]


def make_algorithm(config: AnyAlgorithm) -> Algorithm:
    """The recipe's algorithm. Raises RegistryError for one of the user's own that cannot fill the protocol."""
    if not isinstance(config, OwnAlgorithm):
        return ActorCritic(config) if isinstance(config, Ppo) else PolicyAlgorithm(config)
    factory = resolve("algorithm", config.factory, {})
    check_call("algorithm", config.factory, factory, **config.options)
    algorithm: Algorithm = factory(**config.options)
    missing = [name for name in ("needs", "advantages", "loss") if not hasattr(algorithm, name)]
    if missing:
        raise RegistryError(
            f"algorithm '{config.factory}' returned a {type(algorithm).__name__} without {missing}: "
            "relax_hpc.algorithms.Algorithm says what it needs to have"
        )
    check_call("algorithm", f"{config.factory}.advantages", algorithm.advantages, "rollouts")
    check_call("algorithm", f"{config.factory}.loss", algorithm.loss, "inputs")
    unknown = sorted(set(algorithm.needs) - NEEDS)
    if unknown:
        raise RegistryError(f"algorithm '{config.factory}' needs {unknown}; there are {sorted(NEEDS)}")
    return algorithm
