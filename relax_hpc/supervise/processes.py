"""Process groups: processes of one role that start, are judged and end together, whatever starts them.

    start ──► poll: None, … None, Ended ──► stop ──► forget ──► start: the next attempt

LocalProcesses are children of this machine's fork server, a slurm.steps.Step is one srun of several tasks.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from relax_hpc.files.publish import names
from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe.tables.run import Supervision
from relax_hpc.roles.common.process import Exit
from relax_hpc.supervise.fork_server import ForkedProcess, ForkServer
from relax_hpc.supervise.heartbeat_monitor import HeartbeatMonitor
from relax_hpc.telemetry import read_heartbeat

LOOKS_SHARE = 40
"""Heartbeats are read this many times within the silence limit: each look reads one file a process."""
Process = subprocess.Popen[bytes] | ForkedProcess
OUTCOMES: Mapping[int | None, str] = {Exit.DONE: "done", Exit.STOPPED: "stopped"}


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process group ended."""

    outcome: str | None
    """ "done", "stopped" or "failed" (a restart would fail the same way); None where the group was lost."""
    reason: str = ""
    host: str = ""
    """The host on which a lost group failed first; empty where unknown."""


class ProcessGroup(ABC):
    """Processes of one role that start and end together: a worker alone, the ranks of a trainer, the tasks of an srun."""

    stop_signal = signal.SIGTERM

    def __init__(self, run: RunDir, limits: Supervision, name: str, processes: Sequence[str]) -> None:
        """name: of the group, in messages; processes: names of its processes, as in heartbeats and logs."""
        self.run, self.limits, self.name, self.names = run, limits, name, list(processes)
        self.attempt = max(next_attempt(run, process) for process in processes)
        """Number of this attempt, or of the next one after `forget`."""
        self.processes: list[Process] = []
        self.started_at = self._looked_at = float("-inf")
        self._monitor = HeartbeatMonitor()

    def start(self, *arguments: str) -> None:
        """Start all processes. Raises OSError when the file system refuses; none is left then."""
        self._monitor = HeartbeatMonitor()
        try:
            self._spawn(arguments)
        except OSError:
            self.stop(0)
            self.forget()
            raise
        self.started_at = time.monotonic()

    @abstractmethod
    def _spawn(self, arguments: Sequence[str]) -> None: ...

    def poll(self) -> Ended | None:
        """How the group ended, though some of its processes may still run, silent ones too; None while it works."""
        return self._ending() or self._silent()

    @abstractmethod
    def _ending(self) -> Ended | None:
        """How the group ended, by the ends of its processes."""

    @abstractmethod
    def error(self) -> str:
        """The reason the processes gave for failing, or where their log is."""

    @property
    def started(self) -> bool:
        return bool(self.processes)

    @property
    def running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def log(self, rank: int = 0) -> Path:
        """The log of a process."""
        return self.run.logs / f"{self.names[rank]}.{self.attempt:04d}.log"

    def heartbeats(self) -> list[dict[str, Any]]:
        """The heartbeat of each process in this attempt; an empty one before its first."""
        return [self._ours(read_heartbeat(self.run, name)) for name in self.names]

    def _ours(self, heartbeat: dict[str, Any] | None) -> dict[str, Any]:
        return heartbeat if heartbeat is not None and heartbeat["attempt"] == self.attempt else {}

    def _silent(self) -> Ended | None:
        """The end of a group with a process that was silent for too long; heartbeats are read now and then."""
        every_s = self.limits.hang_s / LOOKS_SHARE
        if time.monotonic() - self._looked_at < every_s or not self.running:
            return None
        heard = {name: read_heartbeat(self.run, name) for name in self.names}
        self._looked_at = time.monotonic()
        # A namesake on a node that was cut off may write there too: while it does, nothing can be said of ours.
        said = {name: (h["attempt"], h["time"]) if h is not None else None for name, h in heard.items()}
        for rank, (name, silent_s) in enumerate(self._monitor.look(said, every_s).items()):
            beginning = self._ours(heard[name]).get("state") in (None, "starting")
            if silent_s > (self.limits.start_s if beginning else self.limits.hang_s) and self._of(rank).poll() is None:
                who, host = self._where(rank)
                return Ended(None, f"{who}: no heartbeat for {silent_s:.0f} s", host)
        return None

    def _where(self, rank: int) -> tuple[str, str]:
        """Name a process as messages do, with its host; no host where it is this machine."""
        return self.names[rank], ""

    def _of(self, rank: int) -> Process:
        """The process of a rank; an srun is that of all."""
        return self.processes[rank % len(self.processes)]

    def ask_to_stop(self) -> None:
        """Ask the processes to leave in order."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(self.stop_signal)

    def stop(self, grace_s: float) -> None:
        """End what is left of the group, each process at the latest after `grace_s` seconds."""
        for process in self.processes:
            end(process, (signal.SIGTERM, grace_s))

    def forget(self) -> None:
        """Make ready for the next attempt, once all processes ended."""
        if self.processes:
            self.processes = []
            self.attempt += 1


class LocalProcesses(ProcessGroup):
    """Processes on this machine, children of its fork server."""

    def __init__(
        self,
        run: RunDir,
        limits: Supervision,
        role: str,
        name: str,
        processes: Sequence[str],
        fork_server: ForkServer,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(run, limits, name, processes)
        self._role, self._fork_server, self._environment = role, fork_server, environment

    def _spawn(self, arguments: Sequence[str]) -> None:
        for rank, name in enumerate(self.names):
            command = [
                self._role, str(self.run.root), "--name", name, "--attempt", str(self.attempt),
                "--rank", str(rank), "--world", str(len(self.names)), *arguments,
            ]  # fmt: skip
            self.processes.append(self._fork_server.spawn(command, self.log(rank), self._environment))

    def _ending(self) -> Ended | None:
        codes = [process.poll() for process in self.processes]
        if Exit.FATAL in codes:  # any rank may say so: the others wait for it, or are lost with it
            rank = codes.index(Exit.FATAL)
            return Ended("failed", f"{self.names[rank]}: {self._said(rank) or f'see {self.log(rank)}'}")
        if all(code is None for code in codes):
            return None
        if codes[0] is None and all(code is None or code in OUTCOMES for code in codes):
            return None  # the other ranks leave a moment before rank 0
        ended = {name: how_it_ended(code) for name, code in zip(self.names, codes, strict=True) if code is not None}
        alone = ended.get(self.name)
        return Ended(OUTCOMES.get(codes[0]), alone or ", ".join(f"{name}: {how}" for name, how in ended.items()))

    def error(self) -> str:
        return next(filter(None, map(self._said, range(len(self.processes)))), f"see {self.log()}")

    def _said(self, rank: int) -> str:
        return str(getattr(self.processes[rank], "final_message", ""))


def end(process: Process, *ways: tuple[signal.Signals | None, float]) -> None:
    """Send each signal and wait its seconds for the process to end; then kill it."""
    for number, seconds in ways:
        if process.poll() is None and seconds > 0:
            if number is not None:
                process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
    if process.poll() is None:
        process.kill()  # a stopped process (SIGSTOP) dies of this too
        process.wait()


def next_attempt(run: RunDir, name: str) -> int:
    """Number of the next attempt at a role, after all earlier ones, whoever made them: each left a log or a heartbeat."""
    log = re.compile(rf"{re.escape(name)}\.(\d+)\.log")
    logs = [int(match[1]) for path in names(run.logs) if (match := log.fullmatch(path))]
    return max([*logs, int((read_heartbeat(run, name) or {}).get("attempt", -1))]) + 1


def how_it_ended(code: int) -> str:
    """Describe an exit code in words."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
