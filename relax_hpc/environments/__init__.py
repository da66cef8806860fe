"""Environments: what a sample's turns are played against."""

from relax_hpc.environments.base import Environment, Turn
from relax_hpc.environments.load import make_environments
from relax_hpc.environments.single_turn import SingleTurn

__all__ = ["Environment", "SingleTurn", "Turn", "make_environments"]
