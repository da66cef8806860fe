"""Shared by scorers and the critic: a role that makes columns of the requests that lack them.

SHARDS/REQUEST.h5 ──read──► numbers for its tokens, by a model ──publish──► COLUMNS/REQUEST.NAME.h5 ──► the trainer takes the request
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from relax_hpc.files.publish import Data, publish
from relax_hpc.records import Rollouts
from relax_hpc.roles.common import gpus
from relax_hpc.roles.common.process import RoleProcess, Stop
from relax_hpc.roles.common.ranks import begin_attempt, meet, room_for_all
from relax_hpc.roles.common.role import GroupRole
from relax_hpc.roles.scoring.pending_columns import PendingColumns, opened
from relax_hpc.spool.column import encode
from relax_hpc.spool.shard import Shard

LOOK_AGAIN_S = 0.1
"""Seconds between looks for weights that cannot be had yet, or for another rank."""


class Whole(NamedTuple):
    """A shard, read for a model."""

    rollouts: Rollouts
    """All of its samples that have tokens."""
    created: float
    checksum: int


@dataclass(frozen=True, slots=True)
class Lacking:
    """A request whose columns are to be made."""

    request: str
    behind: int
    """How many requests lack columns."""
    waited_s: float


class ColumnRole(GroupRole):
    """One process of a role that makes columns."""

    def __init__(self, process: RoleProcess, commit_dir: Path | None) -> None:
        """Take over from earlier attempts, and meet the other ranks."""
        super().__init__(process, commit_dir)
        self.requests = 0
        process.telemetry.heartbeat("starting", requests=0)
        torch.set_num_threads(self.recipe.trainer.threads)
        if commit_dir is not None:
            begin_attempt(process, commit_dir, self.wait)
        if gpus.computes_on_gpu(self.recipe.trainer.device, process.arguments.role):
            gpus.assign_beside(
                self.recipe, process.arguments.role, self.first_gpu(), process.arguments.rank, self.world
            )
        if commit_dir is not None:
            meet(commit_dir, self.rank, self.world, self.recipe.trainer.device)

    def first_gpu(self) -> int:
        """Return the first GPU of its node that no other role has."""
        return self.recipe.trainer.processes // self.recipe.trainer.nodes

    def pending_columns(self, names: tuple[str, ...], rank: int = 0, processes: int = 1) -> PendingColumns:
        """Return the account of the requests that lack columns. rank, processes: the share of a process that works alone."""
        return PendingColumns(self.run, self.shards, names, self.recipe.async_.max_staleness, rank, processes)

    def read(self, request: str, pending: PendingColumns, routed: bool = False) -> Whole | None:
        """Read a request's shard, `routed` with the experts of its tokens; None if some rank cannot, since it is damaged
        or removed."""

        def whole(shard: Shard) -> Whole:
            picked = np.flatnonzero(np.diff(shard.offsets))
            return Whole(shard.rollouts(picked, routed), shard.meta["created"], shard.checksum)

        read = opened(self.shards, self.shard_reader, request, whole)
        if self.everywhere(read is not None):
            return read
        pending.done(request)
        return None

    def publish_columns(
        self, lacking: Lacking, shard: Whole, columns: Mapping[str, tuple[str, NDArray[np.float32]]], score_s: float
    ) -> None:
        """Publish the columns of a request, and report them. columns: name -> the model's name and its numbers;
        score_s: seconds that making them took."""
        began, request = time.perf_counter(), lacking.request
        for name, (model, values) in columns.items():
            path, image = self.run.column(request, name), encode(name, request, shard.checksum, model, values)
            put = partial(self._publish, path, image, self.shards.shard(request))
            self.process.when_room(put, f"column {path.name}")
        self.requests += 1
        if self.rank == 0:
            tokens = int(shard.rollouts.loss_mask.sum())
            self.process.telemetry.metrics(
                kind="column", request=request, columns=[*columns], samples=len(shard.rollouts), tokens=tokens, score_s=score_s,
                tokens_per_s=tokens * len(columns) / score_s, lag_s=max(time.time() - shard.created, 0.0),
                wait_s=lacking.waited_s, publish_s=time.perf_counter() - began, behind=lacking.behind,
            )  # fmt: skip

    def _publish(self, path: Path, image: Data, shard: Path) -> None:
        """Publish a column, unless its shard was removed meanwhile: nobody would remove the column any more."""
        with room_for_all(self.world):
            if self.rank == 0:
                publish(path, image, commit_dir=self.commit_dir)
                if not shard.exists():
                    path.unlink(missing_ok=True)

    def wait(self, pause_s: float = LOOK_AGAIN_S) -> None:
        """Wait before the first command: each process may leave on its own. A role that is starting is given more
        time."""
        if self.process.stopping:
            raise Stop
        self.heartbeat("starting")
        time.sleep(pause_s)

    def heartbeat(self, state: str) -> None:
        self.process.telemetry.heartbeat(state, requests=self.requests)
