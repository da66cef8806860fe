"""Every algorithm against its paper, written out in Python floats over samples and tokens: the step's loss and its gradient.

The oracle is given the logprobs twice, `now` and `fixed`: what a paper puts under a stop-gradient is computed from `fixed`,
so that its derivative by `now` is the paper's gradient.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from relax_hpc.algorithms import make_algorithm
from relax_hpc.records import Rollouts
from relax_hpc.trainers.token_loss import PolicyLoss, critic_updates, updates
from tests import tiny

CONFIGS: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo"},
    "grpo, as published": {"name": "grpo", "clip": [0.2, 0.2], "aggregate": "sequence", "kl_coef": 0.04},
    "grpo, dual clip": {"name": "grpo", "dual_clip": 1.5},
    "grpo, entropy": {"name": "grpo", "entropy_coef": 0.1, "aggregate": "sequence"},
    "grpo, kl in reward": {"name": "grpo", "kl_coef": 0.2, "kl_in": "reward", "kl_estimator": "k1"},
    "grpo, unbiased kl": {"name": "grpo", "kl_coef": 0.2, "kl_unbiased": True},
    "grpo, opsm": {"name": "grpo", "opsm": 0.05},
    "decoupled": {"name": "grpo", "old_logprobs": "recomputed", "correction": {"name": "tis", "high": 1.3}},
    "icepop": {"name": "grpo", "old_logprobs": "recomputed", "correction": {"name": "icepop", "low": 0.8, "high": 1.3}},
    "mis": {"name": "dr_grpo", "old_logprobs": "recomputed", "correction": {"name": "mis", "high": 1.5}},
    "mis, geometric": {
        "name": "gspo",
        "old_logprobs": "recomputed",
        "clip": [0.1, 0.1],
        "correction": {"name": "mis", "low": 0.9, "high": 1.2, "weight": "geometric"},
    },
    "dr_grpo": {"name": "dr_grpo"},
    "dapo": {"name": "dapo", "overlong": [4, 12]},
    "gspo": {"name": "gspo", "clip": [0.05, 0.1]},
    "gspo, token": {"name": "gspo", "clip": [0.05, 0.1], "level": "token"},
    "sapo": {"name": "sapo"},
    "cispo": {"name": "cispo", "clip": [0.3, 0.2]},
    "rloo": {"name": "rloo"},
    "rloo, corrected": {"name": "rloo", "correction": {"name": "tis", "low": 0.9, "high": 1.1}},
    "reinforce_plus_plus": {"name": "reinforce_plus_plus", "kl_coef": 0.1},
    "reinforce_plus_plus, no kl": {"name": "reinforce_plus_plus", "group_size": 1},
    "reinforce_plus_plus, discounted": {"name": "reinforce_plus_plus", "kl_coef": 0.1, "discount": 0.7},
    "reinforce_plus_plus_baseline": {"name": "reinforce_plus_plus_baseline", "kl_coef": 0.1},
    "ppo": {"name": "ppo", "group_size": 1},
    "ppo, kl, discounted": {"name": "ppo", "kl_coef": 0.1, "discount": 0.8, "gae_lambda": 0.6,
                            "overlong": [4, 12], "clip": [0.1, 0.3], "aggregate": "sequence"},
    "opd": {"name": "opd", "group_size": 1, "teacher": "teacher", "aggregate": "sequence"},
    "dr_grpo, teacher": {"name": "dr_grpo", "teacher": "teacher", "teacher_coef": 0.3},
    "ppo, teacher": {"name": "ppo", "teacher": "teacher", "teacher_coef": 0.3},
    "grpo, mean over prompts": {"name": "grpo", "aggregate": "prompt"},
    "cispo, normalized over the step": {"name": "cispo", "clip": [0.3, 0.2], "normalize": "batch", "aggregate": "prompt"},
    "gspo, not normalized": {"name": "gspo", "clip": [0.05, 0.1], "normalize": "none"},
    "rloo, normalized over the step": {"name": "rloo", "normalize": "batch"},
    "gmpo": {"name": "gmpo", "clip": [0.1, 0.2]},
    "gmpo, dual clip": {"name": "gmpo", "clip": [0.2, 0.2], "dual_clip": 1.05, "aggregate": "token"},
    "dppo": {"name": "dppo", "clip": [0.004, 0.002]},
    "dppo, kl, truncated": {"name": "dppo", "divergence": "kl", "clip": [0.0005, 0.001], "truncate": 1.2},
    "maxrl": {"name": "maxrl"},
    "gdpo": {"name": "gdpo", "parts": {"right": 1.0, "form": -0.5}},
    "grpo, truncated samples masked": {"name": "grpo", "mask_truncated": True, "aggregate": "prompt"},
    "truncated weights, geometric rejection, veto": {
        "name": "grpo",
        "old_logprobs": "recomputed",
        "correction": {"name": "tis", "high": 1.3},
        "rejection": {"geometric": [0.95, 1.05], "product": [0.3, 3.0], "veto": 0.7},
    },
    "trust region masking": {"name": "dr_grpo", "rejection": {"mean_kl": 0.025, "max_kl": 0.08}},
    "clip_cov": {"name": "grpo", "clip_cov": {"share": 1.0, "low": 0.05, "high": 0.3}},
    "kl_cov": {"name": "grpo", "clip": [0.99, 1e6], "kl_cov": {"share": 0.2, "coef": 0.7}},
    "ppo, adaptive": {"name": "ppo", "group_size": 1, "gae_alpha": 0.3},
}  # fmt: skip
BUDGET = 16
"""max_new_tokens of tests.tiny's recipes, one turn."""
TOKEN_REWARDS = ("reinforce_plus_plus", "ppo")
"""What takes the KL from the reward of each token."""


