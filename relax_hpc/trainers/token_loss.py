"""What every backend's loss has in common: the algorithm asked for one number a token, and its answer checked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_hpc.algorithms import Algorithm, LossInputs
from relax_hpc.algorithms.kl import k3
from relax_hpc.records import Rollouts
from relax_hpc.run_dir import RunError


class TokenLoss:
    """The cross-entropy of a warm-up; `PolicyLoss` is an algorithm's."""

    needs_reference = False

    def tokens(
        self, targets: NDArray[np.int64], logprobs: Tensor, reference: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """([M] losses, metrics as [M] tensors) of the tokens `targets`, by their index in rollouts.tokens."""
        return -logprobs, {}

    def __call__(
        self, targets: NDArray[np.int64], logprobs: Tensor, entropies: Tensor, reference: Tensor | None
    ) -> tuple[Tensor, dict[str, float]]:
        """(sum of the losses, sums of the losses and of the metrics). Raises RunError for a loss of the wrong shape."""
        loss, metrics = self.tokens(targets, logprobs, reference)
        values = {"loss": loss, "entropy": entropies, **metrics}
        wrong = [n for n, v in values.items() if v.shape != targets.shape]
        if wrong:
            raise RunError(
                f"the algorithm's {wrong} have other shapes than [{targets.size}]: one number a token is expected"
            )
        sums = torch.stack([v.detach().to(loss) for v in values.values()]).double().sum(1)
        return loss.sum(), dict(zip(values, sums.tolist(), strict=True))


class PolicyLoss(TokenLoss):
    """An algorithm's loss on a step's rollouts."""

    def __init__(self, rollouts: Rollouts, algorithm: Algorithm, device: torch.device) -> None:
        """Raises RunError for advantages of the wrong shape."""
        advantages = algorithm.advantages(rollouts)
        if advantages.shape != rollouts.tokens.shape:
            raise RunError(
                f"{type(algorithm).__name__}.advantages returned shape {list(advantages.shape)} for {rollouts.tokens.size} tokens: "
                "one number a token is expected"
            )
        self.algorithm, self.device, self.advantages = algorithm, device, advantages
        self.behaviour = torch.from_numpy(rollouts.logprobs)
        self.needs_reference = "reference" in algorithm.needs

    def tokens(
        self, targets: NDArray[np.int64], logprobs: Tensor, reference: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        chosen = torch.from_numpy(targets)
        inputs = LossInputs(
            logprobs=logprobs,
            behaviour=self.behaviour[chosen].to(self.device),
            advantages=self.advantages[chosen].to(self.device),
            reference=reference,
        )
        loss, metrics = self.algorithm.loss(inputs)
        # of behaviour to current: the tokens are the behaviour's
        return loss, {"kl": k3(inputs.behaviour, logprobs.detach()), **metrics}


def add(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Sums by name."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total


def as_rollouts(prompts: list[NDArray[np.int32]], answers: list[NDArray[np.int32]]) -> Rollouts:
    """Prompts and answers as samples whose every token is in the loss."""
    tokens = np.concatenate([np.zeros(0, np.int32), *answers])
    none = np.zeros(len(prompts), np.float32)
    return Rollouts(
        ids=[str(i) for i in range(len(prompts))],
        group=np.arange(len(prompts)),
        rewards=none,
        raw_rewards=none,
        prompt_tokens=np.concatenate([np.zeros(0, np.int32), *prompts]),
        prompt_offsets=np.cumsum([0, *(len(p) for p in prompts)]),
        tokens=tokens,
        offsets=np.cumsum([0, *(len(a) for a in answers)]),
        loss_mask=np.ones(len(tokens), np.uint8),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.zeros(len(tokens), np.int32),
        finish=none.astype(np.uint8),
    )
