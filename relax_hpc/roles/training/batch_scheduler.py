"""Rank 0's side of the spool: releases requests, waits for shards, writes the ledger, restarts where it was.

    release ► open requests … shards (and columns) ► choose ► ledger entry s ► (all ranks train) ► settle ► release …

After a restart the ledger entries c … s-1 are adopted one by one (training repeats, generation does not). Then the
requests that are missing are released again.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from relax_hpc.algorithms.filters import Filter
from relax_hpc.files.errors import RunError
from relax_hpc.files.run_dir import RunDir
from relax_hpc.files.watch import FolderWatch, backoff
from relax_hpc.roles.training.columns import Columns, columns_of
from relax_hpc.roles.training.quarantine import Quarantine
from relax_hpc.roles.training.retention import Retention
from relax_hpc.roles.training.sample_reuse import SampleReuse
from relax_hpc.spool import partial_rollouts
from relax_hpc.spool.ledger import FAILED, SURPLUS, Dropped, Entry, Ledger, Taken
from relax_hpc.spool.planner import Choice, RequestPlanner
from relax_hpc.spool.queue import LOOK_AT_STARTS_S, Queue
from relax_hpc.spool.reading import Shards
from relax_hpc.spool.request import Request, replacement_id
from relax_hpc.spool.shard import DamagedShard, Shard

POLL_FOR_S = 1.0
"""Seconds that one wait lasts before the other processes hear that there is nothing yet (they must not look hung)."""


class BatchScheduler:
    """Rank 0's account of requests, shards and the ledger."""

    def __init__(
        self,
        run: RunDir,
        planner: RequestPlanner,
        ledger: Ledger,
        queue: Queue,
        filters: list[Filter],
        retention: Retention,
        shard_reader: Shards,
        incarnation: int,
        when_room: Callable[[Callable[[], None], str], None],
        columns: Columns,
        quarantine: Quarantine,
        sample_reuse: int = 0,
        solved_at: float | None = None,
        max_failed: float = 1.0,
    ) -> None:
        """when_room: calls its argument, again and again while the disk is full. sample_reuse: groups that a step takes
        once more. solved_at: the raw reward of a solved prompt, if entries are to count solved prompts. max_failed:
        the share of a step's groups that may have failed."""
        self._solved_at, self._max_failed = solved_at, max_failed
        self._again = SampleReuse(ledger, shard_reader, sample_reuse, planner.max_staleness)
        self.planner, self.ledger, self.queue, self.retention, self.shard_reader = (
            planner,
            ledger,
            queue,
            retention,
            shard_reader,
        )
        self._run, self._filters, self._incarnation, self._when_room = run, filters, incarnation, when_room
        self._columns, self._quarantine = columns, quarantine
        self._watches: dict[Path, FolderWatch] = {}
        self._unscored: dict[str, Shard] = {}
        """Outstanding requests that are published and lack columns."""
        self._complete: dict[str, Shard] = {}
        """Outstanding requests that are published, with all columns; small shards are in memory already."""
        self._kept_out: dict[str, dict[int, str]] = {}
        """Complete request -> its groups that failed or that a filter keeps out, and why."""
        self._dropped: dict[str, Dropped] = {}
        """Requests given up and not seen since: their lengths are reported when they arrive."""
        self._looked_at_starts = float("-inf")
        self.live = False
        """True from the ledger's end on; before it, steps are replayed."""

    @property
    def depth(self) -> int:
        """How many complete requests wait for the trainer."""
        return len(self._complete)

    @property
    def unscored(self) -> int:
        """How many requests wait only for their columns."""
        return len(self._unscored)

    @property
    def outstanding(self) -> int:
        """How many requests are asked for and not yet trained on."""
        return len(self.planner.outstanding)

    def begin(self, state: dict[str, Any] | None) -> None:
        """Go on from a checkpoint's state, or from nothing."""
        if state is not None:
            self.planner.load_state_dict(state["planner"])
            self._dropped = {d["request"]: Dropped(**d) for d in state["dropped"]}
        else:
            self.planner.release(upto=self.planner.last_batch(0))

    def next_entry(self, step: int, version: int, lineage: int) -> Entry | None:
        """Return the ledger entry of `step`: the one that is there, or a new one; None if there is nothing to take yet.

        Raises RunError, and writes none, if too many of its groups failed: they can be scored or generated again.
        """
        found = None if self.live else self.ledger.find(step)
        if found is not None:
            return found if columns_of(found, self.shard_reader, self._columns) is not None else None
        if not self.live:
            self._reconcile(step, version)
        choice = self._wait(step, version)
        if choice is None:
            return None
        entry = Entry(
            step=step,
            incarnation=self._incarnation,
            lineage=lineage,
            take=tuple(Taken(i, self._complete[i].first_version, self._columns.versions(i)) for i in choice.take),
            filtered=self._filtered(choice),
            dropped=tuple(Dropped(i, "stale", replacement_id(i)) for i in choice.drop),
            reused=self._again.choose(step),
            solved=self._solved(choice),
            extra_requests=self.planner.extended,
        )
        self._check_failures(entry)
        return self.ledger.commit(entry)

    def _check_failures(self, entry: Entry) -> None:
        groups = sum(len(self._complete[taken.request].groups) for taken in entry.take)
        failed = [(name, reason) for name, reason in entry.filtered.items() if reason.startswith(FAILED)]
        if len(failed) > self._max_failed * groups:
            name, reason = failed[0]
            request, _, group = name.rpartition("/")
            _, detail = self._complete[request].failure(int(group))
            raise RunError(
                f"step {entry.step}: {len(failed)} of {groups} groups failed, more than rollout.max_failed_fraction = {self._max_failed}; "
                f"the first is {name}: {reason.removeprefix(FAILED)}{f' ({detail})' if detail else ''}; mend the cause and go on with `relax-hpc run RUN_DIR --code new`, "
                "which takes edited files into the run and scores these groups again; where the cause was not in your files, with --redo "
                "score (again by the same code), or --redo generate (new answers too); or raise the limit with --set "
                "rollout.max_failed_fraction=…"
            )

    def settle(self, entry: Entry, step: int) -> None:
        """Account for a step that was trained, and release the requests that may now be asked for."""
        self.planner.extend_upto(entry.step, entry.extra_requests)  # for a replayed step; else they are there already
        replacements = self.planner.apply(
            entry.step, [t.request for t in entry.take], [d.request for d in entry.dropped], entry.solved
        )
        self._dropped |= {d.request: d for d in entry.dropped}
        for request_id in (*(t.request for t in entry.take), *(d.request for d in entry.dropped)):
            self._kept_out.pop(request_id, None)
            shard = self._complete.pop(request_id, None) or self._unscored.pop(request_id, None)
            if shard is not None:
                shard.close()
                if request_id in self._dropped:  # it is counted with the stale arrivals
                    self.retention.add(-shard.bytes - self._columns.bytes(request_id))
            self._columns.forget(request_id)
        if not self.live:
            self.planner.release(upto=self.planner.last_batch(step))
            return
        self._put(replacements)
        if entry.dropped:
            self.queue.withdraw(d.request for d in entry.dropped)
        self.release(step)

    def release(self, step: int) -> bool:
        """Release the batches that may be outstanding before `step` and the quota has room for; False when the quota holds some back."""
        for batch in range(self.planner.next_batch, self.planner.last_batch(step) + 1):
            if not self.retention.has_room(len(self.planner.outstanding)):
                return False
            self._put(self.planner.release(upto=batch))
        return True

    def _put(self, requests: list[Request], oldest: int = 0) -> None:
        self._when_room(lambda: self.queue.put(requests, oldest), f"{len(requests)} requests")

    def stale_arrivals(self) -> list[tuple[str, float]]:
        """Return the dropped requests that came, with their columns, since the last call, and their mean length in
        tokens."""
        arrived = []
        for request_id in self._published(list(self._dropped)):
            with contextlib.suppress(DamagedShard), Shard(self._run.shard(request_id)) as shard:  # it is not trained on
                if not self._columns.ready({request_id: shard}):
                    continue
                if self.live:
                    self.retention.add(shard.bytes + self._columns.bytes(request_id))
                arrived.append((request_id, float(shard.offsets[-1]) / max(len(shard.samples), 1)))
            del self._dropped[request_id]
            self._columns.forget(request_id)
            self.shard_reader.remove(request_id)
        return arrived

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the checkpoint: the outstanding requests, and the prompt cursor."""
        return {
            "planner": self.planner.state_dict(),
            "dropped": [asdict(dropped) for dropped in self._dropped.values()],
            "requests_per_step": self.planner.n,
            "max_staleness": self.planner.max_staleness,
        }

    def _reconcile(self, step: int, version: int) -> None:
        """Release again, at the end of a replay, each outstanding request that is neither open, claimed nor
        published."""
        self.queue.remove_torn()
        self.retention.scan(excluding=self.planner.outstanding)
        somewhere = self.queue.in_progress()  # before the shards: a request moves from here to there, never back unseen
        missing = [
            o for i, o in self.planner.outstanding.items() if i not in somewhere and not self._run.shard(i).exists()
        ]
        self._put(missing, oldest=version)
        # Requests of a later batch may be a successor's: this trainer may have been superseded without knowing it yet.
        stray = [
            i for i in somewhere
            if not i.startswith("e") and i not in self.planner.outstanding and int(i[1:7]) < self.planner.next_batch
        ]  # fmt: skip
        self.queue.withdraw(stray)
        partial_rollouts.remove(self._run, self.planner.outstanding, self.planner.next_batch)
        if missing or stray:
            logging.getLogger("trainer").info("released again: %s; withdrawn: %s", [o.id for o in missing], stray)
        self.release(step)
        self.live = True  # last: where the disk is full, all of this is done again

    def _wait(self, step: int, version: int) -> Choice | None:
        """Return the choice of `step`, polling for up to POLL_FOR_S; None if it must wait longer."""
        deadline = time.monotonic() + POLL_FOR_S
        for pause_s in backoff():
            self._look()
            choice = self._choose(step, {})
            if (choice is None or choice.drop) and len(self._complete) >= self.planner.n:
                choice = self._choose_knowing_starts(step, version)
            if choice is not None or time.monotonic() > deadline:
                return choice
            time.sleep(pause_s)
        raise AssertionError("backoff ends never")

    def _choose_knowing_starts(self, step: int, version: int) -> Choice | None:
        """Choose when enough is complete but an unfinished request seems due: look when it was started, and let
        requests not yet started start later."""
        if time.monotonic() - self._looked_at_starts < LOOK_AT_STARTS_S:
            return None
        self._looked_at_starts = time.monotonic()
        self.queue.raise_oldest(version)
        started = self.queue.in_progress()
        self._look()  # a request that finished while we listed is complete, not one never started
        return self._choose(step, started)

    def _choose(self, step: int, started: dict[str, int]) -> Choice | None:
        passing = self._passing()
        self._extend(step, passing)  # of all that was seen until now: only then may a batch be short
        complete, unscored = ({i: s.first_version for i, s in of.items()} for of in (self._complete, self._unscored))
        return self.planner.choose(step, complete, started | unscored, passing)

    def _passing(self) -> dict[str, int]:
        """Return how many groups of each complete request pass. Only where the planner wants groups: each shard is read
        for it."""
        if not self.planner.wanted:
            return {}
        return {i: len(shard.groups) - len(self._out(i)) for i, shard in self._complete.items()}

    def _extend(self, step: int, passing: dict[str, int]) -> None:
        """Release extra requests in place of groups that do not pass."""
        if not self.planner.wanted or not self.retention.has_room(len(self.planner.outstanding)):
            return
        new = self.planner.extend(step, passing)
        if new:  # a trainer before us may have released them, and died before its entry
            somewhere = self.queue.in_progress()
            self._put([o for o in new if o.id not in somewhere and not self._run.shard(o.id).exists()])

    def _look(self) -> None:
        """Open the shards that appeared: one stat a folder, however many requests are outstanding."""
        waiting = [i for i in self.planner.outstanding if i not in self._complete and i not in self._unscored]
        for request_id in self._published(waiting):
            shard = self._opened(request_id)
            if shard is not None:
                self._unscored[request_id] = shard
                self.retention.add(shard.bytes)
        for request_id in self._columns.ready(self._unscored):
            self._complete[request_id] = self._unscored.pop(request_id)
            self.retention.add(self._columns.bytes(request_id))

    def _opened(self, request_id: str) -> Shard | None:
        """Open a published shard, checked whole. If it is damaged, its request is released again; a listing may show it
        a while longer."""
        try:
            return self.shard_reader.opened(request_id)
        except DamagedShard as damage:
            self._quarantine.put(request_id, damage)
            self._put([self.planner.outstanding[request_id]])
        except RunError:
            if self._run.shard(request_id).exists():
                raise
        return None

    def _published(self, request_ids: Iterable[str]) -> list[str]:
        names: dict[Path, frozenset[str]] = {}
        found = []
        for request_id in request_ids:
            path = self._run.shard(request_id)
            if path.parent not in names:
                watch = self._watches.setdefault(path.parent, FolderWatch(path.parent))
                names[path.parent] = watch.names()
            if path.name in names[path.parent]:
                found.append(request_id)
        return found

    def _solved(self, choice: Choice) -> dict[str, tuple[int, int]]:
        """Return source -> (samples that solved their prompts, samples scored); those that a filter keeps out count
        too."""
        counts: dict[str, tuple[int, int]] = {}
        for shard in (self._complete[i] for i in choice.take if self._solved_at is not None):
            right = shard.samples["raw_reward"] >= self._solved_at
            for group, row in enumerate(shard.groups):
                mine = right[shard.samples["group"] == group]
                if len(mine) and not row["failed"]:
                    before = counts.get(source := str(row["source"]), (0, 0))
                    counts[source] = (before[0] + int(mine.sum()), before[1] + len(mine))
        return counts

    def _filtered(self, choice: Choice) -> dict[str, str]:
        """Return REQUEST/GROUP -> why the group stays out of the loss: it failed, does not pass, or the batch is
        full."""
        filtered: dict[str, str] = {}
        passed = 0
        for request_id in choice.take:
            out = self._out(request_id)
            for group in range(len(self._complete[request_id].groups)):
                reason = out.get(group)
                if reason is None and passed == self.planner.wanted > 0:
                    reason = f"{SURPLUS}the batch has its {self.planner.wanted} groups"
                if reason is None:
                    passed += 1
                else:
                    filtered[f"{request_id}/{group}"] = reason
        return filtered

    def _out(self, request_id: str) -> dict[int, str]:
        """Return the groups of a complete request that do not pass, and why."""
        if request_id not in self._kept_out:
            shard, out = self._complete[request_id], dict[int, str]()
            for group in range(len(shard.groups)):
                reason = f"{FAILED}{shard.failure(group)[0]}" if shard.groups["failed"][group] else None
                for own in self._filters:
                    reason = reason or own(shard.group(group))
                if reason:
                    out[group] = reason
            self._kept_out[request_id] = out
        return self._kept_out[request_id]


class WithoutRequests:
    """Base of stand-ins for the batch scheduler where nothing is requested."""

    depth, unscored, outstanding = 0, 0, 0

    def settle(self, entry: Entry, step: int) -> None: ...

    def release(self, step: int) -> bool:
        return True

    def stale_arrivals(self) -> list[tuple[str, float]]:
        return []


class Replay(WithoutRequests):
    """Stands in for the batch scheduler in a run that trains on another run's shards: that run's ledger, step by
    step."""

    live = True

    def __init__(self, source: RunDir, ledger: Ledger, shard_reader: Shards, columns: Columns) -> None:
        self._source, self._own, self._shard_reader, self._columns = source, ledger, shard_reader, columns

    def next_entry(self, step: int, version: int, lineage: int) -> Entry | None:
        """Return the other run's entry of `step`; None while columns are missing. Raises RunError at its end."""
        entry = Ledger(self._source).find(step)
        if entry is None:
            raise RunError(f"'{self._source.root}' has {step} steps, this run wants more: --set run.steps={step}")
        found = columns_of(entry, self._shard_reader, self._columns)
        if found is None:
            return None
        return self._own.commit(replace(entry, take=tuple(replace(t, columns=found[t.request]) for t in entry.take)))

    def state_dict(self) -> dict[str, Any]:
        return {}