def step_data(seed: int) -> tuple[Rollouts, dict[str, NDArray[np.float64]]]:
    """Samples of uneven lengths, two thirds of their tokens in the loss; logprobs of four policies near each other."""
    rollouts = tiny.random_rollouts(11, group_size=4, seed=seed, masked=0.3)
    rng = np.random.default_rng(seed)
    near = lambda spread: (rollouts.logprobs + rng.normal(size=len(rollouts.tokens)) * spread).astype(np.float32)
    columns = {"reference": near(0.4), "recomputed": near(0.2)}
    now = near(0.3).astype(np.float64)
    entropies = rng.random(len(rollouts.tokens))
    columns["teacher"] = near(0.5)
    columns["values"] = rng.normal(size=len(rollouts.tokens)).astype(np.float32)
    parts = {name: rng.integers(0, 3, len(rollouts)).astype(np.float32) for name in ("right", "form")}
    parts["form"][[1, 2]] = np.nan
    finish = (rng.random(len(rollouts)) < 0.3).astype(np.uint8)
    rollouts = replace(rollouts, columns=columns, extra=parts, finish=finish, rewards=rollouts.rewards.clip(-0.5) + 0.5)
    return rollouts, {"now": now, "entropies": entropies}


# -- the papers -------------------------------------------------------------------------------------------------------


def estimate(name: str, current: float, other: float) -> float:
    d = current - other
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[name]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def oracle_advantages(c: dict[str, Any], rollouts: Rollouts) -> dict[int, float]:
    """Token -> advantage, of the tokens in the loss."""
    found = (
        oracle_estimates(c, rollouts)
        if c["name"] != "opd"
        else dict.fromkeys(np.flatnonzero(rollouts.loss_mask).tolist(), 0.0)
    )
    if "teacher" not in c:
        return found
    student, teacher = rollouts.logprobs.tolist(), rollouts.columns["teacher"].tolist()
    return {t: a - c.get("teacher_coef", 1.0) * (student[t] - teacher[t]) for t, a in found.items()}


