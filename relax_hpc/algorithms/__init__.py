"""Algorithms: pure functions of tensors from rewards and logprobs to one loss a token; one module each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relax_hpc.algorithms.base import NEEDS, Algorithm, LossInputs, Totals
from relax_hpc.algorithms.cispo import CispoAlgorithm
from relax_hpc.algorithms.common.policy import PolicyAlgorithm
from relax_hpc.algorithms.dppo import DppoAlgorithm
from relax_hpc.algorithms.gdpo import GdpoAlgorithm
from relax_hpc.algorithms.gmpo import GmpoAlgorithm
from relax_hpc.algorithms.grpo import GroupRelative, MaxRlAlgorithm
from relax_hpc.algorithms.gspo import GspoAlgorithm
from relax_hpc.algorithms.opd import OpdAlgorithm
from relax_hpc.algorithms.own import Own
from relax_hpc.algorithms.ppo import ActorCritic
from relax_hpc.algorithms.reinforce_plus_plus import BaselineAlgorithm, ReinforcePlusPlusAlgorithm
from relax_hpc.algorithms.rloo import RlooAlgorithm
from relax_hpc.algorithms.sapo import SapoAlgorithm
from relax_hpc.algorithms.sft import Supervised
from relax_hpc.recipe.tables.algorithm import AnyAlgorithm

__all__ = [
    "NEEDS",
    "ActorCritic",
    "Algorithm",
    "LossInputs",
    "PolicyAlgorithm",
    "Supervised",
    "Totals",
    "make_algorithm",
]

ALGORITHMS: dict[str, Callable[[Any], Algorithm]] = {
    "grpo": GroupRelative,
    "dr_grpo": GroupRelative,
    "dapo": GroupRelative,
    "gspo": GspoAlgorithm,
    "sapo": SapoAlgorithm,
    "cispo": CispoAlgorithm,
    "gmpo": GmpoAlgorithm,
    "dppo": DppoAlgorithm,
    "maxrl": MaxRlAlgorithm,
    "gdpo": GdpoAlgorithm,
    "rloo": RlooAlgorithm,
    "reinforce_plus_plus": ReinforcePlusPlusAlgorithm,
    "reinforce_plus_plus_baseline": BaselineAlgorithm,
    "ppo": ActorCritic,
    "opd": OpdAlgorithm,
    "sft": Supervised,
    "own": Own,
}
"""Name in a recipe -> the algorithm, made from its table."""


def make_algorithm(config: AnyAlgorithm) -> Algorithm:
    """Make the recipe's algorithm. Raises RegistryError for a user's own that does not fit the protocol."""
    return ALGORITHMS[config.name](config)
