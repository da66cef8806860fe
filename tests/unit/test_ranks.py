"""What the ranks of a group agree on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from relax_hpc.files.errors import RunError
from relax_hpc.roles.common.ranks import together
from tests.processes import context


def rank_of_three(rank: int, store: str, said: Any) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, 3), rank=rank, world_size=3)

    def read() -> str:
        if rank == 2:
            raise RunError("column 'tokens' is damaged")
        return "rollouts"

    try:
        together(read, 3)
    except RunError as error:
        said.put((rank, str(error)))
    said.put((rank, together(lambda: f"of {rank}", 3)))
    dist.destroy_process_group()


def test_damage_that_one_rank_alone_sees_ends_every_rank_in_the_same_way(tmp_path: Path) -> None:
    made = context()
    said = made.Queue()
    ranks = [made.Process(target=rank_of_three, args=(r, str(tmp_path / "store"), said)) for r in range(3)]
    for rank in ranks:
        rank.start()
    found = sorted(said.get(timeout=120) for _ in range(6))
    for rank in ranks:
        rank.join()
    damage = "rank 2: column 'tokens' is damaged"
    assert found == sorted([(r, damage) for r in range(3)] + [(r, f"of {r}") for r in range(3)])
