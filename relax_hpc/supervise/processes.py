"""Process handles and the restart policy: start a process, tell whether it is alive or silent, end it, start it again."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from relax_hpc.files.publish import names
from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe.schema import Supervision
from relax_hpc.supervise.fork_server import ForkedProcess, ForkServer
from relax_hpc.supervise.heartbeat_monitor import HeartbeatMonitor
from relax_hpc.telemetry import read_heartbeat

LONGEST_BACKOFF_S = 60.0
LOOKS_SHARE = 40
"""Workers' heartbeats are read this many times within the silence limit: each look reads one file a worker."""
PIPE_BYTES = 1 << 16


@dataclass(slots=True, eq=False)
class ProcessHandle:
    """One process of a role, over all its attempts."""

    run: RunDir
    fork_server: ForkServer
    role: str
    name: str
    attempt: int = 0
    process: ForkedProcess | None = None
    claim_dir: str = ""
    _heartbeat_monitor: HeartbeatMonitor = field(default_factory=HeartbeatMonitor)
    _final_message: int = -1
    """Reading end of a pipe for the role's last words when it fails: the disk with its heartbeat and log may be full.
    """

    def start(self, arguments: list[str], environment: Mapping[str, str] = MappingProxyType({})) -> None:
        """Start the process, with a log of its own for this attempt."""
        reading, writing = os.pipe()
        command = [
            self.role, str(self.run.root), "--name", self.name, "--attempt", str(self.attempt), *arguments,
        ]  # fmt: skip
        try:
            self.process = self.fork_server.spawn(command, self.log, writing, environment)
        except OSError:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._close_pipe()
        self._final_message = reading
        self._heartbeat_monitor = HeartbeatMonitor()

    @property
    def log(self) -> Path:
        return self.run.logs / f"{self.name}.{self.attempt:04d}.log"

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def heartbeat(self) -> dict[str, Any] | None:
        """The heartbeat of this attempt; None before its first."""
        heartbeat = read_heartbeat(self.run, self.name)
        return heartbeat if heartbeat is not None and heartbeat["attempt"] == self.attempt else None

    def silent_for(self, limits: Supervision) -> float | None:
        """Seconds without a heartbeat if the process runs and the recipe's limit is exceeded; else None."""
        if not self.running:
            return None
        heartbeat = read_heartbeat(self.run, self.name)
        # A namesake on a node that was cut off may write there too: while it does, nothing can be said of ours.
        said = (heartbeat["attempt"], heartbeat["time"]) if heartbeat is not None else None
        silent_s = self._heartbeat_monitor.look({self.name: said}, limits.hang_s / LOOKS_SHARE)[self.name]
        limit_s = silence_limit(
            heartbeat if heartbeat is not None and heartbeat["attempt"] == self.attempt else None, limits
        )
        return silent_s if silent_s > limit_s else None

    def signal(self, number: signal.Signals) -> None:
        if self.running and self.process is not None:
            self.process.send_signal(number)

    def error(self) -> str:
        """The reason the process itself gave for failing; where its log is when it gave none."""
        said = ""
        if self._final_message >= 0 and select.select([self._final_message], [], [], 0)[0]:
            said = os.read(self._final_message, PIPE_BYTES).decode(errors="replace")
            self._close_pipe()
        return said or f"see {self.log}"

    def _close_pipe(self) -> None:
        if self._final_message >= 0:
            os.close(self._final_message)
            self._final_message = -1

    def end(self, grace_s: float) -> None:
        """Ask the process to stop; kill it when it has not ended within `grace_s`."""
        if self.process is None:
            return
        if self.process.poll() is None and grace_s > 0:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace_s)
        if self.process.poll() is None:
            self.process.kill()  # a stopped process (SIGSTOP) dies of this too
            self.process.wait()


@dataclass(slots=True)
class RestartPolicy:
    """How often something was restarted without progress, and when it may be started again."""

    limits: Supervision
    failures: int = 0
    last_progress: Any = None
    not_before: float = 0.0
    """Earliest time of the next start, by time.monotonic()."""
    reasons: list[str] = field(default_factory=list)
    errors: frozenset[str] = frozenset()
    """The errors, each with its place, with which its processes last failed to begin."""
    again: str = ""
    """The error that kept it from beginning twice in a row at the same place: the next start would meet it too. Empty
    where that is not so.
    """

    def failed(self, reason: str, progress: Any, *heartbeats: Mapping[str, Any]) -> bool:
        """Note a failure and return True if it may be started again; False when the recipe allows no further restart.

        `progress`: a number that grows as the failed process does its work; only a new maximum counts. None: it did
        none. `heartbeats`: the last heartbeat of each of its processes.
        """
        if progress is not None and (self.last_progress is None or progress > self.last_progress):
            self.failures, self.last_progress = 0, progress
        self.failures += 1
        self.reasons.append(reason)
        said = {
            f"{heartbeat.get('error')} ({heartbeat['place']})": heartbeat
            for heartbeat in heartbeats
            if heartbeat.get("place")
        }
        same = sorted(self.errors & said.keys())
        self.again = "; ".join(f"{error} on {said[error].get('host', 'an unknown node')}" for error in same)
        self.errors = frozenset(said)
        if self.again:
            return False
        wait_s = min(self.limits.backoff_s * 2 ** (self.failures - 1), LONGEST_BACKOFF_S)
        self.not_before = time.monotonic() + (wait_s if self.failures > 1 else 0.0)
        return self.failures <= self.limits.max_restarts

    def exhausted(self, name: str, reason: str, error: str, log: Path) -> str:
        """The message for when the restart policy gives up."""
        if self.again:
            return (
                f"{name} cannot begin: twice the same error, {self.again}; mend what it names, then go on with the run; its "
                f"log: {log}"
            )
        return (
            f"{name} was lost {self.failures} times without progress (supervision.max_restarts = "
            f"{self.limits.max_restarts}), last: {reason}; {error}; its log: {log}"
        )


def next_attempt(run: RunDir, name: str) -> int:
    """Number of the next attempt at a role, after all earlier ones, whoever made them: each left a log or a heartbeat."""
    log = re.compile(rf"{re.escape(name)}\.(\d+)\.log")
    logs = [int(match[1]) for path in names(run.logs) if (match := log.fullmatch(path))]
    return max([*logs, int((read_heartbeat(run, name) or {}).get("attempt", -1))]) + 1


def silence_limit(heartbeat: dict[str, Any] | None, limits: Supervision) -> float:
    """Seconds of silence that a role is allowed."""
    return limits.start_s if heartbeat is None or heartbeat.get("state") == "starting" else limits.hang_s


def how_it_ended(code: int) -> str:
    """Describe an exit code in words."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
