"""Rewards: functions that score answers. Nothing here imports torch; rewards run in light processes."""

from relax_hpc.rewards.base import Reward, Step, Trajectory, parts
from relax_hpc.rewards.load import LoadedReward, make_rewards
from relax_hpc.rewards.runner import RewardRunner, Score

__all__ = ["RewardRunner", "LoadedReward", "Reward", "Score", "Step", "Trajectory", "make_rewards", "parts"]
