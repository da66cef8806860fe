"""Rewards of single turns: from the environment through the shard into returns, and what a reward sees of all turns."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from relax_hpc.algorithms import PolicyAlgorithm, make_algorithm
from relax_hpc.algorithms.common.advantages import token_rewards
from relax_hpc.recipe.tables.algorithm import Dapo, DrGrpo, Rloo
from relax_hpc.records import Finish, Group, Prompt, Rollouts, Sample, concatenate, mask_old
from relax_hpc.roles.rollout.runner import RolloutRunner
from relax_hpc.spool.request import Request
from relax_hpc.spool.shard import Shard
from relax_hpc.spool.shard_writer import encode
from tests import tiny

MASKS = ([1, 1, 0, 1, 0, 0, 1], [1, 0, 1], [1, 1], [0, 1, 0, 1])
"""Of four samples: three, two, one and two turns."""
GIVEN = ([0, 1.0, 0, 2.0, 0, 0, 0], [4.0, 0, 0], [0, 0], [0, 8.0, 0, 0])
TOTALS = [5.0, 4.0, 1.0, 8.5]
RETURNS = [[5.0, 4.0, 2.0], [4.0, 0.0], [1.0], [8.5, 0.5]]
"""Rewards still to come at each turn, undiscounted."""


def made(rollout: list[int] | None = None) -> Rollouts:
    answers = tiny.prompts([len(mask) for mask in MASKS])
    return dataclasses.replace(
        tiny.rollouts([answers[0]] * len(MASKS), answers, len(MASKS)),
        loss_mask=np.concatenate(MASKS).astype(np.uint8),
        turn_rewards=np.concatenate(GIVEN).astype(np.float32),
        rewards=np.array(TOTALS, np.float32),
        rollout=None if rollout is None else np.array(rollout, np.int32),
    )


def advantages(rollouts: Rollouts, **keys: object) -> list[list[float]]:
    """Of each sample's turns."""
    algorithm = make_algorithm(DrGrpo.model_validate(keys))
    assert isinstance(algorithm, PolicyAlgorithm)
    found = algorithm.advantages(rollouts).numpy()
    assert not found[rollouts.loss_mask == 0].any()
    ends = np.split(np.arange(len(found)), rollouts.offsets[1:-1])
    runs = [np.split(e, np.flatnonzero(np.diff(rollouts.loss_mask[e])) + 1) for e in ends]
    turns = [[found[run] for run in sample if rollouts.loss_mask[run[0]]] for sample in runs]
    assert all((turn == turn[0]).all() for sample in turns for turn in sample)
    return [[float(turn[0]) for turn in sample] for sample in turns]


def relative(returns: list[list[float]]) -> list[list[float]]:
    """Less the mean of those that had a turn of this number."""
    reached = [[r[k] for r in returns if len(r) > k] for k in range(3)]
    return [[one - float(np.mean(reached[k])) for k, one in enumerate(mine)] for mine in returns]


def test_a_turn_is_compared_with_what_others_earned_from_that_turn_on() -> None:
    assert advantages(made(), credit="turn") == [pytest.approx(a) for a in relative(RETURNS)]
    discounted: list[list[float]] = [[1 + 1 + 0.5, 2 + 1, 2], [4, 0], [1], [8.25, 0.5]]
    assert advantages(made(), credit="turn", turn_discount=0.5) == [pytest.approx(a) for a in relative(discounted)]
    whole = [r[0] - np.mean([x[0] for x in discounted]) for r in discounted]
    by_sample = [pytest.approx([a] * len(r)) for a, r in zip(whole, RETURNS, strict=True)]
    assert advantages(made(), turn_discount=0.5) == by_sample
    assert advantages(made()) == [
        pytest.approx([t - np.mean(TOTALS)] * len(r)) for t, r in zip(TOTALS, RETURNS, strict=True)
    ]


@pytest.mark.parametrize("config", [Dapo(credit="turn"), Rloo(credit="turn")], ids=["dapo", "rloo"])
def test_turns_are_compared_as_the_algorithm_compares_samples(config: Dapo | Rloo) -> None:
    found = make_algorithm(config).advantages(made()).numpy()
    first = np.array([r[0] for r in RETURNS])
    scale = 4 / 3 if isinstance(config, Rloo) else 1 / (first.std(ddof=1) + 1e-6)
    np.testing.assert_allclose(found[[0, 7, 10, 13]], (first - first.mean()) * scale, rtol=1e-5)
    assert found[6] == 0, "nobody else came to a third turn"


def test_turns_of_one_attempt_are_counted_on_through_its_samples() -> None:
    """The first two samples are one attempt of five turns, which earned 1 + 2 + 4 and 3 at its end."""
    rollouts = dataclasses.replace(made([0, 0, 1, 2]), rewards=np.array([10.0, 10.0, 1.0, 8.5], np.float32))
    joined = [[10.0, 9.0, 7.0, 7.0, 3.0], [1.0], [8.5, 0.5]]
    means = [np.mean([r[k] for r in joined if len(r) > k]) for k in range(5)]
    first, *others = [[one - m for one, m in zip(r, means, strict=False)] for r in joined]
    expected = [pytest.approx(a) for a in (first[:3], first[3:], *others)]
    assert advantages(rollouts, credit="turn") == expected
    earned = token_rewards(torch.from_numpy(rollouts.rewards), torch.zeros(16).double(), rollouts)
    assert earned.tolist() == [0, 1, 0, 2, 0, 0, 7, 4, 0, 3, 0, 1, 0, 8, 0, 0.5]


