"""Disk space: bytes of shards and columns, bytes promised to requests in progress, and which shards may be removed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe.schema import Recipe
from relax_hpc.spool.layout import SCORE_BYTES
from relax_hpc.spool.ledger import Ledger

TOKEN_BYTES = 4 + 1 + 4
"""Bytes of one token: tokens, loss_mask and logprobs."""
SHARD_BYTES = 16 << 10
"""Bytes that a shard holds besides its tokens, generously; a column holds less."""


class Retention:
    """Bytes of shards and their columns in the run directory, against the quota."""

    def __init__(
        self, run: RunDir, recipe: Recipe, commit_dir: Path, ledger: Ledger, context: int, critic: RunDir | None = None
    ) -> None:
        """critic: where the checkpoints of a critic in processes of its own are."""
        self._run, self._recipe, self._commit_dir, self._ledger, self._critic = run, recipe, commit_dir, ledger, critic
        self._asked = 0
        """The step before which the trainer needs nothing."""
        self.removed_before = 0
        self.used_bytes = self._media_bytes = 0
        samples = recipe.rollout.groups_per_request * recipe.algorithm.group_size
        longest = min(recipe.rollout.max_new_tokens * recipe.rollout.max_turns, context)
        self.request_bytes = (
            samples * longest * TOKEN_BYTES + recipe.rollout.groups_per_request * context * 4 + SHARD_BYTES
        )
        self.request_bytes += len(recipe.columns) * (samples * longest * SCORE_BYTES + SHARD_BYTES)

        if recipe.async_.partial:
            self.request_bytes *= 2  # its partial rollout lies beside it until its shard is there
        self._text_bytes = self.request_bytes

    def scan(self, excluding: Collection[str]) -> None:
        """Count the bytes there are, except those of the requests `excluding`: these are in progress, and added when
        they are taken in."""
        there = [p for folder in (self._run.shards, self._run.columns) for p in folder.rglob("[!.]*.h5")]
        sizes = {p: p.stat().st_size for p in there}
        self.used_bytes = sum(size for p, size in sizes.items() if p.name.partition(".")[0] not in excluding)
        self.reserve_media(max(sizes.values(), default=0) - self.request_bytes)

    def add(self, more_bytes: int) -> None:
        self.used_bytes += more_bytes

    def reserve_media(self, seen_bytes: int) -> None:
        """Reserve for each request as many bytes of media as one was seen to have: no recipe says how large they are."""
        self._media_bytes = max(self._media_bytes, seen_bytes)
        self.request_bytes = self._text_bytes + self._media_bytes

    def has_room(self, requests_in_progress: int) -> bool:
        """Return True if one more batch may be released: every request in progress has its largest possible shard
        reserved."""
        quota_gb = self._recipe.spool.quota_gb
        if quota_gb is None:
            return True
        reserved = (requests_in_progress + self._recipe.requests_per_step) * self.request_bytes
        return self.used_bytes + reserved <= quota_gb * 1e9

    def remove_before(self, step: int) -> None:
        """Remove shards that no checkpoint from `step` on replays, by way of our own folder: a fenced trainer deletes
        nothing."""
        self._asked = step
        # a critic learns the steps again that came after its newest checkpoint, or its older one where that is damaged
        self._remove_before(step if self._critic is None else min(step, *(self._critic.checkpoint_steps() or [0])))

    def _remove_before(self, step: int) -> None:
        if self._recipe.spool.keep == "all":
            return
        if self._recipe.algorithm.sample_reuse:  # the first steps from there on may train on these once more
            step -= self._recipe.async_.max_staleness
        for trained in range(self.removed_before, step):
            entry = self._ledger.find(trained)
            if entry is None:
                continue
            for request_id in entry.states:
                self._remove(self._run.shard(request_id))  # first: a scorer that is late sees that it is gone
                for name in self._recipe.columns:
                    self._remove(self._run.column(request_id, name))
        self.removed_before = max(step, self.removed_before)

    def waits_for_critic(self) -> bool:
        """Return True if more may go once the critic has a checkpoint as new as the trainer's. Shards that its newest
        one does not replay are removed now."""
        if self._critic is None or self._recipe.spool.keep == "all":
            return False
        before, newest = self.removed_before, newest_step(self._critic)
        self._remove_before(min(self._asked, newest))
        return newest < self._asked or self.removed_before > before

    def _remove(self, path: Path) -> None:
        gone = self._commit_dir / path.name
        with contextlib.suppress(FileNotFoundError):
            self.used_bytes -= path.stat().st_size
            os.rename(path, gone)
            gone.unlink()


def newest_step(critic: RunDir) -> int:
    """Return the step of a critic's newest checkpoint; 0 before the first."""
    return max(critic.checkpoint_steps(), default=0)
