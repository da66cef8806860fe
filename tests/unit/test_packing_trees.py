"""Samples that have turns in common: computed once, and the logprobs, values and gradients of samples apart, to 1e-9."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import relax_hpc.trainers.trees.attention as attention
from relax_hpc.algorithms import make_algorithm
from relax_hpc.records import Media, Rollouts
from relax_hpc.trainers.forward import Critic, predicting_states, token_logprobs
from relax_hpc.trainers.packing import Rows, join, pack, plan
from relax_hpc.trainers.token_loss import PolicyLoss
from relax_hpc.trainers.trees import segments
from relax_hpc.trainers.trees.segments import grow, split, tries
from tests import omni, tiny

CPU = torch.device("cpu")
LOSSES: list[dict[str, Any]] = [
    {"name": "grpo", "clip": [0.1, 0.1], "aggregate": "sequence", "entropy_coef": 0.1},
    {"name": "gspo", "clip": [0.9, 9.0], "kl_coef": 0.3},
    {"name": "dapo", "overlong": [4, 12]},
    {"name": "cispo"},
    {"name": "reinforce_plus_plus", "discount": 0.7, "kl_coef": 0.1},
]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of three tokens, and calls of attention of four queries."""
    monkeypatch.setattr(segments, "SHORTEST_SHARED", 3)
    monkeypatch.setattr(attention, "QUERIES", 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tiny.folder(tiny.recipe(), tmp_path_factory.mktemp("model"))
    return AutoModelForCausalLM.from_pretrained(folder).double()


def micro_batches(made: Rollouts, share: bool) -> list[Rows]:
    return [rows for part in plan(made, 2, 60, share=share) for rows in part]


def compared(
    module: Any, made: Rollouts, loss: Callable[[Any, Rollouts, Rows], torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients of the sum over micro-batches, shared and apart."""
    found: list[list[torch.Tensor]] = []
    for share in (True, False):
        module.zero_grad()
        rows = micro_batches(made, share)
        assert any(pack(made, each).shared is not None for each in rows) == share
        with omni.InFloat64():
            for each in rows:
                loss(module, made, each).backward()
        found.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    assert max(float(gradient.abs().max()) for gradient in found[1]) > 1e-3
    return found[0], found[1]


def assert_equal(found: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("table", LOSSES, ids=lambda table: table["name"])
def test_every_loss_has_the_gradients_of_samples_apart(model: Any, table: dict[str, Any]) -> None:
    """Each sample has behavior logprobs and advantages of its own at a token that it shares."""
    algorithm = make_algorithm(tiny.recipe(algorithm=table).algorithm)
    made = tiny.branching_rollouts(4, seed=3)
    reference = np.random.default_rng(1).normal(-3, 0.3, len(made.tokens)).astype(np.float32)
    made = dataclasses.replace(made, columns={"reference": reference})
    whole = PolicyLoss(made, algorithm, algorithm.advantages(made).double(), 16, CPU)

    def loss(module: Any, made: Rollouts, rows: Rows) -> torch.Tensor:
        batch = pack(made, rows)
        targets = torch.from_numpy(made.tokens[batch.targets]).long()
        return whole(
            batch.targets, *token_logprobs(module, batch, targets, 0.9, entropy_gradient=whole.entropy_gradient)
        )[0]

    assert_equal(compared(model, made, loss))


def weighted(module: Any, made: Rollouts, rows: Rows) -> torch.Tensor:
    batch = pack(made, rows)
    targets = torch.from_numpy(made.tokens[batch.targets]).long()
    return (token_logprobs(module, batch, targets, 0.9)[0] * torch.from_numpy(np.cos(batch.targets))).sum()


@pytest.mark.parametrize("kernel", ["flash", "plain", "mask"])
@pytest.mark.parametrize("seed", range(4))
def test_every_way_to_attend_is_the_same(model: Any, seed: int, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel == "plain":
        monkeypatch.setattr(attention, "_fast", lambda *ignored: False)
    if kernel == "mask":
        monkeypatch.setattr("relax_hpc.trainers.forward.understood", lambda body: False)
    assert_equal(compared(model, tiny.branching_rollouts(3, seed=seed), weighted))


def test_a_critics_values_have_the_gradients_of_samples_apart(model: Any) -> None:
    critic = Critic(model.base_model).double()
    torch.nn.init.normal_(critic.head.weight)

    def loss(module: Any, made: Rollouts, rows: Rows) -> torch.Tensor:
        batch = pack(made, rows)
        values = module.head(predicting_states(module.body, batch, CPU)).squeeze(-1)
        return ((values - torch.from_numpy(np.cos(batch.targets))) ** 2).sum()

    assert_equal(compared(critic, tiny.branching_rollouts(3, seed=1), loss))


def test_each_token_is_there_once_with_its_place_and_its_ancestors() -> None:
    rows = [[3, 4, 5, 6, 7, 8], [3, 4, 5, 9, 9, 9], [3, 4, 5, 6, 7, 8, 10, 11], [20, 21]]
    made = tiny.rollouts([np.array([1, 2], np.int32)] * 4, [np.array(row, np.int32) for row in rows], 4)
    assert join(made, np.arange(4)) == [(0, 1, 2), (3,)]
    trie = grow(made, (0, 1, 2))
    assert [(s.first, s.last, s.parent) for s in trie.segments] == [(0, 5, -1), (5, 7, 0), (5, 7, 0), (5, 9, 0)]
    assert trie.deep
    batch = pack(made, [[(0, 1, 2)]])
    mask = batch.attention_mask()[0, 0]
    for predictor, target in zip(batch.predictors, batch.targets, strict=True):
        sample = int(np.searchsorted(made.offsets, target, side="right")) - 1
        before = [1, 2, *rows[sample][: target - made.offsets[sample]]]
        seen = np.flatnonzero(mask[predictor])
        assert batch.tokens[0][seen].tolist() == before
        assert batch.positions[0][seen].tolist() == list(range(len(before)))


def test_a_token_that_samples_share_is_predicted_once() -> None:
    made = tiny.branching_rollouts(4, seed=2, masked=0.0)
    [[rows]] = plan(made, 1, 10**6)
    shared = pack(made, rows).shared
    assert shared is not None and len(shared.asked) < len(shared.of) == len(made.tokens)


def test_media_versions_and_experts_that_differ_are_not_shared() -> None:
    asked, answer = np.arange(3, 9, dtype=np.int32), np.arange(10, 20, dtype=np.int32)
    made = tiny.rollouts([asked] * 3, [answer] * 3, 3)
    assert tries(made, [0, 1, 2]) == [(0, 1, 2)]
    one, other = (Media.of({"pixel_values": np.full((2, 2), n, np.float32)}) for n in (1, 2))
    assert tries(dataclasses.replace(made, media=(one, other, one)), [0, 1, 2]) == [(0, 2), (1,)]
    later = dataclasses.replace(made, media=(one,) * 3, shown_later=np.array([0, 1, 0], np.uint8))
    assert tries(later, [0, 1, 2]) == [(0, 2), (1,)]
    assert tries(tiny.routed(made, 2, 4, 2), [0, 1, 2]) == []


def test_a_tree_is_split_where_it_is_too_large_and_no_sample_is_lost() -> None:
    made = tiny.branching_rollouts(1, each=12, seed=4)
    tree = tuple(range(12))
    parts = split(made, tree, 30)
    assert len(parts) > 1 and sorted(sample for part in parts for sample in part) == list(tree)
    assert all(grow(made, part).tokens <= 30 for part in parts)
    both = plan(made, 2, 10**6)
    tokens = [sum(pack(made, rows).tokens.size for rows in share) for share in both]
    assert min(tokens) > 0.3 * max(tokens), "ranks have a part each"


def test_a_few_first_words_in_common_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SHORTEST_SHARED", 64)
    made = tiny.branching_rollouts(6, seed=1)
    assert all(pack(made, rows).shared is None for rows in micro_batches(made, share=True))
