"""Environments, which answer the model's turns in an episode. Nothing here imports torch; a user's own run in light
processes."""

from relax_hpc.environments.base import Environment, ToolError, Turn
from relax_hpc.environments.host import Environments, record
from relax_hpc.environments.load import make_environments
from relax_hpc.environments.process import Seat
from relax_hpc.environments.single_turn import SingleTurn

__all__ = ["Environment", "Environments", "Seat", "SingleTurn", "ToolError", "Turn", "make_environments", "record"]