def oracle_estimates(c: dict[str, Any], rollouts: Rollouts) -> dict[int, float]:
    """The same, of rewards alone."""
    tokens = {
        i: [t for t in range(rollouts.offsets[i], rollouts.offsets[i + 1]) if rollouts.loss_mask[t]]
        for i in range(len(rollouts))
    }
    rewards = [float(r) for r in rollouts.rewards]
    for i in range(len(rollouts)):
        if "overlong" in c:
            begin, end = c["overlong"]
            length = len(tokens[i])  # of the model's own
            rewards[i] += 0 if length <= begin else -1 if length > end else (begin - length) / (end - begin)
    penalty = {t: 0.0 for ts in tokens.values() for t in ts}
    in_reward = c.get("kl_in", "reward" if c["name"] in TOKEN_REWARDS else "loss") == "reward"
    if c.get("kl_coef") and in_reward:
        for t in penalty:
            kl = estimate(
                c.get("kl_estimator", "k1"), float(rollouts.logprobs[t]), float(rollouts.columns["reference"][t])
            )
            penalty[t] = c["kl_coef"] * kl
    if c["name"] in TOKEN_REWARDS:
        earned = {t: -penalty[t] + (rewards[i] if t == ts[-1] else 0.0) for i, ts in tokens.items() for t in ts}
        advantages_of: dict[int, float] = {}
        for ts in tokens.values():
            advantages_of |= gae_oracle(c, ts, earned, rollouts.columns["values"].tolist(), c.get("gae_lambda", 0.95))
        return whitened(advantages_of)
    rewards = [r - sum(penalty[t] for t in tokens[i]) for i, r in enumerate(rewards)]
    if c["name"] == "gdpo":
        return {t: a for i, a in enumerate(gdpo_oracle(c["parts"], rollouts)) for t in tokens[i]}
    advantages = []
    for i, r in enumerate(rewards):
        group = [rewards[j] for j in range(len(rewards)) if rollouts.group[j] == rollouts.group[i]]
        if c["name"] == "maxrl":
            advantages.append((r - mean(group)) / mean(group))
            continue
        others = [rewards[j] for j in range(len(rewards)) if rollouts.group[j] == rollouts.group[i] and j != i]
        if c["name"] == "rloo":
            advantages.append(r - mean(others) if others else 0.0)
            continue
        centred = r - mean(group)
        plain = c["name"] in ("dr_grpo", "reinforce_plus_plus_baseline")
        if c.get("normalize", "none" if plain else "group") == "group":
            centred /= math.sqrt(sum((x - mean(group)) ** 2 for x in group) / (len(group) - 1)) + 1e-6
        advantages.append(centred)
    if c.get("normalize") == "batch":
        means = {g: mean([r for r, of in zip(rewards, rollouts.group, strict=True) if of == g]) for g in rollouts.group}
        apart = [r - means[g] for r, g in zip(rewards, rollouts.group, strict=True)]
        deviation = math.sqrt(sum(x * x for x in apart) / (len(apart) - 1))
        advantages = [a / (deviation + 1e-6) for a in advantages]
    spread = {t: advantages[i] for i, ts in tokens.items() for t in ts}
    return whitened(spread) if c["name"] == "reinforce_plus_plus_baseline" else spread


def gdpo_oracle(parts: dict[str, float], rollouts: Rollouts) -> list[float]:
    """arXiv 2601.05242: each part normalized in its group, and their sum over the step."""
    total = [0.0] * len(rollouts)
    for name, weight in parts.items():
        values = rollouts.extra[name].tolist()
        for i, value in enumerate(values):
            group = [v for v, g in zip(values, rollouts.group, strict=True) if g == rollouts.group[i] and v == v]
            if value == value and len(group) > 1:
                deviation = math.sqrt(sum((v - mean(group)) ** 2 for v in group) / (len(group) - 1))
                total[i] += weight * (value - mean(group)) / (deviation + 1e-6)
    deviation = math.sqrt(sum((a - mean(total)) ** 2 for a in total) / (len(total) - 1))
    return [(a - mean(total)) / (deviation + 1e-6) for a in total]


