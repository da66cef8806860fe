"""Expected gradients of every way to put the KL into training, against the exact one of a softmax over a few words.

Each word is a sample of one token, as often as the policy that samples would draw it: sums over the samples are expectations, exactly.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from relax_hpc.algorithms import make_algorithm
from relax_hpc.trainers.token_loss import updates
from tests import tiny

COEF = 0.5
POLICY = (13, 2, 7, 10)
"""How often each word is drawn, of 32."""
SAMPLER, PROXIMAL, REFERENCE = (5, 9, 14, 4), (8, 3, 15, 6), (3, 15, 2, 12)
NEAR = (12.9, 2.1, 6.95, 10.05)
"""A reference that the policy has hardly moved away from."""


def log(counts: tuple[float, ...]) -> Tensor:
    return (torch.tensor(counts, dtype=torch.float64) / 32).log()


def exact(reference: Tensor, forward: bool = False) -> Tensor:
    """∇ COEF·KL(π ‖ ref) by the logits; forward: of KL(ref ‖ π)."""
    logits = log(POLICY).requires_grad_()
    policy = logits.log_softmax(0)
    kl = (reference.exp() * (reference - policy)).sum() if forward else (policy.exp() * (policy - reference)).sum()
    [found] = torch.autograd.grad(COEF * kl, [logits])
    return found


def expected(algorithm: dict[str, Any], sampler: tuple[int, ...], reference: Tensor, proximal: Tensor) -> Tensor:
    """The expected gradient of the loss by the logits, where all rewards are 0 and `sampler` draws. Raises ValidationError for a refused one."""
    recipe = tiny.recipe(algorithm={"kl_coef": COEF, **algorithm})
    words = np.repeat(np.arange(4), sampler)
    one = [np.array([3 + word], np.int32) for word in words]
    numbers = lambda policy: policy[words].numpy().astype(np.float32)
    rollouts = replace(
        tiny.rollouts(one, one, group_size=len(words)),
        rewards=np.zeros(len(words), np.float32),
        logprobs=numbers(log(sampler)),
        columns={
            "reference": numbers(reference),
            "recomputed": numbers(proximal),
            "values": np.zeros(len(words), np.float32),
        },
    )
    [(_, loss)] = updates(rollouts, make_algorithm(recipe.algorithm), recipe, torch.device("cpu"))
    logits = log(POLICY).requires_grad_()
    logprobs = logits.log_softmax(0)[words]
    losses, _ = loss.tokens(np.arange(len(words)), logprobs, torch.zeros_like(logprobs))
    [found] = torch.autograd.grad(losses.mean(), [logits])
    return found


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, 0))


REFUSED = {("reward", "k2", False), ("reward", "k3", False), ("loss", "k1", False)} | {
    ("reward", estimator, True) for estimator in ("k1", "k2", "k3")
}


@pytest.mark.parametrize("old_logprobs", ["engine", "recomputed"])
@pytest.mark.parametrize(
    ("kl_in", "estimator", "unbiased"), [*product(("loss", "reward"), ("k1", "k2", "k3"), (False, True))]
)
def test_each_option_has_the_gradient_of_the_kl_or_is_refused(
    kl_in: str, estimator: str, unbiased: bool, old_logprobs: str
) -> None:
    config = {
        "name": "dr_grpo", "aggregate": "token", "kl_in": kl_in, "kl_estimator": estimator, "kl_unbiased": unbiased, "old_logprobs": old_logprobs,
    }  # fmt: skip
    reference = log(REFERENCE)
    if (kl_in, estimator, unbiased) in REFUSED:
        with pytest.raises(ValidationError, match=r"kl_(estimator|unbiased)"):
            expected(config, POLICY, reference, log(POLICY))
    elif unbiased:  # whoever sampled, and whatever the proximal policy
        found = expected(config, SAMPLER, reference, log(PROXIMAL))
        torch.testing.assert_close(found, exact(reference), rtol=1e-5, atol=1e-6)
    else:  # the policy itself sampled
        found = expected(config, POLICY, reference, log(POLICY))
        torch.testing.assert_close(found, exact(reference, forward=estimator == "k3"), rtol=1e-5, atol=1e-6)
        near = expected(config, POLICY, log(NEAR), log(POLICY))
        assert cosine(near, exact(log(NEAR))) > 0.999  # k3's is that of the other KL, which is the same nearby


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo", "rloo"])
@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_what_is_put_elsewhere_than_by_default_has_an_estimator_that_is_right_there(name: str, kl_in: str) -> None:
    config = {"name": name, "kl_in": kl_in}
    if name == "grpo" and kl_in == "loss":  # GRPO as published: k3, the gradient of the other KL
        config["kl_estimator"] = "k2"
    on_policy = {"async": {"max_staleness": 0}} if name == "rloo" else {}
    assert tiny.recipe(algorithm={**config, "kl_coef": COEF}, **on_policy)
    if name != "rloo":
        assert cosine(expected(config, POLICY, log(REFERENCE), log(POLICY)), exact(log(REFERENCE))) > 0.999
