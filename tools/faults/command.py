"""A real run on a mount: `relax-hpc run`, given again whenever it has ended, as a person or a scheduler would."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import names
from relax_hpc.files.run_dir import RunDir
from relax_hpc.launch.stop import stop
from relax_hpc.supervise.lease import holder
from relax_hpc.telemetry import read_heartbeat
from tools.faults.faultfs import FaultFS

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "tools" / "bench" / "chaos.toml"
POLL_S = 0.03
STUCK_S = 90.0
"""How long a run may make no step."""
STEPS = 1_000_000
"""More than a driven run makes: it ends when it is asked to."""


class Stuck(RuntimeError):
    """The run makes no progress after a fault."""


@dataclass
class Command:
    """The command, and what its run has come to. All that is read here is read behind the mount, where nothing goes wrong."""

    disk: FaultFS
    name: str
    sets: list[str]
    process: subprocess.Popen[bytes] | None = None
    ends: list[int] = field(default_factory=list)
    """Exit codes of the command, kills left out."""
    changes: int = 0

    @property
    def seen(self) -> RunDir:
        return RunDir(self.disk.backing / self.name)

    @property
    def log(self) -> Path:
        return self.disk.mount.with_name(f"{self.name}.log")

    def start(self) -> None:
        """Give the command: with the recipe, or with the run where that is there."""
        steps = f"run.steps={STEPS + self.changes}"
        if self.seen.exists:
            words = [str(self.disk.mount / self.name), "--set", steps]
        else:
            own = [f"run.root={self.disk.mount}", f"run.name={self.name}", steps]
            words = [str(RECIPE), *(word for each in (*own, *self.sets) for word in ("--set", each))]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "relax_hpc", "run", *words],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT,
            )  # fmt: skip

    def keep_going(self) -> None:
        if self.process is not None and self.process.poll() is None:
            return
        if self.process is not None and self.process.returncode != -signal.SIGKILL:
            self.ends.append(self.process.returncode)
        self.start()

    def steps(self) -> int:
        """The length of the ledger."""
        for folder in reversed(names(self.seen.ledger)):
            if entries := names(self.seen.ledger / folder):
                return int(entries[-1][:8]) + 1
        return 0

    def until(self, reached: Callable[[], object], limit_s: float) -> bool:
        """Keep the command at work until something holds; return False where it does not in time."""
        deadline = time.monotonic() + limit_s
        while not reached():
            if time.monotonic() > deadline:
                return False
            self.keep_going()
            time.sleep(POLL_S)
        return True

    def goes_on(self, steps: int = 1) -> None:
        """Wait for further steps. Raises Stuck."""
        there = self.steps()
        if not self.until(lambda: self.steps() >= there + steps, STUCK_S):
            tail = self.log.read_text(errors="replace")[-1500:]
            raise Stuck(f"no step in {STUCK_S:.0f} s after step {there}: see {self.seen.root}\n{tail}")

    def pid(self, role: str) -> int | None:
        """The living process of a role, or of the supervisor."""
        with contextlib.suppress(OSError):
            about = holder(self.seen) if role == "supervisor" else read_heartbeat(self.seen, f"{role}-0")
            if about and is_alive(int(about["pid"])):
                return int(about["pid"])
        return None

    def kill(self, role: str) -> None:
        """Kill a role's process, once there is one."""
        if self.until(lambda: self.pid(role), STUCK_S) and (pid := self.pid(role)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """Ask the run to end, where it is at work."""
        with contextlib.suppress(RunError):
            stop(self.seen)

    def change(self) -> None:
        """Have the command given again, with another recipe."""
        self.changes += 1
        self.kill("supervisor")

    def end(self) -> int:
        """End the run in order; return the number of its steps. Raises Stuck."""
        deadline = time.monotonic() + STUCK_S
        while self.process is None or self.process.poll() is None:
            if time.monotonic() > deadline:
                raise Stuck(f"it does not end: see {self.seen.root}")
            self.stop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                assert self.process is not None
                self.process.wait(10)
        return self.seen.checkpoint_steps()[-1]


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False