def gae_oracle(
    c: dict[str, Any], ts: list[int], earned: dict[int, float], values: list[float], smoothing: float
) -> dict[int, float]:
    """One sample's, arXiv 1506.02438 eq. 16 as it stands, a sum over what is still to come; REINFORCE++ has the return."""
    gamma, found = c.get("discount", 1.0), {}
    if c["name"] == "reinforce_plus_plus":
        return {t: sum(gamma**k * earned[u] for k, u in enumerate(ts[i:])) for i, t in enumerate(ts)}
    after = {t: values[u] for t, u in zip(ts, ts[1:], strict=False)}
    if "gae_alpha" in c:
        smoothing = max(0.0, 1 - 1 / (c["gae_alpha"] * max(1, len(ts))))
    delta = [earned[t] + gamma * after.get(t, 0.0) - values[t] for t in ts]
    for i, t in enumerate(ts):
        found[t] = sum((gamma * smoothing) ** k * d for k, d in enumerate(delta[i:]))
    return found


def whitened(values: dict[int, float]) -> dict[int, float]:
    centre = mean(list(values.values()))
    deviation = math.sqrt(mean([(v - centre) ** 2 for v in values.values()]))
    return {t: (v - centre) / (deviation + 1e-6) for t, v in values.items()}


def bounded(x: float, low: float, high: float) -> float:
    return low if x < low else high if x > high else x


def oracle(
    c: dict[str, Any],
    rollouts: Rollouts,
    advantages: dict[int, float],
    now: list[float],
    fixed: list[float],
    entropies: list[float],
) -> float:
    """The step's loss."""
    columns = (rollouts.logprobs, rollouts.columns["recomputed"], rollouts.columns["reference"])
    mu, prox, ref = (column.tolist() for column in columns)
    old = prox if c.get("old_logprobs") == "recomputed" else mu
    name = c["name"]
    low, high = c.get("clip", {"grpo": (0.2, 0.28), "dapo": (0.2, 0.28)}.get(name, (0.2, 0.2)))
    of_paper = {"dr_grpo": "constant", "rloo": "constant", "gspo": "sequence", "sapo": "sequence", "gmpo": "sequence"}
    how = c.get("aggregate", of_paper.get(name, "token"))
    mean_a, mean_lp = (mean([x[t] for t in advantages]) for x in (advantages, mu))
    covariance = {t: (a - mean_a) * (mu[t] - mean_lp) for t, a in advantages.items()}
    highest = sorted(covariance, key=lambda t: -covariance[t])[: int(0.2 * len(covariance))]
    per_sample: list[list[float]] = []
    groups: dict[int, list[float]] = {}
    for i in range(len(rollouts)):
        if c.get("mask_truncated") and rollouts.finish[i] == 1:
            continue
        ts = [t for t in range(rollouts.offsets[i], rollouts.offsets[i + 1]) if rollouts.loss_mask[t]]
        if not ts:
            continue
        losses = []
        for t in ts:
            a, lp = advantages[t], now[t]
            ratio = math.exp(lp - old[t])
            if name == "gspo":
                ratio = math.exp(mean([now[u] - old[u] for u in ts]))
                if c.get("level") == "token":
                    ratio = math.exp(mean([fixed[u] - old[u] for u in ts])) * math.exp(lp - fixed[t])
            if name == "sapo":
                tau = 1.0 if a > 0 else 1.05
                loss = -4 / tau / (1 + math.exp(-tau * (ratio - 1))) * a
            elif name == "cispo":
                loss = -bounded(math.exp(fixed[t] - old[t]), 1 - low, 1 + high) * a * lp
            elif name == "rloo":
                loss = -a * lp
            elif name == "gmpo":
                sign = 1 if a > 0 else -1
                logs = [sign * min(sign * (now[u] - old[u]), sign * bounded(now[u] - old[u], -low, high)) for u in ts]
                loss = min(-math.exp(mean(logs)) * a, c.get("dual_clip", 3.0) * abs(a))
            elif name == "dppo":
                p, q = math.exp(old[t]), math.exp(fixed[t])
                kl = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
                apart = kl if c.get("divergence") == "kl" else abs(p - q)
                away = (a > 0 and q > p and apart > high) or (a < 0 and q < p and apart > low)
                loss = 0.0 if away else -min(q / p, c.get("truncate", 10.0)) * a * lp
            else:
                loss = -min(ratio * a, bounded(ratio, 1 - low, 1 + high) * a)
                if a < 0:  # 3: the default where tokens may be stale, which they may be in these recipes
                    loss = -max(-loss, c.get("dual_clip", 3.0) * a)
            correction = c.get("correction", {"name": ""})
            if correction["name"] in ("tis", "icepop"):
                w = math.exp(prox[t] - mu[t])
                lowest, highest = correction.get("low", 0), correction["high"]
                inside = lowest <= w <= highest
                loss *= bounded(w, lowest, highest) if correction["name"] == "tis" else w if inside else 0.0
            if correction["name"] == "mis":
                logs = [prox[u] - mu[u] for u in ts]
                w = math.exp(mean(logs) if correction.get("weight") == "geometric" else sum(logs))
                loss *= w if correction.get("low", 0) <= w <= correction["high"] else 0.0
            if "clip_cov" in c and 0.05 <= covariance[t] <= 0.3:
                loss = 0.0
            if "kl_cov" in c and t in highest:
                loss += 0.7 * abs(lp - old[t])
            if c.get("rejection") and rejects(c["rejection"], [math.exp(prox[u] - mu[u]) for u in ts]):
                loss = 0.0
            if "opsm" in c and a < 0 and mean([mu[u] - fixed[u] for u in ts]) > c["opsm"]:
                loss = 0.0
            if c.get("kl_coef") and c.get("kl_in", "reward" if name in TOKEN_REWARDS else "loss") == "loss":
                kind = c.get("kl_estimator", "k2" if name == "reinforce_plus_plus_baseline" else "k3")
                unbiased = math.exp(lp - old[t]) if c.get("kl_unbiased") else 1.0
                loss += c["kl_coef"] * estimate(kind, lp, ref[t]) * unbiased
            losses.append(loss - c.get("entropy_coef", 0.0) * entropies[t])
        per_sample.append(losses)
        groups.setdefault(int(rollouts.group[i]), []).extend(losses)
    if how == "prompt":
        return mean([mean(losses) for losses in groups.values()])
    if how == "token":
        return mean([x for losses in per_sample for x in losses])
    return mean([mean(losses) if how == "sequence" else sum(losses) / BUDGET for losses in per_sample])


