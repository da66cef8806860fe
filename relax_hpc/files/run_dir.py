"""The run directory: every path of a run, and the only ways in which a file appears in it.

    RUN/
      run.json recipe.toml changes.jsonl    what the run is; recipe.toml is the resolved recipe in force
      snapshot/                             code, versions and git state at submission; snapshot/user/v0/ the user's own files
      model/                                config and tokenizer (weights are versions)
      lease/000002/                         the holder; lease/000002/i000007/ is an incarnation of the trainer
      requests/open/                        requests that no worker has claimed; all of them move by rename
      requests/claimed/WORKER/              requests that a worker generates
      requests/partial/REQUEST.p1.h5        partial rollouts of requests that were given back
      shards/0000/REQUEST.h5   evals/       what was generated; complete or absent
      columns/0000/REQUEST.NAME.h5          numbers of a scorer's models, or of a critic, for the same tokens
      reference/                            the weights before step 0, where a scorer holds them or a critic starts from them
      critic/                               a critic in processes of its own: its attempts' folders, its checkpoints
      scorer/                               scorers that work as one group: their attempts' folders
      quarantine/                           shards that lost a race, or were made once more, each with its reason
      ledger/0000/00000123.json             what each step trains on
      weights/v00000012.l0.i3/              a version's tensors; weights/v00000012.l0.json makes it exist
      checkpoints/
      heartbeats/  metrics/  logs/          one writer each
      tracking/                             copies of the metrics for other tools; which messages were sent
      caches/                               compiled kernels, packed once for nodes that have none
      slurm/                                batch scripts as they were sent; slurm/jobs/ID.json, a file for each job;
                                            slurm/places/GROUP-INDEX.json, the node agent that a node of a group has now
      evaluated/                            evaluations of its checkpoints by `relax-hpc eval`, each laid out like a run
      rows.json                             how many rows of the sources are left out or cut, where keys say so
      stop  outcome.json                    how it shall end, how it ended

Publishing is always: unique temporary name, write, fsync, link or rename, fsync of the directory. A trainer's temporary
names lie in its incarnation's folder: when a successor renames that folder, whatever the old trainer still wants to
commit fails by path, so a superseded incarnation can commit nothing however late it wakes up.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import is_there, names, read_json, rename_once, sync_folder

STEPS_PER_SHARD_FOLDER = 64
"""Training steps whose shards share a folder, so that a directory has hundreds of entries, not tens of thousands."""

STEPS_PER_FOLDER = 1000

OPTIMIZERS = {"trainer": "optimizer", "critic": "critic_optimizer"}
"""Role -> the name of its optimizer's files in a checkpoint."""

_CHECKPOINT = re.compile(r"step-(\d{8,})")


class RunDir:
    """Paths of one run. It knows names, not meanings."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()
        self.doing = self.root / "doing.json"
        self.identity = self.root / "run.json"
        self.rows = self.root / "rows.json"
        self.recipe = self.root / "recipe.toml"
        self.changes = self.root / "changes.jsonl"
        self.snapshot = self.root / "snapshot"
        self.model = self.root / "model"
        self.lease = self.root / "lease"
        self.open_requests = self.root / "requests" / "open"
        self.claimed_requests = self.root / "requests" / "claimed"
        self.partial_rollouts = self.root / "requests" / "partial"
        self.shards = self.root / "shards"
        self.evals = self.root / "evals"
        self.columns = self.root / "columns"
        self.reference = self.root / "reference"
        self.critic, self.scorer = self.root / "critic", self.root / "scorer"
        self.quarantine = self.root / "quarantine"
        self.ledger = self.root / "ledger"
        self.weights = self.root / "weights"
        self.checkpoints = self.root / "checkpoints"
        self.heartbeats = self.root / "heartbeats"
        self.metrics = self.root / "metrics"
        self.logs = self.root / "logs"
        self.caches = self.root / "caches"
        self.tracking = self.root / "tracking"
        self.slurm = self.root / "slurm"
        self.stop = self.root / "stop"
        self.outcome = self.root / "outcome.json"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunDir) and self.root == other.root

    def __hash__(self) -> int:
        return hash(self.root)

    @property
    def exists(self) -> bool:
        return is_there(self.identity)

    def read_id(self) -> str | None:
        """The run's id, which its shards name; None where there is no run.json."""
        return (read_json(self.identity) or {}).get("id")

    def create(self) -> None:
        """Make the folders; existing ones stay."""
        for folder in (
            self.open_requests, self.claimed_requests, self.partial_rollouts, self.shards, self.evals, self.columns, self.quarantine, self.ledger, self.lease,
            self.weights, self.checkpoints, self.heartbeats, self.metrics, self.logs,
        ):  # fmt: skip
            folder.mkdir(parents=True, exist_ok=True)

    def shard(self, request_id: str) -> Path:
        """The path of a request's shard, published or to be."""
        if request_id.startswith("e"):
            return self.evals / f"{request_id}.h5"
        return self.shards / f"{int(request_id[1:7]) // STEPS_PER_SHARD_FOLDER:04d}" / f"{request_id}.h5"

    def column(self, request_id: str, name: str) -> Path:
        """The path of a column of a request's shard, published or to be."""
        return self.columns / self.shard(request_id).parent.name / f"{request_id}.{name}.h5"

    def partial_rollout(self, request_id: str, number: int) -> Path:
        """The path of a request's partial rollout, the number-th that was given back."""
        return self.partial_rollouts / f"{request_id}.p{number}.h5"

    def checkpoint_steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending."""
        found = [match for name in names(self.checkpoints) if (match := _CHECKPOINT.fullmatch(name))]
        return sorted(int(match[1]) for match in found if is_there(self.checkpoints / match[0] / "DONE"))

    def ledger_entry(self, step: int) -> Path:
        return self.ledger / f"{step // STEPS_PER_FOLDER:04d}" / f"{step:08d}.json"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"


@contextlib.contextmanager
def drafted(final: Path) -> Iterator[RunDir]:
    """Make a new run directory under a hidden name: `final` appears whole when the block ends well, or not at all."""
    draft = RunDir(final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.new"))
    try:
        draft.create()
        yield draft
        rename_once(draft.root, final, lambda: is_there(final) and not is_there(draft.root))
        sync_folder(final.parent)
    finally:
        shutil.rmtree(draft.root, ignore_errors=True)


def open_existing(path: str | os.PathLike[str]) -> RunDir:
    """Open the run at `path`. Raises RunError when there is none."""
    run = RunDir(path)
    if not run.exists:
        raise RunError(f"'{path}' is not a run directory: it has no run.json; runs are made by `relax-hpc run RECIPE`")
    if is_there(run.root / "orders"):
        raise RunError(
            f"'{path}' was made by an older version of relax_hpc: its rollout requests lie in 'orders/', expected 'requests/'; go on with "
            "it by the version in its snapshot/, or begin a new run"
        )
    return run
