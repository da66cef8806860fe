"""Rewards: what an answer is worth. Nothing here imports torch; rewards run in light processes."""

from relax_hpc.rewards.base import Reward, parts
from relax_hpc.rewards.judge import Judge, Score
from relax_hpc.rewards.load import LoadedReward, make_rewards

__all__ = ["Judge", "LoadedReward", "Reward", "Score", "make_rewards", "parts"]