def rejects(bounds: dict[str, Any], w: list[float]) -> bool:
    """Liu, Li et al. 2025 and arXiv 2512.23075."""
    kl = [x - 1 - math.log(x) for x in w]
    (low, high), (least, most) = bounds.get("geometric", (0, math.inf)), bounds.get("product", (0, math.inf))
    return (
        not low <= math.prod(w) ** (1 / len(w)) <= high
        or not least <= math.prod(w) <= most
        or min(w) < bounds.get("veto", 0)
        or mean(kl) > bounds.get("mean_kl", math.inf)
        or max(kl) > bounds.get("max_kl", math.inf)
    )


# -- ours -------------------------------------------------------------------------------------------------------------


def policy_loss(c: dict[str, Any], rollouts: Rollouts) -> PolicyLoss:
    staleness = {"max_staleness": 0} if c["name"] == "rloo" else {}
    recipe = tiny.recipe(algorithm=c, **{"async": staleness})
    algorithm = make_algorithm(recipe.algorithm)
    [(_, loss)] = updates(rollouts, algorithm, recipe, torch.device("cpu"))
    return loss


def splits(rollouts: Rollouts) -> dict[str, list[list[int]]]:
    """Ways to cut the samples into micro-batches."""
    every = list(range(len(rollouts)))
    return {"whole": [every], "one each": [[i] for i in every], "mixed": [[7, 2, 0], [10, 1, 9, 3], [8], [4, 6, 5], []]}


