"""A step's shard that one rank reads damaged and another whole, over real gloo processes: all ranks do the same, and none waits for ever."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from relax_hpc.files.errors import Damaged
from relax_hpc.files.publish import read_json, to_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.roles.common.load_batch import load, load_batch
from relax_hpc.roles.common.quarantine import Quarantine
from relax_hpc.spool.ledger import Entry
from relax_hpc.spool.queue import RequestQueue
from relax_hpc.spool.reading import Shards
from relax_hpc.spool.shard import Shard
from tests.processes import context
from tests.unit.test_batch_scheduler import WORKER, Trainer, flip, generate

REQUEST = "r000000-001"


def rank_of_two(rank: int, root: Path, entry: Entry, memory: Path | None, said: Any) -> None:
    """memory: the folder of copies of this rank's node."""
    run, events = RunDir(root), list[dict[str, Any]]()
    dist.init_process_group("gloo", store=dist.FileStore(str(root / "store"), 2), rank=rank, world_size=2)
    shards = Shards(run, memory)
    quarantine = Quarantine(run, root / "lease" / "000001" / "i000001", lambda **about: events.append(about))
    try:
        found: Any = load(
            partial(load_batch, entry, run, shards, ()), entry, shards, quarantine, rank, 2
        ).rollouts.tokens
        found = found.tolist()
    except Damaged as error:
        found = str(error)
    said.put((rank, found, [(event["kind"], event["request"], event["reason"]) for event in events]))
    dist.destroy_process_group()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("holder", [0, 1, None], ids=["rank 0 has it", "rank 1 has it", "nobody has it"])
def test_a_shard_that_a_rank_reads_damaged_is_put_back_from_the_memory_of_one_that_has_it(
    tmp_path: Path, holder: int | None
) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    run.identity.write_bytes(to_json({"id": "this"}))
    RequestQueue(run).open_claim_dir(WORKER)
    trainer = Trainer(run, 1, staleness=0)
    assert trainer.entry() is None, "requests are open now"
    generate(run, 0)
    entry, path, memory = trainer.train(), run.shard(REQUEST), tmp_path / "memory"
    whole = load_batch(entry, run, Shards(run, None), ()).rollouts.tokens.tolist()
    Shards(run, memory).put(REQUEST, path.read_bytes())
    flip(path)
    made = context()
    said = made.Queue()
    ranks = [
        made.Process(target=rank_of_two, args=(rank, run.root, entry, memory if rank == holder else None, said))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        found = sorted(said.get(timeout=60) for _ in ranks)
    finally:
        for process in ranks:
            process.kill()
    if holder is None:
        assert all("step 0 trains on a shard that is damaged" in what and not events for _, what, events in found)
        assert path.exists() and not list(run.quarantine.iterdir())
        return
    assert [what for _, what, _ in found] == [whole, whole], "both train on what was generated"
    reader = 1 - holder
    [(kind, request, reason)] = found[holder][2]
    assert (kind, request) == ("damaged_shard", REQUEST) and f"rank {reader}: '{path}': column 'tokens'" in reason
    assert not found[reader][2]
    with Shard(path) as mended:
        mended.validate()
    assert read_json(run.quarantine / f"{REQUEST}.0.reason.json")["reason"] == reason
    assert (run.quarantine / f"{REQUEST}.0.damaged").stat().st_ino != path.stat().st_ino
