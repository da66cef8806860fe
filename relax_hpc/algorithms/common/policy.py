"""The common part of the built-in algorithms: each has an estimate of advantages and a surrogate loss of its own, and
terms that all of them may have.

rewards - overlong - KL in the reward ──estimate──► advantages
                                  less the reverse KL to a teacher, where there is one
log ρ, advantages ──surrogate──► × correction × rejection × opsm ──► + KL to the reference - entropy ──► × weight in the mean
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax_hpc.algorithms.base import TEACHER, LossAndMetrics, LossInputs
from relax_hpc.algorithms.common.advantages import over_tokens, overlong_penalty, sample_sums, token_rewards
from relax_hpc.algorithms.common.correction import importance_weights, rejection_mask, sequence_mask
from relax_hpc.algorithms.common.covariance import highest, without_some
from relax_hpc.algorithms.common.kl import ESTIMATORS, importance_weighted, k1
from relax_hpc.algorithms.common.losses import clipped_surrogate
from relax_hpc.algorithms.common.sequences import weights
from relax_hpc.algorithms.common.turns import Turns, turn_returns
from relax_hpc.recipe.tables.algorithm_keys import Clipped, Grouped, PolicyGradient, Ratio
from relax_hpc.records import Finish, Rollouts

KL_COV = "kl_cov"
"""The column of marks on tokens that `kl_cov` holds where they are."""


class PolicyAlgorithm(ABC):
    """The algorithm that a recipe's [algorithm] table describes; see relax_hpc.algorithms.base.Algorithm."""

    def __init__(self, config: PolicyGradient) -> None:
        self.config = config
        self.decoupled = isinstance(config, Ratio) and config.old_logprobs == "recomputed"
        self.needs = config.needs

    def advantages(self, rollouts: Rollouts) -> Tensor:
        estimate = self.estimate(rollouts)
        return estimate if self.config.teacher is None else estimate - self._distance(rollouts)

    def selected(self, rollouts: Rollouts, advantages: Tensor) -> tuple[Rollouts, Tensor]:
        """Choose among all tokens of the step: the samples with truncated ones masked and marks as a column, the advantages
        with 0 at tokens that lose their gradient, where the recipe has these."""
        config = self.config
        if config.mask_truncated:
            cut = np.repeat(rollouts.finish == Finish.LENGTH, np.diff(rollouts.offsets))
            rollouts = replace(rollouts, loss_mask=rollouts.loss_mask * ~cut)
        if isinstance(config, Ratio) and config.clip_cov is not None:
            bounds = config.clip_cov.share, config.clip_cov.low, config.clip_cov.high
            advantages = without_some(advantages, rollouts, *bounds)
        if isinstance(config, Ratio) and config.kl_cov is not None:
            marks = {KL_COV: highest(advantages, rollouts, config.kl_cov.share)}
            rollouts = replace(rollouts, columns=rollouts.columns | marks)
        return rollouts, advantages

    def loss(self, inputs: LossInputs) -> LossAndMetrics:
        missing = [name for name in self.needs & {"reference", "recomputed", TEACHER} if getattr(inputs, name) is None]
        if missing:
            raise ValueError(f"{self.config!r} needs the logprobs of {missing} and got none")
        old = inputs.recomputed if self.decoupled and inputs.recomputed is not None else inputs.old_logprobs
        loss, metrics = self.surrogate(inputs, old)
        if isinstance(self.config, Ratio) and self.config.kl_cov is not None:
            loss = loss + self.config.kl_cov.coef * inputs.columns[KL_COV] * (inputs.logprobs - old).abs()
        loss, said = self._corrected(loss, inputs)
        metrics |= said
        terms, said = self._terms(inputs)
        metrics |= {"pg_loss": loss.detach(), **said}
        if said:
            loss = loss + terms
        if inputs.teacher is not None:
            metrics["teacher_kl"] = k1(inputs.logprobs, inputs.teacher).detach()
        scale = weights(self.config.aggregate, inputs)
        return loss if scale is None else loss * scale, metrics

    def reward_parts(self, rollouts: Rollouts) -> dict[str, float]:
        """Means over samples: the parts of the reward that `overlong` and the KL take, and the rest; empty where
        neither is used."""
        config = self.config
        if not len(rollouts) or (config.overlong is None and not (config.kl_coef > 0 and config.kl_in == "reward")):
            return {}
        left, kl = self._rewards(rollouts), sample_sums(self._penalties(rollouts), rollouts)
        overlong = torch.from_numpy(rollouts.rewards).double() - left
        parts = {"overlong_penalty": overlong, "kl_penalty": kl, "shaped_reward": left - kl}
        return {name: float(values.mean()) for name, values in parts.items()}

    @abstractmethod
    def estimate(self, rollouts: Rollouts) -> Tensor:
        """[T] float32 advantages from rewards alone, without the teacher's part."""

    def surrogate(self, inputs: LossInputs, old: Tensor) -> LossAndMetrics:
        """The policy's loss, and the metrics of its clip or gate. old: [M] logprobs that the ratio is taken against."""
        assert isinstance(self.config, Clipped)
        bounds = *self.config.clip, self.config.dual_clip or None
        return clipped_surrogate(inputs.logprobs - old, inputs.advantages, *bounds)

    def per_sample(self, rollouts: Rollouts, estimate: Callable[..., Tensor], **options: Any) -> Tensor:
        """[T] a sample's advantage at each of its tokens: `estimate`(rewards less all penalties [N], groups [N]), and
        with `rollout` [N] where an attempt may have several samples. With credit = "turn" the same of turns [M], each
        compared with those of its number."""
        assert isinstance(self.config, Grouped)
        rewards, penalties, discount = self._rewards(rollouts), self._penalties(rollouts), self.config.turn_discount
        by_turn = self.config.credit == "turn"
        if by_turn or discount != 1:
            turns = Turns.of(rollouts)
            returns = turn_returns(rewards, penalties, rollouts, turns, discount)
        if by_turn:
            cells = rollouts.group[turns.sample] * len(turns.number) + turns.number
            return turns.spread(estimate(returns, torch.from_numpy(cells), **options), rollouts)
        rewards = rewards - sample_sums(penalties, rollouts)
        if discount != 1:
            rewards = turns.whole(returns, rewards, rollouts)
        attempts = {} if rollouts.rollout is None else {"rollout": torch.from_numpy(rollouts.rollout)}
        return over_tokens(estimate(rewards, torch.from_numpy(rollouts.group), **attempts, **options), rollouts)

    def token_rewards(self, rollouts: Rollouts) -> Tensor:
        """[T] float64 rewards of single tokens, less their penalties."""
        return token_rewards(self._rewards(rollouts), self._penalties(rollouts), rollouts)

    def _distance(self, rollouts: Rollouts) -> Tensor:
        """[T] teacher_coef·(log π - log π_teacher) at each token in the loss, π being the policy that sampled. Its mean
        over samples is the reverse KL; as a negative advantage it has the policy gradient of the next token's reverse
        KL."""
        old_logprobs, teacher = (torch.from_numpy(x) for x in (rollouts.logprobs, rollouts.columns[TEACHER]))
        kl = self.config.teacher_coef * k1(old_logprobs, teacher)
        return kl.where(torch.from_numpy(rollouts.loss_mask).bool(), 0.0)

    def _rewards(self, rollouts: Rollouts) -> Tensor:
        """[N] float64 rewards, less the overlong penalty."""
        rewards = torch.from_numpy(rollouts.rewards).double()
        if self.config.overlong is None:
            return rewards
        return rewards - overlong_penalty(rollouts, *self.config.overlong)

    def _penalties(self, rollouts: Rollouts) -> Tensor:
        """[T] float64 penalty that the KL to the reference takes from the reward at each token in the loss."""
        config = self.config
        if not (config.kl_coef > 0 and config.kl_in == "reward"):
            return torch.zeros(len(rollouts.tokens), dtype=torch.float64)
        old_logprobs, reference = (
            torch.from_numpy(x).double() for x in (rollouts.logprobs, rollouts.columns["reference"])
        )
        kl = config.kl_coef * ESTIMATORS[config.kl_estimator](old_logprobs, reference)
        return kl.where(torch.from_numpy(rollouts.loss_mask).bool(), 0.0)

    def _corrected(self, loss: Tensor, inputs: LossInputs) -> LossAndMetrics:
        """Weight `loss` by the off-policy correction, rejection and sequence mask, where the recipe has them."""
        metrics: dict[str, Tensor] = {}
        if self.config.correction is not None:
            weight, metrics = importance_weights(self.config.correction, inputs)
            loss = loss * weight
        if self.config.rejection is not None:
            kept, said = rejection_mask(self.config.rejection, inputs)
            loss, metrics = loss * kept, metrics | said
        if self.config.opsm is not None:
            kept = sequence_mask(self.config.opsm, inputs)
            loss, metrics = loss * kept, metrics | {"opsm_masked": 1 - kept}
        return loss, metrics

    def _terms(self, inputs: LossInputs) -> LossAndMetrics:
        """Terms that are added to the policy's loss: the KL to the reference and the entropy bonus."""
        config, metrics, terms = self.config, {}, torch.zeros_like(inputs.logprobs)
        if config.kl_coef > 0 and inputs.reference is not None:
            kl = ESTIMATORS[config.kl_estimator](inputs.logprobs, inputs.reference)
            metrics["reference_kl"] = kl.detach()
            if config.kl_unbiased:
                kl = importance_weighted(config.kl_estimator, inputs.logprobs, inputs.reference, inputs.old_logprobs)
            if config.kl_in == "loss":
                terms = terms + config.kl_coef * kl
        if config.entropy_coef > 0:
            terms = terms - config.entropy_coef * inputs.entropies
            metrics["entropy_bonus"] = config.entropy_coef * inputs.entropies.detach()
        return terms, metrics