def ours(loss: PolicyLoss, rollouts: Rollouts, data: dict[str, Any], cut: list[list[int]]) -> tuple[float, Any]:
    """(the step's loss, its gradient by the logprobs)"""
    logprobs = torch.tensor(data["now"], requires_grad=True)
    entropies, total = torch.tensor(data["entropies"]), torch.zeros((), dtype=torch.float64)
    for samples in cut:
        parts = [np.arange(rollouts.offsets[i], rollouts.offsets[i + 1]) for i in samples]
        targets = np.concatenate([np.zeros(0, np.int64), *parts])
        targets = targets[loss.rollouts.loss_mask[targets] == 1]
        losses, metrics = loss.tokens(targets, logprobs[targets], entropies[targets])
        assert all(value.shape == losses.shape and not value.requires_grad for value in metrics.values())
        total = total + losses.sum() / loss.totals.tokens
    total.backward()
    assert logprobs.grad is not None
    return total.item(), logprobs.grad.numpy()


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradient_are_the_papers_under_every_split(name: str) -> None:
    c = CONFIGS[name]
    for seed in (0, 1):
        rollouts, data = step_data(seed)
        now, entropies = data["now"].tolist(), data["entropies"].tolist()
        advantages = oracle_advantages(c, rollouts)
        expected, gradient = oracle(c, rollouts, advantages, now, now, entropies), np.zeros(len(now))
        for t in np.flatnonzero(rollouts.loss_mask).tolist():
            up, down = ([*now[:t], now[t] + by, *now[t + 1 :]] for by in (1e-5, -1e-5))
            higher, lower = (oracle(c, rollouts, advantages, moved, now, entropies) for moved in (up, down))
            gradient[t] = (higher - lower) / 2e-5
        assert np.abs(gradient).max() > 1e-3
        loss = policy_loss(c, rollouts)
        for cut in splits(rollouts).values():
            value, found = ours(loss, rollouts, data, cut)
            assert value == pytest.approx(expected, rel=2e-5, abs=1e-6)
            np.testing.assert_allclose(found, gradient, rtol=2e-4, atol=2e-7)


@pytest.mark.parametrize("name", [n for n, c in CONFIGS.items() if "correction" not in c and not c.get("kl_coef")])
def test_where_the_policy_has_not_moved_the_gradient_is_that_of_reinforce(name: str) -> None:
    rollouts, data = step_data(3)
    unmoved = {"recomputed": rollouts.logprobs, "reference": rollouts.logprobs}
    rollouts = replace(rollouts, columns=rollouts.columns | unmoved)
    data["now"] = rollouts.logprobs.astype(np.float64)
    loss = policy_loss(CONFIGS[name], rollouts)
    _, found = ours(loss, rollouts, data, splits(rollouts)["mixed"])
    advantages, mask = loss.advantages.numpy(), loss.rollouts.loss_mask == 1
    sample = np.repeat(np.arange(len(rollouts)), np.diff(rollouts.offsets))
    count = np.bincount(sample[mask], minlength=len(rollouts))
    used = (count > 0).sum()
    how = loss.algorithm.config.aggregate  # type: ignore[attr-defined]
    weight = {"token": np.full(len(mask), 1 / mask.sum()), "sequence": 1 / (used * np.maximum(count, 1)[sample]),
              "prompt": 1 / (loss.totals.groups * np.maximum(np.bincount(rollouts.group[sample[mask]], minlength=3), 1)[rollouts.group[sample]]),
              "constant": np.full(len(mask), 1 / (used * BUDGET))}[how]  # fmt: skip
    np.testing.assert_allclose(found, -advantages * weight * mask, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "gspo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
)
def test_equal_rewards_teach_nothing(name: str) -> None:
    rollouts, data = step_data(0)
    rollouts = replace(rollouts, rewards=np.full_like(rollouts.rewards, 0.3))
    value, gradient = ours(policy_loss({"name": name}, rollouts), rollouts, data, splits(rollouts)["whole"])
    assert abs(value) < 1e-6 and np.abs(gradient).max() < 1e-6


