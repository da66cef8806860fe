"""Scripted roles: what a supervisor starts, watches and loses, without a process; their own calls never fail.

the supervisor's fork server ──► Script ──third look──► it writes what its role would, then dies, ends or works on
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from relax_hpc.files.publish import replace, to_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.roles.common.process import Exit
from relax_hpc.spool.queue import RequestQueue
from relax_hpc.supervise.fork_server import ForkServer
from relax_hpc.telemetry import Telemetry
from tools.faults.calls import Faults

POLLS = 3
"""How often a role is looked at before its script goes on."""
Act = Callable[[], int | None]


class Script:
    """A role's process: what it does is done at its POLLS-th look, and then it ends with an exit code, or works on."""

    final_message = ""

    def __init__(self, act: Act, spared: Any) -> None:
        self._act, self._spared, self._polls = act, spared, 0
        self.code: int | None = None
        self.signals = list[signal.Signals]()

    def poll(self) -> int | None:
        self._polls += 1
        if self.code is None and self._polls >= POLLS:
            with self._spared():
                self.code = Exit.STOPPED if signal.SIGTERM in self.signals else self._act()
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        while self.poll() is None:
            if signal.SIGTERM not in self.signals:
                raise subprocess.TimeoutExpired("role", timeout or 0.0)
        assert self.code is not None
        return self.code

    def send_signal(self, number: signal.Signals) -> None:
        self.signals.append(number)

    def kill(self) -> None:
        self.code = self.code if self.code is not None else -signal.SIGKILL


class Stage(ForkServer):
    """The roles of a run on one machine. Each dies once: a worker on a request that it claimed, the trainer after a
    checkpoint. The second trainer ends the run."""

    def __init__(self, run: RunDir, faults: Faults) -> None:
        super().__init__(run)
        self.faults, self.queue = faults, RequestQueue(run)
        self.spawned = list[tuple[str, int]]()

    def spawn(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str] = MappingProxyType({})) -> Any:
        name, attempt = _after(arguments, "--name"), int(_after(arguments, "--attempt"))
        log.open("ab").close()  # as the fork server does
        self.spawned.append((name, attempt))
        return Script(self.script(arguments, Telemetry(self._run, name, attempt)), self.faults.spared)

    def script(self, arguments: Sequence[str], voice: Telemetry) -> Act:
        if arguments[0] == "trainer":
            folder = Path(_after(arguments, "--incarnation"))
            return lambda: self.train(voice, folder)
        if arguments[0] == "rollout":
            claim_dir = _after(arguments, "--claim-dir")
            return lambda: self.generate(voice, claim_dir)
        return lambda: self.score(voice)

    def train(self, voice: Telemetry, folder: Path) -> int | None:
        if len(self._run.checkpoint_steps()) == 0:
            self.checkpoint(3)
            voice.heartbeat("training", step=3)
            return -signal.SIGKILL
        again = {name for name, attempt in self.spawned if attempt == 1}
        if self.claimed() or {name for name, _ in self.spawned} - again:
            return None  # it waits for what the dead worker had, and for the next one
        assert folder.is_dir(), "the incarnation that it commits by"
        self.checkpoint(6)
        voice.heartbeat("done", step=6)
        return Exit.DONE

    def checkpoint(self, step: int) -> None:
        self._run.checkpoint(step).mkdir()
        (self._run.checkpoint(step) / "DONE").touch()

    def generate(self, voice: Telemetry, claim_dir: str) -> int | None:
        voice.heartbeat("idle", requests=0)
        if not claim_dir.endswith("0000"):
            return None
        self.queue.open_claim_dir(claim_dir)
        assert self.queue.claim(claim_dir, 0) is not None
        return -signal.SIGKILL

    def score(self, voice: Telemetry) -> int | None:
        voice.heartbeat("idle", requests=0)
        return -signal.SIGKILL if voice.attempt == 0 else None

    def claimed(self) -> list[str]:
        return [name for worker in self.queue.workers() for name in os.listdir(self._run.claimed_requests / worker)]


class Node(Stage):
    """The workers of one node: the first dies on a request, the second works until the run is over, which it says."""

    def generate(self, voice: Telemetry, claim_dir: str) -> int | None:
        code = super().generate(voice, claim_dir)
        if code is None:
            voice.heartbeat("idle", requests=1)
            replace(self._run.outcome, to_json({"outcome": "done"}))
        return code


def _after(arguments: Sequence[str], key: str) -> str:
    return arguments[arguments.index(key) + 1]
