"""PPO (arXiv 1707.06347): advantages and returns from a critic's values, the clipped losses of both.

rewards - overlong, less KL token by token ──► rewards of tokens ─┬─ values, λ of the policy ──► advantages (whitened)
                                                                  └─ values, λ of the critic ──► + values = returns
"""

from __future__ import annotations

import torch
from torch import Tensor

import relax_hpc.algorithms.advantages as estimates
from relax_hpc.algorithms.base import VALUES
from relax_hpc.algorithms.losses import clipped_value
from relax_hpc.algorithms.policy import PolicyAlgorithm, Said
from relax_hpc.recipe.tables.algorithm import Ppo
from relax_hpc.records import Rollouts


class ActorCritic(PolicyAlgorithm):
    """An algorithm with a critic. The trainer gives it `rollouts.columns["values"]`, the critic's values before the
    step's first update."""

    config: Ppo

    def __init__(self, config: Ppo) -> None:
        super().__init__(config)
        of_reward = {"reference"} if config.kl_coef > 0 and config.kl_in == "reward" else set()
        self.returns_need = frozenset({VALUES} | of_reward)
        """Columns among the needs that returns are made from."""

    def returns(self, rollouts: Rollouts) -> Tensor:
        """[T] float32 returns, which the critic learns; 0 where the loss mask is 0."""
        values = torch.from_numpy(rollouts.columns[VALUES] * rollouts.loss_mask)
        return (self._gae(rollouts, self.config.value_lambda) + values).float()

    def value_loss(self, values: Tensor, old: Tensor, returns: Tensor) -> Said:
        """The critic's loss: ([M] loss, metrics). values: [M] with gradient; old: [M] those before the step; returns:
        [M]."""
        return clipped_value(values, old, returns, self.config.critic.clip)

    def _estimate(self, rollouts: Rollouts) -> Tensor:
        advantages = self._gae(rollouts, self.config.gae_lambda)
        mask = torch.from_numpy(rollouts.loss_mask)
        return (estimates.whiten(advantages, mask) if self.config.whiten else advantages).float()

    def _gae(self, rollouts: Rollouts, smoothing: float) -> Tensor:
        earned = estimates.token_rewards(self._rewards(rollouts), self._penalties(rollouts), rollouts)
        values = torch.from_numpy(rollouts.columns[VALUES])
        return estimates.gae(earned, values, rollouts, self.config.discount, smoothing)