@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_far_apart_leave_loss_and_gradient_finite(name: str) -> None:
    rollouts, data = step_data(0)
    rollouts = replace(rollouts, logprobs=rollouts.logprobs.copy())
    rollouts.logprobs[::3] = -1e4
    data["now"][1::3] = -1e4
    data = {key: value.astype(np.float32) for key, value in data.items()}
    value, gradient = ours(policy_loss(CONFIGS[name], rollouts), rollouts, data, splits(rollouts)["whole"])
    assert math.isfinite(value) and np.isfinite(gradient).all()


@pytest.mark.parametrize("name", ["ppo", "ppo, kl, discounted"])
def test_the_critics_loss_and_gradient_are_the_papers_under_every_split(name: str) -> None:
    """Half the square of what is missing to the return, the worse of clipped and free: arXiv 2005.12729, section 3."""
    c = CONFIGS[name] | {"value_lambda": 0.9, "critic": {"clip": 0.3}}
    rollouts, _ = step_data(0)
    recipe = tiny.recipe(algorithm=c)
    [(_, loss)], explained = critic_updates(
        rollouts,
        make_algorithm(recipe.algorithm),
        recipe,
        torch.device("cpu"),  # type: ignore[arg-type]
    )
    old = rollouts.columns["values"].tolist()
    now = (rollouts.columns["values"] + np.random.default_rng(1).normal(size=len(old)) * 0.4).astype(np.float64)
    tokens = [
        [t for t in range(rollouts.offsets[i], rollouts.offsets[i + 1]) if rollouts.loss_mask[t]]
        for i in range(len(rollouts))
    ]
    returns: dict[int, float] = {}
    for i, ts in enumerate(tokens):
        penalty = {
            t: c.get("kl_coef", 0.0) * (float(rollouts.logprobs[t]) - float(rollouts.columns["reference"][t]))
            for t in ts
        }
        overlong = min(1.0, max(0.0, (len(ts) - 4) / 8)) if "overlong" in c else 0.0
        earned = {t: -penalty[t] + (float(rollouts.rewards[i]) - overlong if t == ts[-1] else 0.0) for t in ts}
        returns |= {t: a + old[t] for t, a in gae_oracle(c, ts, earned, old, 0.9).items()}
    count = len(returns)
    expected, gradient, clipped = 0.0, np.zeros(len(old)), 0
    for t, r in returns.items():
        free, held = (now[t] - r) ** 2, (bounded(now[t], old[t] - 0.3, old[t] + 0.3) - r) ** 2
        expected += max(free, held) / 2 / count
        gradient[t] = (now[t] - r) / count if free >= held else 0.0
        clipped += held > free
    assert 0 < clipped < count
    spread = np.var(list(returns.values()))
    assert explained == pytest.approx(1 - np.var([r - old[t] for t, r in returns.items()]) / spread, rel=1e-4)
    for cut in splits(rollouts).values():
        values, total, said = torch.tensor(now, requires_grad=True), torch.zeros(()).double(), []
        for samples in cut:
            targets = np.array([t for i in samples for t in tokens[i]], np.int64)
            part, metrics = loss(targets, values[torch.from_numpy(targets)])
            total, said = total + part / count, [*said, metrics]
        total.backward()
        assert total.item() == pytest.approx(expected, rel=1e-5)
        assert values.grad is not None
        np.testing.assert_allclose(values.grad.numpy(), gradient, rtol=1e-4, atol=1e-8)
        assert sum(m["value_clip_fraction"] for m in said) == clipped


def test_updates_share_out_whole_groups_and_every_token_once() -> None:
    rollouts = tiny.random_rollouts(21, group_size=4)
    recipe = tiny.recipe(trainer={"updates_per_step": 4})
    parts = [part for part, _ in updates(rollouts, make_algorithm(recipe.algorithm), recipe, torch.device("cpu"))]
    masks = np.stack([part.loss_mask for part in parts])
    assert np.array_equal(masks.sum(0), rollouts.loss_mask)
    group = np.repeat(rollouts.group, np.diff(rollouts.offsets))
    assert all(((masks[:, group == g].sum(1)) > 0).sum() == 1 for g in np.unique(group))
    assert all(mask.any() for mask in masks)
