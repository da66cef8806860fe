"""The loop that trainer, critic and scorer share: rank 0 decides what is done next, all ranks do it.

rank 0: decide ──Command──► broadcast ──► every rank: actions[command.do] ──► decide … until "end"
           └─ nothing to do: looks again for POLL_FOR_S, then "wait", so that no rank seems to hang
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from relax_hpc import checkpoint
from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import read_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.files.watch import backoff
from relax_hpc.media.process import Processor
from relax_hpc.roles.common.process import Exit, RoleProcess
from relax_hpc.roles.common.ranks import first_said, gathered, told
from relax_hpc.spool.reading import Shards

POLL_FOR_S = 1.0
"""Seconds that one wait lasts before the other processes hear that there is nothing yet."""


@dataclass(frozen=True, slots=True)
class Command:
    """Rank 0's decision, which all ranks act on."""

    do: str
    """"wait", "end", or one of the role's actions."""
    work: Any = None
    """The action's argument."""
    exit: Exit = Exit.STOPPED
    error: str = ""
    """The error that ends the role, on every rank."""


class GroupRole(ABC):
    """One process of a role whose processes act together: its run, its place among the ranks, and the loop."""

    idle = "idle"
    """The state in the heartbeat while there is nothing to do."""

    def __init__(self, process: RoleProcess, commit_dir: Path | None) -> None:
        """commit_dir: the folder through which the group commits; None for a process that works alone."""
        self.process, self.recipe, self.run, self.commit_dir = process, process.recipe, process.run, commit_dir
        self.rank: int = process.arguments.rank if commit_dir else 0
        self.world: int = process.arguments.world if commit_dir else 1
        self.identity: dict[str, Any] = read_json(process.run.identity)
        source = self.identity["shards_from"]
        self.shards = RunDir(source) if source else process.run
        """The run whose shards are trained on."""
        processor = Processor(process.run.model, process.recipe.media, keeps_files=True)
        self.shard_reader = Shards(self.shards, process.recipe.spool.node_cache, processor.remake)
        self.actions: dict[str, Callable[[Any], object]] = {}
        self._pauses: Iterator[float] | None = None
        self._idle_since = self._usual_s = 0.0

    @abstractmethod
    def decide(self) -> Command:
        """Decide what all ranks do next; called on rank 0."""

    @abstractmethod
    def heartbeat(self, state: str) -> None: ...

    def act(self) -> Command:
        """Act on rank 0's commands until the last one, and return that."""
        while (command := self.agree()).do != "end":
            if command.do != "wait":
                self.actions[command.do](command.work)
        return command

    def agree(self) -> Command:
        """Broadcast rank 0's command and return it, on every rank. A stop is agreed on here, never inside an action.
        Raises RunError where rank 0 did, FileNotFoundError where a successor took over."""
        command: Command | None = None
        if self.rank == 0:
            try:
                command = self.decide()
            except RunError as error:
                command = Command("end", exit=Exit.FATAL, error=str(error))
        command = told(command, self.world)
        if command.error:
            raise RunError(command.error)
        if command.do == "wait":
            if self.commit_dir is not None and not self.commit_dir.exists():
                raise FileNotFoundError(self.commit_dir)  # fenced: on a node that was cut off it may wait here for ever
            self.heartbeat(self.idle)
        return command

    def poll(self, look: Callable[[float], Command | None], watchers: int = 1) -> Command:
        """Return the command that `look` finds, which is given the seconds waited; "wait" if there is none for a while,
        "end" when asked to stop. watchers: see backoff."""
        until = time.perf_counter() + POLL_FOR_S
        if self._pauses is None:
            self._pauses, self._idle_since = backoff(watchers=watchers, usual_s=self._usual_s), time.perf_counter()
        while not self.process.stopping:
            waited_s = time.perf_counter() - self._idle_since
            found = look(waited_s)
            if found is not None:
                self._usual_s, self._pauses = max(waited_s, self._usual_s / 2), None
                return found
            if time.perf_counter() > until:
                return Command("wait")
            time.sleep(next(self._pauses))
        return Command("end")

    def everywhere(self, flag: bool) -> bool:
        """Return True if the flag is set on every rank; collective."""
        return all(gathered(flag, self.world))

    def restore(self, own: RunDir, load: Callable[[Path], None]) -> dict[str, Any] | None:
        """Load the newest whole checkpoint of `own`, and return its state; damaged ones are quarantined. None before
        the first."""

        def move_to_quarantine(step: int, damage: str) -> None:
            if self.rank == 0 and self.commit_dir is not None:
                checkpoint.move_to_quarantine(own, self.commit_dir, self.run.quarantine, step, damage)
                self.process.telemetry.metrics(kind="damaged_checkpoint", step=step, reason=damage)

        return checkpoint.restore(own, load, partial(first_said, world=self.world), move_to_quarantine)
