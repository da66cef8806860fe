"""Several samples of one attempt: baselines, shards and scores count the attempt once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from relax_hpc.algorithms.common.advantages import group_relative
from relax_hpc.records import Finish, Group, Prompt, Sample, concatenate
from relax_hpc.rewards.scores import answers
from relax_hpc.spool.shard import Shard
from relax_hpc.spool.shard_writer import encode

ATTEMPTS = {"rewards": [1.0, 0.0, 0.0, 0.0, 2.0], "rollout": [0, 1, 1, 1, 2]}
"""Three attempts at a prompt; the second made three samples."""


@pytest.mark.parametrize("estimate", ["grpo", "dr_grpo", "rloo"])
def test_a_group_baseline_counts_an_attempt_once(estimate: str) -> None:
    rewards, rollout = torch.tensor(ATTEMPTS["rewards"]), torch.tensor(ATTEMPTS["rollout"])

    def advantages(rewards: torch.Tensor, rollout: torch.Tensor | None) -> torch.Tensor:
        group = torch.full((len(rewards),), 7)
        if estimate == "rloo":
            return group_relative(rewards, group, rollout, normalize="none", leave_out=True)
        return group_relative(rewards, group, rollout, normalize="group" if estimate == "grpo" else "none")

    once = advantages(torch.tensor([1.0, 0.0, 2.0]), None)
    assert torch.equal(advantages(rewards, rollout), once[rollout])
    assert not torch.allclose(advantages(rewards, None), once[rollout])


def _shard(path: Path, group: Group) -> Path:
    path.write_bytes(b"".join(encode("r000000-000", [group], {"version": 0, "samples_per_prompt": 3})))
    return path


def _sample(reward: float, rollout: int | None) -> Sample:
    tokens = np.array([5, 6], np.int32)
    mask, logprobs = np.ones(2, np.uint8), np.full(2, -1, np.float32)
    return Sample(tokens, mask, logprobs, [(0, 0)], Finish.STOP, reward, reward, rollout=rollout)


def test_a_shard_tells_the_attempts_of_its_samples_and_scores_count_each_once(tmp_path: Path) -> None:
    prompt = Prompt(0, 0, "", np.array([3], np.int32))
    made = [_sample(r, i) for r, i in zip(ATTEMPTS["rewards"], map(int, ATTEMPTS["rollout"]), strict=True)]
    plain = _shard(tmp_path / "plain.h5", Group(prompt, [_sample(1.0, None)]))
    with Shard(_shard(tmp_path / "some.h5", Group(prompt, made))) as shard, Shard(plain) as other:
        assert [s.rollout for s in shard.group(0).samples] == ATTEMPTS["rollout"]
        assert [s.rollout for s in other.group(0).samples] == [None] and "rollout" not in other
        assert shard.raw_rewards()[0].tolist() == [1.0, 0.0, 2.0]
        [found] = answers([shard])
        assert found.rewards.tolist() == [1.0, 0.0, 2.0]
        joined = concatenate([shard.rollouts(), other.rollouts()]).rollout
        assert joined is not None and joined.tolist() == [*ATTEMPTS["rollout"], 0]
        assert concatenate([other.rollouts()]).rollout is None
