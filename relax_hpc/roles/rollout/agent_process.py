"""One agent's process: its task and its result are files in a folder of its own; what it writes is kept to the last lines.

start ──► runs ──► exits ──────────────────────────────► its status; the rest of its group is killed
            └── stop: TERM ──grace──► KILL of the group ──┘
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from relax_hpc.recipe.agent import Agent
from relax_hpc.sandbox.wrap import GRACE_S, start

OUTPUT_BYTES = 1 << 14
"""Bytes of what an agent writes that are kept, the last ones."""
RESULT_BYTES = 1 << 20
TASK, RESULT = "RELAX_HPC_TASK", "RELAX_HPC_RESULT"


class AgentError(Exception):
    """An agent's failure: the reason in general, and the message in this case."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class AgentProcess:
    """A started agent."""

    def __init__(self, agent: Agent, task: Mapping[str, Any], given: Mapping[str, str], socket: Path) -> None:
        """given: its variables, beside those of its files; socket: the gateway's. Raises AgentError."""
        self._folder = tempfile.TemporaryDirectory(prefix="relax-hpc-agent-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        files = {TASK: str(folder / "task.json"), RESULT: str(folder / "result.json")}
        Path(files[TASK]).write_text(json.dumps(task), encoding="utf-8")
        self._result, self._kill_at = Path(files[RESULT]), math.inf
        try:
            self._process = start(
                agent.sandbox, agent.command, folder=agent.cwd or folder, given=dict(given) | files, writable=[folder], socket=socket,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except OSError as error:
            self._folder.cleanup()
            raise AgentError("the agent cannot be started", f"{agent.command}: {error}") from error
        self._kept = bytearray()
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def _read(self, pipe: IO[bytes]) -> None:
        while piece := os.read(pipe.fileno(), OUTPUT_BYTES):
            self._kept += piece
            del self._kept[:-OUTPUT_BYTES]

    @property
    def output(self) -> str:
        """The end of what it wrote."""
        return self._kept.decode(errors="replace").strip()

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Ask all of it to end; `ended` kills it when `grace_s` seconds are over."""
        if self._kill_at == math.inf:
            self._kill_at = time.monotonic() + grace_s
            self._signal(signal.SIGTERM)

    def ended(self) -> bool:
        """Return True if it has ended; what it started and left in its group is killed with it."""
        over = self._process.poll() is not None
        if over or time.monotonic() > self._kill_at:
            self._signal(signal.SIGKILL)
        if over:
            self._reader.join(1.0)
        return over

    def reward(self) -> tuple[float, dict[str, float]]:
        """Return the reward of an agent that has ended, and the numbers beside it. Raises AgentError."""
        if status := self._process.returncode:
            said = f"exit status {status}" if status > 0 else f"signal {-status}"
            raise AgentError("the agent failed", f"it ended with {said}; its last output:\n{self.output}")
        if not self._result.is_file():
            raise AgentError(
                "the agent left no reward",
                f'it ended without writing ${RESULT}: write {{"reward": NUMBER}} there; its last output:\n{self.output}',
            )
        try:
            with self._result.open("rb") as file:
                found = json.loads(file.read(RESULT_BYTES))
            reward, metadata = found["reward"], found.get("metadata") or {}
            numbers = {str(key): float(value) for key, value in metadata.items() if isinstance(value, int | float)}
            if isinstance(reward, bool | int | float) and math.isfinite(reward):
                return float(reward), numbers
            raise TypeError(f"the reward is {reward!r}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise AgentError(
                "the agent's result cannot be read",
                f'${RESULT}: {type(error).__name__}: {error}; expected {{"reward": NUMBER, "metadata": {{NAME: NUMBER}}}}',
            ) from error

    def close(self) -> None:
        """End it at once, and remove its folder."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._folder.cleanup()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)
