"""Names in a run's folders that nobody of ours made, such as copies and folders of a person: left alone, whoever lists the folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_hpc.files.publish import to_json, write_file
from relax_hpc.files.run_dir import RunDir
from relax_hpc.monitor.status import Status
from relax_hpc.recipe import load_recipe
from relax_hpc.recipe.schema import Recipe
from relax_hpc.slurm import job_registry
from relax_hpc.slurm.job_registry import JobRegistry
from relax_hpc.slurm.rollout_nodes import RolloutNodes
from relax_hpc.slurm.submission.sbatch import jobs, record
from relax_hpc.spool.ledger import Ledger
from relax_hpc.spool.queue import RequestQueue
from relax_hpc.spool.request import Request
from relax_hpc.supervise.supervisor import sweep
from relax_hpc.telemetry import Telemetry
from relax_hpc.weights.versions import Versions
from tests.runs import write_recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return load_recipe(write_recipe(tmp_path), ["slurm.time=60"])


@pytest.fixture
def run(tmp_path: Path, recipe: Recipe) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    shutil.copy(tmp_path / "small.toml", run.recipe)
    write_file(run.identity, to_json({"id": "r", "debug": None, "shards_from": None}))
    record(run, "7", "leader")
    record(run, "8", "rollout")
    done = run.checkpoint(40)
    done.mkdir()
    (done / "DONE").touch()
    RequestQueue(run).put([Request("r000000-000", ((0, 0),), 4, 1, 0)])
    Telemetry(run, "trainer-0", 0).heartbeat("training", step=3)
    return run


FOLDERS: dict[str, Callable[[RunDir], Path]] = {
    "checkpoints": lambda run: run.checkpoints, "ledger": lambda run: run.ledger, "a ledger's": lambda run: run.ledger / "0000",
    "partial": lambda run: run.partial_rollouts, "heartbeats": lambda run: run.heartbeats, "metrics": lambda run: run.metrics, "logs": lambda run: run.logs,
    "claimed": lambda run: run.claimed_requests, "weights": lambda run: run.weights, "wanted": lambda run: run.weights / "wanted",
    "jobs": lambda run: run.slurm / "jobs", "ended": lambda run: run.slurm / "ended", "shards": lambda run: run.shards,
    "evals": lambda run: run.evals, "columns": lambda run: run.columns, "quarantine": lambda run: run.quarantine, "caches": lambda run: run.caches,
}  # fmt: skip
NAMES = ("evil", "evil.json", "step-00000060.bak", "step-00000060", "node-agent-evil.json", "00000001.json.bak", "7.bak.json", "7 (copy).json",
         "rollout-0 (copy).jsonl", "v00000001.bak", "r000000-000.p1.h5.bak", "1e5.json")  # fmt: skip


@pytest.mark.parametrize("kind", ["file", "empty", "folder"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_stray_name_changes_nothing(
    run: RunDir, recipe: Recipe, folder: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(job_registry, "job_state", lambda ids: asked.extend(ids) or dict.fromkeys(ids, "RUNNING"))
    place = FOLDERS[folder](run)
    for name in NAMES:
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "folder":
            path.mkdir()
        else:
            path.write_bytes(b'{"id": 1}\n' if kind == "file" else b"")
    (run.checkpoints / "step-00000040.bak").mkdir()
    (run.checkpoints / "step-00000040.bak" / "DONE").touch()  # as a copy of a checkpoint has it
    voice = Telemetry(run, "supervisor", 0)
    assert run.checkpoint_steps() == [40]
    assert set(RequestQueue(run).in_progress()) == {"r000000-000"}
    RequestQueue(run).remove_torn()
    for claim_dir in RequestQueue(run).workers():
        RequestQueue(run).give_back(claim_dir, lost=True)
    agents = RolloutNodes(run, recipe, voice)
    agents.look()
    assert agents.alive() == [] and agents.failed() == []
    book = JobRegistry(run)
    book.look()
    assert asked == ["8"] and list(book.sent("leader")) == ["7"]
    assert [job["id"] for job in jobs(run)] == ["7", "8"]
    commit_dir = run.lease / "000001"
    commit_dir.mkdir()
    versions = Versions(run, commit_dir, 1)
    assert versions.on_disk() == [] and versions.find(0) is None
    versions.forget(10, ())
    assert Ledger(run, commit_dir).find(0) is None
    sweep(run)
    status = Status.of(run)
    assert status.step == 3 and "trainer-0" in status.roles()
