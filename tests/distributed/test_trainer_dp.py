"""Data parallelism over real gloo processes: the same loss, gradient norm and weights for any number of them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from relax_hpc.algorithms import make_algorithm
from relax_hpc.recipe.schema import Recipe
from relax_hpc.trainers import make_trainer
from tests import processes, tiny

JOIN_S = 600
STEPS = 4


SEQUENCES = {
    "name": "gspo",
    "clip": [0.9, 9.0],
    "old_logprobs": "recomputed",
    "correction": {"name": "mis", "high": 20.0, "weight": "geometric"},
}
"""Whose loss of a token depends on all tokens of its sample, and whose mean on the number of samples."""


def recipe_of(kl_coef: float) -> Recipe:
    return tiny.recipe(
        trainer={
            "tokens_per_micro_batch": 50,
            "learning_rate": 1e-3,
            "weight_decay": 0.1,
            "updates_per_step": 2,
        },
        algorithm={**SEQUENCES, "kl_coef": kl_coef},
        run={"steps": STEPS},
    )


CRITIC = tiny.recipe(
    trainer={"tokens_per_micro_batch": 50, "updates_per_step": 2},
    algorithm={"name": "ppo", "critic": {"learning_rate": 1e-3, "clip": 0.05}},
)


def work(
    rank: int, world: int, where: Path, out: Path, kl_coef: float, first: int, last: int, samples: int, results: Any
) -> None:
    """One process: steps first … last - 1, from its checkpoint in `out` where first > 0; saves one at the end."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # here, not in the process of the tests: others would inherit it
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{out}/meet-{first}-{last}", rank=rank, world_size=world)
    recipe = recipe_of(kl_coef)
    trainer, algorithm = make_trainer(recipe, where, rank, world), make_algorithm(recipe.algorithm)
    if first:
        trainer.load(out / f"step-{first}")
    metrics = []
    for step in range(first, last):
        metrics.append(trainer.step(tiny.random_rollouts(samples, seed=step), algorithm, step))
        torch.rand(step + 1)  # moves the random state on, so that a resumed process must have taken it back
    loss = (
        trainer.supervised_step(tiny.prompts([3, 9, 4]), tiny.prompts([2, 5, 8], seed=4), 1e-4)
        if last == STEPS
        else 0.0
    )
    (saved := out / f"step-{last}").mkdir(exist_ok=True)
    trainer.save(saved)
    if last == STEPS:
        trainer = make_trainer(CRITIC, where, rank, world)
        algorithm = make_algorithm(CRITIC.algorithm)
        metrics += [trainer.step(tiny.random_rollouts(samples, seed=s), algorithm, s) for s in range(2)]
    save_file(dict(trainer.export()), out / f"rank-{rank}.safetensors")
    results.put((rank, metrics, loss, torch.rand(4).tolist()))
    if world > 1:
        dist.destroy_process_group()


def run(
    world: int, where: Path, out: Path, kl_coef: float = 0.0, first: int = 0, last: int = STEPS, samples: int = 21
) -> list[Any]:
    """(metrics of each step, warm-up loss, random numbers) of every rank; fails rather than hangs."""
    out.mkdir(exist_ok=True)
    context = processes.context()
    results = context.Queue()
    ranks = [
        context.Process(target=work, args=(rank, world, where, out, kl_coef, first, last, samples, results))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + JOIN_S
    try:
        said = sorted(results.get(timeout=max(1.0, deadline - time.monotonic())) for _ in ranks)
        for process in ranks:
            process.join(max(1.0, deadline - time.monotonic()))
        assert [process.exitcode for process in ranks] == [0] * world
    finally:
        for process in ranks:
            process.kill()
    return [rest for _, *rest in said]


@pytest.mark.quick
def test_any_number_of_processes_makes_the_same_steps(tmp_path: Path) -> None:
    where = tiny.folder(recipe_of(0.3), tmp_path / "model")
    [(alone, alone_loss, _)] = run(1, where, tmp_path / "w1", 0.3)
    expected = load_file(tmp_path / "w1" / "rank-0.safetensors")
    for world in (2, 3):
        out = tmp_path / f"w{world}"
        ranks = run(world, where, out, 0.3)
        assert all(metrics == ranks[0][0] and loss == ranks[0][1] for metrics, loss, _ in ranks), (
            "metrics differ between ranks"
        )
        for mine, one in zip(ranks[0][0], alone, strict=True):
            assert mine.keys() == one.keys()
            for name in one:
                assert mine[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), (world, name)
        assert ranks[0][1] == pytest.approx(alone_loss, rel=1e-4)
        for rank in range(world):
            held = load_file(out / f"rank-{rank}.safetensors")
            assert held.keys() == expected.keys()
            for name, tensor in held.items():
                torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-4)
                assert torch.equal(tensor, load_file(out / "rank-0.safetensors")[name]), "ranks hold different weights"


def test_a_resumed_group_goes_on_to_the_bit(tmp_path: Path) -> None:
    where = tiny.folder(recipe_of(0.3), tmp_path / "model")
    straight = run(2, where, tmp_path / "straight", 0.3)
    run(2, where, tmp_path / "cut", 0.3, last=2)
    resumed = run(2, where, tmp_path / "cut", 0.3, first=2)
    for a, b in zip(straight, resumed, strict=True):
        assert a[0][2:] == b[0]
        assert a[1:] == b[1:], "warm-up loss or random state differ"
    assert straight[0][2] != straight[1][2], "ranks draw the same random numbers"
    for name, tensor in load_file(tmp_path / "straight" / f"step-{STEPS}" / "model.safetensors").items():
        assert torch.equal(tensor, load_file(tmp_path / "cut" / f"step-{STEPS}" / "model.safetensors")[name]), name


def test_more_processes_than_samples(tmp_path: Path) -> None:
    where = tiny.folder(recipe_of(0.0), tmp_path / "model")
    [(alone, _, _)] = run(1, where, tmp_path / "w1", samples=2)
    for metrics, _, _ in run(3, where, tmp_path / "w3", samples=2):
        for mine, one in zip(metrics, alone, strict=True):
            assert mine == pytest.approx(one, rel=1e-4, abs=1e-6)
