"""The trainer group as its supervisor sees it: started, judged and ended as one, by whatever means its processes start."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe.schema import Recipe
from relax_hpc.roles.common.process import Exit
from relax_hpc.supervise.fork_server import ForkServer
from relax_hpc.supervise.processes import ProcessHandle, how_it_ended, next_attempt

FINAL = {Exit.DONE: "done", Exit.STOPPED: "stopped", Exit.FATAL: "failed"}
"""Exit codes after which a restart would change nothing, with their outcomes."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a group ended: `final` is the outcome, or None where the group was lost and may be restarted."""

    final: str | None
    reason: str = ""
    host: str = ""
    """The host on which a lost group failed first; empty where unknown."""


class Trainers(Protocol):
    """A group of trainer processes; when one is lost, all end."""

    @property
    def started(self) -> bool: ...

    @property
    def attempt(self) -> int: ...

    def start(self, incarnation: Path) -> None:
        """Start all processes; they commit through the folder `incarnation`."""

    def ending(self) -> Ending | None:
        """How the group ended; None while it works."""

    def ask_to_stop(self) -> None:
        """Ask the trainer to checkpoint and leave."""

    def silent(self) -> Ending | None:
        """An Ending when a process has been silent for too long; None when all is well."""

    def end(self, grace_s: float) -> None:
        """End what is left of the group, at the latest after `grace_s` seconds."""

    def final_message(self) -> str:
        """The reason the group gave for failing, or where its log is."""


class LocalTrainers:
    """Trainer processes on this machine, children of the supervisor."""

    def __init__(self, run: RunDir, recipe: Recipe, fork_server: ForkServer) -> None:
        self._limits = recipe.supervision
        names = [f"trainer-{i}" for i in range(recipe.trainer.processes)]
        self._handles = [
            ProcessHandle(run, fork_server, "trainer", name, attempt=next_attempt(run, name)) for name in names
        ]

    @property
    def started(self) -> bool:
        return any(m.process is not None for m in self._handles)

    @property
    def attempt(self) -> int:
        return self._handles[0].attempt

    def start(self, incarnation: Path) -> None:
        world = str(len(self._handles))
        for rank, handle in enumerate(self._handles):
            handle.start(["--incarnation", str(incarnation), "--rank", str(rank), "--world", world])

    def ending(self) -> Ending | None:
        codes = {m: m.process.poll() for m in self._handles if m.process is not None}
        if all(code is None for code in codes.values()):
            return None
        for handle, code in codes.items():  # any rank may say so: the others wait for it, or are lost with it
            if code == Exit.FATAL:
                return Ending("failed", handle.error())
        controller = codes[self._handles[0]]
        if controller in FINAL:
            return Ending(FINAL[Exit(controller)])
        if controller is None and all(code in (None, *FINAL) for code in codes.values()):
            return None  # the other ranks leave a moment before rank 0
        ended = {m.name: how_it_ended(code) for m, code in codes.items() if code is not None}
        return Ending(None, ", ".join(f"{name}: {how}" for name, how in ended.items()))

    def ask_to_stop(self) -> None:
        for handle in self._handles:
            handle.signal(signal.SIGTERM)

    def silent(self) -> Ending | None:
        for handle in self._handles:
            silent_s = handle.silent_for(self._limits)
            if silent_s is not None:
                return Ending(None, f"{handle.name}: no heartbeat for {silent_s:.0f} s")
        return None

    def end(self, grace_s: float) -> None:
        for handle in self._handles:
            handle.end(grace_s)
            if handle.process is not None:
                handle.process = None
                handle.attempt += 1

    def final_message(self) -> str:
        return self._handles[0].error()