def test_rewards_of_turns_are_rewards_of_tokens_and_move_to_the_token_in_the_loss_before() -> None:
    rollouts, none = made(), torch.zeros(16).double()
    rewards = torch.from_numpy(rollouts.rewards)
    plain = token_rewards(rewards, none, rollouts)
    assert plain.tolist() == [0, 1, 0, 2, 0, 0, 2, 4, 0, 0, 0, 1, 0, 8, 0, 0.5]
    versions = np.ones(16, np.int32)
    versions[[3, 7]] = 0
    old, _ = mask_old(dataclasses.replace(rollouts, versions=versions), 1)
    # what sample 1 earned at its first turn, nothing in the loss has earned
    assert token_rewards(rewards, none, old).tolist() == [0, 3, 0, 0, 0, 0, 2, 0, 0, 0, 0, 1, 0, 8, 0, 0.5]
    own = make_algorithm(DrGrpo(credit="turn")).advantages(old).numpy()
    np.testing.assert_array_equal(
        own, np.where(old.loss_mask, make_algorithm(DrGrpo(credit="turn")).advantages(rollouts), 0)
    )


def test_a_shard_has_the_rewards_of_turns_where_there_are_any(tmp_path: Path) -> None:
    def sample(given: list[float] | None) -> Sample:
        tokens = np.array([5, 6, 7], np.int32)
        mask, logprobs = np.array([1, 0, 1], np.uint8), np.zeros(3, np.float32)
        rewards = None if given is None else np.array(given, np.float32)
        return Sample(tokens, mask, logprobs, [(0, 0)], Finish.STOP, 3.0, 3.0, turns=2, turn_rewards=rewards)

    prompt = Prompt(0, 0, "", np.array([3], np.int32))
    for name, given in (("some", [2.0, 0, 0]), ("none", None)):
        group = Group(prompt, [sample(None), sample(given)])
        (tmp_path / name).write_bytes(b"".join(encode("r000000-000", [group], {"version": 0})))
    with Shard(tmp_path / "some") as some, Shard(tmp_path / "none") as none:
        some.validate()
        assert "turn_rewards" not in none and none.rollouts().turn_rewards is None
        whole = concatenate([none.rollouts(), some.rollouts(np.array([1]))]).turn_rewards
        assert whole is not None and whole.tolist() == [0] * 6 + [2, 0, 0]
        back = some.group(0).samples[1].turn_rewards
        assert back is not None and back.tolist() == [2, 0, 0]


CODE = '''
from relax_hpc.environments import Turn

class Pays:
    """Gives 1, then 2, then nothing; or all at the end."""
    def tools(self): return [{"name": "add"}]
    def reset(self, prompt): self.turns = 0
    def step(self, answer):
        self.turns += 1
        return Turn(self.turns == 3, "go on", [1, 2, None][self.turns - 1])
    def close(self): ...

def sees(prompt, answer):
    said = [turn.said for turn in answer.turns]
    assert answer == said[-1], (answer, said)
    assert [turn.observation for turn in answer.turns] == ["go on"] * 3 and answer.turns[0].calls == []
    return {"reward": 10 * len(said), "given": sum(turn.reward or 0 for turn in answer.turns)}
'''


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """Two samples of three turns with an environment that pays for turns and a reward that sees all."""
    folder = tmp_path_factory.mktemp("pays")
    (folder / "code.py").write_text(CODE)
    source = {"task": "chain_sum", "environment": f"{folder}/code.py:Pays", "reward": f"{folder}/code.py:sees"}
    rollout = {"device": "cpu", "max_turns": 4, "max_new_tokens": 20, "stop": [*string.printable], "code_processes": 2}
    recipe = tiny.recipe(model={"context": 200}, source=[source], rollout=rollout)
    model = tiny.folder(recipe, folder / "model")
    runner = RolloutRunner(recipe, model)
    runner.engine.load(0, load_file(model / "model.safetensors").items())
    request = Request("r000000-000", ((0, 1),), 2, 1, 0)
    yield runner.groups(request, runner.prompts(request), lambda state: None)[0]
    runner.close()


def test_the_environments_rewards_and_the_sources_add_up_and_the_last_turn_is_scored(group: Group) -> None:
    assert not group.reason, group.detail
    for sample in group.samples:
        assert sample.finish is Finish.STOP and sample.turns == 3
        assert (sample.reward, sample.raw_reward, sample.extra["given"]) == (33, 33, 3)
        ends = np.flatnonzero(np.diff(sample.loss_mask.astype(int), append=0) == -1)
        assert sample.turn_rewards is not None and len(ends) == 3
        assert sample.turn_rewards[ends].tolist() == [1, 2, 0] and sample.turn_rewards.sum() == 3
