"""Each algorithm learns: a table of logits, sampled one version behind where the algorithm may be, finds the word that is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax_hpc.algorithms import ActorCritic, make_algorithm
from relax_hpc.records import Rollouts
from relax_hpc.trainers.token_loss import critic_updates, updates
from tests import tiny

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LETTERS, WORD = 6, np.array([4, 1, 5])
GROUPS, COPIES, STEPS = 8, 8, 50
CONFIGS: dict[str, dict[str, Any]] = {
    "grpo": {"name": "grpo"},
    "grpo, kl, entropy": {"name": "grpo", "kl_coef": 0.01, "entropy_coef": 0.001, "opsm": 0.1},
    "decoupled": {"name": "grpo", "old_logprobs": "recomputed", "correction": {"name": "tis"}},
    "icepop": {"name": "grpo", "old_logprobs": "recomputed", "correction": {"name": "icepop"}},
    "mis": {"name": "grpo", "old_logprobs": "recomputed", "correction": {"name": "mis"}},
    "dr_grpo": {"name": "dr_grpo"},
    "dapo": {"name": "dapo", "overlong": [3, 4]},
    "gspo": {"name": "gspo", "clip": [0.2, 0.28]},
    "gspo, token": {"name": "gspo", "clip": [0.2, 0.28], "level": "token"},
    "sapo": {"name": "sapo"},
    "cispo": {"name": "cispo"},
    "prompts, batch": {"name": "grpo", "aggregate": "prompt", "normalize": "batch", "kl_cov": {"share": 0.01}},
    "gmpo": {"name": "gmpo"},
    "dppo": {"name": "dppo", "clip_cov": {"share": 0.01, "low": 0.1}},
    "maxrl": {"name": "maxrl"},
    "gdpo": {"name": "gdpo", "parts": {"begin": 1.0, "rest": 2.0}},
    "rejection": {"name": "grpo", "rejection": {"mean_kl": 0.1, "max_kl": 0.5, "veto": 1e-4}},
    "pairs": {"name": "own", "factory": f"{EXAMPLES / 'preference.py'}:Preference", "options": {"beta": 0.1}},
    "rloo": {"name": "rloo"},
    "reinforce_plus_plus": {"name": "reinforce_plus_plus", "kl_coef": 0.01},
    "reinforce_plus_plus_baseline": {"name": "reinforce_plus_plus_baseline", "kl_coef": 0.01},
    "ppo": {"name": "ppo", "group_size": 1, "value_lambda": 0.95, "kl_coef": 0.01},
    "ppo, adaptive": {"name": "ppo", "group_size": 1, "gae_alpha": 2.0, "value_lambda": 0.95, "kl_coef": 0.01},
    "opd": {"name": "opd", "group_size": 1, "teacher": "teacher"},
}


def generate(logits: torch.Tensor, rng: np.random.Generator) -> Rollouts:
    """Words of three letters or four; the reward is the share of letters that are right."""
    probabilities = logits.detach().softmax(-1).double().numpy()
    lengths = rng.integers(3, 5, GROUPS * COPIES)
    answers = [
        np.array([rng.choice(LETTERS, p=probabilities[i] / probabilities[i].sum()) for i in range(n)], np.int32)
        for n in lengths
    ]
    rollouts = tiny.rollouts([np.zeros(1, np.int32)] * len(answers), answers, COPIES)
    rollouts.rewards[:] = [np.mean(answer[:3] == WORD) for answer in answers]
    parts = {"begin": slice(0, 1), "rest": slice(1, 3)}
    rollouts.extra.update(
        {name: np.array([np.mean(a[part] == WORD[part]) for a in answers], np.float32) for name, part in parts.items()}
    )
    where = np.concatenate([np.arange(n) for n in lengths])
    rollouts.logprobs[:] = logits.detach().log_softmax(-1).numpy()[where, rollouts.tokens]
    known = np.full((4, LETTERS), np.log(0.1 / (LETTERS - 1)), np.float32)
    known[np.arange(3), WORD] = np.log(0.9)  # the teacher knows the word, and is indifferent to what comes after it
    known[3] = -np.log(LETTERS)
    rollouts.columns["teacher"] = known[where, rollouts.tokens]
    rollouts.columns["reference"] = np.full(len(where), -np.log(LETTERS), np.float32)  # of version 0: all letters alike
    return rollouts


@pytest.mark.parametrize("name", CONFIGS)
def test_the_word_is_found(name: str) -> None:
    behind = 0 if name == "rloo" else 1
    recipe = tiny.recipe(algorithm=CONFIGS[name], **{"async": {"max_staleness": behind}})
    algorithm, rng = make_algorithm(recipe.algorithm), np.random.default_rng(0)
    logits = torch.zeros(4, LETTERS, requires_grad=True)
    values = torch.zeros(4, requires_grad=True)  # a table too
    optimizer = torch.optim.Adam([logits, values], lr=0.1)
    waiting: list[Rollouts] = []
    for _ in range(STEPS):
        waiting.append(generate(logits, rng))
        if len(waiting) <= behind:
            continue
        taken = waiting.pop(0)
        place = torch.from_numpy(np.concatenate([np.arange(n) for n in np.diff(taken.offsets)]))
        taken.columns["values"] = values.detach().numpy()[place]
        [(rollouts, loss)] = updates(taken, algorithm, recipe, torch.device("cpu"))
        distribution = logits.log_softmax(-1)[place]
        entropies = -(distribution.exp() * distribution).sum(-1)
        logprobs = distribution.gather(1, torch.from_numpy(rollouts.tokens).long()[:, None])[:, 0]
        every = np.arange(len(rollouts.tokens))
        total, _ = loss(every, logprobs, entropies)
        if isinstance(algorithm, ActorCritic):
            [(_, of_critic)], explained = critic_updates(taken, algorithm, recipe, torch.device("cpu"))
            total = total + of_critic(every, values[place])[0]
        optimizer.zero_grad()
        (total / len(rollouts.tokens)).backward()
        optimizer.step()
    right = logits.detach().softmax(-1).numpy()[np.arange(3), WORD].mean()
    assert not isinstance(algorithm, ActorCritic) or explained > 0.1
    assert right > 0.8, f"{right:.2f} of the letters, from {1 / LETTERS:.2f}"
