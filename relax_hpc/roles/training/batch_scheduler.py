"""Rank 0's side of the spool: releases requests, waits for shards, writes the ledger, restarts where it was.

    release ► open requests … arrivals (shards, columns) ► choose ► ledger entry s ► (all ranks train) ► settle ► release …

After a restart the ledger entries c … s-1 are adopted one by one (training repeats, generation does not). Then the
requests that are missing are released again.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from typing import Any

from relax_hpc.roles.common.columns import columns_of
from relax_hpc.roles.training.arrivals import Arrivals
from relax_hpc.roles.training.retention import Retention
from relax_hpc.roles.training.sample_reuse import SampleReuse
from relax_hpc.roles.training.selection import GroupSelection
from relax_hpc.spool import partial_rollouts
from relax_hpc.spool.ledger import Dropped, Entry, Ledger, Taken
from relax_hpc.spool.planner import Choice, RequestPlanner
from relax_hpc.spool.queue import LOOK_AT_STARTS_S, RequestQueue
from relax_hpc.spool.request import Request, replacement_id


class BatchScheduler:
    """Rank 0's account of requests, shards and the ledger."""

    def __init__(
        self,
        planner: RequestPlanner,
        ledger: Ledger,
        queue: RequestQueue,
        arrivals: Arrivals,
        selection: GroupSelection,
        retention: Retention,
        reuse: SampleReuse,
    ) -> None:
        self.planner, self.ledger, self.queue, self.arrivals = planner, ledger, queue, arrivals
        self._selection, self._retention, self._reuse = selection, retention, reuse
        self._looked_at_starts = float("-inf")
        self.live = False
        """True from the ledger's end on; before it, steps are replayed."""

    @property
    def depth(self) -> int:
        """How many complete requests wait for the trainer."""
        return len(self.arrivals.complete)

    @property
    def unscored(self) -> int:
        """How many requests wait only for their columns."""
        return len(self.arrivals.unscored)

    @property
    def outstanding(self) -> int:
        """How many requests are asked for and not yet trained on."""
        return len(self.planner.outstanding)

    def begin(self, state: dict[str, Any] | None) -> None:
        """Go on from a checkpoint's state, or from nothing."""
        if state is not None:
            self.planner.load_state_dict(state["planner"])
            self.arrivals.dropped = {d["request"]: Dropped(**d) for d in state["dropped"]}
        else:
            self.planner.release(upto=self.planner.last_batch(0))

    def next_entry(self, step: int, version: int, lineage: int) -> Entry | None:
        """Return the ledger entry of `step`: the one that is there, or a new one; None if there is nothing to take yet.

        Raises RunError, and writes none, if too many of its groups failed.
        """
        found = None if self.live else self.ledger.find(step)
        if found is not None:
            ready = columns_of(found, self.arrivals.shard_reader, self.arrivals.columns)
            return found if ready is not None else None
        if not self.live:
            self._reconcile(step, version)
        choice = self._next_choice(step, version)
        if choice is None:
            return None
        taken, columns = {i: self.arrivals.complete[i] for i in choice.take}, self.arrivals.columns
        filtered = self._selection.filtered(taken)
        self._selection.check_failures(step, taken, filtered)
        entry = Entry(
            step=step,
            incarnation=self.ledger.incarnation,
            lineage=lineage,
            take=tuple(Taken(i, shard.first_version, columns.versions(i)) for i, shard in taken.items()),
            filtered=filtered,
            dropped=tuple(Dropped(i, "stale", replacement_id(i)) for i in choice.drop),
            reused=self._reuse.choose(step),
            solved=self._selection.solved(taken),
            extra_requests=self.planner.extended,
        )
        return self.ledger.commit(entry)

    def settle(self, entry: Entry, step: int) -> None:
        """Account for a step that was trained, and release the requests that may now be asked for."""
        self.planner.extend_upto(entry.step, entry.extra_requests)  # for a replayed step; else they are there already
        dropped = [d.request for d in entry.dropped]
        replacements = self.planner.apply(entry.step, [t.request for t in entry.take], dropped, entry.solved)
        self.arrivals.settle(entry)
        self._selection.forget(entry.states)
        if not self.live:
            self.planner.release(upto=self.planner.last_batch(step))
            return
        self.queue.put(replacements)
        if dropped:
            self.queue.withdraw(dropped)
        self.release(step)

    def release(self, step: int) -> bool:
        """Release the batches that may be outstanding before `step` and the quota has room for; False when the quota holds some back."""
        for batch in range(self.planner.next_batch, self.planner.last_batch(step) + 1):
            if not self._retention.has_room(self.outstanding):
                return False
            self.queue.put(self.planner.release(upto=batch))
        return True

    def stale_arrivals(self) -> list[tuple[str, float]]:
        """Return the dropped requests that came since the last call, and their mean length in tokens."""
        return self.arrivals.stale(count_bytes=self.live)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the checkpoint: the outstanding requests, and the prompt cursor."""
        return {
            "planner": self.planner.state_dict(),
            "dropped": [asdict(dropped) for dropped in self.arrivals.dropped.values()],
            "requests_per_step": self.planner.n,
            "max_staleness": self.planner.max_staleness,
        }

    def _reconcile(self, step: int, version: int) -> None:
        """Release again, at the end of a replay, each outstanding request that is neither open, claimed nor
        published."""
        self.queue.remove_torn()
        self._retention.scan(excluding=self.planner.outstanding)
        missing, somewhere = self._missing([*self.planner.outstanding.values()])
        self.queue.put(missing, oldest=version)
        # Requests of a later batch may be a successor's: this trainer may have been superseded without knowing it yet.
        stray = [
            i for i in somewhere
            if not i.startswith("e") and i not in self.planner.outstanding and int(i[1:7]) < self.planner.next_batch
        ]  # fmt: skip
        self.queue.withdraw(stray)
        partial_rollouts.remove(self.arrivals.run, self.planner.outstanding, self.planner.next_batch)
        if missing or stray:
            logging.getLogger("trainer").info("released again: %s; withdrawn: %s", [o.id for o in missing], stray)
        self.release(step)
        self.live = True  # last: where the disk is full, all of this is done again

    def _missing(self, requests: list[Request]) -> tuple[list[Request], dict[str, int]]:
        """Return those requests that are nowhere, and all that are open or claimed."""
        somewhere = self.queue.in_progress()  # before the shards: a request moves from here to there, never back unseen
        return [o for o in requests if o.id not in somewhere and not self.arrivals.is_published(o.id)], somewhere

    def _next_choice(self, step: int, version: int) -> Choice | None:
        """Return the choice of `step`; None if it must wait longer. When enough is complete but an unfinished request
        seems due: look when it was started, and let requests not yet started start later."""
        self._look()
        choice = self._choose(step, {})
        if (choice is not None and not choice.drop) or self.depth < self.planner.n:
            return choice
        if time.monotonic() - self._looked_at_starts < LOOK_AT_STARTS_S:
            return None
        self._looked_at_starts = time.monotonic()
        self.queue.raise_oldest(version)
        started = self.queue.in_progress()
        self._look()  # a request that finished while we listed is complete, not one never started
        return self._choose(step, started)

    def _look(self) -> None:
        """Take in the shards that appeared; requests whose shards are damaged are released again."""
        self.queue.put([self.planner.outstanding[i] for i in self.arrivals.look(self.planner.outstanding)])

    def _choose(self, step: int, started: dict[str, int]) -> Choice | None:
        passing = self._selection.passing(self.arrivals.complete)
        self._extend(step, passing)  # of all that was seen until now: only then may a batch be short
        complete, unscored = (
            {i: shard.first_version for i, shard in shards.items()}
            for shards in (self.arrivals.complete, self.arrivals.unscored)
        )
        return self.planner.choose(step, complete, started | unscored, passing)

    def _extend(self, step: int, passing: dict[str, int]) -> None:
        """Release extra requests in place of groups that do not pass."""
        if self.planner.wanted and self._retention.has_room(self.outstanding):
            new = self.planner.extend(step, passing)
            if new:  # a trainer before us may have released them, and died before its entry
                self.queue.put(self._missing(new)[0])
