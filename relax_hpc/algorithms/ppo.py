"""PPO (arXiv 1707.06347): advantages and returns from a critic's values, the clipped losses of both.

rewards - overlong, less KL token by token ──► rewards of tokens ─┬─ values, λ of the policy ──► advantages (whitened)
                                                                  └─ values, λ of the critic ──► + values = returns
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_hpc.algorithms.base import VALUES, LossAndMetrics
from relax_hpc.algorithms.common.advantages import STD_EPS, adaptive_smoothing, gae, whiten
from relax_hpc.algorithms.common.policy import PolicyAlgorithm
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

    def value_loss(self, values: Tensor, old: Tensor, returns: Tensor) -> LossAndMetrics:
        """The critic's loss: ([M] loss, metrics). values: [M] with gradient; old: [M] those before the step; returns:
        [M]."""
        return clipped_value(values, old, returns, self.config.critic.clip)

    def estimate(self, rollouts: Rollouts) -> Tensor:
        alpha = self.config.gae_alpha
        smoothing = self.config.gae_lambda if alpha is None else adaptive_smoothing(rollouts, alpha)
        advantages = self._gae(rollouts, smoothing)
        return whiten(advantages, torch.from_numpy(rollouts.loss_mask)).float()

    def _gae(self, rollouts: Rollouts, smoothing: float | NDArray[np.float64]) -> Tensor:
        values = torch.from_numpy(rollouts.columns[VALUES])
        return gae(self.token_rewards(rollouts), values, rollouts, self.config.discount, smoothing)


def clipped_value(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> LossAndMetrics:
    """The critic's clipped loss: ([M] loss, metrics), all inputs [M]: max((V - R)², (clip(V, V_old ± clip) - R)²) / 2.

    The value loss of PPO's own implementation, as in arXiv 2005.12729, section 3; where the clip is active no gradient
    flows.
    """
    free = (values - returns).square()
    bounded = (values.clamp(old - clip, old + clip) - returns).square()
    metrics = {"value_clip_fraction": (bounded > free).float(), "value_mean": values, "return_mean": returns}
    return torch.maximum(free, bounded) / 2, {name: value.detach() for name, value in metrics.items()}


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Explained variance, 1 - Var(R - V) / Var(R), over tokens with mask 1: 1 for a perfect critic, 0 for one that
    predicts a constant.

    0 where the returns are all alike, up to rounding.
    """
    chosen = mask.bool()
    target, error = returns.double()[chosen], (returns.double() - values)[chosen]
    spread = float(target.var(correction=0)) if len(target) else 0.0
    return 1 - float(error.var(correction=0)) / spread if spread > STD_EPS**2 else 0.0
