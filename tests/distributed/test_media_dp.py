"""Data parallelism with media over real gloo processes: a process whose share has none makes the same step as the others."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from relax_hpc.algorithms import make_algorithm
from relax_hpc.records import Rollouts
from relax_hpc.trainers import make_trainer
from relax_hpc.trainers.packing import plan
from relax_hpc.trainers.trees.segments import media_of
from tests import omni, processes, tiny

JOIN_S = 300
EACH = 2


def samples() -> Rollouts:
    """Of three prompts, one of which shows a sound and an image; its rank has nothing else to do."""
    shown = [omni.prompt("qwen3_omni", kinds, seed) for seed, kinds in enumerate([("audio", "image"), (), ()])]
    rng = np.random.default_rng(0)
    answers = [rng.integers(3, 60, length).astype(np.int32) for length in (5, 9, 12, 11, 10, 12)]
    made = tiny.rollouts([s.tokens for s in shown for _ in range(EACH)], answers, EACH)
    return replace(made, media=tuple(s.media for s in shown for _ in range(EACH)))


def work(rank: int, world: int, where: Path, out: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{out}/meet-{world}", rank=rank, world_size=world)
    recipe = omni.recipe(where, trainer={"weight_decay": 0.1}, algorithm={"kl_coef": 0.1, "group_size": EACH})
    trainer, algorithm = make_trainer(recipe, where, rank, world), make_algorithm(recipe.algorithm)
    for step in range(2):
        trainer.step(samples(), algorithm, step)
    save_file(dict(trainer.export()), out / f"{world}-{rank}.safetensors")
    if world > 1:
        dist.destroy_process_group()


def test_a_process_without_media_makes_the_same_steps(tmp_path: Path) -> None:
    shares = plan(samples(), 2, 16384)
    seen = [any(media_of(samples(), tree[0]) for rows in share for row in rows for tree in row) for share in shares]
    assert sorted(seen) == [False, True]
    where = omni.folder("qwen3_omni", tmp_path / "model")
    ranks = [processes.context().Process(target=work, args=(r, w, where, tmp_path)) for w in (1, 2) for r in range(w)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(JOIN_S)
        assert [process.exitcode for process in ranks] == [0] * len(ranks)
    finally:
        for process in ranks:
            process.kill()
    alone, *both = (load_file(tmp_path / f"{name}.safetensors") for name in ("1-0", "2-0", "2-1"))
    before = dict(make_trainer(omni.recipe(where), where, 0, 1).export())
    for name, tensor in alone.items():
        assert not torch.equal(tensor, before[name]), name
        assert torch.equal(both[0][name], both[1][name]), "ranks hold different weights"
        torch.testing.assert_close(tensor, both[0][name], rtol=0, atol=2e-4)
